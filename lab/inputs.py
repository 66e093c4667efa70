"""What the tests draw: batches for the loss, prompts, and policies that do more than the starting policy does."""

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

import tinylm
from lab.start import whole_number

SEED = whole_number("LAB_SEED", random.SystemRandom().randrange(10**6))  # of a test run's inputs


@dataclass
class Batch:
    """The arguments of grpo_loss: logp, old_logp, ref_logp and mask [N, Tr], advantages [N], clip and beta."""

    logp: Tensor
    old_logp: Tensor
    ref_logp: Tensor
    advantages: Tensor
    mask: Tensor
    clip: float = 0.2
    beta: float = 0.04


def uniform(generator: torch.Generator, low: float, high: float, *shape: int) -> Tensor:
    """Numbers of this shape, uniform between `low` and `high`."""
    return low + (high - low) * torch.rand(*shape, generator=generator)


def fresh_draw() -> Callable:
    """draw(a, b, *shape) is uniform between a and b; from the start of this test run's numbers."""
    return partial(uniform, torch.Generator().manual_seed(SEED))


def fresh_batch(draw: Callable, lengths: list[int], Tr: int, clip: float = 0.2, beta: float = 0.04) -> Batch:
    """A response of each of the `lengths`, advantages of both signs and unequal size, ratios on both sides of both ends
    of the clip. draw(a, b, *shape) is uniform between a and b.
    """
    N = len(lengths)
    mask = (torch.arange(Tr) < torch.tensor(lengths)[:, None]).float()
    logp = draw(-3, -0.5, N, Tr)
    A = draw(0.3, 2, N) * torch.tensor([1.0, -1.0] * N)[:N]
    old_logp = logp - draw(-0.9, 0.9, N, Tr)
    ref_logp = logp + draw(-1.2, 1.2, N, Tr)
    # The padding's log-probs mean nothing: make them large, but finite (infinity * 0 is NaN).
    for values, poison in ((logp, -2.0), (old_logp, -7.0), (ref_logp, 3.0)):
        values[mask == 0] = poison
    return Batch(logp, old_logp, ref_logp, A, mask, clip, beta)


def some_prompts(count: int) -> Tensor:
    """Training prompts [count, Tp], the same in all of a test run."""
    train, _ = tinylm.problems()
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(SEED))
    return train[order[:count]]


def short_and_long_prompts(count: int) -> Tensor:
    """Sums below 100 and above in turn, so that responses of three and of four tokens stand side by side."""
    prompts = some_prompts(40 * count)
    is_short = tinylm.answers(prompts)[:, 2] == tinylm.EOS
    return torch.stack([prompts[is_short][:count], prompts[~is_short][:count]], dim=1).flatten(0, 1)[:count]


def talkative(sft: tinylm.TinyLM) -> tinylm.TinyLM:
    """The SFT model made to forget its end-of-sequence and to write padding, so that all kinds of answers occur."""
    model = copy.deepcopy(sft)
    model.head = torch.nn.Linear(sft.head.in_features, len(tinylm.VOCAB))
    model.head.weight = copy.deepcopy(sft.head.weight)
    bias = torch.zeros(len(tinylm.VOCAB))
    bias[tinylm.EOS], bias[tinylm.PAD] = -4.0, 3.0
    model.head.bias = torch.nn.Parameter(bias)
    return model


def shaken(sft: tinylm.TinyLM, seed: int, size: float = 0.02) -> tinylm.TinyLM:
    """A policy some way from the reference: the SFT model with noise on its weights."""
    model = copy.deepcopy(sft).requires_grad_()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(size * torch.randn(weight.shape, generator=generator))
    return model
