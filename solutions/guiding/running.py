"""The guide, run: the environment that it needs, every block as a notebook, and the tests of what it says of TRL."""
# ruff: noqa: PLC0415  what `guide.py --install` installs can only be imported afterwards

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from manifest import LAB

from guiding.document import GUIDE, notebook, parts, requirements
from guiding.tiny_model import put_tiny_model

SHORT = "4"  # LAB_STEPS unless it is set: long enough for every branch, short enough for CI
CHECKS = ("test_trl.py", "test_train_qwen.py")  # in tests/; elsewhere, where there is no TRL, they are skipped


def needed() -> list[str]:
    """What `--install` installs: what the guide's install line names, and what runs `CHECKS`."""
    return [*requirements(), "pytest"]


def unmet() -> list[str]:
    """Of what is needed, what this environment does not have, each with what is there instead."""
    problems = []
    for requirement in needed():
        name, _, pinned = requirement.partition("==")
        try:
            here = importlib.metadata.version(name).split("+")[0]  # 2.13.0+cpu is torch 2.13.0
        except importlib.metadata.PackageNotFoundError:
            here = "missing"
        if here == "missing" or (pinned and here != pinned):
            problems.append(f"{requirement} (here: {here})")
    return problems


def run_blocks(out: Path | None) -> int:
    """Execute every block. Returns 0, or 1 if one raised or was not run. Keeps notebook and pictures in `out`."""
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    cells = notebook()
    environment = {"RL_SOLUTIONS": "1", "HF_HUB_OFFLINE": "1", "LAB_STEPS": SHORT, "MPLBACKEND": "agg"} | os.environ
    environment["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"  # a debugger's warning about frozen modules
    titles = parts(cells)
    seconds = dict.fromkeys(titles, 0.0)
    started, reached = {}, []

    def start(cell, cell_index):
        reached.append(cell_index)
        started[cell_index] = time.perf_counter()

    def end(cell, cell_index, execute_reply=None):
        seconds[titles[cell_index]] += time.perf_counter() - started.pop(cell_index)

    with tempfile.TemporaryDirectory(prefix="guide-") as name:
        work = Path(name)
        (work / "solutions").mkdir()
        for file in ("tinylm.py", "grpo.py", "solutions/grpo.py", "tinylm_sft.pt"):
            if (LAB / file).exists():
                shutil.copy(LAB / file, work / file)
        put_tiny_model(cells, work / "tiny_qwen")
        client = NotebookClient(
            cells,
            timeout=3600,  # of a block; at LAB_STEPS=200 the slowest takes a few minutes
            kernel_name="python3",
            extra_arguments=["--log-level=ERROR"],
            resources={"metadata": {"path": str(work)}},
            on_cell_start=start,
            on_cell_executed=end,
        )
        status, stopped_at = 0, len(cells.cells)
        try:
            client.execute(env=environment)
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            status, stopped_at = 1, reached[-1] if reached else 0
            if stopped_at in started:  # a time-out: it never ended
                end(None, stopped_at)
            print(f"{GUIDE.name}, part {titles[stopped_at]!r}: {error}", file=sys.stderr)
        if out:
            out.mkdir(parents=True, exist_ok=True)
            nbformat.write(cells, out / f"{GUIDE.stem}.ipynb")
            for picture in work.glob("*.png"):
                shutil.copy(picture, out / picture.name)
    code = [i for i, cell in enumerate(cells.cells) if cell.cell_type == "code"]
    ran = sum(i < stopped_at and cells.cells[i].execution_count is not None for i in code)
    for title, spent in seconds.items():
        failed = "  FAILED" if status and title == titles[stopped_at] else ""
        print(f"{spent:7.1f} s  {title}{failed}")
    print(f"{ran} of {len(code)} blocks of {GUIDE.name} ran, LAB_STEPS={environment['LAB_STEPS']}")
    return status or int(ran != len(code))


def run_checks() -> int:
    """Run the tests that need this environment. Returns pytest's exit status."""
    tests = [str(LAB / "solutions" / "tests" / name) for name in CHECKS]
    # Without the two conftest.py, which need what only the lab's own tests need.
    pytest = [sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", "--durations=3"]
    return subprocess.run([*pytest, *tests], check=False, cwd=LAB).returncode
