"""What a wrong value gives away: known mistakes, each known by the value that it computes. One module for each task."""

import itertools
from collections.abc import Iterator

AND = "; and "  # between two mistakes that are named at once


def few_deviations(*choices: dict) -> Iterator[tuple]:
    """All ways to choose one key of each dict with one or two that are not the right one (""), fewest first."""
    for count in (1, 2):
        for places in itertools.combinations(range(len(choices)), count):
            for wrong in itertools.product(*(list(choices[place])[1:] for place in places)):
                chosen = dict(zip(places, wrong, strict=True))
                yield tuple(chosen.get(place, "") for place in range(len(choices)))


def joined(names: tuple) -> str:
    """The mistakes among the names, in one sentence."""
    return AND.join(filter(None, names))
