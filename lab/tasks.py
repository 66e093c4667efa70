"""A grpo.py in use: its settings, whether its functions are written, and the gradients that they make."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from types import ModuleType

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

import tinylm


def config_of(grpo: ModuleType, args: argparse.Namespace):
    """The GRPOConfig that the flags ask for."""
    return grpo.GRPOConfig(**{field.name: getattr(args, field.name) for field in fields(grpo.GRPOConfig)})


def call_tasks(grpo: ModuleType, model: tinylm.TinyLM) -> None:
    """Call tasks 1 to 4 once, on two rows, so that of several stubs the first one is named."""
    device = next(model.parameters()).device
    two, rows = torch.ones(2, device=device), torch.ones(2, 1, device=device)
    grpo.sample_group(model, tinylm.encode(["37+48="]).to(device), 2, generator=torch.Generator(device))
    grpo.group_advantages(two, 2)
    grpo.k3_kl(rows, rows)
    grpo.grpo_loss(rows, rows, rows, two, rows)


def is_the_labs(error: Exception) -> bool:
    """Whether the message is one of the lab's own, which name the task; of others it is shown where they come from."""
    return str(error).startswith(("Task", "sample_group (task 1)", "grpo_step (task 5)"))


@contextmanager
def watched_gradient() -> Iterator[list[float]]:
    """Within the block a list of one number: the norm of the gradient, over all weights, that an optimizer of torch has
    followed last.
    """
    norm = [0.0]

    def keep(optimizer: torch.optim.Optimizer, *_) -> None:
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        gradients = [weight.grad.flatten() for weight in weights if weight.grad is not None]
        norm[0] = torch.cat(gradients).norm().item() if gradients else 0.0

    hook = register_optimizer_step_pre_hook(keep)
    try:
        yield norm
    finally:
        hook.remove()
