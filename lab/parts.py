"""The parts of GRPO by themselves, as curves: what the functions of tasks 2, 3 and 4 give for chosen arguments."""

from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from lab.explain import push

SAMPLES, REPEATS = 64, 2000  # tokens in a mean; means


class Advantages(NamedTuple):
    """Task 2: of groups of G with 0, 1 ... G right answers [G + 1]; NaN where a group has no such answer."""

    right: Tensor  # the advantage of a right answer
    wrong: Tensor  # and of a wrong one


class Estimators(NamedTuple):
    """Task 3: "k1", "k2" and "k3"."""

    log_u: Tensor  # [points]
    values: dict[str, Tensor]  # each [points]
    kl: float  # the exact divergence of two policies, nats
    means: dict[str, Tensor]  # [REPEATS] estimates of it, each the mean over SAMPLES tokens


class Objective(NamedTuple):
    """Task 4: of one token with advantage A, without the KL term."""

    ratio: Tensor  # [points]
    value: Tensor  # [points]
    slope: Tensor  # [points]: its derivative with respect to the ratio


def advantages(grpo: ModuleType, G: int, std: bool) -> Advantages:
    """What `group_advantages` gives to all G + 1 groups at once."""
    rights = torch.arange(G + 1).unsqueeze(1)  # [G + 1, 1]
    rewards = (torch.arange(G) < rights).float()  # the first ones are right
    found = grpo.group_advantages(rewards.view(-1), G, std).view(-1, G)
    right, wrong = found[:, 0].clone(), found[:, -1].clone()
    right[0] = wrong[-1] = torch.nan
    return Advantages(right, wrong)


def estimators(grpo: ModuleType) -> Estimators:
    """k3 is the function of task 3; k1 and k2 are formulas."""

    def of(logp: Tensor, ref_logp: Tensor) -> dict[str, Tensor]:
        return {"k1": logp - ref_logp, "k2": (logp - ref_logp) ** 2 / 2, "k3": grpo.k3_kl(logp, ref_logp)}

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(14, generator=generator)
    logp = logits.log_softmax(0)
    ref_logp = (logits + 0.5 * torch.randn(14, generator=generator)).log_softmax(0)
    drawn = torch.multinomial(logp.exp(), SAMPLES * REPEATS, replacement=True, generator=generator)
    means = {name: values[drawn].view(REPEATS, SAMPLES).mean(1) for name, values in of(logp, ref_logp).items()}
    log_u = torch.linspace(-2, 2, 161)
    kl = (logp.exp() * (logp - ref_logp)).sum().item()
    return Estimators(log_u, of(torch.zeros(161), log_u), kl, means)


def objective(grpo: ModuleType, A: float, clip: float) -> Objective:
    """Value and slope of the objective around the interval in which the ratio may move."""
    ratio = torch.linspace(max(0.02, 1 - 2.5 * clip), min(4.0, 1 + 2.5 * clip), 201)
    advantage, one, zeros = torch.tensor([A]), torch.ones(1, 1), torch.zeros(1, 1)
    values, slopes = [], []
    for logp in ratio.log().view(-1, 1, 1):  # one token at a time: the loss is a mean over all
        rest = (zeros, zeros, advantage, one, clip, 0.0)
        values.append(-float(grpo.grpo_loss(logp, *rest)[0]))
        slopes.append(float(push(grpo, logp, *rest)) / float(logp.exp()))  # d/d ratio = d/d logp / ratio
    return Objective(ratio, torch.tensor(values), torch.tensor(slopes))


def each_part(grpo: ModuleType, tasks: list[int], G: int, clip: float) -> tuple[dict[int, list], list[str]]:
    """(task -> what is to be drawn of it, what the stubs say): a task that is not written yet is left out."""
    parts: dict[int, Callable[[], list]] = {
        2: lambda: [advantages(grpo, G, std=True), advantages(grpo, G, std=False)],
        3: lambda: [estimators(grpo)],
        4: lambda: [objective(grpo, A, clip) for A in (1.0, -1.0)],
    }
    there, stubs = {}, []
    for task in sorted(set(tasks)):
        try:
            there[task] = parts[task]()
        except NotImplementedError as stub:
            if not str(stub).startswith("Task"):  # not the lab's
                raise
            stubs.append(str(stub))
    return there, list(dict.fromkeys(stubs))
