"""Task 2: advantages, and what known mistakes make of them."""

from collections.abc import Callable

import torch
from torch import Tensor

from lab.diagnose import Seen, few_deviations, joined, named, symptoms

EPS = 1e-4


def mean(g: Tensor) -> Tensor:
    return g.mean(1, keepdim=True)


def std(g: Tensor) -> Tensor:
    return g.std(1, correction=0, keepdim=True)


def ones(g: Tensor) -> Tensor:
    return torch.ones_like(g[:, :1])


# One choice for each part; "" is the right one. Any one or two wrong choices together can be named.
GROUPINGS = {  # which rewards are compared, as rows of a matrix, and the way back
    "": (lambda r, G: r.view(-1, G), lambda a: a.reshape(-1)),
    "view(G, -1) makes G groups of P rows: the rows are prompt-major, P groups of G, so view(-1, G)": (
        lambda r, G: r.view(G, -1),
        lambda a: a.reshape(-1),
    ),
    "mean and std run across the prompts (dim=0 of view(-1, G)): a group is one row of it, so dim=1": (
        lambda r, G: r.view(-1, G).T,
        lambda a: a.T.reshape(-1),
    ),
    "the groups are interleaved, read as columns by view(G, -1): rows are prompt-major, so view(-1, G)": (
        lambda r, G: r.view(G, -1).T,
        lambda a: a.T.reshape(-1),
    ),
    "the rewards are replaced by their ranks: use the rewards themselves": (
        lambda r, G: r.view(-1, G).argsort(dim=1).argsort(dim=1).double(),
        lambda a: a.reshape(-1),
    ),
    "mean and std are taken over the whole batch: take them within each group": (
        lambda r, G: r.view(1, -1),
        lambda a: a.reshape(-1),
    ),
}
CENTRES = {
    "": lambda g: g - mean(g),
    "the rewards are not centred: subtract the group's mean": lambda g: g,
    "the mean is the batch's: subtract each group's own mean": lambda g: g - g.mean(),
    "the sign is flipped: a reward above the mean is a positive advantage": lambda g: mean(g) - g,
    "the baseline leaves the response itself out (as in RLOO): subtract the mean of all G": lambda g: (
        (g - mean(g)) * g.shape[1] / (g.shape[1] - 1)
    ),
    "the median is subtracted: subtract the mean": lambda g: g - g.median(1, keepdim=True).values,
    "the group's lowest reward is subtracted: subtract the mean": lambda g: g - g.amin(1, keepdim=True),
    "the group's highest reward is subtracted: subtract the mean": lambda g: g - g.amax(1, keepdim=True),
}
SCALES = {  # what is divided by where normalize_std is True
    "": std,
    "this is the sample standard deviation (divides by G - 1); the lab uses the population one (divides by G)": (
        lambda g: g.std(1, keepdim=True)
    ),
    "this divides by the variance: divide by its square root, the standard deviation": lambda g: std(g) ** 2,
    "this divides by the sample variance: divide by the population standard deviation": lambda g: g.var(
        1, keepdim=True
    ),
    "the std is the batch's: divide by each group's own": lambda g: g.std(correction=0) * ones(g),
    "the std is the batch's sample std: divide by each group's own population std": lambda g: g.std() * ones(g),
    "the advantages are not divided by the standard deviation": ones,
    "this divides by the mean absolute deviation: divide by the standard deviation": lambda g: mean(
        (g - mean(g)).abs()
    ),
    "this divides by the range (max - min): divide by the standard deviation": lambda g: (
        g.amax(1, keepdim=True) - g.amin(1, keepdim=True)
    ),
    "this divides by the largest reward: divide by the standard deviation": lambda g: g.amax(1, keepdim=True),
    "this divides by the largest advantage: divide by the standard deviation": lambda g: (
        (g - mean(g)).abs().amax(1, keepdim=True)
    ),
    "this divides by the root of the sum of squares, not of their mean: the std has a mean under the root": lambda g: (
        std(g) * g.shape[1] ** 0.5
    ),
    "only the sign of the advantage is left: divide by the standard deviation": lambda g: (
        (g - mean(g)).abs() - EPS + 1e-9
    ),
    "this multiplies by the standard deviation: divide by it": lambda g: 1 / (std(g) + EPS),
}
UNSCALED = {  # the same where it is False
    "": ones,
    "normalize_std is False, yet the advantages are divided by the standard deviation": std,
    "normalize_std is False, yet the advantages are divided by the sample standard deviation": lambda g: g.std(
        1, keepdim=True
    ),
    "the advantages are divided by G: subtracting the mean is all": lambda g: g.shape[1] * ones(g),
}
DIVISORS = {
    "": lambda scale: scale + EPS,
    "eps is added to the variance, under the root: add it to the std": lambda scale: (scale**2 + EPS).sqrt(),
}
PARTS = (GROUPINGS, CENTRES, SCALES, UNSCALED, DIVISORS)


def advantages_with(names: tuple, rewards: Tensor, G: int, normalize_std: bool) -> tuple[Tensor]:
    """The advantages [N] with the named choice for each part, in float64."""
    (group, flatten), centre, scale, unscaled, divisor = (part[name] for part, name in zip(PARTS, names, strict=True))
    groups = group(rewards.double(), G)
    return (flatten(centre(groups) / divisor((scale if normalize_std else unscaled)(groups))),)


def probes() -> list[tuple[Tensor, int, bool, float]]:
    """Rewards, G, normalize_std, and how exact the comparison can be."""
    generator = torch.Generator().manual_seed(1)
    uneven = torch.rand(3, 4, generator=generator) * torch.tensor([[1.0], [2.0], [0.5]]) + torch.tensor(
        [[0.0], [1], [-1]]
    )
    verified = torch.tensor([[1.0, 0, 0, 0, 1], [1, 1, 0, 1, 0], [0, 1, 1, 1, 1]])
    small = 0.5 + 0.02 * torch.tensor([1.0, -1, 1, -1, 9, 9, 11, 11])  # std 0.02: eps makes a difference
    return [
        (uneven.flatten(), 4, True, 2e-3),
        (verified.flatten(), 5, True, 2e-3),
        (uneven.flatten(), 4, False, 2e-3),
        (small, 4, True, 1e-2),
    ]


def diagnose(call: Callable[..., Tensor | None]) -> str:
    """What is wrong with a group_advantages; `call` gives its result, or None where it raises. "" if it is right."""
    seen = []
    for *given, tolerance in probes():
        if (got := call(*given)) is not None:
            right = advantages_with(("",) * len(PARTS), *given)
            seen.append(Seen(tuple(given), (got,), right, tolerance))
    wrong = [probe for probe in seen if not probe.is_right]
    if not wrong:
        return symptoms.of_eps(call)
    mistakes = (
        (joined(names), lambda *given, names=names: advantages_with(names, *given)) for names in few_deviations(*PARTS)
    )
    return named(mistakes, seen) or symptoms.of_advantages(call, *wrong[0].given)
