"""grade.py and sandbox.py against broken and hostile submissions: each gets a fair grade and a clear line, and harms
nobody. They are graded in a small copy of the lab, with one or two quick tests per task.

About a minute on two cores; `-k "not slow"` leaves out what runs submissions.
"""

import csv
import io
import json
import os
import signal
import stat
import subprocess
import sys
import textwrap
import time
import zipfile
from pathlib import Path

import grade
import pytest
from helpers import copy_lab
from manifest import AUTOGRADER

import tinylm

LAB = Path(__file__).resolve().parents[2]

REFERENCE = (LAB / "solutions" / "grpo.py").read_text(encoding="utf-8")
BODIES = grade.task_bodies(REFERENCE)
LINES = len(REFERENCE.splitlines())
TIMEOUT = 5  # seconds of computing for a test, many times what the small ones need

SMALL_TESTS = """
import copy

import pytest
import torch

import tinylm


def model():
    torch.manual_seed(0)
    return tinylm.TinyLM()


class Descent:
    def __init__(self, parameters):
        self.parameters = list(parameters)

    def zero_grad(self):
        for parameter in self.parameters:
            parameter.grad = None

    def step(self):
        with torch.no_grad():
            for parameter in self.parameters:
                parameter -= 0.1 * parameter.grad


PROMPTS = tinylm.encode(["12+34=", "56+78="])


@pytest.mark.points(20)
def test_task1_rows(examiner):
    samples = examiner.call(1, model(), PROMPTS, 3, 1.0, torch.Generator().manual_seed(0))
    expected = tinylm.response_mask(samples.responses)
    examiner.compare(1, "samples.mask", examiner.tensor(1, "mask", samples.mask, (6, 4)), expected, {})


@pytest.mark.points(20)
def test_task2_values(examiner):
    got = examiner.tensor(2, "the advantages", examiner.call(2, torch.tensor([1.0, 0, 0, 1]), 4, True), (4,))
    examiner.compare(2, "the advantage", got, torch.tensor([1.0, -1, -1, 1]), {}, tolerance=1e-3)


def check_k3(examiner, log_u):
    logp = torch.full_like(log_u, -2.0)
    got = examiner.tensor(3, "k3", examiner.call(3, logp, logp + log_u), tuple(log_u.shape))
    examiner.compare(3, "k3", got, log_u.double().exp() - log_u - 1, {})


@pytest.mark.points(12)
def test_task3_positive(examiner):
    check_k3(examiner, torch.tensor([[1.0, 0.5]]))


@pytest.mark.points(8)
def test_task3_negative(examiner):
    check_k3(examiner, torch.tensor([[-1.0, -0.5]]))


@pytest.mark.points(20)
def test_task4_clip(examiner):
    old = torch.zeros(2, 1)
    logp = torch.tensor([[1.5], [0.5]]).log()
    loss, _ = examiner.call(4, logp, old, logp.clone(), torch.tensor([1.0, 1.0]), torch.ones(2, 1), 0.2, 0.0)
    examiner.compare(4, "the loss", examiner.tensor(4, "the loss", loss, ()), torch.tensor(-0.85), {})


@pytest.mark.points(20)
def test_task5_step(examiner):
    policy = model()
    before = copy.deepcopy(policy)
    config = examiner.grpo.GRPOConfig(G=4, inner_steps=1, beta=0.5)
    reference = copy.deepcopy(policy)
    with torch.no_grad():
        reference.head.weight += 0.1  # so that k3 has a slope, whatever the rewards
    examiner.call(5, policy, reference, Descent(policy.parameters()), PROMPTS, config, torch.Generator().manual_seed(0))
    if torch.equal(policy.head.weight, before.head.weight):
        examiner.fail(5, "the weights do not change")
    assert torch.equal(policy.position_embedding.weight[-1], before.position_embedding.weight[-1])
"""


def small_lab(folder: Path) -> Path:
    """A copy of the lab whose tests are SMALL_TESTS."""
    tinylm.load_or_train_sft()
    copy_lab([*AUTOGRADER, "grpo.py", "tinylm_sft.pt"], folder)
    (folder / "test_grpo.py").write_text(SMALL_TESTS, encoding="utf-8")
    return folder


def command(lab: Path, *args) -> list[str]:
    return [sys.executable, str(lab / "solutions" / "grade.py"), *map(str, args)]


def run_grade(lab: Path, *args) -> subprocess.CompletedProcess:
    return subprocess.run(command(lab, *args), capture_output=True, encoding="utf-8", timeout=1500, check=False)


def rows_of(out: Path) -> dict[str, dict[str, str]]:
    with out.open(encoding="utf-8", newline="") as file:
        return {row["name"]: row for row in csv.DictReader(file)}


def with_body(task: int, body: str, before: str = "") -> str:
    """The reference with other lines in the body of a task, or with lines `before` its own."""
    _, first, last = BODIES[task]
    lines = REFERENCE.splitlines(keepends=True)
    new = textwrap.indent(textwrap.dedent(before or body), "    ") + "\n"
    return "".join([*lines[:first], new, *(lines[first:last] if before else []), *lines[last:]])


def on_import(code: str) -> str:
    return REFERENCE + "\n\n" + textwrap.dedent(code)


def inside(task: int, code: str) -> str:
    return with_body(task, "", before=code)


# Hostile submissions -------------------------------------------------------------------------------------------------

ZEROS = "return torch.zeros_like(logp)"  # as k3: wrong
ALL, NONE, LACKS_3, ONLY_1_2 = (20, 20, 20, 20, 20), (0, 0, 0, 0, 0), (20, 20, 0, 20, 20), (20, 20, 0, 0, 0)

# Each must be refused. They run one after another while one submission is imported.
ACTIONS = {
    "kill the parent": "os.kill(os.getppid(), 9)",
    "kill a group": "os.killpg(os.getpgid(os.getppid()), 9)",
    # A fork bomb that ends by itself, even where it is not stopped.
    "fork": "for _ in range(3):\n    if os.fork() == 0: time.sleep(20); os._exit(0)",
    "system": "os.system('sleep 20')",
    "spawn": "os.posix_spawn('/bin/sleep', ['sleep', '20'], {})",
    "subprocess": "subprocess.Popen(['sleep', '20'])",
    "fork_exec": "import _posixsubprocess\n_posixsubprocess.fork_exec()",
    "multiprocessing": "multiprocessing.Process(target=print).start()",
    "thread": "threading.Thread(target=print).start()",
    "low thread": "import _thread\n_thread.start_new_thread(print, ())",
    "fresh module": "own = sys.modules.pop('_thread')\ntry: import _thread\nfinally: sys.modules['_thread'] = own",
    "signal": "signal.signal(signal.SIGALRM, signal.SIG_IGN)",
    "timer": "signal.alarm(0)",
    "socket": "import socket\nsocket.socket()",
    "ctypes": "import ctypes\nctypes.CDLL(None)",
    "write tinylm": "open(tinylm.__file__, 'w')",
    "write by os": "os.open('test_grpo.py', os.O_WRONLY | os.O_TRUNC)",
    "write the checkpoint": "torch.save({}, 'tinylm_sft.pt')",
    "write by torch": "torch.from_file('tinylm.py', True, 9)",
    "write by numpy": "import numpy\nnumpy.zeros(9).tofile('grpo.py')",
    "write another's": "pathlib.Path({submissions!r}, 'good.py').write_text('')",
    "step out": "open('home/../../../../../../../../../../../../../' + {submissions!r} + '/good.py', 'w')",
    "delete another's": "os.remove({submissions!r} + '/good.py')",
    "delete all": "import shutil\nshutil.rmtree({submissions!r})",
    "rename": "os.rename('tinylm.py', 'home/x.py')",
    "link": "os.symlink('/etc', 'home/x')",
    "report": "open({out!r}, 'a')",
    "list another's": "os.listdir({submissions!r})",
    "read another's": "open({submissions!r} + '/good.py')",
    "read the reference": "open({lab!r} + '/solutions/grpo.py')",
    "read as bytes": "open(({lab!r} + '/solutions/grpo.py').encode())",
    "load the reference": "import runpy\nrunpy.run_path({lab!r} + '/solutions/grpo.py')",
    "read the stand-in": "open('solutions/grpo.py')",
    "read the parent": "open(f'/proc/{os.getppid()}/environ')",
    "frame": "sys._getframe()",
    "frame by inspect": "inspect.currentframe()",
    "traceback": "try: 1 / 0\nexcept ZeroDivisionError as error: error.__traceback__.tb_frame",
    "traceback walk": "try: 1 / 0\nexcept ZeroDivisionError as error: list(traceback.walk_tb(error.__traceback__))",
    "pytest's frame": "import _pytest._code\ntry: 1 / 0\n"
    "except ZeroDivisionError as error: _pytest._code.ExceptionInfo.from_exception(error).traceback[0].frame",
    "generator": "(x for x in ()).gi_frame",
    "all frames": "sys._current_frames()",
    "trace": "sys.settrace(print)",
    "gc": "gc.get_objects()",
    "referrers": "gc.get_referrers(torch)",
    "code": "tinylm.reward.__code__ = (lambda a, b: 1.0).__code__",
    "defaults": "tinylm.generate.__defaults__ = ()",
    "class of a module": "import types\nclass M(types.ModuleType): pass\ntinylm.__class__ = M",
    "code of a library": "compile('1', torch.__file__, 'exec')",
    "hook": "seen = []\nsys.addaudithook(lambda *args: seen.append(args))\nopen(os.devnull)\n"
    "if not seen: raise PermissionError('the grader does not allow it, and says nothing')",
}
TRY_ACTIONS = """
import gc, inspect, multiprocessing, os, pathlib, signal, subprocess, sys, threading, time, traceback
allowed = []
for name, code in ACTIONS.items():
    try:
        exec(code)
        allowed.append(name)
    except PermissionError as error:
        if "the grader does not allow" not in str(error):
            allowed.append(name)
    except Exception as error:
        allowed.append(f"{name} ({type(error).__name__}: {error})")
if allowed:
    raise RuntimeError("; ".join(f"<{name}>" for name in allowed))
"""


def each(**bodies: str) -> str:
    """The reference with something before the body of each task given, as task1="..."."""
    source = REFERENCE
    for name, code in sorted(bodies.items(), reverse=True):
        lines = source.splitlines(keepends=True)
        lines.insert(BODIES[int(name[-1])][1], textwrap.indent(textwrap.dedent(code), "    ") + "\n")
        source = "".join(lines)
    return source


UNDO = """
    class Undo:
        def __init__(self):
            self.was, torch.allclose = torch.allclose, lambda *a, **k: True
        def __del__(self):
            torch.allclose = self.was
    k3 = torch.zeros_like(logp)
    HOLDER.undo = Undo()
    return k3
"""
# NAME -> (grpo.py, points of the five tasks, words of the status, words of the feedback).
HOSTILE = {
    "good": (REFERENCE, ALL, ["graded"], ["100 of 100"]),
    "stubs": (
        (LAB / "grpo.py").read_text(encoding="utf-8"),
        NONE,
        ["graded"],
        [f"Task {task} ({BODIES[task][0]}) is not written yet: open grpo.py" for task in BODIES],
    ),
    "wrong in task 2": (with_body(2, "return rewards"), (20, 0, 20, 20, 20), ["graded"], ["Task 2 (group_advantages)"]),
    "refused": (
        on_import("ACTIONS = {actions!r}" + TRY_ACTIONS),
        ALL,
        ["tried what the grader refuses: os.kill, os.killpg, os.fork"],
        ["100 of 100"],
    ),
    "odd but right": (
        each(
            task2="print('x' * 10**6)",
            task3="for _ in range(100): print('x' * 10**6)",
            task4="import os\nos.environ['RL_SOLUTIONS'] = '1'",
        )
        + "\nimport atexit, os\natexit.register(os._exit, 0)\n"
        + "atexit.register(os.remove, {submissions!r} + '/good.py')\n"
        + "GRPOConfig.__post_init__ = lambda self: setattr(self, 'inner_steps', 0)\n"
        + "import collections, logging, typing\nlogging.warning('x')\n"
        + "collections.namedtuple('A', 'b')\ntyping.TypeVar('T')\n",
        ALL,
        ["graded"],
        ["100 of 100"],
    ),
    "fails in five ways": (
        each(
            task1="import sys\nsys.exit(0)",
            task2="return group_advantages(rewards, G)",
            task3="raise KeyboardInterrupt",
            task4="torch.ones(5 * 10**9)",
            task5="open('home/big', 'wb').write(bytes(10**9))",
        ),
        NONE,
        ["graded"],
        ["SystemExit", "RecursionError", "interrupted", "RuntimeError", "OSError"],
    ),
    "ends in five ways": (
        each(
            task1="import os\nos._exit(0)",
            task2="import os\nos.abort()",
            task3="import pytest\npytest.skip()",
            task4="while True: pass",
            task5="import sys\nsys.setrecursionlimit(10**9)\n"
            "return grpo_step(model, ref_model, optimizer, prompts, config, generator)",
        ),
        NONE,
        [
            "ended the process (exit status 0) in test_task1_rows",
            "killed by the signal SIGABRT in test_task2_values",
            f"took longer than {TIMEOUT} seconds in test_task4_clip",
        ],
        ["grpo.py ended the process", "grpo.py took longer", "Skipped"],
    ),
    "cheats in five ways": (
        each(
            task1="import os\nfor n in range(3, 60):\n"
            "    try: os.write(n, b'x passed - - - y\\n')\n    except OSError: pass",
            task2="class Yes(list):\n    def __eq__(self, other): return True\nreturn Yes()",
            task3="class Yes(torch.Tensor):\n    @classmethod\n"
            "    def __torch_function__(cls, function, types, args=(), kwargs=None):\n"
            "        if function is torch.allclose: return True\n"
            "        return super().__torch_function__(function, types, args, kwargs or {})\n"
            "return torch.zeros_like(logp).as_subclass(Yes)",
            task4="import sys\nreference = sys.modules['reference_grpo']\n"
            "return reference.grpo_loss(logp, old_logp, ref_logp, advantages, mask, clip, beta)",
            task5="import inspect, sys\nraise ValueError(inspect.getsource(sys.modules['reference_grpo'].k3_kl))",
        ),
        NONE,
        ["wrote into the grader's channel in test_task1_rows"],
        ["must be a torch.Tensor, not a Yes", "not written"],
    ),
    # On import
    "loops": (on_import("while True: pass"), NONE, [f"took longer than {TIMEOUT} seconds when imported"], []),
    "leaves": (on_import("import os\nos._exit(0)"), NONE, ["ended the process (exit status 0) when imported"], []),
    "exits": (on_import("import sys\nsys.exit(0)"), NONE, ["cannot be imported: SystemExit"], []),
    "lacks a module": (
        on_import("import no_such"),
        NONE,
        ["ModuleNotFoundError"],
        [f"line {LINES + 3}: import no_such"],
    ),
    "no Python": (REFERENCE + "\ndef f(:\n", NONE, ["cannot be imported: SyntaxError"], [f"line {LINES + 2}: def f(:"]),
    "latin-1": (REFERENCE.encode() + "\nA = 'é'\n".encode("latin-1"), NONE, ["SyntaxError"], ["utf-8"]),
    # Replacements
    "patches": (
        on_import(
            """
            import _pytest.python, math, pytest, statistics, test_grpo
            torch.allclose = torch.testing.assert_close = lambda *a, **k: True
            torch.Tensor.double = torch.Tensor.norm = lambda *a: 0
            math.isclose = lambda *a: True
            pytest.fail = _pytest.python.Function.runtest = print
            tinylm.reward = lambda *a: 1.0
            tinylm.int = torch.abs = float
            tinylm.generate.__closure__[0].cell_contents = print
            test_grpo.check_k3 = lambda *a: None
            """
        ).replace("log_u.exp() - log_u - 1", "log_u"),
        NONE,
        ["tampered: replaced "],
        [
            "torch.allclose",
            "torch.testing.assert_close",
            "torch.Tensor.double",
            "torch.Tensor.norm",
            "math.isclose",
            "pytest.fail",
            "_pytest.python.Function.runtest",
            "tinylm.reward",
            "tinylm.int",
            "torch.abs",
            "tinylm.generate.__closure__",
            "test_grpo.check_k3",
        ],
    ),
    "patches the language": (
        on_import("import builtins, sys\nbuiltins.AssertionError = SystemExit\nsys.modules['tinylm'] = torch"),
        NONE,
        ["tampered: replaced builtins.AssertionError, sys.modules.tinylm (on import)"],
        [],
    ),
    "a mode of torch": (
        on_import(
            """
            from torch.overrides import TorchFunctionMode
            class Yes(TorchFunctionMode):
                def __torch_function__(self, function, types, args=(), kwargs=None):
                    return True if function is torch.allclose else function(*args, **(kwargs or {}))
            Yes().__enter__()
            """
        ),
        NONE,
        ["tampered: replaced Yes (on import)"],
        [],
    ),
    "a kernel of its own": (  # which no snapshot shows
        on_import(
            "own = torch.library.Library('aten', 'IMPL')\nown.impl('allclose', lambda *a, **k: True, 'CPU')"
        ).replace("log_u.exp() - log_u - 1", "log_u"),
        NONE,
        ["tampered: made a wrong solution pass"],
        ["tampered with the tests"],
    ),
    "patches late": (
        with_body(3, "torch.allclose = lambda *a, **k: True\n" + ZEROS),
        ONLY_1_2,
        ["tampered: replaced torch.allclose (test_task3_positive)"],
        ["tampered with the tests"],
    ),
    "patches and undoes": (with_body(3, UNDO.replace("HOLDER", "k3")), LACKS_3, ["graded"], ["8 of 8"][:0]),
    "undoes later": (with_body(3, UNDO.replace("HOLDER", "logp")), ONLY_1_2, ["tampered: replaced torch.allclose"], []),
    # Refused unread
    "utf-16": (REFERENCE.encode("utf-16"), NONE, ["refused: grpo.py is not a text in UTF-8"], ["UTF-16"]),
    "empty": ("\n", NONE, ["refused: grpo.py is empty"], []),
    "renamed notebook": ('{"cells": []}', NONE, ["refused: a notebook"], []),
}


def make_zip(path: Path, members: dict[str, str], link: str = "") -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            info = zipfile.ZipInfo(name)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = ((stat.S_IFLNK if name == link else stat.S_IFREG) | 0o644) << 16
            archive.writestr(info, content)


def make_others(folder: Path, lab: Path) -> dict[str, tuple]:
    """Submissions in other shapes, written to `folder`: the same table as HOSTILE."""
    wrong = "raise SystemExit\n"
    (folder / "in a folder").mkdir()
    (folder / "in a folder" / "grpo.py").write_text(REFERENCE, encoding="utf-8")
    for name, text in {
        "conftest.py": wrong,
        "tinylm.py": wrong,
        "sitecustomize.py": wrong,
        "test_grpo.py": wrong,
    }.items():
        (folder / "in a folder" / name).write_text(text, encoding="utf-8")
    make_zip(
        folder / "Zoë Ü.zip", {"lab/grpo.py": "\ufeff" + REFERENCE, "lab/conftest.py": wrong, "lab/x/grpo.py": wrong}
    )
    make_zip(folder / "climbs.zip", {"grpo.py": REFERENCE, "../climbed.py": wrong})
    make_zip(folder / "absolute.zip", {"grpo.py": REFERENCE, "/tmp/climbed.py": wrong})
    make_zip(folder / "linked.zip", {"grpo.py": "/etc/passwd"}, link="grpo.py")
    make_zip(folder / "bomb.zip", {"grpo.py": "#" * 30_000_000})
    make_zip(folder / "two.zip", {"a/grpo.py": REFERENCE, "b/grpo.py": wrong})
    (folder / "broken.zip").write_bytes(b"PK\3\4 and no more")
    (folder / "notebook.ipynb").write_text("{}", encoding="utf-8")
    (folder / "essay.txt").write_text("I wrote an essay", encoding="utf-8")
    (folder / "=1+1.py").write_text("", encoding="utf-8")
    (folder / ".DS_Store").write_text("", encoding="utf-8")
    make_zip(folder / "twice.zip", {"grpo.py": REFERENCE})
    (folder / "Twice.py").write_text(REFERENCE, encoding="utf-8")
    (folder / "link").symlink_to(lab / "solutions")
    (folder / "inner link").mkdir()
    (folder / "inner link" / "grpo.py").symlink_to(lab / "solutions" / "grpo.py")
    return {
        "in a folder": ("", ALL, ["graded"], []),
        "Zoë Ü": ("", ALL, ["graded"], []),
        "climbs": ("", NONE, ["refused: the zip holds a path that leads out"], ["../climbed.py"]),
        "absolute": ("", NONE, ["refused: the zip holds a path that leads out"], []),
        "linked": ("", NONE, ["refused: the zip holds a link"], []),
        "bomb": ("", NONE, ["refused: grpo.py in the zip is larger than 1024 kB"], []),
        "two": ("", NONE, ["refused: 2 files named grpo.py"], []),
        "broken": ("", NONE, ["refused: the zip is damaged"], []),
        "notebook": ("", NONE, ["refused: a notebook instead of a module"], []),
        "essay.txt": ("", NONE, ["refused: neither"], []),
        "=1+1": ("", NONE, ["refused: grpo.py is empty"], []),
        "Twice": ("", NONE, ["refused: several submissions of this name: Twice.py, twice.zip"], []),
        "link": ("", NONE, ["refused: it is a link"], []),
        "inner link": ("", NONE, ["refused: grpo.py is a link"], []),
    }


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file() and "__pycache__" not in p.parts}


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """All submissions above, graded by one command: (table, rows, folder of the output)."""
    folder = tmp_path_factory.mktemp("hostile")
    lab, submissions, out = small_lab(folder / "lab"), folder / "submissions", folder / "out" / "grades.csv"
    submissions.mkdir()
    out.parent.mkdir()
    places = {"{submissions!r}": repr(str(submissions)), "{lab!r}": repr(str(lab)), "{out!r}": repr(str(out))}

    def filled(text: str) -> str:
        for place, path in places.items():
            text = text.replace(place, path)
        return text

    actions = repr({name: filled(code) for name, code in ACTIONS.items()})
    for name, (source, *_) in HOSTILE.items():
        data = source if isinstance(source, bytes) else filled(source).replace("{actions!r}", actions).encode()
        (submissions / f"{name}.py").write_bytes(data)
    table = HOSTILE | make_others(submissions, lab)
    before = contents(folder)
    done = run_grade(lab, submissions, "--out", out, "--timeout", TIMEOUT, "--gradescope")
    assert done.returncode == 0, done.stderr
    after = {path: content for path, content in contents(folder).items() if not path.startswith(str(out.parent))}
    assert after == before, "a submission changed files around it"
    return table, rows_of(out), out.parent


@pytest.mark.parametrize("name", [*HOSTILE, "in a folder", "Zoë Ü"])
def test_slow_grade(graded, name):
    check_grade(graded, name)


REFUSED = ["climbs", "absolute", "linked", "bomb", "two", "broken", "notebook", "essay.txt", "=1+1", "Twice", "link"]


@pytest.mark.parametrize("name", [*REFUSED, "inner link"])
def test_slow_refused(graded, name):
    check_grade(graded, name)


def check_grade(graded, name: str) -> None:
    table, rows, folder = graded
    _, points, status, words = table[name]
    row = rows[f"'{name}" if name.startswith("=") else name]
    text = (folder / "feedback" / f"{name}.txt").read_text(encoding="utf-8")
    assert tuple(float(row[f"task{task}"]) for task in range(1, 6)) == points, (row, text)
    assert float(row["total"]) == sum(points)
    assert all(part in row["status"] for part in status), row["status"]
    assert row["status"] == "graded" or status != ["graded"], row["status"]
    assert all(word in text for word in words), text
    assert "Traceback" not in text and str(LAB) not in text and "/tmp/" not in text.replace("'/tmp/climbed.py'", "")
    results = json.loads((folder / "gradescope" / name / "results.json").read_text(encoding="utf-8"))
    assert sum(test["score"] for test in results["tests"]) == sum(points)
    assert sum(test["max_score"] for test in results["tests"]) == 100
    assert {test["status"] for test in results["tests"] if test["score"]} <= {"passed"}
    assert [test["number"] for test in results["tests"]] == ["1.1", "2.1", "3.1", "3.2", "4.1", "5.1"]


@pytest.mark.parametrize("action", ACTIONS)
def test_slow_refused_action(graded, action):
    _, _, folder = graded
    assert f"<{action}" not in (folder / "feedback" / "refused.txt").read_text(encoding="utf-8")


def test_slow_table(graded):
    table, rows, folder = graded
    assert set(rows) == {f"'{name}" if name.startswith("=") else name for name in table}
    assert list(rows) == sorted(rows)
    assert not list(folder.glob(".*")), "a temporary file was left"


def test_slow_nothing_leads_to_the_examiner(tmp_path):
    """From all modules and classes, no chain of references ends at the sandbox's functions or at pytest's Config.

    The audit hook is left out here, because it refuses the very means of looking.
    """
    lab = small_lab(tmp_path / "lab")
    sandbox = lab / "solutions" / "sandbox.py"
    text = sandbox.read_text(encoding="utf-8")
    hook = "    sys.addaudithook(make_hook(state.rules))\n"
    assert text.count(hook) == 1
    sandbox.write_text(text.replace(hook, ""), encoding="utf-8")
    search = """
        import gc, sys, types
        classes, waiting = {object}, [object]
        while waiting:
            new = set(type.__subclasses__(waiting.pop())) - classes
            classes |= new
            waiting += new
        seen, waiting, found, keep = set(), [*sys.modules.values(), *classes], [], []
        while waiting:
            thing = waiting.pop()
            if id(thing) in seen or isinstance(thing, types.FrameType):
                continue
            seen.add(id(thing))
            keep.append(thing)
            code = getattr(thing, "__code__", None) if type(thing) is types.FunctionType else None
            if type(thing).__name__ in ("Config", "PytestPluginManager"):
                found.append(type(thing).__name__)
            elif code is not None and code.co_filename.endswith("sandbox.py"):
                found.append(thing.__name__)
            else:
                waiting += gc.get_referents(thing)
        raise RuntimeError(f"{len(seen) > 100_000} {len(classes) > 1000} {sorted(set(found))}")
    """
    submissions = tmp_path / "submissions"
    submissions.mkdir()
    (submissions / "looks.py").write_text(inside(4, search), encoding="utf-8")
    done = run_grade(lab, submissions, "--out", tmp_path / "grades.csv", "--timeout", 60)
    assert done.returncode == 0, done.stderr
    assert "RuntimeError: True True []" in (tmp_path / "feedback" / "looks.txt").read_text(encoding="utf-8")


# Going on where it was stopped ---------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs a kill that cannot be caught")
def test_slow_resume_after_a_kill(tmp_path):
    lab, submissions, out = small_lab(tmp_path / "lab"), tmp_path / "submissions", tmp_path / "grades.csv"
    submissions.mkdir()
    for name in ("a", "b"):
        (submissions / f"{name}.py").write_text(REFERENCE, encoding="utf-8")
    options = (submissions, "--out", out, "--jobs", 1, "--timeout", 60)
    first = subprocess.Popen(
        command(lab, *options),
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env=os.environ | {"TMPDIR": str(tmp_path)},  # a kill leaves a sandbox's folder behind
    )
    while first.poll() is None and (not out.exists() or out.read_text(encoding="utf-8").count("\n") < 2):
        time.sleep(0.02)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    kept = rows_of(out)
    assert list(kept) == ["a"]
    with out.open("a", encoding="utf-8") as file:
        file.write("b,20,20,2")  # a row that the kill cut short

    refused = run_grade(lab, *options)
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1 and "--resume" in refused.stderr
    assert out.read_text(encoding="utf-8").endswith("b,20,20,2")

    (submissions / "b.py").write_text(with_body(3, ZEROS), encoding="utf-8")
    done = run_grade(lab, *options, "--resume")
    assert done.returncode == 0, done.stderr
    rows = rows_of(out)
    assert rows["a"] == kept["a"]  # its seconds too: it was not graded again
    assert [row["total"] for row in rows.values()] == ["100", "80"]


def test_what_is_finished(tmp_path):
    """A grade is finished if its row holds this very submission under these very tests, and its feedback is there."""
    exam = grade.Exam({"test_grpo.py": b"x"}, {}, [], 1.0, canaries={1: None})
    digest = grade.submission_digest(b"source", exam)
    book = grade.Book(tmp_path / "grades.csv", False)
    assert not book.done("+a", digest)
    book.write(exam)
    book.enter(grade.Grade("+a", digest), exam)
    book.enter(grade.Grade("b", digest), exam)
    again = grade.Book(tmp_path / "grades.csv", False)
    again.rows = {row["name"]: row for row in grade.finished_rows(tmp_path / "grades.csv")}
    assert again.done("+a", digest)
    assert not again.done("+a", grade.submission_digest(b"other source", exam))
    exam.files["test_grpo.py"] = b"y"
    assert not again.done("+a", grade.submission_digest(b"source", exam))
    (tmp_path / "feedback" / "+a.txt").unlink()
    assert not again.done("+a", digest)
    again.enter(grade.Grade("+a", digest, status="again"), exam)  # until then the old row was there
    assert [row["status"] for row in grade.finished_rows(tmp_path / "grades.csv")] == ["graded", "graded", "again"]
    again.write(exam)
    assert {name: row["status"] for name, row in rows_of(tmp_path / "grades.csv").items()} == {
        "'+a": "again",
        "b": "graded",
    }


def test_rows_that_are_not_whole_are_left_out(tmp_path):
    out = tmp_path / "grades.csv"
    header = "name,task1,total,seconds,status,submission\n"
    out.write_text(header + "a,1,1,1,graded,x\nb,1,1\nc,1,1,1,graded,x", encoding="utf-8")
    assert [row["name"] for row in grade.finished_rows(out)] == ["a"]
    out.write_bytes(f"{header}a,1,1,1,graded,x\nJos\u00e9".encode()[:-1])  # cut within a letter
    assert [row["name"] for row in grade.finished_rows(out)] == ["a"]
    out.write_text("", encoding="utf-8")
    assert grade.finished_rows(out) == []
    for foreign in ("something else\n", "something else"):
        out.write_text(foreign, encoding="utf-8")
        with pytest.raises(ValueError, match="not a table of grades"):
            grade.finished_rows(out)


# Small parts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["grpo.py", "lab/grpo.py"], "grpo.py"),
        (["lab/grpo.py", "lab/solutions/grpo.py"], "lab/grpo.py"),
        (["__MACOSX/._grpo.py", "a/grpo.py"], "a/grpo.py"),
    ],
)
def test_which_grpo_py_counts(names, chosen):
    assert grade.choose(names) == chosen


@pytest.mark.parametrize("names", [[], ["a/b/grpo.py"], ["a/grpo.py", "b/grpo.py"], ["GRPO.PY"], ["x.ipynb"]])
def test_no_grpo_py_to_choose(names):
    with pytest.raises(grade.Refused):
        grade.choose(names)


def test_a_zip_that_lies_about_its_size(tmp_path):
    path = tmp_path / "lies.zip"
    make_zip(path, {"grpo.py": "#" * 5_000_000})
    data = path.read_bytes().replace((5_000_000).to_bytes(4, "little"), (100).to_bytes(4, "little"))
    path.write_bytes(data)
    with pytest.raises(grade.Refused, match=r"larger than|damaged"):
        grade.read_submission([path])


def test_messages_name_no_folder_of_this_machine():
    text = "OSError: '/home/me/secret lab/x.py' \x1b[31m C:\\Users\\me\\y.py\n" + "z" * 1000
    told = grade.readable(text)
    assert "home" not in told and "Users" not in told and "\x1b" not in told
    assert max(map(len, told.splitlines())) == 300


def test_unwritten_leaves_earlier_tasks():
    text = grade.unwritten(REFERENCE, 4)
    compile(text, "grpo.py", "exec")
    assert "log_u.exp()" in text and "torch.minimum(unclipped" not in text and "loss.backward()" not in text
    assert list(BODIES) == [1, 2, 3, 4, 5] and BODIES[3][0] == "k3_kl"


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["{folder}"],
        ["{folder}", "--out", "x.csv", "--results", "x.json"],
        ["{folder}/none", "--out", "{folder}/x.csv"],
        ["{folder}", "--out", "{folder}/x.csv"],  # no submission in it
        ["{folder}", "--out", "{folder}/x.csv", "--jobs", "0"],
        ["{folder}", "--out", "{folder}/x.csv", "--timeout", "nan"],
    ],
)
def test_bad_input_is_one_line(tmp_path, args):
    done = run_grade(LAB, *(arg.replace("{folder}", str(tmp_path)) for arg in args))
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and not done.stdout
    assert not list(tmp_path.iterdir())


def test_csv_of_one_row():
    exam = grade.Exam({}, {}, [], 1.0, tests=[grade.Test("test_task1_a", 1, "1.1", 5)], canaries={1: None})
    row = grade.row_of(grade.Grade('+x "y", z', "d", {"test_task1_a": 5}, {}, "a\nb", 1.25), exam)
    text = grade.table([row], grade.columns(exam))
    assert next(csv.DictReader(io.StringIO(text))) == row
    assert row["name"].startswith("'+") and row["status"] == "a b" and row["total"] == "5"
