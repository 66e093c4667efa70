"""For the tests that are not grades: the instructor's modules on the path, the reference first, and the policy."""

import sys
from pathlib import Path

import pytest

LAB = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(LAB / "solutions"), str(LAB)]  # `import grpo` is the reference


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: trains for several seconds; CI runs it, -m 'not slow' leaves it out")


@pytest.fixture(scope="session")
def sft():
    """The starting policy, trained here if need be. No test changes it."""
    import tinylm  # noqa: PLC0415  the path above comes first

    return tinylm.load_or_train_sft()
