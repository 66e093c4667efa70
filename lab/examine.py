"""A student's functions, examined: whatever goes wrong becomes a few lines that start with "Task N".

Each of the five functions has a method here that asks the door (`lab/door/`) and sees that the answer has the right
types and shapes before a test compares it. The tests decide; `lab/diagnose/` knows what a wrong value gives away.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import tinylm
from lab.diagnose import Mistakes, advantages, close, k3, loss, samples, step
from lab.door import NAMES
from lab.door.calls import Calls
from lab.door.models import flat, spec_of
from lab.inputs import SEED, Batch, fresh_draw

Door = Callable[[dict], dict]  # from a question to its answer, as `lab/door/` describes them
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


def differences(got: Tensor, expected: Tensor, given: Given, tolerance: float = 1e-4, what: str = "") -> str:
    """Got and expected where they differ, with what they were computed from: of a vector the first three rows that do,
    a line each; of a matrix, named `what`, the first one.
    """
    if got.dim() not in (1, 2) or got.shape != expected.shape:
        return f"\n  got {rounded(got)}, expected {rounded(expected)}"
    wrong = ~torch.isclose(got.double(), expected.double(), tolerance, tolerance)
    rows = (wrong.any(dim=1) if wrong.dim() == 2 else wrong).nonzero().flatten().tolist()
    columns = given | {"got": got, "expected": expected}
    if got.dim() == 1:
        lines = [f"row {i}: {', '.join(f'{name} {shown(of[i])}' for name, of in columns.items())}" for i in rows[:3]]
    else:
        lines = [f"{what}in row {i}, the first of {len(rows)} wrong ones (of {len(got)}):" for i in rows[:1]]
        lines += [f"  {name:<9} {shown(of[i])}" for i in rows[:1] for name, of in columns.items()]
    return "".join(f"\n  {line}" for line in lines)


def shown(value) -> str:
    return rounded(value) if isinstance(value, Tensor) else repr(value)


def kind_of(value) -> str:
    """The type of a value that came through the door, where unknown things are {"a": their type}."""
    return value["a"] if isinstance(value, dict) and set(value) == {"a"} else type(value).__name__


def in_shape(value, like: Tensor) -> Tensor | None:
    """The value in float64, if it is a tensor of this shape."""
    return value.double() if isinstance(value, Tensor) and value.shape == like.shape else None


def with_slope(value: Tensor | None, gradient, logp: Tensor) -> tuple[Tensor, Tensor] | None:
    """A value and its gradient with respect to logp, which is 0 where there is none."""
    if value is None:
        return None
    return value, torch.zeros_like(logp).double() if gradient is None else gradient.double()


def step_question(policy, reference, optimizer: str, prompts: Tensor, settings: dict, seed: int) -> dict:
    """The question for one step, or for several: prompts [P, Tp] or [steps, P, Tp]."""
    question = {"policy": spec_of(policy), "reference": spec_of(reference), "optimizer": optimizer, "seed": seed}
    return question | {"prompts": prompts.view(-1, *prompts.shape[-2:]), "config": settings}


@dataclass
class Memory:
    """What the tests of one run have found out about one grpo.py."""

    diagnoses: dict[int, str] = field(default_factory=dict)  # task -> what is wrong with its function
    said: set[tuple[int, str]] = field(default_factory=set)  # (task, first line) of each failure


class Examiner:
    """Asks the five functions through a door. A failure ends the test; no traceback unless asked for."""

    def __init__(self, door: Door, sft: tinylm.TinyLM, memory: Memory, with_traceback: bool = False):
        self.door, self.sft, self.memory, self.with_traceback = door, sft, memory, with_traceback
        self.fix_first = ""  # what an earlier task, on which this one builds, does wrong

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
            diagnose = {
                1: lambda: samples.diagnose(self.sample_again, self.sft),
                2: lambda: advantages.diagnose(self.advantages_again),
                3: lambda: k3.diagnose(self.k3_again),
                4: lambda: loss.diagnose(self.loss_again),
                5: lambda: step.diagnose(self.step_again, self.sft),
            }
            try:
                self.memory.diagnoses[task] = diagnose[task]()
            except Exception:  # what a student's function returns is beyond foreseeing; the test's own words remain
                self.memory.diagnoses[task] = ""
        return self.memory.diagnoses[task]

    def ask(self, task: int, **question) -> dict:
        """What the door answers, if the task's function gave something to look at."""
        if self.fix_first:
            self.fail(task, self.fix_first)
        answer = self.door({"task": task, **question})
        if problem := answer["problem"]:
            own = f"Task {task} ({NAMES[task]}) "
            if problem.startswith(own):
                pytest.fail(problem, pytrace=self.with_traceback)
            if problem.startswith("Task "):
                self.fail(task, f"it needs another task first. {problem}")
            known = self.diagnosis(task)  # by inputs on which it raises nothing
            self.fail(task, f"{known}\n  {problem}" if known and known not in problem else problem)
        return answer

    def tensor(self, task: int, what: str, got, shape: tuple, floating: bool = True) -> Tensor:
        """Check type, shape, dtype and finiteness; returns `got`, in float64 if it is floating."""
        if not isinstance(got, Tensor):
            self.fail(task, f"{what} must be a torch.Tensor, not a {kind_of(got)}")
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
        return got.double() if floating else got

    def tokens(self, task: int, what: str, got, shape: tuple) -> Tensor:
        """Check that these are token ids of this shape."""
        got = self.tensor(task, what, got, shape, floating=False)
        if got.is_floating_point() or ((got < 0) | (got >= len(tinylm.VOCAB))).any():
            self.fail(task, f"{what} must be token ids, from 0 to {len(tinylm.VOCAB) - 1}")
        return got

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

    # Asked again, to see what a wrong value depends on: here nothing fails, None stands for all that goes wrong ------

    def again(self, task: int, **question) -> dict | None:
        """The answer, or None if there was a problem."""
        answer = self.door({"task": task, **question})
        return None if answer["problem"] else answer

    def sample_again(self, model: nn.Module, prompts: Tensor, G: int) -> SimpleNamespace | None:
        """Samples."""
        answer = self.again(1, model=spec_of(model), prompts=prompts, G=G, temperature=1.0, seed=SEED, times=1)
        return answer and SimpleNamespace(**answer["samples"][0])

    def advantages_again(self, rewards: Tensor, G: int, normalize_std: bool, eps: float = 1e-4) -> Tensor | None:
        """Advantages [N], in float64."""
        answer = self.again(2, rewards=rewards, G=G, normalize_std=normalize_std, eps=eps)
        return answer and in_shape(answer["value"], rewards)

    def k3_again(self, logp: Tensor, ref_logp: Tensor) -> tuple[Tensor, Tensor] | None:
        """k3, and the gradient of its sum with respect to logp."""
        answer = self.again(3, logp=logp, ref_logp=ref_logp, weights=torch.ones_like(logp))
        return answer and with_slope(in_shape(answer["value"], logp), answer["gradient"], logp)

    def loss_again(self, batch: Batch) -> tuple[Tensor, Tensor] | None:
        """The loss, and its gradient with respect to logp."""
        answer = self.again(4, **vars(batch))
        return answer and with_slope(in_shape(answer["value"], torch.tensor(0.0)), answer["gradient"], batch.logp)

    def metrics_again(self, batch: Batch) -> dict | None:
        """The metrics of the loss."""
        answer = self.again(4, **vars(batch))
        return answer and answer["metrics"]

    def step_again(self, policy: nn.Module, reference: nn.Module, prompts: Tensor, settings: dict) -> tuple | None:
        """The samples of a step of SGD, what it called, and all weights of policy and reference afterwards."""
        answer = self.again(5, **step_question(policy, reference, "SGD", prompts, settings, SEED))
        if answer is None:
            return None
        taken = SimpleNamespace(**answer["steps"][0]["samples"])
        return taken, Calls(**answer["calls"]), answer["policy"], answer["reference"]

    # The five functions ------------------------------------------------------------------------------------------

    def samples(
        self, model: nn.Module, prompts: Tensor, G: int, temperature: float = 1.0, seed: int = 0, times: int = 1
    ) -> list[SimpleNamespace]:
        """The Samples of so many calls with one generator; their five fields have the right types and shapes."""
        question = {"prompts": prompts, "G": G, "temperature": temperature, "seed": seed, "times": times}
        answer = self.ask(1, model=spec_of(model), **question)
        N, Tp, Tr = len(prompts) * G, tinylm.PROMPT_LEN, tinylm.RESPONSE_LEN
        found = [SimpleNamespace(**fields) for fields in answer["samples"]]
        for got in found:
            self.tokens(1, "samples.prompts", got.prompts, (N, Tp))
            self.tokens(1, "samples.responses", got.responses, (N, Tr))
            if isinstance(got.mask, Tensor) and tuple(got.mask.shape) == (N, Tp + Tr):
                self.fail(1, "samples.mask covers the prompt too: its shape must be that of the responses, [N, Tr]")
            self.tensor(1, "samples.mask", got.mask, (N, Tr), floating=False)
            self.tensor(1, "samples.rewards", got.rewards, (N,))
            if not isinstance(got.texts, list) or len(got.texts) != N:
                self.fail(1, f"samples.texts must be a list of N = {N} strings, one per response")
        return found

    def sample(self, *args, **settings) -> SimpleNamespace:
        """The Samples of one call."""
        return self.samples(*args, **settings)[0]

    def advantages(self, rewards: Tensor, G: int, normalize_std: bool = True) -> Tensor:
        """Advantages [N], with the default eps."""
        got = self.ask(2, rewards=rewards, G=G, normalize_std=normalize_std)["value"]
        if isinstance(got, Tensor) and got.isnan().any():
            self.wrong(2, f"the advantages hold NaN for the rewards {rounded(rewards.view(-1, G))}")
        return self.tensor(2, "the advantages", got, (len(rewards),))

    def k3(self, logp: Tensor, ref_logp: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """k3 [N, Tr], and the gradient of sum(weights * k3) with respect to logp, for weights [N, Tr]."""
        answer = self.ask(3, logp=logp, ref_logp=ref_logp, weights=weights)
        value = self.tensor(3, "k3", answer["value"], tuple(logp.shape))
        if answer["gradient"] is None:
            why = "something was detached, and the penalty could never pull the policy back"
            self.fail(3, f"k3 carries no gradient towards logp: {why}")
        return value, self.tensor(3, "the gradient of k3", answer["gradient"], tuple(logp.shape))

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor, dict]:
        """The loss of a batch, its gradient with respect to logp [N, Tr], and the answer, for `metric`."""
        answer = self.ask(4, **vars(batch))
        value = self.tensor(4, "the loss", answer["value"], ())
        if answer["gradient"] is None:
            self.fail(4, "the loss carries no gradient: something was detached, or turned into a number")
        return value, self.tensor(4, "the gradient of the loss", answer["gradient"], tuple(batch.logp.shape)), answer

    def steps(
        self, policy: nn.Module, reference: nn.Module, optimizer: str, prompts: Tensor, settings: dict, seed: int = SEED
    ) -> dict:
        """The answer for a step from each row of prompts [steps, P, Tp], or for one from prompts [P, Tp]: samples of
        the right size, which answer the prompts, metrics, and all weights of policy and reference afterwards.
        """
        answer = self.ask(5, **step_question(policy, reference, optimizer, prompts, settings, seed))
        for what in answer["changed"]:
            self.fail(5, f"it changed {what}, which others rely on: leave it as it was")
        Tp, Tr = tinylm.PROMPT_LEN, tinylm.RESPONSE_LEN
        each = prompts.view(-1, *prompts.shape[-2:]).repeat_interleave(settings["G"], dim=1)
        for taken, rows in zip(answer["steps"], each, strict=True):
            got = taken["samples"] = SimpleNamespace(**taken["samples"])
            if isinstance(got.rewards, Tensor) and got.rewards.numel() != len(rows):
                counts = f"\n  got {got.rewards.numel()}, expected {len(rows)}"
                self.fail(5, f"it must sample P * config.G responses{counts}")
            self.tensor(5, "samples.rewards", got.rewards, (len(rows),))
            self.tensor(5, "samples.mask", got.mask, (len(rows), Tr), floating=False)
            self.tokens(5, "samples.responses", got.responses, (len(rows), Tr))
            if not torch.equal(self.tokens(5, "samples.prompts", got.prompts, (len(rows), Tp)), rows):
                self.fail(5, "the samples do not answer the prompts that were given, each config.G times in a row")
            texts, mask = tinylm.decode_and_strip_padding(got.responses), tinylm.response_mask(got.responses)
            rewards = samples.scores(tinylm.decode(rows), texts)
            if got.texts != texts or not (close(got.mask, mask) and close(got.rewards, rewards)):
                self.fail(5, "rewards, mask and texts of the samples do not fit their responses: return what came")
        for what, model in (("policy", policy), ("reference", reference)):
            shape = tuple(flat(model).shape)
            self.tensor(5, f"all weights of the {what}", answer[what], shape, floating=False)  # NaN if it went too far
        return answer

    def metric(self, task: int, answer: dict, key: str) -> Tensor:
        """The metric of this key as a float64 scalar; a plain number will do as well."""
        metrics = answer["metrics"]
        if key not in metrics:
            self.fail(task, f"metrics has no {key!r}; it has {sorted(metrics)}")
        if key in answer["attached"]:
            self.fail(task, f"metrics[{key!r}] keeps the graph alive: detach it")
        value = metrics[key]
        value = torch.tensor(float(value)) if isinstance(value, int | float) else value
        return self.tensor(task, f"metrics[{key!r}]", value.double() if isinstance(value, Tensor) else value, ())


def run(test: Callable, examiner: Examiner) -> str:
    """Run a test without pytest: "" if it passes, or what it says."""
    fixtures = {"examiner": examiner, "sft": examiner.sft, "draw": fresh_draw()}
    try:
        test(*(fixtures[name] for name in inspect.signature(test).parameters))
    except pytest.fail.Exception as failure:
        return str(failure)
    return ""
