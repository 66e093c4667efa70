"""release.py: what is in the archives, that they repeat, and that Gradescope's script runs as Gradescope runs it."""

import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import nbformat
import pytest
from helpers import HAS_BUBBLEWRAP
from manifest import AUTOGRADER, STUDENT, copy_lab

import tinylm

LAB = Path(__file__).resolve().parents[2]

QUICK_TESTS = """
import pytest
import torch
import tinylm


@pytest.mark.points(30)
def test_task1_rows(examiner, sft):
    got = examiner.sample(sft, tinylm.encode(["12+34="]), 2)
    examiner.compare(1, "samples.mask", got.mask, tinylm.response_mask(got.responses))


@pytest.mark.points(30)
def test_task2_values(examiner):
    got = examiner.advantages(torch.tensor([1.0, 0, 0, 1]), 4)
    examiner.compare(2, "the advantage", got, torch.tensor([1.0, -1, -1, 1]), tolerance=1e-3)


@pytest.mark.points(40)
def test_task3_values(examiner):
    got, _ = examiner.k3(torch.zeros(1, 1), torch.ones(1, 1), torch.ones(1, 1))
    examiner.compare(3, "k3", got, torch.tensor([[0.71828]]))
"""
NOTEBOOK = "colab_grpo_trl.ipynb"
NEEDS_BASH = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A copy of the lab with two quick tests."""
    tinylm.load_or_train_sft()
    folder = tmp_path_factory.mktemp("release") / "lab"
    copy_lab([*STUDENT, *AUTOGRADER, "solutions/release.py", "solutions/guiding/document.py", "tinylm_sft.pt"], folder)
    (folder / "solutions" / "tests").mkdir()
    (folder / "solutions" / "tests" / "test_x.py").touch()
    (folder / "solutions" / "x.pyc").touch()
    (folder / "test_grpo.py").write_text(QUICK_TESTS, encoding="utf-8")
    return folder


def run_release(lab: Path, *args) -> subprocess.CompletedProcess:
    command = [sys.executable, str(lab / "solutions" / "release.py"), *map(str, args)]
    return subprocess.run(command, capture_output=True, encoding="utf-8", cwd=lab.parent, timeout=300, check=False)


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def check_notebook(content: bytes) -> None:
    """It opens as a notebook, and its code cells are the guide's blocks, in order, with the magic commands."""
    cells = nbformat.reads(content.decode(), as_version=4)
    nbformat.validate(cells)
    text = (LAB / NOTEBOOK).with_suffix(".md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python[^\n]*\n(.*?)\n?^```$", text, flags=re.MULTILINE | re.DOTALL)
    assert [cell.source for cell in cells.cells if cell.cell_type == "code"] == blocks
    assert cells.metadata.kernelspec.language == "python"


def test_students_archive(lab):
    out = lab.parent / "lab15.zip"
    done = run_release(lab)
    assert done.returncode == 0, done.stderr
    first = digest(out)
    with zipfile.ZipFile(out) as archive:
        assert archive.testzip() is None
        assert archive.namelist() == [f"lab15/{name}" for name in sorted([*STUDENT, NOTEBOOK])]
        check_notebook(archive.read(f"lab15/{NOTEBOOK}"))
        for name in ("grpo.py", *[name for name in STUDENT if name.endswith(".png")]):
            assert archive.read(f"lab15/{name}") == (LAB / name).read_bytes()

    for path in lab.rglob("*.py"):
        os.utime(path, (10**9, 10**9))  # another checkout has other times
    done = run_release(lab)
    assert done.returncode == 0 and "(replaced)" in done.stdout
    assert digest(out) == first

    done = run_release(lab, "--with-solutions")
    assert done.returncode == 0 and "the solutions among them" in done.stdout
    with zipfile.ZipFile(out) as archive:
        extra = set(archive.namelist()) - {f"lab15/{name}" for name in [*STUDENT, NOTEBOOK]}
    assert {"lab15/solutions/grpo.py", "lab15/solutions/tests/test_x.py"} < extra
    assert not any(name.endswith((".pyc", ".pt")) for name in extra)


@pytest.mark.parametrize(
    ("name", "old", "new", "told"),
    [
        ("grpo.py", "G: int = 8", "G: int = 9", "differ outside of the five bodies: grpo.py, line"),
        ("grpo.py", "raise NotImplementedError", "return NotImplementedError", "task 1 is not left unwritten"),
        (
            "solutions/grpo.py",
            "log_u.exp() - log_u - 1",
            "log_u",
            "the reference does not pass: Task 3 (k3_kl)",
        ),
        ("README.md", None, None, "missing in the lab: README.md"),
    ],
)
def test_nothing_is_written_if_something_is_wrong(lab, tmp_path, name, old, new, told):
    copy = tmp_path / "lab"
    shutil.copytree(lab, copy)
    text = (copy / name).read_text(encoding="utf-8")
    if old is None:
        (copy / name).unlink()
    else:
        assert old in text
        (copy / name).write_text(text.replace(old, new, 1), encoding="utf-8")
    done = run_release(copy)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and told in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["lab"]


def test_without_jupytext_it_says_what_to_install(lab, tmp_path):
    (tmp_path / "jupytext.py").write_text("raise ModuleNotFoundError(name='jupytext')", encoding="utf-8")
    command = [sys.executable, str(lab / "solutions" / "release.py")]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    pipes = {"capture_output": True, "encoding": "utf-8"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, timeout=300, check=False, **pipes)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "solutions/requirements.txt" in done.stderr
    assert not (tmp_path / "lab15.zip").exists()


@pytest.mark.parametrize("foreign", ["text", "zip"])
def test_a_file_that_is_not_ours_is_kept(lab, tmp_path, foreign):
    out = tmp_path / "lab15.zip"
    if foreign == "zip":
        with zipfile.ZipFile(out, "w") as archive:
            archive.writestr("thesis.txt", "years of work")
    else:
        out.write_text("years of work", encoding="utf-8")
    before = out.read_bytes()
    done = run_release(lab, "--out", out)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "not by this command" in done.stderr
    assert out.read_bytes() == before


def test_bad_flags_are_one_line(lab, tmp_path):
    for args in (
        ["--out", tmp_path / "x.tar"],
        ["--out", tmp_path / "no" / "x.zip"],
        ["--gradescope", "--with-solutions"],
    ):
        done = run_release(lab, *args)
        assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


# Gradescope ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def autograder(lab):
    """/autograder as Gradescope lays it out: source/ unpacked from the zip, and run_autograder copied from it."""
    out = lab.parent / "autograder.zip"
    done = run_release(lab, "--gradescope")
    assert done.returncode == 0, done.stderr
    root = lab.parent / "autograder"
    for name in ("source", "submission", "results"):
        (root / name).mkdir(parents=True)
    with zipfile.ZipFile(out) as archive:
        for info in archive.infolist():
            archive.extract(info, root / "source")
            (root / "source" / info.filename).chmod(info.external_attr >> 16 & 0o777)
    shutil.copy(root / "source" / "run_autograder", root)
    shutil.copyfile(LAB / "tinylm_sft.pt", root / "source" / "tinylm_sft.pt")  # else it is trained: seconds
    return root


def run_autograder(root: Path, python: str = sys.executable) -> dict:
    flags = "" if HAS_BUBBLEWRAP else "--unconfined"
    environment = os.environ | {"AUTOGRADER_ROOT": str(root), "AUTOGRADER_PYTHON": python, "AUTOGRADER_FLAGS": flags}
    subprocess.run([root / "run_autograder"], cwd=root, env=environment, capture_output=True, timeout=300, check=False)
    results = json.loads((root / "results" / "results.json").read_text(encoding="utf-8"))
    for test in results["tests"]:
        assert 0 <= test["score"] <= test["max_score"] and test["status"] in ("passed", "failed")
        assert isinstance(test["number"], str) and isinstance(test["output"], str)
    assert sum(test["max_score"] for test in results["tests"]) == 100
    return results


def submit(root: Path, files: dict[str, str]) -> None:
    shutil.rmtree(root / "submission")
    (root / "submission").mkdir()
    for name, text in files.items():
        path = root / "submission" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


@NEEDS_BASH
def test_scripts_are_in_order(autograder):
    for name in ("setup.sh", "run_autograder"):
        path = autograder / "source" / name
        assert path.read_bytes().startswith(b"#!/usr/bin/env bash\n") and b"\r" not in path.read_bytes()
        assert path.stat().st_mode & stat.S_IXUSR
        subprocess.run(["bash", "-n", path], check=True)
    text = (autograder / "source" / "setup.sh").read_text(encoding="utf-8")
    assert "/autograder/source/requirements.txt" in text and "://" not in text


@NEEDS_BASH
def test_gradescope_grades_a_right_and_a_partly_wrong_submission(autograder):
    right = (LAB / "solutions" / "grpo.py").read_text(encoding="utf-8")
    submit(autograder, {"grpo.py": right})
    results = run_autograder(autograder)
    assert [(test["number"], test["score"], test["status"]) for test in results["tests"]] == [
        ("1.1", 30, "passed"),
        ("2.1", 30, "passed"),
        ("3.1", 40, "passed"),
    ]
    assert results["visibility"] == "visible" and results["stdout_visibility"] == "hidden"
    assert isinstance(results["execution_time"], int)

    submit(
        autograder, {"lab15/grpo.py": right.replace("log_u.exp() - log_u - 1", "log_u"), "lab15/conftest.py": "exit()"}
    )
    *passed, failed = run_autograder(autograder)["tests"]
    assert (
        [test["score"] for test in passed] == [30, 30]
        and failed["score"] == 0
        and failed["output"].startswith("Task 3 (k3_kl): ")
    )


@NEEDS_BASH
@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({}, "there is no grpo.py"),
        ({"grpo.py": "import os\nos._exit(0)"}, "ended the process"),
    ],
)
def test_gradescope_gets_results_for_a_broken_submission(autograder, files, told):
    submit(autograder, files)
    results = run_autograder(autograder)
    assert sum(test["score"] for test in results["tests"]) == 0
    assert told in results["output"] and all(told in test["output"] for test in results["tests"])


@NEEDS_BASH
def test_gradescope_gets_results_even_without_a_grader(autograder, tmp_path):
    results = run_autograder(autograder, python=str(tmp_path / "no python"))
    assert [test["score"] for test in results["tests"]] == [0] and "tell your instructor" in results["tests"][0][
        "output"
    ]

    reference = autograder / "source" / "solutions" / "grpo.py"
    text = reference.read_text(encoding="utf-8")
    submit(autograder, {"grpo.py": text})
    try:
        reference.write_text(text.replace("log_u.exp() - log_u - 1", "log_u"), encoding="utf-8")
        results = run_autograder(autograder)
    finally:
        reference.write_text(text, encoding="utf-8")
    assert [test["score"] for test in results["tests"]] == [0] and "not in order" in results["tests"][0]["output"]
