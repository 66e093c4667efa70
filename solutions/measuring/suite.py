"""The graded tests again and again, under other circumstances.

The seed is that of the tests' inputs, of Python's hashes, and of the global random generators; warnings are errors. The
circumstances change from run to run.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from manifest import SFT

from measuring.processes import TIMEOUT, busy_core, copy_whole_lab, environment, printed, running

# The global generators too: no test may depend on them. (The processes of pytest-xdist seed theirs as they like.)
SEEDED_PYTEST = """
import random, sys
import numpy, pytest, torch
seed = int(sys.argv.pop(1))
random.seed(seed), numpy.random.seed(seed), torch.manual_seed(seed)
sys.exit(pytest.main(sys.argv[1:]))
"""


@dataclass
class Circumstance:
    """How the suite is run."""

    name: str
    flags: list[str] = field(default_factory=list)  # of pytest; {seed} stands for the seed
    plugin: str = ""  # the module it needs
    busy: bool = False  # beside a process per core that computes without end
    elsewhere: bool = False  # from another folder, with the path to the tests
    suites: int = 1  # at the same moment; several of them find no starting policy there


def circumstances() -> list[Circumstance]:
    return [
        Circumstance("as it is"),
        Circumstance("in random order", ["-p", "randomly", "--randomly-seed={seed}"], plugin="pytest_randomly"),
        Circumstance("in parallel", ["-p", "xdist", "-n", "2"], plugin="xdist"),
        Circumstance("on busy cores", busy=True),
        Circumstance("from another folder", elsewhere=True),
        Circumstance("two at once, no policy yet", suites=2),
    ]


def run_suite(lab: Path, seed: int, circumstance: Circumstance) -> str:
    """Run the reference's tests in the copy `lab`. Returns what went wrong, or ""."""
    flags = ["-q", "-p", "no:cacheprovider", "-W", "error", "--solutions"]
    flags += [flag.format(seed=seed) for flag in circumstance.flags]
    seeds = {"LAB_SEED": str(seed), "PYTHONHASHSEED": str(seed)}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        if circumstance.suites > 1:
            lab = shutil.copytree(lab, folder / "lab", ignore=shutil.ignore_patterns(SFT, "__pycache__"))
        for _ in range((os.cpu_count() or 1) * circumstance.busy):
            stack.enter_context(busy_core())
        command = [sys.executable, "-c", SEEDED_PYTEST, seed, *flags]
        command += [lab / "test_grpo.py"] if circumstance.elsewhere else []
        # Of this machine's plugins only those named in the flags.
        variables = environment(folder, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1", **seeds)
        where = folder if circumstance.elsewhere else lab
        suites = [stack.enter_context(running(command, where, variables)) for _ in range(circumstance.suites)]
        problems = []
        for process, output in suites:
            try:
                if process.wait(TIMEOUT):
                    problems.append(f"exit status {process.returncode}\n{printed(output)}")
            except subprocess.TimeoutExpired:
                problems.append(f"not done after {TIMEOUT} seconds\n{printed(output)}")
        files = {path.name for path in lab.glob(f"*{SFT}")}
        if circumstance.suites > 1 and not problems and files != {SFT}:
            problems.append(f"the starting policy is not there, or more than that: {sorted(files)}")
    return "\n".join(problems)


def stress_suite(count: int, first_seed: int) -> bool:
    """Run it `count` times; a line for each and a table. Returns whether all passed."""
    all_of_them = circumstances()
    skipped = [c for c in all_of_them if c.plugin and importlib.util.find_spec(c.plugin) is None]
    tried = [c for c in all_of_them if c not in skipped]
    times: dict[str, list[float]] = {c.name: [] for c in tried}
    failed = dict.fromkeys(times, 0)
    print(f"{'seed':>6}  {'circumstance':28}{'seconds':>8}")
    with tempfile.TemporaryDirectory() as folder:
        lab = copy_whole_lab(Path(folder) / "lab")
        for i in range(count):
            seed, circumstance = first_seed + i, tried[i % len(tried)]
            started = time.monotonic()
            problem = run_suite(lab, seed, circumstance)
            seconds = time.monotonic() - started
            times[circumstance.name].append(seconds)
            failed[circumstance.name] += bool(problem)
            print(f"{seed:6}  {circumstance.name:28}{seconds:8.1f}  {'FAILED' if problem else 'passed'}", flush=True)
            if problem:
                print("\n".join(f"        {line}" for line in problem.splitlines()), flush=True)
    print(f"\n{'circumstance':28}{'runs':>8}{'failed':>8}{'median seconds':>16}")
    for name, seconds in times.items():
        print(f"{name:28}{len(seconds):8}{failed[name]:8}{f'{median(seconds):.1f}' if seconds else '':>16}")
    for circumstance in skipped:
        print(f"{circumstance.name:28} skipped: pytest-{circumstance.plugin.removeprefix('pytest_')} is not installed")
    total = sum(failed.values())
    print(f"{'all':28}{count:8}{total:8}")
    return total == 0
