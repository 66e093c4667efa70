"""What several of these tests do: start the lab's commands, as programs or in this process, and look at the outcome."""

import csv
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch
from grading.confinement import works
from manifest import LAB

import passk
import run
import tinylm
from lab.flags import passk_parser, run_parser
from lab.start import REFERENCE, load_module

HAS_BUBBLEWRAP = works(["bwrap", "--ro-bind", "/", "/", "--unshare-all", "true"])
TINY = ["--iters", "3", "--prompts", "2", "--G", "2", "--eval-every", "1"]  # a run that takes no time
PARSERS = {run: run_parser, passk: passk_parser}


def start(folder: Path, *arguments: str | Path, **changes: str | None) -> subprocess.Popen:
    """Python with `arguments`, in `folder`; `changes` go into its environment, None takes a variable out."""
    environment = {"RL_SOLUTIONS": None} | changes
    environment = {name: value for name, value in (os.environ | environment).items() if value is not None}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "encoding": "utf-8"}
    return subprocess.Popen([sys.executable, *map(str, arguments)], cwd=folder, env=environment, **pipes)


@contextmanager
def running(folder: Path, *arguments: str | Path, **changes: str | None) -> Iterator[subprocess.Popen]:
    """The same for a program that may go on for ever: it is ended with the block at the latest."""
    process = start(folder, *arguments, **changes)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


def finish(process: subprocess.Popen) -> subprocess.CompletedProcess:
    stdout, stderr = process.communicate(timeout=600)
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def call_main(module: ModuleType) -> int:
    """The exit status of a command's `main` in this process, with the flags in sys.argv."""
    if module not in PARSERS:
        return module.main() or 0
    parser = PARSERS[module]()
    return module.main(parser, parser.parse_args())


def call_command(name: str, *flags: str) -> int:
    """The exit status of `python solutions/NAME FLAGS` in this process: what it takes from its rooms may be patched."""
    with mock.patch.object(sys, "argv", [name, *flags]), mock.patch.object(sys, "path", list(sys.path)):
        try:
            runpy.run_path(str(LAB / "solutions" / name), run_name="__main__")
        except SystemExit as stop:
            return stop.code or 0
    return 0


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def assert_one_line(result: subprocess.CompletedProcess, *words: str) -> None:
    """Exit status 2 and a single line on stderr that holds the words."""
    assert result.returncode == 2, result
    assert result.stderr.count("\n") == 1 and result.stderr.endswith("\n"), result.stderr
    for word in words:
        assert word in result.stderr


def rows_of(path: Path) -> tuple[str, list[dict[str, str]]]:
    """(the settings line, the rows)."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return lines[0], list(csv.DictReader(line for line in lines if not line.startswith("#")))


def differ(a: Path, b: Path) -> bool:
    """Whether two checkpoints differ in any bit of any weight."""
    pairs = zip(tinylm.load_checkpoint(a).parameters(), tinylm.load_checkpoint(b).parameters(), strict=True)
    return not all(torch.equal(left, right) for left, right in pairs)


def reference_module(path: Path = REFERENCE) -> ModuleType:
    """A module of its own, of the reference or of another file."""
    return load_module(path, f"grpo_of_{path.parent.name}")
