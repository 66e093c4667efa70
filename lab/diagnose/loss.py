"""Task 4: the loss, part by part, with the choices that known mistakes make in each."""

import dataclasses
import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from lab.diagnose import Mistakes, Seen, few_deviations, joined, named, symptoms
from lab.diagnose.k3 import k3_of
from lab.inputs import Batch, fresh_batch, uniform


def sequence_ratio(b: Batch) -> Tensor:
    return ((b.logp - b.old_logp) * b.mask).sum(1, keepdim=True).exp().expand_as(b.logp)


# One choice for each part of the loss; "" is the right one. Any one or two wrong choices together can be named.
RATIOS = {
    "": lambda b: (b.logp - b.old_logp).exp(),
    "old and new are swapped in the ratio: it is exp(logp - old_logp)": lambda b: (b.old_logp - b.logp).exp(),
    "the ratio is one number for the whole response (sequence level): take it token by token": sequence_ratio,
    "the ratio is one number for the whole response, the geometric mean over its tokens (as in GSPO): take it "
    "token by token": lambda b: (
        (((b.logp - b.old_logp) * b.mask).sum(1, keepdim=True) / b.mask.sum(1, keepdim=True)).exp().expand_as(b.logp)
    ),
    "the exp of the log-ratio is missing": lambda b: b.logp - b.old_logp,
    "the ratio is logp / old_logp: dividing probabilities means subtracting their logs": lambda b: b.logp / b.old_logp,
    "the ratio is taken against the reference: it is against old_logp": lambda b: (b.logp - b.ref_logp).exp(),
    "the ratio is the new probability alone: divide by the old one, exp(logp - old_logp)": lambda b: b.logp.exp(),
    "the mask is applied to the log-ratio, before the exp: padding then counts as ratio 1": lambda b: (
        (b.logp - b.old_logp) * b.mask
    ).exp(),
    "the ratio carries no gradient: do not detach logp": lambda b: (b.logp - b.old_logp).exp().detach(),
    "old_logp is not used, so the ratio is always 1: the frozen old_logp belongs in it": lambda b: (
        b.logp - b.logp.detach()
    ).exp(),
    "the ratio is missing: this is the plain policy gradient, logp * A": lambda b: b.logp,
}
SURROGATES = {
    "": lambda r, A, b: torch.minimum(r * A, r.clamp(1 - b.clip, 1 + b.clip) * A),
    "max is taken for min: the surrogate is the smaller of the two terms": lambda r, A, b: torch.maximum(
        r * A, r.clamp(1 - b.clip, 1 + b.clip) * A
    ),
    "only the clipped term is there: take the minimum with the unclipped one": lambda r, A, b: (
        r.clamp(1 - b.clip, 1 + b.clip) * A
    ),
    "nothing is clipped: take the minimum with the clipped term": lambda r, A, b: r * A,
    "the clip is in log space (exp(-clip) to exp(clip)): clip the ratio itself": lambda r, A, b: torch.minimum(
        r * A, r.clamp(math.exp(-b.clip), math.exp(min(b.clip, 700))) * A
    ),
    "the clip works for positive advantages only: its lower end, 1 - clip, binds for negative ones": lambda r, A, b: (
        torch.where(A > 0, torch.minimum(r, 0 * r + 1 + b.clip) * A, r * A)
    ),
    "the clip works for negative advantages only: its upper end, 1 + clip, binds for positive ones": lambda r, A, b: (
        torch.where(A < 0, r.clamp(min=1 - b.clip) * A, r * A)
    ),
    "the clip is wrong for negative advantages: take the minimum after multiplying by A": lambda r, A, b: (
        torch.minimum(r, r.clamp(1 - b.clip, 1 + b.clip)) * A
    ),
    "the larger ratio is taken before multiplying by A: take the minimum after it": lambda r, A, b: (
        torch.maximum(r, r.clamp(1 - b.clip, 1 + b.clip)) * A
    ),
    "clip is ignored, a fixed 0.2 stands in its place": lambda r, A, b: torch.minimum(r * A, r.clamp(0.8, 1.2) * A),
    "ratio * A is clipped: clip the ratio, then multiply by A": lambda r, A, b: torch.minimum(
        r * A, (r * A).clamp(1 - b.clip, 1 + b.clip)
    ),
    "the upper end of the clip is 1, not 1 + clip": lambda r, A, b: torch.minimum(r * A, r.clamp(1 - b.clip, 1) * A),
    "the clip reaches from -clip to clip: it is 1 - clip to 1 + clip": lambda r, A, b: torch.minimum(
        r * A, r.clamp(-b.clip, b.clip) * A
    ),
    "the clip reaches from 1 / (1 + clip) to 1 + clip: its lower end is 1 - clip": lambda r, A, b: torch.minimum(
        r * A, r.clamp(1 / (1 + b.clip), 1 + b.clip) * A
    ),
    "the bounds of the clip are swapped: from 1 - clip to 1 + clip": lambda r, A, b: torch.minimum(
        r * A, r.clamp(1 + b.clip, 1 - b.clip) * A
    ),
    "the upper end of the clip is raised (clip-higher, as in DAPO): it is 1 + clip": lambda r, A, b: torch.minimum(
        r * A, r.clamp(1 - b.clip, 1 + 1.4 * b.clip) * A
    ),
    "the two terms are averaged: take the smaller": lambda r, A, b: (r + r.clamp(1 - b.clip, 1 + b.clip)) * A / 2,
    "the two terms are added: take the smaller": lambda r, A, b: (r + r.clamp(1 - b.clip, 1 + b.clip)) * A,
    "negative advantages have a second clip (dual clip): the lab has none": lambda r, A, b: torch.where(
        A < 0,
        torch.maximum(torch.minimum(r * A, r.clamp(1 - b.clip, 1 + b.clip) * A), 2 * A),
        torch.minimum(r * A, r.clamp(1 - b.clip, 1 + b.clip) * A),
    ),
}
ADVANTAGES = {
    "": lambda b: b.advantages[:, None],
    "the advantages are broadcast over the tokens, not over the rows: make them [N, 1]": lambda b: (
        b.advantages[None, :] if b.logp.shape[1] in (1, len(b.logp)) else None
    ),
    "the advantages are not used": lambda b: torch.ones_like(b.advantages)[:, None],
    "the absolute advantage is used: its sign says whether to go up or down": lambda b: b.advantages.abs()[:, None],
    "only the sign of the advantage is used": lambda b: b.advantages.sign()[:, None],
    "the advantages are tiled token by token: every token of response i gets advantages[i]": lambda b: (
        b.advantages.repeat(b.logp.shape[1]).view(b.logp.shape)
    ),
    "the advantages are normalised again, over the batch: use them as they come": lambda b: (
        (b.advantages - b.advantages.mean()) / (b.advantages.std(correction=0) + 1e-8)
    )[:, None],
    "the advantages are normalised again, over the batch and with the sample std: use them as they come": lambda b: (
        ((b.advantages - b.advantages.mean()) / (b.advantages.std() + 1e-8))[:, None] if len(b.advantages) > 1 else None
    ),
    "one mean advantage is used for all responses": lambda b: b.advantages.mean().expand(len(b.logp), 1),
}
PENALTIES = {
    "": lambda b: b.beta * k3_of(b.ref_logp - b.logp),
    "the KL penalty has the wrong sign: the objective is surrogate - beta * k3": lambda b: (
        -b.beta * k3_of(b.ref_logp - b.logp)
    ),
    "the KL penalty is missing: subtract beta * k3": lambda b: 0 * b.logp,
    "beta is missing: the penalty is beta * k3": lambda b: k3_of(b.ref_logp - b.logp),
    "beta is ignored, a fixed 0.04 stands in its place": lambda b: 0.04 * k3_of(b.ref_logp - b.logp),
    "beta is applied twice": lambda b: b.beta**2 * k3_of(b.ref_logp - b.logp),
    "the KL penalty is reversed: u = pi_ref / pi_theta": lambda b: b.beta * k3_of(b.logp - b.ref_logp),
    "the KL penalty is k1: use k3": lambda b: b.beta * (b.logp - b.ref_logp),
    "the KL penalty is k2: use k3": lambda b: b.beta * (b.logp - b.ref_logp) ** 2 / 2,
    "the KL penalty is taken against old_logp: it is against ref_logp": lambda b: b.beta * k3_of(b.old_logp - b.logp),
    "the KL penalty compares old_logp with ref_logp: it must move with logp": lambda b: (
        b.beta * k3_of(b.ref_logp - b.old_logp)
    ),
    "the KL penalty carries no gradient: do not detach it": lambda b: b.beta * k3_of(b.ref_logp - b.logp).detach(),
    "the KL penalty is multiplied by the ratio (as newer TRL does): the lab's is plain k3": lambda b: (
        b.beta * k3_of(b.ref_logp - b.logp) * (b.logp - b.old_logp).exp()
    ),
}
AVERAGES = {
    "": lambda x, b: ((x * b.mask).sum(1) / b.mask.sum(1)).mean(),
    "this is the average over all tokens of the batch; average each response over its own tokens first": lambda x, b: (
        (x * b.mask).sum() / b.mask.sum()
    ),
    "each response is divided by Tr, the padded length: divide by its own number of tokens": lambda x, b: (
        (x * b.mask).sum(1) / x.shape[1]
    ).mean(),
    "the mask is ignored: padding counts as tokens": lambda x, b: x.mean(),
    "the padding is summed too, before dividing by the length: multiply by the mask": lambda x, b: (
        x.sum(1) / b.mask.sum(1)
    ).mean(),
    "each response is divided by the number of tokens of the whole batch: divide by its own": lambda x, b: (
        (x * b.mask).sum(1) / b.mask.sum()
    ).mean(),
    "the mask is summed over the responses (dim=0): divide each by its own tokens, mask.sum(dim=1)": lambda x, b: (
        (x * b.mask).sum(1) / b.mask.sum(0)
    ).mean(),
    "a response's tokens are summed: divide by their number": lambda x, b: (x * b.mask).sum(1).mean(),
    "the responses are summed: average over them": lambda x, b: ((x * b.mask).sum(1) / b.mask.sum(1)).sum(),
    "everything is summed: average over a response's tokens, then over responses": lambda x, b: (x * b.mask).sum(),
    "all is divided by the length of the longest response: divide each by its own": lambda x, b: (
        (x * b.mask).sum(1) / b.mask.sum(1).max()
    ).mean(),
    "the average runs over responses first, token by token: it runs over a response's own tokens first": lambda x, b: (
        (x * b.mask).sum(0) / b.mask.sum(0).clamp(min=1)
    ).mean(),
    "the surrogate counts the padding: mask it like the KL penalty": lambda x, b: (
        (b.surrogate - b.penalty * b.mask).sum(1) / b.mask.sum(1)
    ).mean(),
    "the KL penalty is summed over a response's tokens: average it like the surrogate": lambda x, b: (
        ((b.surrogate * b.mask).sum(1) / b.mask.sum(1)).mean() - (b.penalty * b.mask).sum(1).mean()
    ),
    "the KL penalty counts the padding: mask it like the surrogate": lambda x, b: (
        (b.surrogate * b.mask - b.penalty).sum(1) / b.mask.sum(1)
    ).mean(),
    "the KL penalty is averaged over all N * Tr places: average it like the surrogate": lambda x, b: (
        ((b.surrogate * b.mask).sum(1) / b.mask.sum(1)).mean() - b.penalty.mean()
    ),
    "the KL penalty is averaged over all tokens of the batch: average it like the surrogate": lambda x, b: (
        ((b.surrogate * b.mask).sum(1) / b.mask.sum(1)).mean() - (b.penalty * b.mask).sum() / b.mask.sum()
    ),
    "the length is one too large": lambda x, b: ((x * b.mask).sum(1) / (b.mask.sum(1) + 1)).mean(),
    "the end-of-sequence is left out: the mask's last 1 counts too": lambda x, b: (
        ((x * b.mask)[:, :-1] * b.mask[:, 1:]).sum(1) / b.mask[:, 1:].sum(1).clamp(min=1)
    ).mean(),
    "the first token of each response is left out": lambda x, b: (
        (x * b.mask)[:, 1:].sum(1) / b.mask[:, 1:].sum(1).clamp(min=1)
    ).mean(),
    "the average is taken twice: the mean over responses is divided by N again": lambda x, b: (
        ((x * b.mask).sum(1) / b.mask.sum(1)).mean() / len(x)
    ),
}
SIGNS = {
    "": -1.0,
    "the loss is not negated: optimizers minimise, and the objective is to be maximised": 1.0,
}
PARTS = (RATIOS, SURROGATES, ADVANTAGES, PENALTIES, AVERAGES, SIGNS)


def loss_with(names: tuple, batch: Batch) -> tuple[Tensor, Tensor] | None:
    """(loss, gradient) with the named choice for each part; None where that choice makes no sense."""
    leaf = batch.logp.detach().double().requires_grad_()
    b = Batch(**{name: v.double() if isinstance(v, Tensor) else v for name, v in vars(batch).items()})
    b.logp = leaf
    ratio, surrogate, advantages, penalty, average, sign = (part[name] for part, name in zip(PARTS, names, strict=True))
    if (A := advantages(b)) is None:
        return None
    b.surrogate, b.penalty = surrogate(ratio(b), A, b), penalty(b)
    try:
        loss = sign * average(b.surrogate - b.penalty, b)
    except RuntimeError:  # advantages broadcast over the tokens make [N, N] of [N, 1], which not every average takes
        return None
    gradient = torch.autograd.grad(loss, leaf, allow_unused=True)[0] if loss.requires_grad else None
    return loss.detach(), torch.zeros_like(leaf) if gradient is None else gradient


def right_of(batch: Batch) -> tuple[Tensor, Tensor]:
    """(loss, gradient) as they should be."""
    return loss_with(("",) * len(PARTS), batch)


SWAPS = (("clip", "beta"), ("old_logp", "ref_logp"))


def swapped(batch: Batch, a: str, b: str) -> Batch:
    return dataclasses.replace(batch, **{a: getattr(batch, b), b: getattr(batch, a)})


def probes() -> list[Batch]:
    """Batches that tell the mistakes from one another: lengths equal and not, N = Tr, a row without signal, a clip that
    never binds, no penalty and a large one.
    """
    draw = partial(uniform, torch.Generator().manual_seed(1))
    square = fresh_batch(draw, [3, 1, 4, 2], Tr=4, clip=0.1, beta=0.5)
    square.advantages[1] = 0
    free = fresh_batch(draw, [4, 2, 3, 4, 3, 4], Tr=4, clip=1000.0, beta=0.0)
    every_second = (torch.arange(6)[:, None] + torch.arange(4)) % 2 == 0
    free.old_logp[every_second] = free.logp[every_second] - draw(1, 1.5, 12)  # ratios from 2.7 to 4.5: other clips show
    return [
        fresh_batch(draw, [2, 4, 1, 3, 4, 2], Tr=5, clip=0.3, beta=0.1),
        fresh_batch(draw, [5, 5, 5, 5, 5, 5], Tr=5, beta=0.0),
        square,
        free,
    ]


def diagnose(call: Callable[[Batch], tuple[Tensor, Tensor] | None]) -> str:
    """What is wrong with a grpo_loss; `call` gives its loss and gradient with respect to logp, or None where it raises.
    "" if it is right.
    """
    seen = [Seen((batch,), got, right_of(batch)) for batch in probes() if (got := call(batch)) is not None]
    wrong = [probe for probe in seen if not probe.is_right]
    if not wrong:
        return ""
    if not any(value.any() for probe in seen for value in probe.got):
        return "the loss and its gradient are 0: is the mask the wrong way round, or all set to zero?"
    swaps = ((f"{a} and {b} are swapped", lambda batch, a=a, b=b: right_of(swapped(batch, a, b))) for a, b in SWAPS)
    mistakes = ((joined(names), lambda batch, names=names: loss_with(names, batch)) for names in few_deviations(*PARTS))
    if name := named(swaps, seen) or named(mistakes, seen):
        return name
    if not any(probe.got[1].any() for probe in seen):
        return "the gradient of the loss is zero: logp must reach the loss undetached"
    return symptoms.of_loss(call, right_of, *wrong[0].given)


# Metrics ---------------------------------------------------------------------------------------------------------


def outside(batch: Batch) -> Tensor:
    """Where the ratio is outside of the clip [N, Tr]."""
    ratio = (batch.logp - batch.old_logp).exp()
    return (ratio < 1 - batch.clip) | (ratio > 1 + batch.clip)


def tied(batch: Batch) -> Tensor:
    """Where the clipped term is smaller than the other, or equal to it [N, Tr]."""
    ratio, A = (batch.logp - batch.old_logp).exp(), batch.advantages[:, None]
    return ratio.clamp(1 - batch.clip, 1 + batch.clip) * A <= ratio * A


METRICS = {  # each gives a metric from what it is the mean of, [N, Tr], and which tokens are the policy's own, [N, Tr]
    "counts the padding: take the mean over own tokens": lambda values, own, b: values.mean(),
    "is a mean of each response's mean: take one mean over all own tokens": lambda values, own, b: (
        (values * own).sum(1) / own.sum(1)
    ).mean(),
    "is a sum: take the mean over own tokens": lambda values, own, b: values[own].sum(),
    "is multiplied by beta: it is the plain mean of k3": lambda values, own, b: b.beta * values[own].mean(),
}
CLIP_FRACTION = {
    "counts every ratio outside the interval: count those tokens whose clipped term is the smaller one, which lose "
    "their gradient": lambda values, own, b: outside(b)[own].double().mean(),
    "counts ties (<=): count those tokens whose clipped term is the smaller one": lambda values, own, b: (
        tied(b)[own].double().mean()
    ),
    "is the share that is not clipped": lambda values, own, b: 1 - values[own].mean(),
}


def metrics(key: str, values: Tensor, batch: Batch) -> Mistakes:
    """What mistakes make of the metric `key`, whose mean over own tokens is that of `values` [N, Tr]."""
    table = METRICS | (CLIP_FRACTION if key == "clip_fraction" else {})
    return {f"metrics[{key!r}] {name}": wrong(values, batch.mask.bool(), batch) for name, wrong in table.items()}
