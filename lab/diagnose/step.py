"""Task 5: one step, replayed from the samples that the student's function returned, right or with mistakes."""

import copy
import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

import tinylm
from lab.diagnose import few_deviations, joined, loss
from lab.diagnose.k3 import k3_of
from lab.diagnose.loss import Batch
from lab.examine import Calls, Examiner, Mistakes
from lab.inputs import SEED, shaken
from tinylm import TinyLM

History = list[dict[str, Tensor]]  # the metrics of each inner step

# One choice for each part, as in task 4.
OLD_LOGP = {
    "": "frozen",
    "old_logp is recomputed inside the inner loop, so the ratio is always 1: freeze it before the loop": "recomputed",
    "old_logp is taken after the first optimizer step: take it before any step": "late",
    "old_logp carries gradient, which cancels that of logp: compute it under torch.no_grad()": "with gradient",
    "ref_logp stands in for old_logp: old_logp comes from the policy that sampled": "reference",
}
REF_LOGP = {
    "": "reference",
    "the reference is the policy itself: ref_logp comes from ref_model": "policy",
    "ref_logp is recomputed from the policy at every inner step: it comes from ref_model, once": "moving policy",
    "old_logp and ref_logp are swapped": "swapped",
}
STEPS = {
    "": lambda n: n,
    "only one gradient step is taken: take config.inner_steps": lambda n: 1,
    "one gradient step too many is taken": lambda n: n + 1,
    "one gradient step is missing": lambda n: n - 1,
    "no step is taken: the weights do not change; call optimizer.step() after backward": lambda n: 0,
}
GRADIENTS = {
    "": "cleared",
    "the gradients add up over the inner steps: call optimizer.zero_grad() at each": "kept",
    "optimizer.step() stands before loss.backward(): it takes the gradient of the step before": "late",
    "the step goes up the loss (gradient ascent): the loss is negated already": "up",
    "the loss is scaled by 1 / inner_steps: each inner step takes the whole gradient": "shared",
    "the gradients of all inner steps are gathered for one optimizer step: step at each": "gathered",
}
TEMPERATURES = {  # the temperatures of logp, old_logp, ref_logp
    "": lambda T: (T, T, T),
    "config.temperature is missing in all log-probs": lambda T: (1, 1, 1),
    "config.temperature is missing in logp": lambda T: (1, T, T),
    "config.temperature is missing in old_logp": lambda T: (T, 1, T),
    "config.temperature is missing in ref_logp": lambda T: (T, T, 1),
    "config.temperature is missing in old_logp and ref_logp": lambda T: (T, 1, 1),
    "the logits are multiplied by the temperature: divide them": lambda T: (1 / T, 1 / T, 1 / T),
}
SETTINGS = {
    "": {},
    "config.std is ignored: the advantages are always divided by the std": {"std": True},
    "config.std is ignored: the advantages are never divided by the std": {"std": False},
    "config.std is used the wrong way round": {"std": "inverted"},
    "config.clip is ignored, and the default of 0.2 used": {"clip": 0.2},
    "config.clip is not used: nothing is clipped": {"clip": 1000.0},
    "config.beta is ignored, and the default of 0.04 used": {"beta": 0.04},
    "config.beta is not used: there is no KL penalty": {"beta": 0.0},
    "clip and beta are swapped": {"clip": "beta", "beta": "clip"},
}
SIGNALS = {
    "": lambda rewards, A, G: A,
    "the advantages are taken over P rows, not over G: pass config.G": lambda rewards, A, G: grouped(
        rewards, len(rewards) // G
    ),
    "the rewards are used as they are: task 2 makes advantages of them": lambda rewards, A, G: rewards,
    "the sign of the advantages is flipped: this makes right answers less likely": lambda rewards, A, G: -A,
    "the advantages are computed over the whole batch: pass config.G": lambda rewards, A, G: (
        (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-4)
    ),
}
MASKS = {"": lambda m: m, "the mask is not passed to the loss: padding counts": torch.ones_like}
LOSSES = {
    "": lambda ratio, A, b: loss.SURROGATES[""](ratio, A, b) - loss.PENALTIES[""](b),
    "this is REINFORCE, logp * A: the surrogate is the clipped ratio times A, from grpo_loss": lambda ratio, A, b: (
        b.logp * A - loss.PENALTIES[""](b)
    ),
    "this is REINFORCE without a KL penalty: take the loss from grpo_loss": lambda ratio, A, b: b.logp * A,
}
STEP_PARTS = (OLD_LOGP, REF_LOGP, STEPS, GRADIENTS, TEMPERATURES, SETTINGS, SIGNALS, MASKS, LOSSES)
RIGHT = ("",) * len(STEP_PARTS)


def replay(names: tuple, policy: TinyLM, reference: TinyLM, samples, config) -> tuple[Tensor, History]:
    """What grpo_step with SGD makes of `samples`, with the named choice of each part (RIGHT: as it should be): all
    weights in one row, and the metrics of each inner step.
    """
    old, ref, steps, gradients, temperatures, settings, signal, masking, objective = (
        part[name] for part, name in zip(STEP_PARTS, names, strict=True)
    )
    values = {"clip": config.clip, "beta": config.beta, "std": config.std}
    values |= {k: {"inverted": not config.std}.get(v, getattr(config, str(v), v)) for k, v in settings.items()}
    T_logp, T_old, T_ref = temperatures(config.temperature)
    model = copy.deepcopy(policy).requires_grad_()
    weights = list(model.parameters())
    at = (samples.prompts, samples.responses)
    A = grouped(samples.rewards, config.G, values["std"])
    mask = masking(samples.mask.float())
    batch = Batch(None, None, None, signal(samples.rewards, A, config.G), mask, values["clip"], values["beta"])
    with torch.no_grad():
        batch.old_logp = tinylm.token_logp(reference if old == "reference" else policy, *at, T_old)
        batch.ref_logp = tinylm.token_logp(policy if ref == "policy" else reference, *at, T_ref)
    if ref == "swapped":
        batch.old_logp, batch.ref_logp = batch.ref_logp, batch.old_logp
    history, total = [], [torch.zeros_like(weight) for weight in weights]
    last = steps(config.inner_steps) - 1
    for step in range(last + 1):
        batch.logp = tinylm.token_logp(model, *at, T_logp)
        if old == "with gradient":
            batch.old_logp = batch.logp
        elif old == "recomputed" or (old == "late" and step == 1):
            batch.old_logp = batch.logp.detach()
        if ref == "moving policy":
            batch.ref_logp = batch.logp.detach()
        ratio, A = loss.RATIOS[""](batch), batch.advantages[:, None]
        value = -loss.AVERAGES[""](objective(ratio, A, batch), batch)
        gradient = torch.autograd.grad(value, weights)
        own, clipped = batch.mask.bool(), ratio.clamp(1 - batch.clip, 1 + batch.clip) * A < ratio * A
        k3 = k3_of(batch.ref_logp - batch.logp)
        metrics = {"loss": value, "ratio": ratio[own].mean(), "kl": k3[own].mean()}
        metrics["clip_fraction"] = clipped[own].double().mean()
        history.append({key: value.detach().double() for key, value in metrics.items()})
        if gradients in ("kept", "gathered"):
            total = [t + g for t, g in zip(total, gradient, strict=True)]
        applied = total if gradients in ("kept", "gathered", "late") else gradient
        factor = {"up": -1.0, "shared": 1.0 / config.inner_steps}.get(gradients, 1.0)
        if gradients != "gathered" or step == last:
            with torch.no_grad():
                for weight, slope in zip(weights, applied, strict=True):
                    weight.sub_(config.lr * factor * slope)
        if gradients == "late":
            total = gradient
    return flat(model), history


def grouped(rewards: Tensor, G: int, std: bool = True) -> Tensor:
    """The advantages as the reference computes them, eps included: over several steps even 1e-4 would show."""
    groups = rewards.float().view(-1, G)
    centred = groups - groups.mean(1, keepdim=True)
    return (centred / (groups.std(1, correction=0, keepdim=True) + 1e-4) if std else centred).flatten()


def flat(model: TinyLM) -> Tensor:
    """All weights of a model in one row."""
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


def agree(a: Tensor, b: Tensor, length: Tensor) -> bool:
    """Whether two rows of weights are the same, but for rounding: in parts of the step's own length."""
    return bool((a - b).norm() < 2e-3 * length)


def is_right(examiner: Examiner, sft: TinyLM, prompts: Tensor, config, **simpler) -> bool | None:
    """Whether the student's step moves the weights as it should where some settings are simpler (None: it raised)."""
    policy, before = shaken(sft, SEED), shaken(sft, SEED)
    config = dataclasses.replace(config, **simpler)
    optimizer = torch.optim.SGD(policy.parameters(), lr=config.lr)
    if (got := examiner.step_again(policy, copy.deepcopy(sft), optimizer, prompts, config)) is None:
        return None
    expected, _ = replay(RIGHT, before, sft, got, config)
    return agree(flat(policy), expected, (expected - flat(before)).norm())


def explain(
    got: Tensor,
    expected: Tensor,
    before: TinyLM,
    reference: TinyLM,
    samples,
    config,
    calls: Calls,
    pairs: bool,
    symptom: Callable[[], str] = str,
) -> str:
    """What is wrong with the weights `got`, which are not those `expected`. `pairs`: look for two mistakes at once.
    `symptom` says what is seen where no mistake is known.
    """
    start = flat(before)
    length = (expected - start).norm()
    values = f"\n  the weights moved {(got - start).norm() / length:.3f} times as far as they should"
    values += f"\n  with inner_steps {config.inner_steps}, clip {config.clip}, beta {config.beta}, std {config.std}, "
    values += f"temperature {config.temperature}"
    if calls.sampled.count(len(samples.rewards)) > 1:
        return f"responses are sampled more than once: sample once, before the loop, and train on these{values}"
    if not calls.stepped and (got - start).norm() > 0:
        return f"the weights were changed without the optimizer given: call optimizer.step(){values}"
    if (got - start).norm() == 0:
        return f"the weights did not change: call backward() and optimizer.step(), of the optimizer given{values}"
    scale = ((got - start) @ (expected - start) / length**2).item()
    scaled = scale and agree(got - start, scale * (expected - start), length)
    for names in few_deviations(*STEP_PARTS):
        if sum(map(bool, names)) > 1 and (scaled or not pairs):
            break  # two mistakes that happen to give a factor are a worse guess than the factor
        wrong, _ = replay(names, before, reference, samples, config)
        if not agree(wrong, expected, length) and agree(got, wrong, length):
            return joined(names) + values
    if scaled:
        return f"the step has the right direction and {scale:.4g} times the right length: something scales it{values}"
    return (symptom() or "the weights after the step are wrong") + values


def metrics(key: str, of_steps: Tensor) -> Mistakes:
    """What mistakes make of the metric `key`, which was of_steps [inner_steps]."""
    return {
        f"metrics[{key!r}] is the first inner step's: return the last one's": of_steps[0],
        f"metrics[{key!r}] is the mean over the inner steps: return the last one's": of_steps.mean(),
        f"metrics[{key!r}] is the sum over the inner steps: return the last one's": of_steps.sum(),
    }
