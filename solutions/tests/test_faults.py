"""The lab where things are not as they should be: odd paths, no home, no display, full and read-only disks, clocks."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import finish, names, start
from manifest import STUDENT, copy_lab

import tinylm
from lab.history import read_csv

TINY = ["--iters", "2", "--prompts", "2", "--G", "2", "--eval-every", "1", "--solutions"]
FILES = {"grpo_tinylm.png", "grpo_tinylm.csv", "tinylm_grpo.pt"}


@pytest.fixture
def lab(tmp_path, sft) -> Path:
    """A copy of the lab whose path is long, with spaces and letters of several alphabets."""
    folder = tmp_path / "Üben & Spaß, très bien (été)" / "数学 и ещё" / ("x" * 80) / "lab 15"
    return copy_lab([*STUDENT, "solutions/grpo.py", tinylm.SFT_PATH.name], folder)


def run_program(lab: Path, program: str, *flags: str, cwd: Path | None = None, **changes: str | None):
    """Run a program of the copy; `changes` go into its environment, None takes a variable out."""
    return finish(start(cwd or lab, lab / program, *flags, **changes))


def test_a_path_that_is_long_and_not_ascii(lab):
    done = run_program(lab, "run.py", *TINY, PYTHONUTF8=None, LC_ALL="C")
    assert (done.returncode, done.stderr) == (0, "")
    assert names(lab) >= FILES
    again = run_program(lab, "run.py", "--redraw", "grpo_tinylm.csv", "--out", "été.png")
    assert (again.returncode, again.stderr) == (0, "") and (lab / "été.png").exists()
    tests = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--solutions", "-k", "task2", "-p", "no:cacheprovider"],
        cwd=lab,
        capture_output=True,
        check=False,
    )
    assert tests.returncode == 0, tests.stdout


def test_no_home_and_no_display(lab, tmp_path):
    gone = str(tmp_path / "nowhere")
    done = run_program(
        lab, "run.py", *TINY, HOME=None, USER=None, XDG_CACHE_HOME=gone, DISPLAY=None, MPLBACKEND="TkAgg"
    )
    assert done.returncode == 0 and names(lab) >= FILES, done.stderr


@pytest.mark.parametrize("year", [1975, 2100])
def test_clocks_that_were_set_back_or_forward(lab, year):
    seconds = (year - 1970) * 365.25 * 86400
    first = run_program(lab, "run.py", *TINY)
    for path in lab.rglob("*"):
        os.utime(path, (seconds, seconds))
    before = (lab / "grpo_tinylm.csv").read_bytes()
    again = run_program(lab, "run.py", *TINY)
    assert (first.returncode, again.returncode, again.stderr) == (0, 0, "")
    assert (lab / "grpo_tinylm.csv").read_bytes() == before


@pytest.fixture
def mounted(tmp_path):
    """A function that mounts a file system of its own with the options given. Only root may: others skip the test."""
    folder = tmp_path / "small"
    folder.mkdir()

    def mount(*options: str) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", ",".join(options), "none", folder]
        if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("file systems cannot be mounted here")
        return folder

    yield mount
    subprocess.run(["umount", folder], capture_output=True, check=False)


def test_a_full_disk(lab, mounted):
    folder = mounted("size=64k")  # the CSV fits, the checkpoint does not
    done = run_program(lab, "run.py", *TINY, cwd=folder)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done
    assert "could not save" in done.stderr and "No space left" in done.stderr
    assert names(folder) <= {"grpo_tinylm.csv"}, "a file was left behind that is not whole"
    assert len(read_csv(folder / "grpo_tinylm.csv").history) == 3


def test_a_folder_that_is_read_only(lab, mounted):
    folder = mounted("size=4m", "ro")
    for program, flags in (("run.py", TINY), ("passk.py", [])):
        done = run_program(lab, program, *flags, cwd=folder)
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done
        assert "cannot write to the folder" in done.stderr and "Read-only" in done.stderr
    assert names(folder) == set()
