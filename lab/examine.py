"""The student's functions, called with care: whatever goes wrong becomes a few lines that start with "Task N".

Each of the five functions has a method here that calls it, sees that what comes back has the right types and shapes,
and returns it for a test to compare. The tests decide; `lab/diagnose/` knows what a wrong value gives away.
"""

import copy
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType

import pytest
import torch
from torch import Tensor

import tinylm
from lab.diagnose import Mistakes, advantages, close, k3, loss, samples, step
from lab.diagnose.calls import Calls, twice_through_a_graph, watched
from lab.diagnose.errors import describe
from lab.inputs import SEED, Batch

NAMES = {1: "sample_group", 2: "group_advantages", 3: "k3_kl", 4: "grpo_loss", 5: "grpo_step"}
SAMPLES = ("prompts", "responses", "mask", "rewards", "texts")  # the fields of `grpo.Samples`
Given = dict[str, Tensor | list]  # what a wrong value was computed from, row by row


def rounded(values: Tensor) -> str:
    """The numbers, rounded, few enough to read in a terminal."""
    numbers = values.detach().double()
    if numbers.dim() == 0:
        return f"{numbers.item():.5g}"
    cut = ", ..." if numbers.numel() > 32 else ""
    numbers = numbers[: max(1, 32 // max(1, numbers[:1].numel()))]
    rows = [f"{row:.4g}" if row.dim() == 0 else f"[{', '.join(f'{v:.4g}' for v in row)}]" for row in numbers]
    return f"[{', '.join(rows)}{cut}]"


def differences(got: Tensor, expected: Tensor, given: Given, tolerance: float = 1e-4) -> str:
    """Got and expected where they differ, with what they were computed from: of a vector the first three rows that do,
    a line each; of a matrix the first one.
    """
    if got.dim() not in (1, 2) or got.shape != expected.shape:
        return f"\n  got {rounded(got)}, expected {rounded(expected)}"
    wrong = ~torch.isclose(got.double(), expected.double(), tolerance, tolerance)
    rows = (wrong.any(dim=1) if wrong.dim() == 2 else wrong).nonzero().flatten().tolist()
    columns = given | {"got": got, "expected": expected}
    if got.dim() == 1:
        lines = [f"row {i}: {', '.join(f'{name} {shown(of[i])}' for name, of in columns.items())}" for i in rows[:3]]
    else:
        lines = [f"in row {i}, the first of {len(rows)} wrong ones (of {len(got)}):" for i in rows[:1]]
        lines += [f"  {name:<9} {shown(of[i])}" for i in rows[:1] for name, of in columns.items()]
    return "".join(f"\n  {line}" for line in lines)


def shown(value) -> str:
    return rounded(value) if isinstance(value, Tensor) else repr(value)


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


def slope(value: Tensor, logp: Tensor) -> Tensor:
    """The gradient of a scalar with respect to logp, in float64; 0 where there is none."""
    (found,) = torch.autograd.grad(value, logp, allow_unused=True) if value.requires_grad else (None,)
    return torch.zeros_like(logp).double() if found is None else found.double()


def kinds(returned) -> str:
    """The types of what was returned: "(Tensor, dict)"."""
    if isinstance(returned, tuple | list):
        return f"({', '.join(type(part).__name__ for part in returned)})"
    return f"a {type(returned).__name__}"


@dataclass
class Memory:
    """What the tests of one run have found out about one grpo.py."""

    diagnoses: dict[int, str] = field(default_factory=dict)  # task -> what is wrong with its function
    said: set[tuple[int, str]] = field(default_factory=set)  # (task, first line) of each failure


class Examiner:
    """Calls the functions of `grpo`, the module under test. A failure ends the test; no traceback unless asked for."""

    def __init__(self, grpo: ModuleType, sft: tinylm.TinyLM, memory: Memory, with_traceback: bool = False):
        self.grpo, self.sft, self.memory, self.with_traceback = grpo, sft, memory, with_traceback
        self.fix_first = ""  # what an earlier task, on which this one builds, does wrong
        self.calls = Calls()  # of the step that runs, or ran last

    def fail(self, task: int, message: str):
        """End the test with "Task N (function): message"; where the first line has been said, without the others."""
        first, *others = message.splitlines()
        if others and (task, first) in self.memory.said:
            others = ["  as above"]
        self.memory.said.add((task, first))
        pytest.fail("\n".join([f"Task {task} ({NAMES[task]}): {first}", *others]), pytrace=self.with_traceback)

    def wrong(self, task: int, what: str, values: str = ""):
        """End the test, as a value is wrong: with what is wrong with the whole function, where that is known, and
        otherwise with `what` the test has found; then the values.
        """
        self.fail(task, (self.diagnosis(task) or what) + values)

    def diagnosis(self, task: int) -> str:
        """What is wrong with the task's function, in the same words in all tests; "" if that is not known."""
        if task not in self.memory.diagnoses:
            again = functools.partial(self.quietly, task)
            diagnose = {
                1: lambda: samples.diagnose(again, self.sft),
                2: lambda: advantages.diagnose(self.value_again),
                3: lambda: k3.diagnose(self.k3_again),
                4: lambda: loss.diagnose(self.loss_again),
                5: lambda: step.diagnose(self.step_again, self.grpo.GRPOConfig, self.sft),
            }
            try:
                self.memory.diagnoses[task] = diagnose[task]()
            except Exception:  # what a student's function returns is beyond foreseeing; the test's own words remain
                self.memory.diagnoses[task] = ""
        return self.memory.diagnoses[task]

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
            problem = describe(error, function, self.meaning(error))
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
            shapes = f"\n  got {list(got.shape)}, expected {list(shape)}"
            self.fail(task, f"{what} has another shape than it should{hint}{shapes}")
        if floating and not got.is_floating_point():
            self.fail(task, f"{what} has dtype {got.dtype}, expected a floating-point one such as torch.float32")
        if floating and not got.isfinite().all():
            self.fail(task, f"{what} holds {'NaN' if got.isnan().any() else 'infinity'}: {rounded(got)}")
        return got.detach().double() if floating else got.detach()

    def meaning(self, error: BaseException) -> str:
        """What an error means that the order of the calls explains."""
        return twice_through_a_graph(self.calls) if "graph a second time" in str(error) and self.calls.order else ""

    def gradient(self, task: int, value: Tensor, logp: Tensor) -> Tensor | None:
        """The gradient of a scalar with respect to logp, None if there is none."""
        problem = None
        try:
            (found,) = torch.autograd.grad(value, logp, allow_unused=True)
        except RuntimeError as error:
            problem = describe(error, getattr(self.grpo, NAMES[task]))
        if problem:
            self.fail(task, problem)
        return found

    def compare(
        self,
        task: int,
        what: str,
        got: Tensor,
        expected: Tensor,
        given: Given | None = None,
        tolerance: float = 1e-4,
        mistakes: Mistakes | None = None,
        symptom: Callable[[], str] = str,
    ) -> None:
        """Fail unless got = expected, with the rows that differ. Where nothing is known of the whole function: name the
        mistake whose value came instead, or say what is seen, or at least that it is wrong.
        """
        if close(got, expected, tolerance):
            return
        known = (
            name
            for name, value in (mistakes or {}).items()
            if not close(value, expected, tolerance) and close(got, value, tolerance)
        )
        seen = self.diagnosis(task) or next(known, "") or symptom() or f"{what} is wrong"
        self.fail(task, seen + differences(got, expected, given or {}, tolerance))

    # Called again, to see what a wrong value depends on: here nothing fails, None stands for all that goes wrong -----

    def quietly(self, task: int, *args):
        """What the task's function returns, or None if it raises."""
        try:
            return getattr(self.grpo, NAMES[task])(*args)
        except Exception:  # of any type, as it is a student's
            return None

    def value_again(self, rewards: Tensor, *args) -> Tensor | None:
        """Advantages, in float64."""
        got = self.quietly(2, rewards, *args)
        return got.detach().double() if isinstance(got, Tensor) and got.shape == rewards.shape else None

    def k3_again(self, logp: Tensor, ref_logp: Tensor) -> tuple[Tensor, Tensor] | None:
        """k3, and the gradient of its sum with respect to logp."""
        logp = logp.clone().requires_grad_()
        got = self.quietly(3, logp, ref_logp)
        if not isinstance(got, Tensor) or got.shape != logp.shape:
            return None
        return got.detach().double(), slope(got.sum(), logp)

    def loss_again(self, batch: Batch) -> tuple[Tensor, Tensor] | None:
        """The loss, and its gradient with respect to logp."""
        logp = batch.logp.clone().requires_grad_()
        args = (logp, batch.old_logp, batch.ref_logp, batch.advantages, batch.mask, batch.clip, batch.beta)
        returned = self.quietly(4, *args)
        loss = returned[0] if isinstance(returned, tuple | list) and returned else None
        if not isinstance(loss, Tensor) or loss.dim():
            return None
        try:
            return loss.detach().double(), slope(loss, logp)
        except RuntimeError:
            return None

    def step_again(self, policy, reference, optimizer, prompts: Tensor, config):
        """The samples of a step, and what it called."""
        with watched(self.grpo, policy, optimizer) as calls:
            generator = torch.Generator().manual_seed(SEED)
            returned = self.quietly(5, policy, reference, optimizer, prompts, config, generator)
        samples = returned[0] if isinstance(returned, tuple | list) and returned else None
        return (samples, calls) if all(hasattr(samples, name) for name in SAMPLES) else None

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
            self.fail(1, "samples.mask covers the prompt too: its shape must be that of the responses, [N, Tr]")
        self.tensor(1, "samples.mask", samples.mask, (N, Tr), floating=False)
        self.tensor(1, "samples.rewards", samples.rewards, (N,))
        if not isinstance(samples.texts, list | tuple) or len(samples.texts) != N:
            self.fail(1, f"samples.texts must be a list of N = {N} strings, one per response")
        return samples

    def advantages(self, rewards: Tensor, G: int, normalize_std: bool = True) -> Tensor:
        """Advantages [N]."""
        got = self.call(2, rewards, G, normalize_std)
        if isinstance(got, Tensor) and got.isnan().any():
            self.wrong(2, f"the advantages hold NaN for the rewards {rounded(rewards.view(-1, G))}")
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
            if (found := self.gradient(3, (k3 * weights).sum(), logp)) is None:
                self.fail(3, "k3 carries no gradient towards logp: do not detach it")
            return found.double()

        return got, gradient

    def loss(self, batch) -> tuple[Tensor, Tensor, dict]:
        """The loss of a `diagnose.loss.Batch`, its gradient with respect to logp [N, Tr], and the metrics."""
        logp = batch.logp.clone().requires_grad_()
        args = (logp, batch.old_logp, batch.ref_logp, batch.advantages, batch.mask, batch.clip, batch.beta)
        returned = self.call(4, *args)
        if not isinstance(returned, tuple | list) or len(returned) != 2 or not isinstance(returned[1], dict):
            self.fail(4, f"it must return (loss, metrics), a scalar and a dict; it returned {kinds(returned)}")
        loss, metrics = returned
        got = self.tensor(4, "the loss", loss, ())
        if not loss.requires_grad:
            self.fail(4, "the loss carries no gradient: something was detached, or turned into a number")
        gradient = self.gradient(4, loss, logp)
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
        """(samples, metrics) of one step of `policy`: samples of the right size, which answer the prompts; a dict."""
        generator, before = torch.Generator().manual_seed(seed), circumstances(policy, reference, optimizer, config)
        with watched(self.grpo, policy, optimizer) as self.calls:
            returned = self.call(5, policy, reference, optimizer, prompts, config, generator)
        for what, state in circumstances(policy, reference, optimizer, config).items():
            if state != before[what]:
                self.fail(5, f"it changed {what}, which others rely on: leave it as it was")
        if not isinstance(returned, tuple | list) or len(returned) != 2 or not isinstance(returned[1], dict):
            self.fail(5, f"it must return (samples, metrics), a Samples and a dict; it returned {kinds(returned)}")
        samples, metrics = returned
        if not hasattr(samples, "responses") or not hasattr(samples, "rewards"):
            self.fail(5, f"the first value it returns must be the Samples, not a {type(samples).__name__}")
        expected = tinylm.decode(prompts.repeat_interleave(config.G, dim=0))
        if len(samples.rewards) != len(expected):
            counts = f"\n  got {len(samples.rewards)}, expected {len(expected)}"
            self.fail(5, f"it must sample P * config.G responses{counts}")
        if tinylm.decode(samples.prompts) != expected:
            self.fail(5, "the samples do not answer the prompts that were given, each config.G times in a row")
        return samples, metrics

    def metric(self, task: int, metrics: dict, key: str) -> Tensor:
        """metrics[key] as a detached float64 scalar; a plain number will do as well."""
        if key not in metrics:
            self.fail(task, f"metrics has no {key!r}; it has {sorted(map(str, metrics))}")
        value = metrics[key]
        if isinstance(value, Tensor) and value.requires_grad:
            self.fail(task, f"metrics[{key!r}] keeps the graph alive: detach it")
        value = value if isinstance(value, Tensor) else torch.tensor(float(value))
        return self.tensor(task, f"metrics[{key!r}]", value.double(), ())
