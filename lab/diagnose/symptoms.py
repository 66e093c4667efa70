"""What is seen where no mistake is known: true statements about a function, from calling it again with one input
changed, from where its wrong values stand, and from how much they differ. They are computed, never guessed, and none is
made of a function that is right.

Each `of_...` takes `call`, which calls a task's function with other arguments (or gives None where that raises), and
returns the first statement that holds, or "". In order: places and amounts, then the tasks.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from lab.diagnose import close
from lab.inputs import Batch

Features = dict[str, Tensor]  # a few words -> the places that they describe, as booleans
Loss = tuple[Tensor, Tensor]  # a loss, and its gradient with respect to logp


def where(wrong: Tensor, features: Features) -> str:
    """The fewest words that describe the wrong places exactly: one feature or two, or "" if none do."""
    if not wrong.any() or wrong.all():
        return ""
    for name, places in features.items():
        if torch.equal(places, wrong):
            return name
    for (one, a), (other, b) in itertools.combinations(features.items(), 2):
        if torch.equal(a & b, wrong):
            return f"{one} and {other}"
    return ""


def how_much(got: Tensor, expected: Tensor, known: dict[str, float]) -> str:
    """ "1.005 times", if all of `got` is that; with the known quantity that it equals, if there is one."""
    if not expected.any() or not got.isfinite().all():
        return ""
    factor = ((got * expected).sum() / (expected * expected).sum()).item()
    if abs(factor - 1) < 1e-3 or not close(got, factor * expected):
        return ""
    names = [name for name, value in known.items() if value and abs(factor / value - 1) < 1e-3]
    return f"{factor:.4g} times" + (f" ({names[0]})" if names else "")


def first(statements: Iterator[str]) -> str:
    """The first of the statements that says something."""
    return next(filter(None, statements), "")


# Task 1 ----------------------------------------------------------------------------------------------------------


def of_rewards(got: Tensor, expected: Tensor) -> str:
    """What wrong rewards do."""
    if others := sorted(set(got.tolist()) - {0, 1}):
        return f"samples.rewards holds {', '.join(f'{value:.4g}' for value in others[:3])}: a reward is 1 or 0"
    seen = [
        f"{places.sum()} {kind} answers {reward}"
        for kind, reward, places in (("right", 0, expected > got), ("wrong", 1, expected < got))
        if places.any()
    ]
    return f"samples.rewards gives {' and '.join(seen)}"


def of_mask(got: Tensor, own: Tensor) -> str:
    """What a wrong mask does to the policy's own tokens and to the others. got, own: [N, Tr]."""
    if others := sorted(set(got.flatten().tolist()) - {0, 1}):
        return f"samples.mask holds {', '.join(f'{value:.4g}' for value in others[:3])}: the mask is 1 or 0"
    own, place = own.bool(), torch.arange(own.shape[1])
    length = own.sum(dim=1, keepdim=True)
    dropped, kept = own & (got == 0), ~own & (got == 1)
    mine = {"every own token": own, "the first token": own & (place == 0), "the last own token": place == length - 1}
    after = {"every token after the end": ~own, "the first token after the end": ~own & (place == length)}

    def which(wrong: Tensor, places: Features, of: str) -> str:
        return next((name for name, place in places.items() if torch.equal(place, wrong)), f"{wrong.sum()} {of}")

    seen = []
    if dropped.any():
        seen.append("drops " + which(dropped, mine, f"of the {own.sum()} own tokens"))
    if kept.any():
        seen.append("keeps " + which(kept, after, f"of the {(~own).sum()} tokens after the end"))
    return f"samples.mask {' and '.join(seen)}"


# Task 2 ----------------------------------------------------------------------------------------------------------


def of_advantages(call: Callable, rewards: Tensor, G: int, normalize_std: bool) -> str:
    """What a wrong group_advantages does."""
    return first(seen_in_advantages(call, rewards, G, normalize_std))


def seen_in_advantages(call, rewards: Tensor, G: int, normalize_std: bool) -> Iterator[str]:
    def again(changed: Tensor) -> Tensor | None:
        return call(changed, G, normalize_std)

    base = again(rewards)
    if base is None:
        return
    groups, values = rewards.double().view(-1, G), base.view(-1, G)
    if ((groups - groups.mean(dim=1, keepdim=True)) * values).sum(dim=1).max() < -1e-3:
        yield "the higher a reward of a group, the lower its advantage: it should be the other way round"
    changed = rewards.clone()
    changed[:G] = changed[:G] * 3 + torch.linspace(0, 1, G, dtype=rewards.dtype)
    other = again(changed)
    if other is not None and not close(other[G:], base[G:], 1e-3):
        yield "the rewards of one group move the advantages of another: each group is compared with itself alone"
    turned = again(rewards.view(-1, G).flip(1).flatten())
    if turned is not None and not close(turned.view(-1, G).flip(1).flatten(), base, 1e-3):
        yield "the order of the rewards within a group changes their advantages: only their values may count"
    higher = again(rewards + 1)
    if higher is not None and not close(higher, base, 1e-2):
        yield "adding 1 to all rewards changes the advantages: the group's mean is to be subtracted"
    sums = base.view(-1, G).sum(dim=1)
    if sums.abs().max() > 1e-2:
        yield f"the advantages of a group do not sum to 0, but to {sums[sums.abs().argmax()]:.3g}"
    twice = again(2 * rewards)
    if twice is not None and normalize_std and not close(twice, base, 2e-2):
        yield "twice the rewards give other advantages: divided by the std, their size does not count"
    if twice is not None and not normalize_std and not close(twice, 2 * base, 1e-2):
        yield "twice the rewards do not give twice the advantages, as they do when only the mean is subtracted"
    apart = rewards.view(-1, G).clone()  # the highest of each group raised
    apart.scatter_add_(1, apart.argmax(dim=1, keepdim=True), apart.amax(dim=1, keepdim=True).abs() + 1)
    further = again(apart.flatten())
    if further is not None and G > 2 and close(further, base, 1e-3):
        yield "how far apart the rewards of a group are makes no difference, only their order: it should"
    size = base.view(-1, G).square().mean(dim=1).sqrt()
    if normalize_std and (size - 1).abs().max() > 1e-2:
        alike = (size - size.mean()).abs().max() < 1e-3
        what = f"{size.mean():.4g} times" if alike else f"{size.min():.3g} to {size.max():.3g} times"
        yield f"the advantages are {what} as large as they should be: their root mean square in a group is to be 1"


def of_eps(call: Callable) -> str:
    """What a group_advantages that is otherwise right does with eps, and where all rewards of a group are equal."""
    equal = call(torch.tensor([1.0, 1, 1, 1, 0, 1, 0, 1]), 4, True)
    small, large = (call(torch.tensor([1.0, 0, 0, 1]), 4, True, eps) for eps in (1e-4, 100.0))
    if small is not None and large is not None and close(large - small, torch.full((4,), 100.0), 1e-2):
        return "eps is added to the quotient: divide by (std + eps)"
    if equal is not None and equal.isnan().any():
        return "a group whose rewards are all equal gives NaN (0 / 0): divide by (std + eps)"
    return ""


# Task 3 ----------------------------------------------------------------------------------------------------------


def of_k3(call: Callable, logp: Tensor, ref_logp: Tensor) -> str:
    """What a wrong k3_kl does."""
    return first(seen_in_k3(call, logp, ref_logp))


def seen_in_k3(call, logp: Tensor, ref_logp: Tensor) -> Iterator[str]:
    def value(*args) -> Tensor | None:
        result = call(*args)
        return None if result is None else result[0]

    base, log_u = value(logp, ref_logp), (ref_logp - logp).double()
    if base is None:
        return
    expected = log_u.exp() - log_u - 1
    if logp.numel() > 1:
        moved = logp.clone()
        moved[0, 0] -= 0.7
        other = value(moved, ref_logp)
        if other is not None and not close(other.flatten()[1:], base.flatten()[1:]):
            yield "one token's log-probs move the k3 of another: it is a value for each token by itself"
    both = value(logp - 1, ref_logp - 1)
    if both is not None and not close(both, base, 1e-3):
        yield "k3 changes where both log-probs fall by 1: it depends on their difference alone"
    agree = value(logp, logp)
    if agree is not None and agree.abs().max() > 1e-5:
        yield f"k3 is {agree.flatten()[agree.abs().argmax()]:.4g} where the two policies agree: it must be 0"
    if base.min() < -1e-5:
        yield f"k3 is negative for some tokens ({base.min():.3g}): u - log(u) - 1 never is"
    if amount := how_much(base, expected, {"1 / ln 2: bits for nats": 1 / math.log(2), "ln 2": math.log(2)}):
        yield f"k3 is {amount} what it should be"
    wrong = ~torch.isclose(base, expected, 1e-4, 1e-4)
    if wrong.sum() > 1 and close(base[wrong], base[wrong].max().expand(int(wrong.sum()))) and base[~wrong].numel():
        yield f"k3 is {base[wrong].max():.4g} wherever it should be more: nothing may cut it off"
    if place := where(wrong, {"u > 1": log_u > 0, "u < 1": log_u < 0}):
        yield f"k3 is wrong exactly where {place}"
    right = ~wrong & (log_u.abs() > 0.1)  # near 0 many functions agree, which says nothing
    if wrong.any() and right.any() and log_u[wrong].abs().min() > log_u[right].abs().max():
        least = log_u[wrong].abs().min()
        yield f"k3 is wrong exactly where |log(u)| is large, from {least:.3g} on: nothing may cut it off"
    yield sides("k3", base, expected, log_u)


def sides(what: str, got: Tensor, expected: Tensor, log_u: Tensor) -> str:
    """In which direction it is wrong where u > 1, and where u < 1, if that is one direction each."""
    seen = {}
    for name, side in (("u > 1", log_u > 1e-3), ("u < 1", log_u < -1e-3)):
        difference = (got - expected)[side]
        if side.any() and (difference.abs() > 1e-4).all() and (difference.sign() == difference.sign()[0]).all():
            seen[name] = "too large" if difference[0] > 0 else "too small"
    if len(seen) == 2 and len(set(seen.values())) == 1:
        return f"{what} is {seen['u > 1']} wherever u is not 1"
    return f"{what} is " + " and ".join(f"{amount} where {name}" for name, amount in seen.items()) if seen else ""


# Task 4 ----------------------------------------------------------------------------------------------------------


def features_of(batch: Batch) -> Features:
    """Words for the places of a batch [N, Tr]."""
    own, ratio = batch.mask.bool(), (batch.logp - batch.old_logp).exp()
    A, u = batch.advantages[:, None].expand_as(ratio), (batch.ref_logp - batch.logp).exp()
    up, down, above, below = A > 0, A < 0, ratio > 1 + batch.clip, ratio < 1 - batch.clip
    lengths, column = batch.mask.sum(dim=1, keepdim=True), torch.arange(batch.mask.shape[1]).expand_as(batch.mask)
    return {
        "A > 0": own & up,
        "A < 0": own & down,
        "ratio > 1 + clip": own & above,
        "ratio < 1 - clip": own & below,
        "a ratio within the clip": own & ~above & ~below,
        "a ratio outside of the clip": own & (above | below),
        "a ratio that the clip stops": own & ((up & above) | (down & below)),
        "a ratio that is outside, but not to be stopped": own & ((up & below) | (down & above)),
        **({"u > 1": own & (u > 1), "u < 1": own & (u < 1)} if batch.beta else {}),  # without beta, u cannot matter
        "the first token": own & (column == 0),
        "the last token, the end-of-sequence,": own & (column == lengths - 1),
        "the padding": ~own,
        "the longest responses": own & (lengths == lengths.max()),
        "responses of one token": own & (lengths == 1),
    }


CLIPPED = {  # what the gradient of the surrogate is to be, where the clip decides
    "a ratio that the clip stops": "it is 0 there but for the KL term (A > 0 and above it, A < 0 and below it)",
    "a ratio that is outside, but not to be stopped": "ratio * A is the smaller term there, and keeps its gradient",
    "A > 0 and ratio > 1 + clip": "it is 0 there but for the KL term: the clipped term is the smaller one",
    "A < 0 and ratio < 1 - clip": "it is 0 there but for the KL term: the clipped term is the smaller one",
    "A > 0 and ratio < 1 - clip": "the clip does nothing there: ratio * A is the smaller term, and keeps its gradient",
    "A < 0 and ratio > 1 + clip": "the clip does nothing there: ratio * A is the smaller term, and keeps its gradient",
}


def of_loss(call: Callable[[Batch], Loss | None], right_of: Callable[[Batch], Loss], batch: Batch) -> str:
    """What a wrong grpo_loss does. `call` gives its loss and its gradient by logp, `right_of` the right ones."""
    return first(seen_in_loss(call, right_of, batch))


def seen_in_loss(call, right_of, batch: Batch) -> Iterator[str]:
    base, right = call(batch), right_of(batch)
    if base is None:
        return
    yield from amounts(base, right, batch)

    def again(**changes) -> Tensor | None:
        result = call(dataclasses.replace(batch, **changes))
        return None if result is None else result[0]

    yield from what_moves(base[0], again, batch)
    wrong = ~torch.isclose(base[1], right[1], 1e-4, 1e-5)
    if place := where(wrong, features_of(batch)):
        should = CLIPPED.get(place, "elsewhere it is right")
        yield f"the gradient of the loss is wrong exactly at tokens with {place}: {should}"
    yield large_ratios(wrong, batch)
    if not (close(base[0], right[0]) and close(base[1], right[1])):
        yield right_without(call, right_of, batch)


def large_ratios(wrong: Tensor, batch: Batch) -> str:
    """Whether the wrong places are those of one sign of A whose ratio is large."""
    ratio, own = (batch.logp - batch.old_logp).exp(), batch.mask.bool()
    A = batch.advantages[:, None].expand_as(ratio)
    for name, side in (("A > 0", own & (A > 0)), ("A < 0", own & (A < 0))):
        inside, outside = ratio[side & wrong], ratio[side & ~wrong]
        if len(inside) and len(outside) and not wrong[~side].any() and inside.min() > outside.max():
            least = f"a ratio of {inside.min():.3g} or more, not of {outside.max():.3g}"
            return f"the gradient of the loss is wrong exactly at tokens with {name} and {least}"
    return ""


def right_without(call, right_of, batch: Batch) -> str:
    """Which part of the loss it is: the one without which all is right."""
    logp, ones = batch.logp, torch.ones_like(batch.mask)
    simpler = {
        "clip = 1000": ({"clip": 1000.0}, "the clip"),
        "beta = 0": ({"beta": 0.0}, "the KL penalty"),
        "advantages of 0": ({"advantages": 0 * batch.advantages}, "the surrogate"),
        "old_logp = logp, a ratio of 1,": ({"old_logp": logp}, "the ratio, or the clip"),
        "ref_logp = logp, where k3 is 0,": ({"ref_logp": logp}, "the KL penalty"),
        "a mask of ones": ({"mask": ones}, "the mask, or the division by each response's own number of tokens"),
        "advantages that are all 1": (
            {"advantages": ones[:, 0]},
            "the advantages: which token gets which, or their sign",
        ),
    }
    for name, (changes, part) in simpler.items():
        changed = dataclasses.replace(batch, **changes)
        got, expected = call(changed), right_of(changed)
        if got is not None and close(got[0], expected[0]) and close(got[1], expected[1]):
            return f"the loss is not right, but with {name} it is: look at {part}"
    return ""


def amounts(base: Loss, right: Loss, batch: Batch) -> Iterator[str]:
    """A constant that is added, a factor of the whole, a factor of each response."""
    lengths = batch.mask.sum(dim=1)
    known = {
        "N, the number of responses": float(len(lengths)),
        "1 / N": 1 / len(lengths),
        "the mean length": lengths.mean().item(),
        "1 / the mean length": 1 / lengths.mean().item(),
        "Tr": float(batch.mask.shape[1]),
        "-1: the sign": -1.0,
    }
    if close(base[1], right[1]) and not close(base[0], right[0]):
        where_from = "the error lies where the loss has no slope in logp (clipped tokens, a constant)"
        yield f"the loss is {base[0] - right[0]:+.4g} off, yet its gradient is right: {where_from}"
    if amount := how_much(base[1], right[1], known):
        yield f"the gradient of the loss is {amount} what it should be"
    yield of_rows(base[1], right[1], lengths)


def what_moves(loss: Tensor, again: Callable[..., Tensor | None], batch: Batch) -> Iterator[str]:
    """Which changes of the arguments move the loss otherwise than they should. `again` gives the loss after changes."""

    def differs(value: Tensor | None, other: Tensor | None) -> bool:
        return value is not None and other is not None and not close(value, other, 1e-3)

    for name in ("logp", "old_logp", "ref_logp"):
        values = getattr(batch, name).clone()
        values[batch.mask == 0] -= 0.3
        if differs(again(**{name: values}), loss):
            yield f"the {name} of the padding moves the loss: padding means nothing, and is to be masked"
    tensors = ("logp", "old_logp", "ref_logp", "advantages", "mask")
    if differs(again(**{name: torch.cat([getattr(batch, name)] * 2) for name in tensors}), loss):
        yield "all responses twice give another loss: it is a mean over the responses, however many there are"
    none, one, two = (again(beta=beta) for beta in (0.0, 0.1, 0.2))
    if None not in (none, one, two):
        if differs(two - one, one - none):
            yield "twice the beta does not give twice the KL penalty"
        elif close(one, none, 1e-5) and not close(batch.logp, batch.ref_logp):
            yield "beta makes no difference to the loss: the KL penalty is missing, or beta is not used"
    if differs(again(beta=0.0, ref_logp=batch.ref_logp - 0.5), none):
        yield "the reference moves the loss even where beta is 0"
    if differs(again(beta=0.0, advantages=2 * batch.advantages), None if none is None else 2 * none):
        yield "twice the advantages do not give twice the surrogate (beta = 0)"


def of_metric(call: Callable[[Batch], dict | None], key: str, batch: Batch) -> str:
    """What a wrong metric of grpo_loss depends on. `call` gives the metrics."""
    return first(seen_in_metric(call, key, batch))


def seen_in_metric(call, key: str, batch: Batch) -> Iterator[str]:
    def moves(**changes) -> bool:
        other = call(dataclasses.replace(batch, **changes))
        return other is not None and abs(float(other[key]) - value) > 1e-4 * max(1, abs(value))

    if (found := call(batch)) is None:
        return
    what, value = f"metrics[{key!r}]", float(found[key])
    padding = batch.logp.clone()
    padding[batch.mask == 0] = batch.old_logp[batch.mask == 0]  # ratios of 1, in place of what is far from it
    if moves(logp=padding):
        yield f"the log-probs of the padding move {what}: it is the mean over own tokens"
    tensors = ("logp", "old_logp", "ref_logp", "advantages", "mask")
    if moves(**{name: torch.cat([getattr(batch, name)] * 2) for name in tensors}):
        yield f"all responses twice give another {what}: it is a mean, however many there are"
    if moves(beta=2 * batch.beta):
        yield f"beta moves {what}: it is without beta"
    if key == "clip_fraction" and not moves(clip=0.5 * batch.clip):
        yield f"clip makes no difference to {what}"
    if key == "clip_fraction" and not moves(advantages=-batch.advantages):
        yield f"the sign of the advantages makes no difference to {what}: it decides on which side a ratio is clipped"


def of_rows(got: Tensor, expected: Tensor, lengths: Tensor) -> str:
    """Whether each response has a factor of its own, and what that is of its length."""
    factors = (got * expected).sum(dim=1) / (expected * expected).sum(dim=1).clamp(min=1e-12)
    if not close(got, factors.unsqueeze(1) * expected) or lengths.unique().numel() < 2:
        return ""
    forms = {
        "its length": lengths,
        "the root of its length": lengths.sqrt(),
        "1 / its length": 1 / lengths,
        "1 / the root of its length": 1 / lengths.sqrt(),
    }
    for name, form in forms.items():
        if close(factors / factors[0], (form / form[0]).double(), 1e-3):
            return f"the gradient of each response is right but for a factor in proportion to {name}"
    return ""


# Task 5 ----------------------------------------------------------------------------------------------------------


def of_step(is_right: Callable[..., bool | None], config) -> str:
    """Which setting it is without which a wrong grpo_step is right. `is_right` takes another step with some settings
    of `config` changed, and says whether the weights are then as they should be (None: it raised).
    """
    simpler = {
        "inner_steps = 1": ({"inner_steps": 1}, "what is done once, and what in each inner step"),
        "temperature = 1": ({"temperature": 1.0}, "where config.temperature goes: sampling and all log-probs"),
        "beta = 0": ({"beta": 0.0}, "the KL penalty: ref_logp, and config.beta"),
        "clip = 1000": ({"clip": 1000.0}, "the clip: old_logp, and config.clip"),
        "std = False": ({"std": False}, "how the advantages are divided by the std: config.std"),
    }
    for name, (changes, part) in simpler.items():
        changed = any(getattr(config, setting) != value for setting, value in changes.items())
        if changed and is_right(**changes):
            return f"the weights after the step are not right, but with {name} they are: look at {part}"
    if config.inner_steps > 1 and is_right(inner_steps=1, beta=0.0, clip=1000.0):
        return "a single inner step without clip and KL penalty is right: look at old_logp and ref_logp"
    return ""
