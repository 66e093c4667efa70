"""Where to compute."""

import torch


def check_device(name: str) -> None:
    """Raise ValueError if torch cannot compute on the device `name`."""
    try:
        torch.zeros(1, device=name).item()
    except Exception as error:  # of a type that depends on the device
        raise ValueError(f"--device {name}: there is no such device here; cpu always works") from error
