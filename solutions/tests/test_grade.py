"""grade.py and grading/ against careless, broken and dishonest submissions: each gets the points for what its code
computes, and a clear line, and harms nobody. They are graded in a small copy of the lab, with a quick test or two each.

About two minutes on two cores; `-k "not slow"` leaves out what runs submissions.
"""

import csv
import io
import json
import os
import re
import signal
import stat
import subprocess
import sys
import textwrap
import time
import zipfile
from pathlib import Path

import pytest
from grading import confinement
from grading.book import Book, Grade, columns, finished_rows, readable, row_of, table
from grading.exam import Exam, Test, submission_digest, task_bodies, unwritten
from grading.submissions import Refused, choose, read_submission
from helpers import HAS_BUBBLEWRAP
from manifest import AUTOGRADER, copy_lab

import tinylm
from lab.start import REFERENCE as REFERENCE_PATH

LAB = Path(__file__).resolve().parents[2]
REFERENCE = REFERENCE_PATH.read_text(encoding="utf-8")
BODIES = task_bodies(REFERENCE)
LINES = len(REFERENCE.splitlines())
TIMEOUT = 10  # seconds for a test, many times what the small ones need
AS = [] if HAS_BUBBLEWRAP else ["--unconfined"]

SMALL_TESTS = """
import pytest
import torch

import tinylm


def model():
    torch.manual_seed(0)
    return tinylm.TinyLM()


PROMPTS = tinylm.encode(["12+34=", "56+78="])


@pytest.mark.points(20)
def test_task1_rows(examiner):
    samples = examiner.sample(model(), PROMPTS, 3)
    examiner.compare(1, "samples.mask", samples.mask.double(), tinylm.response_mask(samples.responses).double())


@pytest.mark.points(20)
def test_task2_values(examiner):
    got = examiner.advantages(torch.tensor([1.0, 0, 0, 1]), 4)
    examiner.compare(2, "the advantage", got, torch.tensor([1.0, -1, -1, 1]), tolerance=1e-3)


def check_k3(examiner, log_u):
    logp = torch.full_like(log_u, -2.0)
    got, _ = examiner.k3(logp, logp + log_u, torch.ones_like(logp))
    examiner.compare(3, "k3", got, log_u.double().exp() - log_u - 1)


@pytest.mark.points(12)
def test_task3_positive(examiner):
    check_k3(examiner, torch.tensor([[1.0, 0.5]]))


@pytest.mark.points(8)
def test_task3_negative(examiner):
    check_k3(examiner, torch.tensor([[-1.0, -0.5]]))


@pytest.mark.points(20)
def test_task4_clip(examiner):
    from lab.inputs import Batch

    logp = torch.tensor([[1.5], [0.5]]).log()
    batch = Batch(logp, torch.zeros(2, 1), logp.clone(), torch.ones(2), torch.ones(2, 1), beta=0.0)
    examiner.compare(4, "the loss", examiner.loss(batch)[0], torch.tensor(-0.85))


@pytest.mark.points(20)
def test_task5_step(examiner):
    from lab.door.models import flat

    policy, reference = model().requires_grad_(), model()
    with torch.no_grad():
        reference.head.weight += 0.1  # so that k3 has a slope, whatever the rewards
    settings = {"G": 4, "inner_steps": 1, "beta": 0.5, "lr": 0.1}
    if torch.equal(examiner.steps(policy, reference, "SGD", PROMPTS, settings)["policy"], flat(policy)):
        examiner.fail(5, "the weights do not change")
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


def with_body(task: int, body: str) -> str:
    """The reference with other lines in the body of a task."""
    _, first, last = BODIES[task]
    lines = REFERENCE.splitlines(keepends=True)
    return "".join([*lines[:first], textwrap.indent(textwrap.dedent(body), "    ") + "\n", *lines[last:]])


def on_import(code: str) -> str:
    return REFERENCE + "\n\n" + textwrap.dedent(code)


def each(**bodies: str) -> str:
    """The reference with something before the body of each task given, as task1="..."."""
    source = REFERENCE
    for name, code in sorted(bodies.items(), reverse=True):
        lines = source.splitlines(keepends=True)
        lines.insert(BODIES[int(name[-1])][1], textwrap.indent(textwrap.dedent(code), "    ") + "\n")
        source = "".join(lines)
    return source


ALL, NONE, LACKS_3 = (20, 20, 20, 20, 20), (0, 0, 0, 0, 0), (20, 20, 0, 20, 20)

# Careless work, some ninety pieces: right, but for what has nothing to do with the tasks. All points, and no word.
ON_TOP = r"""
import matplotlib.pyplot as plt; plt.figure()
torch.set_default_dtype(torch.float64); torch.set_default_dtype(torch.float32)
import torch._dynamo
group_advantages = torch.compile(group_advantages, backend="eager", disable=True)
import torch.profiler, torch.utils.checkpoint
import functools; tinylm.decode = functools.lru_cache(maxsize=None)(lambda t, f=tinylm.decode: f(t))
def print(*args, **kwargs): pass
import importlib; importlib.reload(tinylm)
import random; random.seed(0)
import numpy as np; np.random.seed(0)
torch.manual_seed(0)
torch.set_num_threads(1)
torch.set_printoptions(precision=3)
torch.use_deterministic_algorithms(True)
torch.autograd.set_detect_anomaly(True)
import warnings; warnings.simplefilter("error")
import logging; logging.basicConfig(level=logging.DEBUG); logging.info("x")
import os; os.environ["PYTEST_ADDOPTS"] = "--collect-only"; os.environ["RL_SOLUTIONS"] = "1"
import sys; sys.path.insert(0, "."); sys.setrecursionlimit(5000)
import threading; threading.Thread(target=sorted, args=([],)).start()
import subprocess; subprocess.run(["true"])
import asyncio; asyncio.run(asyncio.sleep(0))
from concurrent.futures import ThreadPoolExecutor; list(ThreadPoolExecutor(2).map(abs, [1, -1]))
import multiprocessing
import atexit; atexit.register(lambda: 1 / 0)
import faulthandler, signal; signal.signal(signal.SIGINT, signal.SIG_DFL)
import socket; socket.socket().close()
import ctypes, inspect, gc, traceback; inspect.stack(); gc.collect(); gc.get_objects(); traceback.print_stack()
from pathlib import Path; Path("notes.txt").write_text("x"); Path("notes.txt").read_text()
import json; json.dump({}, open("log.json", "w"))
import pickle; pickle.dump(GRPOConfig(), open("config.pkl", "wb"))
torch.save({"a": torch.ones(2)}, "checkpoint.pt"); torch.load("checkpoint.pt")
tinylm.save_checkpoint(tinylm.TinyLM(), __import__("pathlib").Path("mine.pt"))
import tempfile; tempfile.mkdtemp()
import time; time.sleep(0.01)
import pytest, unittest, doctest
import contextlib, io; contextlib.redirect_stdout(io.StringIO())
from tinylm import *
from typing import *
import collections; Samples = collections.namedtuple("Samples", "prompts responses mask rewards texts")
assert group_advantages(torch.tensor([1.0, 0.0]), 2).sum() == 0
exec("answer = 42")
DEBUG, CACHE = True, {}
class Trainer: pass
if __name__ == "__main__": raise SystemExit
try: import wandb\nexcept ImportError: wandb = None
def timed(f): return lambda *a, **k: f(*a, **k)\nk3_kl = timed(k3_kl)
grpo_loss = __import__("functools").partial(grpo_loss)
group_advantages.__doc__ = None
k3_kl.calls = 0
class Logger:\n    def __getattr__(self, name): return lambda *a, **k: None\nlog = Logger()
import tqdm; bar = tqdm.tqdm(total=3); bar.update()
import platform, getpass, datetime; platform.platform()
help = input = None
lambda x: x
import math as m, statistics as s, itertools, collections, operator
del copy
torch.ops.aten.add(torch.ones(1), 1)
torch.backends.mkldnn.enabled
import gzip, shutil, glob; glob.glob("/*")
import sqlite3; sqlite3.connect(":memory:").close()
"""
INSIDE = {  # before a task's own lines
    "print": (1, "print('x' * 10**6)"),
    "print often": (3, "for _ in range(100): print('x' * 10**5)"),
    "a global": (2, "global SEEN\nSEEN = rewards"),
    "a cache": (3, "k3_kl.cache = {id(logp): ref_logp}"),
    "deepcopy of the model": (5, "import copy\nold = copy.deepcopy(model)"),
    "state_dict and back": (5, "model.load_state_dict(model.state_dict())"),
    "a checkpoint": (5, "torch.save(model.state_dict(), 'policy.pt')"),
    "a picture": (
        5,
        "import matplotlib.pyplot as plt\nplt.plot([1])\nplt.savefig('x.png')",
    ),
    "tqdm": (5, "from tqdm import tqdm\nfor _ in tqdm(range(3)): pass"),
    "anomaly mode": (5, "torch.autograd.set_detect_anomaly(True)"),
    "the profiler": (4, "from torch.profiler import profile\nwith profile(): torch.ones(1) + 1"),
    "train mode": (5, "model.train(); ref_model.eval()"),
    "gradients off and on": (4, "torch.set_grad_enabled(False); torch.set_grad_enabled(True)"),
    "asserts": (4, "assert logp.shape == mask.shape and mask.sum() > 0"),
    "a seed of the global generator": (5, "torch.manual_seed(3)"),
    "numpy": (2, "import numpy as np\nassert np.isclose(rewards.numpy().mean(), rewards.mean().item())"),
    "a hook": (5, "model.head.register_forward_hook(lambda *a: None)"),
    "an inner function": (3, "def f(x): return x * 2\nf(logp)"),
    "threads": (1, "import threading\nt = threading.Thread(target=print)\nt.start(); t.join()"),
    "a process": (1, "import subprocess\nsubprocess.run(['true'])"),
    "logging": (4, "import logging\nlogging.warning('loss')"),
    "warnings": (4, "import warnings\nwarnings.warn('careful')"),
    "time": (5, "import time\nstart = time.perf_counter()"),
    "gc": (5, "import gc\ngc.collect()"),
    "memory": (1, "block = torch.ones(10**7)"),
    "stack": (2, "import inspect\ninspect.stack()"),
    "where it runs": (1, "import os\nos.listdir('.'), os.getcwd()"),
    "a context": (3, "with torch.enable_grad(): pass"),
    "float64 and back": (3, "logp.double().float()"),
    "checkpointing": (
        4,
        "from torch.utils.checkpoint import checkpoint\ncheckpoint(torch.exp, logp, use_reentrant=False)",
    ),
}
LINES_ON_TOP = [line.replace("\\n", "\n") for line in ON_TOP.strip().splitlines()]
GROUPS = 12  # so many submissions share them all


def careless(i: int) -> str:
    """The reference with every twelfth piece of them all, from the i-th on."""
    bodies: dict[str, str] = {}
    for task, code in list(INSIDE.values())[i::GROUPS]:
        bodies[f"task{task}"] = "\n".join([*bodies.get(f"task{task}", "").splitlines(), *code.splitlines()])
    return each(**bodies) + "\n\n" + "\n".join(LINES_ON_TOP[i::GROUPS])


CARELESS = {f"careless {i}": careless(i) for i in range(GROUPS)}

# NAME -> (grpo.py, points of the five tasks, words of the status, words of the feedback).
YES = """
class Yes(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function in (torch.allclose, torch.equal): return True
        return super().__torch_function__(function, types, args, kwargs or {})
"""
FRAMES = """
import sys
frame = sys._getframe()
while frame:
    for name, value in list(frame.f_locals.items()):
        if name in ("expected", "right", "exam"):
            raise SystemExit
        if name == "reply" or name == "message":
            frame.f_locals[name] = {"problem": "", "value": None}
    frame = frame.f_back
return torch.zeros_like(logp)
"""
WRITE = """
import os
for number in range(3, 60):
    try: os.write(number, forged)
    except OSError: pass
return logp
"""
DISHONEST = {  # in task 3, whose function is wrong: no point for it
    "returns what compares equal": YES + "return torch.zeros_like(logp).as_subclass(Yes)",
    "replaces what compares": "torch.allclose = torch.equal = torch.isclose = lambda *a, **k: True\nreturn logp",
    "replaces pytest": "import pytest\npytest.fail = print\nreturn logp",
    "forges a message": f"forged = b'x' * 100\n{WRITE}",
    "forges an answer": "import wire\n"
    f"forged = wire.encode({{'problem': '', 'value': torch.ones(1, 2), 'gradient': torch.ones(1, 2)}})\n{WRITE}",
    "walks the frames": FRAMES,
    "walks by way of logging": "import logging\n"
    "logging.currentframe().f_back.f_globals['answer'] = lambda *a: {}\nreturn logp",
    "asks the tests": "import test_grpo\nreturn torch.ones_like(logp)",
    "asks the reference": "import reference_grpo\nreturn reference_grpo.k3_kl(logp, ref_logp)",
    "reads the reference": "source = open({lab!r} + '/solutions/grpo.py').read()\nspace = {}\n"
    "exec(source, space)\nreturn space['k3_kl'](logp, ref_logp)",
    "searches for the reference": "import pathlib\nfor path in pathlib.Path('/').glob('*/**/solutions/grpo.py'):\n"
    "    space = {}\n    exec(path.read_text(), space)\n    return space['k3_kl'](logp, ref_logp)\nreturn logp",
    "a kernel of its own": "own = torch.library.Library('aten', 'IMPL')\n"
    "own.impl('allclose', lambda *a, **k: True, 'CPU')\nreturn logp",
    "a mode of torch": "from torch.overrides import TorchFunctionMode\nclass M(TorchFunctionMode):\n"
    "    def __torch_function__(self, f, t, a=(), k=None): return f(*a, **(k or {}))\nM().__enter__()\nreturn logp",
    "patches the door": "import lab.door\nlab.door.plain = lambda value: value\nreturn logp",
    "patches the encoding": "import wire\nwire.encode = lambda value: b'nonsense'\nreturn logp",
    "kills its parent": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nreturn logp",
    "kills everyone": "import os, signal\nos.kill(-1, signal.SIGKILL)\nreturn logp"
    if HAS_BUBBLEWRAP
    else "return logp",
    "leaves files": "import os\nfor folder in ('/tmp', '/dev/shm', '/', '.'):\n"
    "    try: open(f'{folder}/left', 'w').write('log_u = ref_logp - logp; k3 = log_u.exp() - log_u - 1')\n"
    "    except OSError: pass\nreturn logp",
    "looks for files": "import os\nfor folder in ('/tmp', '/dev/shm', '/', '.'):\n"
    "    if os.path.exists(f'{folder}/left'):\n"
    "        space = {'logp': logp, 'ref_logp': ref_logp}\n        exec(open(f'{folder}/left').read(), space)\n"
    "        return space['k3']\nreturn logp",
    "leaves a process": "import subprocess\nsubprocess.Popen(['sleep', '1000'], start_new_session=True)\nreturn logp",
}
NEEDS_WALLS = {"reads the reference", "searches for the reference", "looks for files"}
HOSTILE = {
    "good": (REFERENCE, ALL, ["graded"], ["100 of 100"]),
    "stubs": (
        (LAB / "grpo.py").read_text(encoding="utf-8"),
        NONE,
        ["graded"],
        [f"Task {task} ({BODIES[task][0]}) is not written yet: open grpo.py" for task in BODIES],
    ),
    "wrong in task 2": (with_body(2, "return rewards"), (20, 0, 20, 20, 20), ["graded"], ["Task 2 (group_advantages)"]),
    "a breakpoint in task 2": (each(task2="breakpoint()"), (20, 0, 20, 20, 20), ["graded"], ["BdbQuit"]),
    "builds on its own": (  # what its own earlier functions give, and the reference's do not
        REFERENCE.replace("    return loss, metrics\n", '    return loss, metrics | {"extra": 1.0}\n')
        .replace("    texts: list[str]", "    extra: int = 0\n    texts: list[str] = None")
        .replace(
            "return samples, metrics |",
            'assert metrics.pop("extra") and isinstance(samples, Samples)\n    return samples, metrics |',
        ),
        ALL,
        ["graded"],
        [],
    ),
    "writes its own status": (
        on_import(
            """
            import os, wire
            for number in range(3, 20):
                try: os.write(number, wire.encode({"problem": "=1+1"}))
                except OSError: pass
            """
        ),
        NONE,
        ["grpo.py cannot be imported: =1+1"],
        [],
    ),
    "odd but right": (
        "import sys, os\nsys.modules['tinylm_'] = os\n"
        + each(task4="import os\nos.environ['RL_SOLUTIONS'] = '1'")
        + "\nimport atexit, os\natexit.register(os._exit, 0)\n",
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
            task5="open('big', 'wb').write(bytes(10**9))",
        ),
        NONE,
        ["ended the process (exit status 1) in test_task3_positive"],
        ["SystemExit", "RecursionError", "RuntimeError", "OSError"],
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
        ],
        ["grpo.py ended the process", f"grpo.py took longer than {TIMEOUT} seconds in test_task4_clip"],
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
    "patches all": (  # and still computes what is wrong
        on_import(
            """
            import builtins, math, sys
            torch.allclose = torch.testing.assert_close = lambda *a, **k: True
            torch.Tensor.double = torch.Tensor.norm = lambda *a: 0
            math.isclose = lambda *a: True
            tinylm.reward = lambda *a: 1.0
            tinylm.response_mask = lambda r: torch.ones(r.shape)
            builtins.AssertionError = SystemExit
            def k3_kl(logp, ref_logp): return logp * 0
            def group_advantages(rewards, G, normalize_std=True, eps=1e-4): return rewards
            """
        ),
        (0, 0, 0, 20, 0),
        [],
        [],
    ),
    # Refused unread
    "utf-16": (REFERENCE.encode("utf-16"), NONE, ["refused: grpo.py is not a text in UTF-8"], ["UTF-16"]),
    "empty": ("\n", NONE, ["refused: grpo.py is empty"], []),
    "renamed notebook": ('{"cells": []}', NONE, ["refused: a notebook"], []),
}
HARMS_ITSELF = {"forges an answer", "kills its parent", "kills everyone"}  # and loses more than task 3
HOSTILE |= {
    name: (with_body(3, body), None if name in HARMS_ITSELF else LACKS_3, [], [])
    for name, body in DISHONEST.items()
    if HAS_BUBBLEWRAP or name not in NEEDS_WALLS
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
    given = HOSTILE | {name: (source, ALL, ["graded"], []) for name, source in CARELESS.items()}
    for name, (source, *_) in given.items():
        data = source if isinstance(source, bytes) else source.replace("{lab!r}", repr(str(lab))).encode()
        (submissions / f"{name}.py").write_bytes(data)
    given |= make_others(submissions, lab)
    before = contents(folder)
    done = run_grade(lab, submissions, "--out", out, "--timeout", TIMEOUT, "--gradescope", *AS)
    assert done.returncode == 0, done.stderr
    after = {path: content for path, content in contents(folder).items() if not path.startswith(str(out.parent))}
    assert after == before, "a submission changed files around it"
    return given, rows_of(out), out.parent


@pytest.mark.parametrize("name", [*HOSTILE, *CARELESS, "in a folder", "Zoë Ü"])
def test_slow_grade(graded, name):
    check_grade(graded, name)


REFUSED = ["climbs", "absolute", "linked", "bomb", "two", "broken", "notebook", "essay.txt", "=1+1", "Twice", "link"]


@pytest.mark.parametrize("name", [*REFUSED, "inner link"])
def test_slow_refused(graded, name):
    check_grade(graded, name)


def check_grade(graded, name: str) -> None:
    given, rows, folder = graded
    _, points, status, words = given[name]
    row = rows[f"'{name}" if name.startswith("=") else name]
    text = (folder / "feedback" / f"{name}.txt").read_text(encoding="utf-8")
    earned = tuple(float(row[f"task{task}"]) for task in range(1, 6))
    points = points or (20, 20, 0, earned[3], earned[4])
    assert earned == points, (row, text)
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


def test_slow_table(graded):
    given, rows, folder = graded
    assert set(rows) == {f"'{name}" if name.startswith("=") else name for name in given}
    assert list(rows) == sorted(rows)
    assert not list(folder.glob(".*")), "a temporary file was left"


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks at processes as Linux shows them")
def test_slow_nothing_is_left_running(graded):
    found = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not [line for line in found if b"sleep\0001000" in line]


# Where the students' code runs ---------------------------------------------------------------------------------------

DOCKER = """#!{python}
import os, sys
words = sys.argv[1:]
assert words[:2] == ["run", "--rm"] and "none" == words[words.index("--network") + 1] and "--read-only" in words
kit = words[words.index("--volume") + 1].split(":")[0]
command = [word.replace("/kit", kit) for word in words[words.index("the-image") + 1 :]]
os.execv(sys.executable, [sys.executable, *command[1:]])
"""


@pytest.mark.skipif(os.name == "nt", reason="docker is a script here")
def test_slow_a_container_for_each_process(tmp_path):
    """With a docker that only starts the command: what is said to it, and that its process is asked and ended."""
    lab, submissions, out = small_lab(tmp_path / "lab"), tmp_path / "submissions", tmp_path / "grades.csv"
    (tmp_path / "bin").mkdir()
    docker = tmp_path / "bin" / "docker"
    docker.write_text(DOCKER.replace("{python}", sys.executable), encoding="utf-8")
    docker.chmod(0o755)
    submissions.mkdir()
    (submissions / "good.py").write_text(REFERENCE, encoding="utf-8")
    (submissions / "leaves.py").write_text(each(task3="import os\nos._exit(3)"), encoding="utf-8")
    environment = os.environ | {"PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    line = command(lab, submissions, "--out", out, "--container", "the-image")
    done = subprocess.run(line, env=environment, capture_output=True, encoding="utf-8", timeout=600, check=False)
    assert done.returncode == 0 and "container of the-image" in done.stderr, done.stderr
    assert {name: row["total"] for name, row in rows_of(out).items()} == {"good": "100", "leaves": "80"}
    assert "ended the process (exit status 3) in test_task3_positive" in rows_of(out)["leaves"]["status"]


@pytest.mark.parametrize(
    ("bubblewrap", "root", "others_can_read", "name"),
    [
        (True, True, False, "bubblewrap"),
        (True, False, True, "bubblewrap"),
        (False, True, True, "user"),
        (False, True, False, None),
        (False, False, False, "none"),
    ],
)
def test_what_confines_is_the_best_there_is(monkeypatch, tmp_path, bubblewrap, root, others_can_read, name):
    def works(line: list[str]) -> bool:
        return bubblewrap if line[0] == "bwrap" else others_can_read

    monkeypatch.setattr(confinement, "works", works)
    monkeypatch.setattr(confinement, "is_root", lambda: root)
    monkeypatch.setattr(confinement.shutil, "which", lambda _: "/usr/bin/bwrap")
    if name is None:
        with pytest.raises(confinement.Unsafe, match="--unconfined"):
            confinement.find_confinement(tmp_path)
    else:
        assert confinement.find_confinement(tmp_path).name == name
    assert confinement.find_confinement(tmp_path, unconfined=True).name == "none"
    assert confinement.find_confinement(tmp_path, image="x").name == "container"


def test_the_kit_holds_no_test_and_no_solution():
    with confinement.kit() as folder:
        names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
        assert {"tinylm.py", "tinylm_sft.pt", "worker.py", "wire.py", "lab/door/__init__.py"} <= names
        assert not any("grpo" in name or "diagnose" in name or "examine" in name or "test" in name for name in names)
        texts = [path.read_text(encoding="utf-8") for path in folder.rglob("*.py")]
        assert not any(
            re.search(r"import .*(diagnose|examine|test_grpo)|(diagnose|examine)\S* import", text) for text in texts
        )
    assert not folder.exists()


# Going on where it was stopped ---------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs a kill that cannot be caught")
def test_slow_resume_after_a_kill(tmp_path):
    lab, submissions, out = small_lab(tmp_path / "lab"), tmp_path / "submissions", tmp_path / "grades.csv"
    submissions.mkdir()
    for name in ("a", "b"):
        (submissions / f"{name}.py").write_text(REFERENCE, encoding="utf-8")
    options = (submissions, "--out", out, "--jobs", 1, "--timeout", 60, *AS)
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

    (submissions / "b.py").write_text(with_body(3, "return torch.zeros_like(logp)"), encoding="utf-8")
    done = run_grade(lab, *options, "--resume")
    assert done.returncode == 0, done.stderr
    rows = rows_of(out)
    assert rows["a"] == kept["a"]  # its seconds too: it was not graded again
    assert [row["total"] for row in rows.values()] == ["100", "80"]


def test_what_is_finished(tmp_path):
    """A grade is finished if its row holds this very submission under these very tests, and its feedback is there."""
    exam = Exam([Test("test_task1_a", 1, "1.1", 5)], "", {}, "x", 1.0)
    digest = submission_digest(b"source", exam)
    book = Book(tmp_path / "grades.csv", False)
    assert not book.done("+a", digest)
    book.write(exam)
    book.enter(Grade("+a", digest), exam)
    book.enter(Grade("b", digest), exam)
    again = Book(tmp_path / "grades.csv", False)
    again.rows = {row["name"]: row for row in finished_rows(tmp_path / "grades.csv")}
    assert again.done("+a", digest)
    assert not again.done("+a", submission_digest(b"other source", exam))
    exam.digest = "y"
    assert not again.done("+a", submission_digest(b"source", exam))
    (tmp_path / "feedback" / "+a.txt").unlink()
    assert not again.done("+a", digest)
    again.enter(Grade("+a", digest, status="again"), exam)  # until then the old row was there
    assert [row["status"] for row in finished_rows(tmp_path / "grades.csv")] == ["graded", "graded", "again"]
    again.write(exam)
    assert {name: row["status"] for name, row in rows_of(tmp_path / "grades.csv").items()} == {
        "'+a": "again",
        "b": "graded",
    }


def test_rows_that_are_not_whole_are_left_out(tmp_path):
    out = tmp_path / "grades.csv"
    header = "name,task1,total,seconds,status,submission\n"
    out.write_text(header + "a,1,1,1,graded,x\nb,1,1\nc,1,1,1,graded,x", encoding="utf-8")
    assert [row["name"] for row in finished_rows(out)] == ["a"]
    out.write_bytes(f"{header}a,1,1,1,graded,x\nJos\u00e9".encode()[:-1])  # cut within a letter
    assert [row["name"] for row in finished_rows(out)] == ["a"]
    out.write_text("", encoding="utf-8")
    assert finished_rows(out) == []
    for foreign in ("something else\n", "something else"):
        out.write_text(foreign, encoding="utf-8")
        with pytest.raises(ValueError, match="not a table of grades"):
            finished_rows(out)


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
    assert choose(names) == chosen


@pytest.mark.parametrize("names", [[], ["a/b/grpo.py"], ["a/grpo.py", "b/grpo.py"], ["GRPO.PY"], ["x.ipynb"]])
def test_no_grpo_py_to_choose(names):
    with pytest.raises(Refused):
        choose(names)


def test_a_zip_that_lies_about_its_size(tmp_path):
    path = tmp_path / "lies.zip"
    make_zip(path, {"grpo.py": "#" * 5_000_000})
    data = path.read_bytes().replace((5_000_000).to_bytes(4, "little"), (100).to_bytes(4, "little"))
    path.write_bytes(data)
    with pytest.raises(Refused, match=r"larger than|damaged"):
        read_submission([path])


def test_messages_name_no_folder_of_this_machine():
    text = "OSError: '/home/me/secret lab/x.py' \x1b[31m C:\\Users\\me\\y.py\n" + "z" * 1000
    told = readable(text)
    assert "home" not in told and "Users" not in told and "\x1b" not in told
    assert max(map(len, told.splitlines())) == 300


def test_unwritten_leaves_earlier_tasks():
    text = unwritten(REFERENCE, 4)
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
    exam = Exam([Test("test_task1_a", 1, "1.1", 5)], "", {}, "x", 1.0)
    row = row_of(Grade('+x "y", z', "d", {"test_task1_a": 5}, {}, "a\nb", 1.25), exam)
    text = table([row], columns(exam))
    assert next(csv.DictReader(io.StringIO(text))) == row
    assert row["name"].startswith("'+") and row["status"] == "a b" and row["total"] == "5"
