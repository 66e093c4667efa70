"""For the tests that are not grades: the instructor's modules on the path, the reference first; runs to look at."""

import subprocess
import sys
from pathlib import Path

import pytest

LAB = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(LAB / "solutions"), str(LAB)]

from helpers import TINY, call_main, finish, start
from manifest import STUDENT, copy_lab

import run
import tinylm

sys.path.insert(0, str(LAB / "solutions"))  # `import grpo` is the reference: run.py has put the student's first


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: trains for several seconds; CI runs it, -m 'not slow' leaves it out")


@pytest.fixture(scope="session")
def sft():
    """The starting policy, trained here if need be. No test changes it."""
    return tinylm.load_or_train_sft()


@pytest.fixture(scope="session")
def no_torch(tmp_path_factory) -> str:
    """A folder for PYTHONPATH in which importing torch ends the program: nothing before that may take seconds."""
    folder = tmp_path_factory.mktemp("no_torch")
    (folder / "torch.py").write_text("raise SystemExit('torch was imported')\n", encoding="utf-8")
    return str(folder)


@pytest.fixture(scope="session")
def runs(tmp_path_factory, sft):
    """Two programs side by side, {name: (folder, what came out)}: "again" repeats "first" under other file names."""
    started = {}
    for name, flags, extra in (
        ("first", [*TINY, "--solutions"], {}),
        ("again", [*TINY, "--out", "plot.svg"], {"RL_SOLUTIONS": "1"}),
    ):
        folder = tmp_path_factory.mktemp(name)
        started[name] = folder, start(folder, LAB / "run.py", *flags, **extra)
    return {name: (folder, finish(process)) for name, (folder, process) in started.items()}


@pytest.fixture
def call(reference, tmp_path, monkeypatch, capsys):
    """run.main in this process, in the empty folder `tmp_path`, on the reference, which a test may spoil.

    It draws no picture, which would take longer than all the rest.
    """
    monkeypatch.setattr(run, "plot", lambda runs, path, mark="": path.write_bytes(b"picture"))
    monkeypatch.setattr(run, "load_grpo", lambda path: reference)
    monkeypatch.delenv("RL_SOLUTIONS", raising=False)
    monkeypatch.chdir(tmp_path)

    def main(*flags: str) -> subprocess.CompletedProcess:
        monkeypatch.setattr(sys, "argv", ["run.py", *flags])
        try:
            status = call_main(run)
        except SystemExit as stop:
            status = stop.code
        return subprocess.CompletedProcess(flags, status, *capsys.readouterr())

    return main


@pytest.fixture
def own_lab(tmp_path, sft) -> Path:
    """A copy of the lab as it is handed out, without solutions: a test may write into its grpo.py."""
    return copy_lab([*STUDENT, tinylm.SFT_PATH.name], tmp_path / "lab")


@pytest.fixture
def two_csvs(runs, tmp_path) -> tuple[Path, Path]:
    """Two CSVs of runs that differ in two settings, in the folder that `call` runs in."""
    folder, _ = runs["first"]
    text = (folder / "grpo_tinylm.csv").read_text(encoding="utf-8")
    (tmp_path / "a.csv").write_text(text, encoding="utf-8")
    changed = text.replace("--inner-steps 2 ", "--inner-steps 8 ").replace("--clip 0.2 ", "--clip 1000.0 ")
    (tmp_path / "b.csv").write_text(changed, encoding="utf-8")
    return tmp_path / "a.csv", tmp_path / "b.csv"
