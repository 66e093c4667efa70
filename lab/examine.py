"""The student's functions, called with care: whatever goes wrong becomes a few lines that start with "Task N".

Each of the five functions has a method here that calls it, sees that what comes back has the right types and shapes,
and returns it for a test to compare. The tests decide; `lab/diagnose/` knows what a wrong value gives away.
"""

import copy
import math
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch
from torch import Tensor

import tinylm
from lab.inputs import SEED

NAMES = {1: "sample_group", 2: "group_advantages", 3: "k3_kl", 4: "grpo_loss", 5: "grpo_step"}
SAMPLES = ("prompts", "responses", "mask", "rewards", "texts")  # the fields of `grpo.Samples`
HINTS = {  # words of an error of torch's -> the tasks in which they mean something, and what
    "backward through the graph a second time": (
        (5,),
        "a graph is gone through twice: logp is to be computed anew in each inner step, with gradient; old_logp and "
        "ref_logp once, before the loop, under torch.no_grad()",
    ),
    "must match the size": (
        (4, 5),
        "tensors of different shapes meet; a number per response [N] broadcasts over the tokens [N, Tr] as [N, 1]",
    ),
    "does not require grad": ((4, 5), "the loss does not depend on logp: something was detached, or under no_grad"),
    "modified by an inplace operation": ((3, 4, 5), "a tensor that the backward pass needs was changed in place"),
    "Inference tensors cannot be saved": ((5,), "leave torch.inference_mode with a clone(), or use torch.no_grad()"),
}
Mistakes = dict[str, Tensor]  # the name of a mistake -> the value it gives


@dataclass
class Calls:
    """What a step called: the number of rows of each `tinylm.generate`, and how often `optimizer.step`."""

    sampled: list[int]
    stepped: int


def close(got: Tensor, expected: Tensor, tolerance: float = 1e-4) -> bool:
    """Equal shapes, and values equal to `tolerance`, relative and absolute."""
    return got.shape == expected.shape and torch.allclose(got.double(), expected.double(), tolerance, tolerance)


def rounded(values: Tensor) -> str:
    """The numbers, rounded, few enough to read in a terminal."""
    numbers = values.detach().double()
    if numbers.dim() == 0:
        return f"{numbers.item():.5g}"
    cut = ", ..." if numbers.numel() > 32 else ""
    numbers = numbers[: max(1, 32 // max(1, numbers[:1].numel()))]
    rows = [f"{row:.4g}" if row.dim() == 0 else f"[{', '.join(f'{v:.4g}' for v in row)}]" for row in numbers]
    return f"[{', '.join(rows)}{cut}]"


def first_difference(got: Tensor, expected: Tensor, tolerance: float = 1e-4) -> str:
    """Where the first wrong number stands: ", first at row 2, token 1"."""
    if got.shape != expected.shape or got.dim() == 0:
        return ""
    places = (~torch.isclose(got.double(), expected.double(), tolerance, tolerance)).nonzero().tolist()
    words = [f"{axis} {i}" for place in places[:1] for axis, i in zip(("row", "token"), place, strict=False)]
    return f", first at {', '.join(words)}" if words else ""


def describe(task: int, error: BaseException) -> str:
    """What the error means in this task, where that is known; the error; and the line of grpo.py it came from."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).name == "grpo.py"]
    where = f"\n  at grpo.py, line {frames[-1].lineno}: {frames[-1].line}" if frames else ""
    text = str(error).splitlines()[0] if str(error) else ""
    hint = "".join(f"{hint}\n  " for words, (tasks, hint) in HINTS.items() if words in text and task in tasks)
    return f"{hint}it raised {type(error).__name__}: {text}{where}"


def circumstances(policy: tinylm.TinyLM, reference: tinylm.TinyLM, optimizer, config) -> dict:
    """What a step may use but not leave changed."""
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    return {
        "the optimizer's settings": groups,
        "config": copy.deepcopy(vars(config)),
        "requires_grad of the policy's weights": [weight.requires_grad for weight in policy.parameters()],
        "requires_grad of the reference's weights": [weight.requires_grad for weight in reference.parameters()],
        "torch's gradient mode": torch.is_grad_enabled(),
        "torch's default type": torch.get_default_dtype(),
    }


class Examiner:
    """Calls the functions of `grpo`, the module under test. A failure ends the test; no traceback unless asked for."""

    def __init__(self, grpo: ModuleType, with_traceback: bool):
        self.grpo, self.with_traceback = grpo, with_traceback
        self.fix_first = ""  # what an earlier task, on which this one builds, does wrong

    def fail(self, task: int, message: str):
        """End the test with "Task N (function): message"."""
        pytest.fail(f"Task {task} ({NAMES[task]}): {message}", pytrace=self.with_traceback)

    def call(self, task: int, *args):
        """Call the task's function, and see that it returns something and leaves its inputs as they were."""
        if self.fix_first:
            self.fail(task, self.fix_first)
        function = getattr(self.grpo, NAMES[task], None)
        if function is None:
            self.fail(task, "grpo.py no longer has a function of this name")
        before = [arg.detach().clone() if isinstance(arg, Tensor) else None for arg in args]
        problem = None
        try:
            result = function(*args)
        except NotImplementedError as error:
            problem = str(error) or "is not written yet: open grpo.py"
        except (Exception, SystemExit) as error:
            problem = describe(task, error)
        if problem:  # outside of the handler, so that pytest does not print the student's exception a second time
            own = f"Task {task} ({NAMES[task]}) "
            if problem.startswith(own):
                pytest.fail(problem, pytrace=self.with_traceback)
            self.fail(task, f"it needs another task first. {problem}" if problem.startswith("Task ") else problem)
        if result is None:
            self.fail(task, "it returned None: is the return statement missing?")
        for position, (arg, copied) in enumerate(zip(args, before, strict=True), start=1):
            if copied is not None and not torch.equal(arg.detach(), copied):
                self.fail(task, f"it changed its argument number {position} in place: work on a copy")
        return result

    def tensor(self, task: int, what: str, got, shape: tuple, floating: bool = True) -> Tensor:
        """Check type, shape, dtype and finiteness; returns `got` detached, in float64 if it is floating."""
        if not isinstance(got, Tensor):
            self.fail(task, f"{what} must be a torch.Tensor, not a {type(got).__name__}")
        if tuple(got.shape) != shape:
            hint = ""
            if got.dim() == 0:
                hint = ": do not average or sum here"
            elif got.numel() == math.prod(shape):
                hint = ": the count is right, so only the last reshape is missing"
            self.fail(task, f"{what} has shape {tuple(got.shape)}, expected {shape}{hint}")
        if floating and not got.is_floating_point():
            self.fail(task, f"{what} has dtype {got.dtype}, expected a floating-point one such as torch.float32")
        if floating and not got.isfinite().all():
            self.fail(task, f"{what} holds {'NaN' if got.isnan().any() else 'infinity'}: {rounded(got)}")
        return got.detach().double() if floating else got.detach()

    def compare(
        self,
        task: int,
        what: str,
        got: Tensor,
        expected: Tensor,
        mistakes: Mistakes,
        given: str = "",
        tolerance: float = 1e-4,
        symptom: Callable[[], str] = str,
    ) -> None:
        """Fail unless got = expected: name the mistake whose value came instead, or say what is seen, or at least the
        first place that differs.
        """
        if close(got, expected, tolerance):
            return
        values = f"\n  got       {rounded(got)}\n  expected  {rounded(expected)}"
        values += f"\n  for       {given}" if given else ""
        for name, value in mistakes.items():
            if not close(value, expected, tolerance) and close(got, value, tolerance):
                self.fail(task, f"{name}{values}")
        seen = symptom() or f"{what} is wrong{first_difference(got, expected, tolerance)}"
        self.fail(task, f"{seen}{values}")

    # Called again, to see what a wrong value depends on: here nothing fails, None stands for all that goes wrong -----

    def quietly(self, task: int, *args):
        """What the task's function returns, or None if it raises."""
        try:
            return getattr(self.grpo, NAMES[task])(*args)
        except Exception:  # of any type, as it is a student's
            return None

    def value_again(self, task: int, *args) -> Tensor | None:
        """A tensor of the first argument's shape, in float64."""
        got = self.quietly(task, *args)
        return got.detach().double() if isinstance(got, Tensor) and got.shape == args[0].shape else None

    def loss_again(self, batch) -> tuple[Tensor, Tensor] | None:
        """(the loss, its gradient with respect to logp)."""
        logp = batch.logp.clone().requires_grad_()
        args = (logp, batch.old_logp, batch.ref_logp, batch.advantages, batch.mask, batch.clip, batch.beta)
        try:
            loss, _ = self.quietly(4, *args)
            (gradient,) = torch.autograd.grad(loss, logp)
        except Exception:
            return None
        return loss.detach().double(), gradient.double()

    def step_again(self, policy, reference, optimizer, prompts: Tensor, config):
        """The samples of a step."""
        returned = self.quietly(5, policy, reference, optimizer, prompts, config, torch.Generator().manual_seed(SEED))
        samples = returned[0] if isinstance(returned, tuple | list) and returned else None
        return samples if all(hasattr(samples, name) for name in SAMPLES) else None

    # The five functions ------------------------------------------------------------------------------------------

    def sample(self, model: tinylm.TinyLM, prompts: Tensor, G: int, temperature: float = 1.0, seed: int = 0):
        """Samples, whose five fields have the right types and shapes."""
        torch.manual_seed(SEED)  # of the global generator, which must not matter
        samples = self.call(1, model, prompts, G, temperature, torch.Generator().manual_seed(seed))
        missing = [name for name in SAMPLES if not hasattr(samples, name)]
        if missing:
            self.fail(1, f"it must return a Samples; a {type(samples).__name__} has no {missing[0]!r}")
        N, Tp, Tr = len(prompts) * G, tinylm.PROMPT_LEN, tinylm.RESPONSE_LEN
        self.tensor(1, "samples.prompts", samples.prompts, (N, Tp), floating=False)
        self.tensor(1, "samples.responses", samples.responses, (N, Tr), floating=False)
        if isinstance(samples.mask, Tensor) and tuple(samples.mask.shape) == (N, Tp + Tr):
            shapes = f"shape {(N, Tp + Tr)}; it must cover the response, {(N, Tr)}"
            self.fail(1, f"samples.mask covers the prompt too, {shapes}")
        self.tensor(1, "samples.mask", samples.mask, (N, Tr), floating=False)
        self.tensor(1, "samples.rewards", samples.rewards, (N,))
        if not isinstance(samples.texts, list | tuple) or len(samples.texts) != N:
            self.fail(1, f"samples.texts must be a list of N = {N} strings, one per response")
        return samples

    def advantages(self, rewards: Tensor, G: int, normalize_std: bool = True, nan: str = "") -> Tensor:
        """Advantages [N]. `nan`: what it means if one of them is NaN."""
        got = self.call(2, rewards, G, normalize_std)
        if isinstance(got, Tensor) and got.isnan().any():
            self.fail(2, nan or f"the advantages hold NaN for the rewards {rounded(rewards.view(-1, G))}")
        return self.tensor(2, "the advantages", got, (len(rewards),))

    def k3(self, logp: Tensor, ref_logp: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """k3 [N, Tr], and a function: the gradient of sum(weights * k3) with respect to logp, for weights [N, Tr]."""
        logp = logp.clone().requires_grad_()
        k3 = self.call(3, logp, ref_logp)
        got = self.tensor(3, "k3", k3, tuple(logp.shape))

        def gradient(weights: Tensor) -> Tensor:
            if not k3.requires_grad:
                why = "something was detached, and the penalty could never pull the policy back"
                self.fail(3, f"k3 carries no gradient: {why}")
            (found,) = torch.autograd.grad((k3 * weights).sum(), logp, allow_unused=True)
            if found is None:
                self.fail(3, "k3 carries no gradient towards logp: do not detach it")
            return found.double()

        return got, gradient

    def loss(self, batch) -> tuple[Tensor, Tensor, dict]:
        """The loss of a `diagnose.loss.Batch`, its gradient with respect to logp [N, Tr], and the metrics."""
        logp = batch.logp.clone().requires_grad_()
        args = (logp, batch.old_logp, batch.ref_logp, batch.advantages, batch.mask, batch.clip, batch.beta)
        returned = self.call(4, *args)
        if not isinstance(returned, tuple | list) or len(returned) != 2 or not isinstance(returned[1], dict):
            kind = type(returned).__name__
            self.fail(4, f"it must return (loss, metrics), a scalar and a dict; it returned a {kind}")
        loss, metrics = returned
        got = self.tensor(4, "the loss", loss, ())
        if not loss.requires_grad:
            self.fail(4, "the loss carries no gradient: something was detached, or turned into a number")
        (gradient,) = torch.autograd.grad(loss, logp, allow_unused=True)
        return got, torch.zeros_like(logp).double() if gradient is None else gradient.double(), metrics

    def step(
        self,
        policy: tinylm.TinyLM,
        reference: tinylm.TinyLM,
        optimizer: torch.optim.Optimizer,
        prompts: Tensor,
        config,
        seed: int = SEED,
    ):
        """(samples, metrics, calls) of one step of `policy`: samples of the right size, which answer the prompts; a
        dict; and what the function called, which a message may look at, but no verdict.
        """
        generator, before = torch.Generator().manual_seed(seed), circumstances(policy, reference, optimizer, config)
        with (
            mock.patch.object(tinylm, "generate", wraps=tinylm.generate) as generate,
            mock.patch.object(optimizer, "step", wraps=optimizer.step) as take_step,
        ):
            returned = self.call(5, policy, reference, optimizer, prompts, config, generator)
        for what, state in circumstances(policy, reference, optimizer, config).items():
            if state != before[what]:
                self.fail(5, f"it changed {what}, which others rely on: leave it as it was")
        rows = [call.args[1] if len(call.args) > 1 else call.kwargs["prompts"] for call in generate.call_args_list]
        calls = Calls([len(of_one) for of_one in rows], take_step.call_count)
        if not isinstance(returned, tuple | list) or len(returned) != 2 or not isinstance(returned[1], dict):
            kind = type(returned).__name__
            self.fail(5, f"it must return (samples, metrics), a Samples and a dict; it returned a {kind}")
        samples, metrics = returned
        if not hasattr(samples, "responses") or not hasattr(samples, "rewards"):
            self.fail(5, f"the first value it returns must be the Samples, not a {type(samples).__name__}")
        expected = tinylm.decode(prompts.repeat_interleave(config.G, dim=0))
        if len(samples.rewards) != len(expected):
            self.fail(5, f"it sampled {len(samples.rewards)} responses, expected P * config.G = {len(expected)}")
        if tinylm.decode(samples.prompts) != expected:
            self.fail(5, "the samples do not answer the prompts that were given, each config.G times in a row")
        return samples, metrics, calls

    def metric(self, task: int, metrics: dict, key: str) -> Tensor:
        """metrics[key] as a detached float64 scalar; a plain number will do as well."""
        if key not in metrics:
            self.fail(task, f"metrics has no {key!r}; it has {sorted(map(str, metrics))}")
        value = metrics[key]
        if isinstance(value, Tensor) and value.requires_grad:
            self.fail(task, f"metrics[{key!r}] keeps the graph alive: detach it")
        value = value if isinstance(value, Tensor) else torch.tensor(float(value))
        return self.tensor(task, f"metrics[{key!r}]", value.double(), ())
