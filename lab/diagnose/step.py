"""Task 5: one step, replayed from the samples that the student's function returned, right or with mistakes."""

import copy
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import torch
from torch import Tensor

import tinylm
from lab.diagnose import Mistakes, few_deviations, joined, loss, symptoms
from lab.diagnose.arguments import Taken, grouped, wrong_arguments
from lab.diagnose.k3 import k3_of
from lab.door.models import flat
from lab.inputs import Batch, shaken, short_and_long_prompts
from tinylm import TinyLM

History = list[dict[str, Tensor]]  # the metrics of each inner step

STEPS = {  # how many gradient steps, of inner_steps
    "": lambda n: n,
    "only one gradient step is taken: take config.inner_steps": lambda n: 1,
    "one gradient step too many is taken": lambda n: n + 1,
    "one gradient step is missing": lambda n: n - 1,
}
GRADIENTS = {
    "": "cleared",
    "the gradients add up over the inner steps: call optimizer.zero_grad() at each": "kept",
    "optimizer.step() stands before loss.backward(): it takes the gradient of the step before": "late",
    "the step goes up the loss (gradient ascent): the loss is negated already": "up",
    "the loss is scaled by 1 / inner_steps: each inner step takes the whole gradient": "shared",
    "the gradients of all inner steps are gathered for one optimizer step: step at each": "gathered",
}
LOSSES = {
    "": lambda ratio, A, b: loss.SURROGATES[""](ratio, A, b) - loss.PENALTIES[""](b),
    "this is REINFORCE, logp * A: the surrogate is the clipped ratio times A, from grpo_loss": lambda ratio, A, b: (
        b.logp * A - loss.PENALTIES[""](b)
    ),
    "this is REINFORCE without a KL penalty: take the loss from grpo_loss": lambda ratio, A, b: b.logp * A,
}
PARTS = (STEPS, GRADIENTS, LOSSES)
RIGHT = ("",) * len(PARTS)


def replay(policy: TinyLM, reference: TinyLM, samples, config, names: tuple = RIGHT) -> tuple[Tensor, History]:
    """What grpo_step with SGD makes of `samples`, with the named choice of each part (RIGHT: as it should be): all
    weights in one row, and the metrics of each inner step.
    """
    steps, gradients, objective = (part[name] for part, name in zip(PARTS, names, strict=True))
    model = copy.deepcopy(policy).requires_grad_()
    weights = list(model.parameters())
    at = (samples.prompts, samples.responses, config.temperature)
    with torch.no_grad():
        old_logp, ref_logp = (tinylm.token_logp(m, *at) for m in (policy, reference))
    A = grouped(samples.rewards, config.G, config.std)
    batch = Batch(old_logp, old_logp, ref_logp, A, samples.mask.float(), config.clip, config.beta)
    history, total = [], [torch.zeros_like(weight) for weight in weights]
    last = steps(config.inner_steps) - 1
    for step in range(last + 1):
        batch.logp = tinylm.token_logp(model, *at)
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


def agree(a: Tensor, b: Tensor, length: Tensor) -> bool:
    """Whether two rows of weights are the same, but for rounding: in parts of the step's own length."""
    return bool((a.double() - b.double()).norm() < 2e-3 * length)


def is_explained(step: Taken, names: tuple = RIGHT) -> bool:
    """Whether the step went where the replay with these names goes."""
    expected, _ = replay(step.before, step.reference, step.samples, step.config, names)
    return agree(step.weights, expected, (expected - flat(step.before)).norm())


def scaled(step: Taken) -> str:
    """How far the step went, if it is in the right direction."""
    start = flat(step.before)
    expected = replay(step.before, step.reference, step.samples, step.config)[0] - start
    moved, length = step.weights - start, expected.norm()
    scale = (moved @ expected / length**2).item()
    if not scale or not agree(moved, scale * expected, length):
        return ""
    return f"the step has the right direction and {scale:.4g} times the right length: something scales it"


def probes() -> list[dict]:
    """Settings under which the mistakes tell themselves from one another. The rate is small, so that no step throws
    the policy so far off that rounding decides what comes next.
    """
    one = {"G": 4, "lr": 0.02, "inner_steps": 1, "temperature": 1.4, "clip": 0.03, "beta": 0.3, "std": False}
    return [one, one | {"inner_steps": 3}, one | {"temperature": 0.8, "clip": 0.05, "beta": 0.5, "std": True}]


def diagnose(call: Callable, sft: TinyLM) -> str:
    """What is wrong with a grpo_step. `call(policy, reference, prompts, settings)` takes a step of SGD and gives
    (samples, calls, the policy's weights, the reference's), or None where it raises. "" if it is right.
    """
    prompts = short_and_long_prompts(6)
    before, start = shaken(sft, 0), flat(sft)

    def take(settings: dict) -> Taken | None:
        if (returned := call(before, sft, prompts, settings)) is None:
            return None
        samples, calls, weights, reference = returned
        moved = not torch.equal(reference, start)
        return Taken(before, sft, samples, calls, SimpleNamespace(**settings), weights, moved)

    steps = [step for settings in probes() if (step := take(settings))]
    wrong = [step for step in steps if not is_explained(step)]
    return symptoms.first(reasons(steps, wrong, take)) if wrong else ""


def reasons(steps: list[Taken], wrong: list[Taken], take: Callable) -> Iterator[str]:
    """Why some of the steps are wrong, what is cheap to know first. `take` takes another one, with other settings."""
    calls = [step.calls for step in steps]
    if any(step.calls.sampled.count(len(step.samples.rewards)) > 1 for step in steps):
        yield "responses are sampled more than once: sample once, before the loop, and train on these"
    if all(torch.equal(step.weights, flat(step.before)) for step in steps):
        yield unmoved(calls[-1].order)
    if not any("step" in call.order for call in calls):
        yield "the weights were changed without the optimizer given: call optimizer.step()"
    if any(step.reference_moved for step in steps):
        yield "the reference was trained: its weights must never change"
    yield wrong_arguments(steps)
    yield next((joined(n) for n in few_deviations(*PARTS) if all(is_explained(step, n) for step in steps)), "")
    yield scaled(wrong[0])

    def is_right(**simpler) -> bool | None:
        step = take(vars(wrong[-1].config) | simpler)
        return None if step is None else is_explained(step)

    yield symptoms.of_step(is_right, wrong[-1].config)


def unmoved(order: list[str]) -> str:
    """Why the weights did not change."""
    order = [event for event in order if event != "logp"]
    what = "the weights did not change"
    if "step" not in order:
        return f"{what}: call optimizer.step(), of the optimizer given"
    if "backward" not in order:
        return f"{what}: no gradient reaches them; call loss.backward() before optimizer.step()"
    wrong = " ".join(order[:3])
    return f"{what}: zero_grad, backward, step is the order of the calls, not {wrong}" if wrong else what


METRICS = {  # from what the metric was at each inner step
    "is the first inner step's: return the last one's": lambda of_steps: of_steps[0],
    "is the mean over the inner steps: return the last one's": lambda of_steps: of_steps.mean(),
    "is the sum over the inner steps: return the last one's": lambda of_steps: of_steps.sum(),
}


def metrics(key: str, of_steps: Tensor) -> Mistakes:
    """What mistakes make of the metric `key`, which was of_steps [inner_steps]."""
    return {f"metrics[{key!r}] {name}": wrong(of_steps) for name, wrong in METRICS.items()}
