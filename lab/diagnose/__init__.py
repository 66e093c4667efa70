"""What a wrong value gives away. Nothing here decides: a test has found the value wrong before.

Each task has a module with a table of known mistakes, each a function that computes what the mistake would give, and
with probes: inputs that tell the mistakes from one another. The student's function is called on all of them, and its
mistake is the first one that gives what it gave, on every probe. Where there is none, `symptoms` says what is seen.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

AND = "; and "  # between two mistakes that are named at once
Mistakes = dict[str, Tensor]  # the name of a mistake -> the value it gives


def close(got: Tensor, expected: Tensor, tolerance: float = 1e-4, equal_nan: bool = False) -> bool:
    """Equal shapes, and values equal to `tolerance`, relative and absolute."""
    return got.shape == expected.shape and torch.allclose(
        got.double(), expected.double(), tolerance, tolerance, equal_nan
    )


@dataclass
class Seen:
    """One probe: the arguments, what the student's function gave for them, and what is right."""

    given: tuple
    got: tuple[Tensor, ...]
    right: tuple[Tensor, ...]
    tolerance: float = 1e-4

    def is_explained(self, values: tuple[Tensor, ...] | None) -> bool:
        """Whether the values are those that the student's function gave."""
        return values is not None and all(
            close(value, got, self.tolerance, equal_nan=True) for value, got in zip(values, self.got, strict=True)
        )

    @property
    def is_right(self) -> bool:
        """Whether the student's function is right here."""
        return self.is_explained(self.right)


def named(candidates: Iterable[tuple[str, Callable[..., tuple | None]]], seen: list[Seen]) -> str:
    """The first of the mistakes that gives what the student's function gave, on every probe; or ""."""
    for name, values_of in candidates:
        if all(probe.is_explained(values_of(*probe.given)) for probe in seen):
            return name
    return ""


def few_deviations(*choices: dict) -> Iterator[tuple]:
    """All ways to choose one key of each dict with one or two that are not the right one (""), fewest first."""
    for count in (1, 2):
        for places in itertools.combinations(range(len(choices)), count):
            for wrong in itertools.product(*(list(choices[place])[1:] for place in places)):
                chosen = dict(zip(places, wrong, strict=True))
                yield tuple(chosen.get(place, "") for place in range(len(choices)))


def joined(names: Iterable[str]) -> str:
    """The mistakes among the names, each once, in one sentence."""
    return AND.join(dict.fromkeys(filter(None, names)))
