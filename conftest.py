"""What pytest needs to grade `grpo.py`: which file is graded, what stands in for earlier tasks, the table of points."""

import functools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # which -P and --import-mode=importlib leave out

import pytest

import tinylm
from lab.door import BUILDS_ON, NAMES, answer
from lab.door.loading import load_student
from lab.examine import Examiner, Memory, run
from lab.inputs import SEED, fresh_draw
from lab.start import REFERENCE, find_grpo, load_module, wants_reference

BY_DEFAULT = wants_reference()  # RL_SOLUTIONS=1


def pytest_addoption(parser):
    parser.addoption("--solutions", action="store_true", help="test solutions/grpo.py (the same as RL_SOLUTIONS=1)")


def pytest_configure(config):
    config.addinivalue_line("markers", "points(n): what the test is worth; all tests together are worth 100")


@pytest.fixture(scope="session")
def reference():
    """The reference solution, or None where `solutions/` was not handed out."""
    return load_module(REFERENCE, "reference_grpo") if REFERENCE.exists() else None


@pytest.fixture(scope="session")
def loaded(request):
    """(the module under test, ""), or (None, why it cannot be imported)."""
    solutions = request.config.getoption("--solutions") or BY_DEFAULT
    try:
        path = find_grpo(solutions)
    except ValueError as error:
        return None, str(error)
    module, problem = load_student(path)
    return module, f"grpo.py cannot be imported: {problem}" if problem else ""


@pytest.fixture
def grpo(loaded, request):
    """The module under test; where it cannot be imported, each test says so in two lines."""
    module, problem = loaded
    if problem:
        pytest.fail(problem, pytrace=request.config.getoption("tbstyle") != "auto")
    return module


@pytest.fixture(scope="session")
def memory():
    """What the tests have found out, so that each says the same of the same mistake, and says it once."""
    return Memory()


@pytest.fixture
def examiner(grpo, reference, sft, memory, monkeypatch, request):
    """Grades one task alone: the reference does the earlier ones; where it is absent, they must pass a first test."""
    door = functools.partial(answer, grpo)
    examiner = Examiner(door, sft, memory, with_traceback=request.config.getoption("tbstyle") != "auto")
    task = int(request.node.name.removeprefix("test_task")[0])
    for earlier in BUILDS_ON.get(task, ()):
        if reference:
            monkeypatch.setattr(grpo, NAMES[earlier], getattr(reference, NAMES[earlier]))
            continue
        first = next(test for name, test in vars(request.module).items() if name.startswith(f"test_task{earlier}_"))
        if failure := run(first, examiner):
            problem = failure.splitlines()[0]
            examiner.fix_first = f"it builds on task {earlier}, so fix task {earlier} first.\n  {problem}"
            break
    return examiner


# Inputs ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def draw():
    """Fresh inputs: draw(a, b, *shape) is uniform between a and b."""
    return fresh_draw()


@pytest.fixture(scope="session")
def sft():
    """The starting policy, which no test changes."""
    return tinylm.load_or_train_sft().requires_grad_(False)


# The table of points ---------------------------------------------------------------------------------------------


def pytest_collection_modifyitems(items):
    for item in items:
        if marker := item.get_closest_marker("points"):
            # On the report, so that it also arrives when the tests run in other processes.
            item.user_properties.append(("points", marker.args[0]))


def pytest_terminal_summary(terminalreporter):
    """After a failure, how to repeat its inputs. After a run of all tests (`-k task1` stays quiet), the points."""
    if terminalreporter.stats.get("failed"):
        terminalreporter.line(f"LAB_SEED={SEED} in the environment repeats these inputs")
    earned, possible = {}, {}
    reports = [report for kind in ("passed", "failed", "error") for report in terminalreporter.stats.get(kind, [])]
    for report in reports:
        points = dict(getattr(report, "user_properties", [])).get("points")
        if points is not None and (report.when == "call" or report.failed):
            task = report.nodeid.split("::test_")[1].split("_")[0]
            possible[task] = possible.get(task, 0) + points
            earned[task] = earned.get(task, 0) + points * report.passed
    if sum(possible.values()) != 100:
        return
    terminalreporter.section("points")
    for task in sorted(possible):
        terminalreporter.line(f"{task:<8}{earned[task]:>5} of {possible[task]}")
    terminalreporter.line(f"{'total':<8}{sum(earned.values()):>5} of {sum(possible.values())}")
