"""Programs that are started in copies of the lab, watched, and ended for sure."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from manifest import SFT, STUDENT, copy_lab, solutions_files

TIMEOUT = 900  # seconds, for a program that is not killed


def copy_whole_lab(folder: Path) -> Path:
    """A copy of the lab's own files at `folder`, with the starting policy. Returns `folder`."""
    from tinylm import load_or_train_sft  # noqa: PLC0415  it imports torch: only where it is needed

    load_or_train_sft()
    return copy_lab([*STUDENT, *solutions_files(), SFT], folder)


def environment(temporary: Path, **more: str) -> dict[str, str]:
    """This process's, without what would change the lab's behaviour; what is temporary goes below `temporary`."""
    ours = ("PYTEST_ADDOPTS", "RL_SOLUTIONS", "LAB_SEED", "PYTHONWARNINGS")
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    return kept | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(temporary)) | more


def end(process: subprocess.Popen) -> None:
    """SIGKILL, to the process and to what it has started: as when the power fails. (On Windows: to it alone.)"""
    if process.returncode is None:  # not yet waited for, so that its id cannot belong to another
        if hasattr(os, "killpg"):
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.wait()


@contextmanager
def running(command: list, folder: Path, variables: dict[str, str]) -> Iterator[tuple[subprocess.Popen, IO[bytes]]]:
    """(the process, the file with all it prints). It is ended with the block at the latest."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [*map(str, command)],
            cwd=folder,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a group of its own, for `end`
        )
        try:
            yield process, output
        finally:
            end(process)


def printed(output: IO[bytes]) -> str:
    output.seek(0)
    return output.read().decode("utf-8", "replace").strip()


@contextmanager
def busy_core():
    """Another process, which computes without end while the block runs."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()
