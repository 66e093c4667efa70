"""Task 2: advantages, and what known mistakes make of them."""

import torch
from torch import Tensor

from lab.diagnose import few_deviations, joined
from lab.examine import Mistakes


def mistakes(rewards: Tensor, G: int, normalize_std: bool) -> Mistakes:
    """What the known mistakes give, alone and two at a time."""
    eps = 1e-4
    right_groups = rewards.double().view(-1, G)
    groupings = {
        "": (right_groups, lambda a: a.reshape(-1)),
        "view(G, -1) makes G groups of P rows: the rows are prompt-major, P groups of G, so view(-1, G)": (
            rewards.double().view(G, -1),
            lambda a: a.reshape(-1),
        ),
        "mean and std run across the prompts (dim=0 of view(-1, G)): a group is one row of it, so dim=1": (
            rewards.double().view(-1, G).T,
            lambda a: a.T.reshape(-1),
        ),
        "the groups are interleaved, read as columns by view(G, -1): rows are prompt-major, so view(-1, G)": (
            rewards.double().view(G, -1).T,
            lambda a: a.T.reshape(-1),
        ),
        "the rewards are replaced by their ranks: use the rewards themselves": (
            right_groups.argsort(dim=1).argsort(dim=1).double(),
            lambda a: a.reshape(-1),
        ),
        "mean and std are taken over the whole batch: take them within each group": (
            rewards.double().view(1, -1),
            lambda a: a.reshape(-1),
        ),
    }
    centres = {
        "": lambda g: g - g.mean(1, keepdim=True),
        "the rewards are not centred: subtract the group's mean": lambda g: g,
        "the mean is the batch's: subtract each group's own mean": lambda g: g - g.mean(),
        "the sign is flipped: a reward above the mean is a positive advantage": lambda g: g.mean(1, keepdim=True) - g,
        "the baseline leaves the response itself out (as in RLOO): subtract the mean of all G": lambda g: (
            (g - g.mean(1, keepdim=True)) * G / (G - 1)
        ),
        "the median is subtracted: subtract the mean": lambda g: g - g.median(1, keepdim=True).values,
        "the group's lowest reward is subtracted: subtract the mean": lambda g: g - g.amin(1, keepdim=True),
        "the group's highest reward is subtracted: subtract the mean": lambda g: g - g.amax(1, keepdim=True),
    }
    std = lambda g: g.std(1, correction=0, keepdim=True)  # noqa: E731
    mean_only = lambda g: torch.ones_like(g[:, :1])  # noqa: E731
    if normalize_std:
        scales = {
            "": lambda g: std(g) + eps,
            "this is the sample standard deviation (divides by G - 1); the lab uses the population one "
            "(divides by G)": lambda g: g.std(1, keepdim=True) + eps,
            "this divides by the variance: divide by its square root, the standard deviation": lambda g: (
                std(g) ** 2 + eps
            ),
            "this divides by the sample variance: divide by the population standard deviation": lambda g: (
                g.var(1, keepdim=True) + eps
            ),
            "the std is the batch's: divide by each group's own": lambda g: g.std(correction=0) + eps,
            "the std is the batch's sample std: divide by each group's own population std": lambda g: g.std() + eps,
            "the advantages are not divided by the standard deviation": mean_only,
            "this divides by the mean absolute deviation: divide by the standard deviation": lambda g: (
                (g - g.mean(1, keepdim=True)).abs().mean(1, keepdim=True) + eps
            ),
            "this divides by the range (max - min): divide by the standard deviation": lambda g: (
                g.amax(1, keepdim=True) - g.amin(1, keepdim=True) + eps
            ),
            "this divides by the largest reward: divide by the standard deviation": lambda g: (
                g.amax(1, keepdim=True) + eps
            ),
            "this divides by the largest advantage: divide by the standard deviation": lambda g: (
                (g - g.mean(1, keepdim=True)).abs().amax(1, keepdim=True) + eps
            ),
            "this divides by the root of the sum of squares, not of their mean: the std has a mean under the "
            "root": lambda g: std(g) * G**0.5 + eps,
            "only the sign of the advantage is left: divide by the standard deviation": lambda g: (
                (g - g.mean(1, keepdim=True)).abs() + 1e-12
            ),
            "this multiplies by the standard deviation: divide by it": lambda g: 1 / (std(g) + eps),
        }
    else:
        scales = {
            "": mean_only,
            "normalize_std is False, yet the advantages are divided by the standard deviation": lambda g: std(g) + eps,
            "normalize_std is False, yet the advantages are divided by the sample standard deviation": lambda g: (
                g.std(1, keepdim=True) + eps
            ),
            "the advantages are divided by G: subtracting the mean is all": lambda g: torch.full_like(g[:, :1], G),
        }
    found = {}
    for names in few_deviations(groupings, centres, scales):
        groups, flatten = groupings[names[0]]
        found[joined(names)] = flatten(centres[names[1]](groups) / scales[names[2]](groups))
    return found
