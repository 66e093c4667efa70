"""What pytest needs to grade `grpo.py`: which file is graded, how a failure is printed, and the table of points."""

import importlib.util
import math
import os
import sys
import traceback
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent
REFERENCE = ROOT / "solutions" / "grpo.py"


def pytest_addoption(parser):
    parser.addoption("--solutions", action="store_true", help="test solutions/grpo.py (the same as RL_SOLUTIONS=1)")


def pytest_configure(config):
    config.addinivalue_line("markers", "points(n): what the test is worth; all tests together are worth 100")
    sys.path.insert(0, str(ROOT))


def load(path: Path, name: str):
    """The module at `path`, imported under `name`."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def reference():
    """The reference solution, or None where `solutions/` was not handed out."""
    return load(REFERENCE, "reference_grpo") if REFERENCE.exists() else None


@pytest.fixture(scope="session")
def loaded(request):
    """(the module under test, None), or (None, why it cannot be imported)."""
    solutions = request.config.getoption("--solutions") or os.environ.get("RL_SOLUTIONS") == "1"
    path = REFERENCE if solutions else ROOT / "grpo.py"
    try:
        return load(path, "grpo"), None
    except (Exception, SystemExit) as error:
        if isinstance(error, SyntaxError):
            where = f"line {error.lineno}: {(error.text or '').strip()}"
        else:
            frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == path]
            where = f"line {frames[-1].lineno}: {frames[-1].line}" if frames else "its first lines"
        return None, f"grpo.py cannot be imported: {type(error).__name__}: {error}\n  at {where}"


@pytest.fixture
def grpo(loaded, request):
    """The module under test; where it cannot be imported, each test says so in two lines."""
    module, problem = loaded
    if problem:
        pytest.fail(problem, pytrace=request.config.getoption("tbstyle") != "auto")
    return module


# How a failure is worded -----------------------------------------------------------------------------------------

NAMES = {1: "sample_group", 2: "group_advantages", 3: "k3_kl", 4: "grpo_loss", 5: "grpo_step"}


class Lab:
    """The student's functions, called with care: whatever goes wrong becomes a few lines that start "Task N"."""

    def __init__(self, grpo, reference, monkeypatch, with_traceback: bool):
        self.grpo, self.reference, self.monkeypatch = grpo, reference, monkeypatch
        self.with_traceback = with_traceback

    def fail(self, task: int, message: str):
        """End the test with "Task N (function): message" and, unless pytest's --tb asks for it, no traceback."""
        pytest.fail(f"Task {task} ({NAMES[task]}): {message}", pytrace=self.with_traceback)

    def call(self, task: int, *args):
        """Call the task's function, and see that it returns something and leaves its inputs as they were."""
        function = getattr(self.grpo, NAMES[task], None)
        if function is None:
            self.fail(task, "grpo.py no longer has a function of this name")
        before = [arg.detach().clone() if isinstance(arg, torch.Tensor) else None for arg in args]
        problem = None
        try:
            result = function(*args)
        except NotImplementedError as error:
            problem = str(error) or "is not written yet: open grpo.py"
        except (Exception, SystemExit) as error:
            problem = self.describe(error)
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

    @staticmethod
    def describe(error: BaseException) -> str:
        """What the error means, where that is known; the error; and the line of grpo.py it came from."""
        frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).name == "grpo.py"]
        where = f"\n  at grpo.py, line {frames[-1].lineno}: {frames[-1].line}" if frames else ""
        text = str(error).splitlines()[0] if str(error) else ""
        hints = {
            "backward through the graph a second time": "old_logp or ref_logp carries gradient: compute both once, "
            "before the loop, under torch.no_grad()",
            "must match the size": "a number per response and one per token do not broadcast: make the first [N, 1]",
            "does not require grad": "the loss does not depend on logp: something was detached, or under no_grad",
            "modified by an inplace operation": "a tensor that the backward pass needs was changed in place",
            "Inference tensors cannot be saved": "leave torch.inference_mode with a clone(), or use torch.no_grad()",
        }
        hint = "".join(f"{hint}\n  " for words, hint in hints.items() if words in text)
        return f"{hint}it raised {type(error).__name__}: {text}{where}"

    def tensor(self, task: int, what: str, got, shape: tuple, floating: bool = True) -> torch.Tensor:
        """Check type, shape, dtype and finiteness; returns `got` detached, in float64 if it is floating."""
        if not isinstance(got, torch.Tensor):
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
            self.fail(task, f"{what} holds {'NaN' if got.isnan().any() else 'infinity'}: {self.rounded(got)}")
        return got.detach().double() if floating else got.detach()

    def compare(self, task: int, what: str, got, expected, mistakes: dict, given: str = "", tolerance: float = 1e-4):
        """Fail unless got = expected; name the mistake whose value came instead, or the first place that differs."""
        if self.close(got, expected, tolerance):
            return
        values = f"\n  got       {self.rounded(got)}\n  expected  {self.rounded(expected)}"
        values += f"\n  for       {given}" if given else ""
        for name, value in mistakes.items():
            if not self.close(value, expected, tolerance) and self.close(got, value, tolerance):
                self.fail(task, f"{name}{values}")
        self.fail(task, f"{what} is wrong{self.first_difference(got, expected, tolerance)}{values}")

    def stand_in(self, task: int, checks: dict):
        """Grade `task` alone: the reference does the earlier tasks, or where it is absent they must pass `checks`."""
        for earlier, check in checks.items():
            if self.reference:
                self.monkeypatch.setattr(self.grpo, NAMES[earlier], getattr(self.reference, NAMES[earlier]))
                continue
            problem = None
            try:
                check(self)
            except pytest.fail.Exception as failure:
                problem = str(failure).splitlines()[0]
            if problem:
                self.fail(task, f"it builds on task {earlier}, so fix task {earlier} first.\n  {problem}")

    @staticmethod
    def close(got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
        """Equal shapes, and values equal to `tolerance`, relative and absolute."""
        return got.shape == expected.shape and torch.allclose(got.double(), expected.double(), tolerance, tolerance)

    @staticmethod
    def rounded(values: torch.Tensor) -> str:
        """The numbers, rounded, few enough to read in a terminal."""
        numbers = values.detach().double()
        if numbers.dim() == 0:
            return f"{numbers.item():.5g}"
        cut = ", ..." if numbers.numel() > 32 else ""
        numbers = numbers[: max(1, 32 // numbers[0].numel())]
        rows = [f"{row:.4g}" if row.dim() == 0 else f"[{', '.join(f'{v:.4g}' for v in row)}]" for row in numbers]
        return f"[{', '.join(rows)}{cut}]"

    @staticmethod
    def first_difference(got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> str:
        """Where the first wrong number stands: ", first at row 2, token 1"."""
        if got.shape != expected.shape or got.dim() == 0:
            return ""
        place = (~torch.isclose(got.double(), expected.double(), tolerance, tolerance)).nonzero()[0].tolist()
        return ", first at " + ", ".join(f"{axis} {i}" for axis, i in zip(("row", "token"), place, strict=False))


@pytest.fixture
def lab(grpo, reference, monkeypatch, request):
    return Lab(grpo, reference, monkeypatch, with_traceback=request.config.getoption("tbstyle") != "auto")


# The table of points ---------------------------------------------------------------------------------------------


def pytest_collection_modifyitems(items):
    for item in items:
        if marker := item.get_closest_marker("points"):
            # On the report, so that it also arrives when the tests run in other processes.
            item.user_properties.append(("points", marker.args[0]))


def pytest_terminal_summary(terminalreporter):
    """Points per task and in all, after a run of all tests (not after `-k task1`: that stays quiet)."""
    if terminalreporter.stats.get("deselected"):
        return
    earned, possible = {}, {}
    reports = [report for kind in ("passed", "failed", "error") for report in terminalreporter.stats.get(kind, [])]
    for report in reports:
        points = dict(getattr(report, "user_properties", [])).get("points")
        if points is not None and (report.when == "call" or report.failed):
            task = report.nodeid.split("::test_")[1].split("_")[0]
            possible[task] = possible.get(task, 0) + points
            earned[task] = earned.get(task, 0) + points * report.passed
    if not possible:
        return
    terminalreporter.section("points")
    for task in sorted(possible):
        terminalreporter.line(f"{task:<8}{earned[task]:>5} of {possible[task]}")
    terminalreporter.line(f"{'total':<8}{sum(earned.values()):>5} of {sum(possible.values())}")
