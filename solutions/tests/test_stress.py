"""stress.py: the circumstances are what they are called, and each fault that is planted is found and told."""

import json
import os
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers import call_command
from manifest import SFT
from measuring import kills, suite
from measuring.kills import Victim
from measuring.processes import copy_whole_lab, environment, running

import tinylm


@pytest.mark.parametrize("flags", [[], ["--seed", "1"], ["--suite", "0"], ["--kills", "x"], ["--kills", "1", "--seed"]])
def test_bad_flags_are_one_line(capsys, flags):
    assert call_command("stress.py", *flags) == 2
    assert capsys.readouterr().err.count("\n") == 1


# The suite -----------------------------------------------------------------------------------------------------------

# A lab of two files, with modules in place of numpy and torch that are imported at once and keep their seed.
FAKE_CONFTEST = "def pytest_addoption(parser):\n    parser.addoption('--solutions', action='store_true')\n"
FAKE_TESTS = """
import json, os, random, time, warnings
from pathlib import Path
import numpy, pytest, torch

HERE, NOTES, SEED = Path(__file__).parent, Path(os.environ["NOTES"]), os.environ["LAB_SEED"]
NOTE = {
    "seeds": [SEED, os.environ["PYTHONHASHSEED"], str(numpy.random.seeded), str(torch.seeded)],
    "process": os.getpid(),
    "folder": os.getcwd(),
    "lab": str(HERE),
    "policy": (HERE / "tinylm_sft.pt").exists(),
}

@pytest.mark.parametrize("i", range(8))
def test_it(i, pytestconfig):
    note = NOTE | {"i": i, "solutions": pytestconfig.getoption("--solutions"), "time": time.time()}
    with NOTES.open("a", encoding="utf-8") as file:
        file.write(json.dumps(note) + "\\n")
    time.sleep(0.02)
    {fault}
    if i == 7 and not NOTE["policy"]:
        (HERE / "tinylm_sft.pt").write_bytes(b"policy")
"""


@pytest.fixture
def run_fake(monkeypatch, tmp_path, capsys):
    """Run the stress test on such a lab; gives (good?, what it printed, the notes of the tests)."""

    def run(count: int, first_seed: int = 0, fault: str = "pass"):
        modules = tmp_path / "modules"
        modules.mkdir()
        (modules / "torch.py").write_text(
            "seeded = None\ndef manual_seed(seed):\n    global seeded\n    seeded = seed\n", encoding="utf-8"
        )
        (modules / "numpy.py").write_text(
            "class random:\n    seeded = None\n    def seed(seed):\n        random.seeded = seed\n", encoding="utf-8"
        )

        def copy_fake(folder: Path) -> Path:
            folder.mkdir()
            (folder / "conftest.py").write_text(FAKE_CONFTEST, encoding="utf-8")
            (folder / "test_grpo.py").write_text(FAKE_TESTS.replace("{fault}", fault), encoding="utf-8")
            (folder / SFT).write_bytes(b"policy")
            return folder

        monkeypatch.setattr(suite, "copy_whole_lab", copy_fake)
        monkeypatch.setenv("PYTHONPATH", str(modules))
        monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
        monkeypatch.setenv("PYTEST_ADDOPTS", "--no-such-flag")  # the instructor's own settings must not matter
        good = suite.stress_suite(count, first_seed)
        notes = (tmp_path / "notes").read_text(encoding="utf-8").splitlines()
        return good, capsys.readouterr().out, [json.loads(line) for line in notes]

    return run


def test_circumstances_are_what_they_are_called(run_fake, monkeypatch):
    busy, real = [], suite.busy_core

    def counted():
        busy.append(real)
        return real()

    monkeypatch.setattr(suite, "busy_core", counted)
    tried = [c for c in suite.circumstances() if not c.plugin or find_spec(c.plugin)]
    good, output, notes = run_fake(len(tried), first_seed=5)
    assert good, output
    assert len(busy) == os.cpu_count()
    runs = {c.name: [n for n in notes if n["seeds"][0] == str(5 + i)] for i, c in enumerate(tried)}
    for name, run in runs.items():
        assert all(note["solutions"] for note in run)
        if name != "in parallel":  # there, the processes are pytest-xdist's own
            assert all(len(set(note["seeds"])) == 1 for note in run), name
        assert (run[0]["folder"] == run[0]["lab"]) == (name != "from another folder")
        order, pids = [note["i"] for note in run], {note["process"] for note in run}
        assert len(order) == (16 if name.startswith("two at once") else 8)
        assert len(pids) == (2 if name.startswith(("two at once", "in parallel")) else 1)
        if name not in ("in random order", "in parallel", "two at once, no policy yet"):
            assert order == list(range(8))
    if "in random order" in runs:
        assert [note["i"] for note in runs["in random order"]] != list(range(8))
    both = runs["two at once, no policy yet"]
    first, second = ([n["time"] for n in both if n["process"] == process] for process in {n["process"] for n in both})
    assert max(first[0], second[0]) < min(first[-1], second[-1])  # they do overlap
    assert not both[0]["policy"] and both[0]["lab"] != runs["as it is"][0]["lab"]


def test_a_missing_plugin_is_told_and_its_circumstance_skipped(run_fake, monkeypatch):
    monkeypatch.setattr(suite.importlib.util, "find_spec", lambda name: None)
    good, output, _ = run_fake(1)
    assert good
    assert "in random order              skipped: pytest-randomly is not installed" in output
    assert "in parallel                  skipped: pytest-xdist is not installed" in output


@pytest.mark.parametrize(
    "fault, told",
    [
        ("assert SEED != '1' or i != 3, 'the third'", "the third"),
        ("SEED == '1' and warnings.warn('a harmless warning')", "a harmless warning"),
        ("SEED == '1' and time.sleep(60)", "not done after 3 seconds"),
        ("SEED == '1' and os._exit(3)", "exit status 3"),
    ],
)
def test_one_seed_that_fails_is_told_with_its_output(run_fake, monkeypatch, fault, told):
    monkeypatch.setattr(suite, "circumstances", lambda: [suite.Circumstance("as it is")])
    monkeypatch.setattr(suite, "TIMEOUT", 3)
    good, output, _ = run_fake(3, fault=fault)
    verdicts = [line.split()[-1] for line in output.splitlines() if line[:6].strip().isdigit()]
    assert not good and verdicts == ["passed", "FAILED", "passed"], output
    assert told in output
    assert output.splitlines()[-1].split() == ["all", "3", "1"]


@pytest.mark.parametrize("fault", ["(HERE / f'.1.{SEED}tinylm_sft.pt').touch()", "NOTE['policy'] = True"])
def test_two_at_once_must_leave_one_policy_and_nothing_else(run_fake, monkeypatch, fault):
    monkeypatch.setattr(suite, "circumstances", lambda: [suite.Circumstance("two", suites=2)])
    good, output, _ = run_fake(1, fault=fault)
    assert not good and "the starting policy is not there, or more than that" in output, output


# Kills ---------------------------------------------------------------------------------------------------------------

START = """
import os, pathlib, time
path = pathlib.Path
def slowly(file, text):
    for letter in text:
        file.write(letter), file.flush(), time.sleep(0.04)
def whole(name):
    with path(f".{os.getpid()}.{name}").open("w") as file:
        slowly(file, "abcde")
    path(file.name).replace(name)
def in_place(name):
    with path(name).open("w") as file:
        slowly(file, "abcde")
"""


def fake(source: str) -> Victim:
    return Victim("fake", [sys.executable, "-c", START + source])


def kill_fakes(monkeypatch, source: str, count: int) -> int:
    """The exit status of `--kills N` if there were no other command than this one."""
    monkeypatch.setattr(kills, "copy_whole_lab", lambda folder: folder.mkdir())
    monkeypatch.setattr(kills, "victims", lambda *_: [fake(source)])
    return call_command("stress.py", "--kills", str(count))


def test_a_command_that_writes_whole_files_stands_all_kills(monkeypatch, capsys):
    assert kill_fakes(monkeypatch, "whole('a.txt'), whole('b.txt')", 8) == 0
    output = capsys.readouterr().out
    row = next(line for line in reversed(output.splitlines()) if line.startswith("fake"))
    kills, late, again, left, faults = map(int, row.split()[1:])
    assert (kills, faults) == (8, 0) and "FAULTY" not in output
    assert late < 4 and again >= 1
    assert left >= 2  # so the kills do come while it writes


def test_a_command_that_writes_in_place_is_found(monkeypatch, capsys):
    assert kill_fakes(monkeypatch, "in_place('a.txt')", 8) == 1
    output = capsys.readouterr().out
    assert "a.txt is read as good, and is not what fake writes when nobody kills it" in output
    assert "  FAULTY\n" in output and int(output.splitlines()[-2].split()[-1]) > 0


@pytest.mark.parametrize("source", ["exit('no luck')", "path('a.pt').touch()", "path('a.exe').touch()"])
def test_a_command_that_fails_by_itself_is_told(monkeypatch, capsys, source):
    assert kill_fakes(monkeypatch, source, 4) == 1
    told = capsys.readouterr().err
    assert "although nobody kills it" in told and ("no luck" in told or "exit" not in source)


class AtSecondChange(random.Random):
    def randint(self, low, high):
        return 2


FROM_NOTHING, FROM_ALL = 10, 15  # kills at a change on the disk, after which the command is started again


@pytest.mark.parametrize(
    "source, j, told",
    [
        ("path('a.txt').unlink(missing_ok=True), time.sleep(0.1), whole('a.txt')", FROM_ALL, "a.txt is lost"),
        ("in_place('a.txt')", FROM_ALL, "a.txt is read as good"),
        ("in_place('a.pt')", FROM_NOTHING, "a.pt is damaged"),
        ("list(path().glob('.*')) and exit('what is that?'), whole('a.txt')", FROM_NOTHING, "exit status 1: what is"),
        ("list(path().glob('.*')) or whole('a.txt')", FROM_NOTHING, "it ends with no good a.txt"),
        (
            "path('a.txt').write_text(str(len(list(path().glob('.*'))))), whole('b.txt')",
            FROM_NOTHING,
            "it ends with another a.txt",
        ),
    ],
)
def test_each_kind_of_fault_is_named(monkeypatch, tmp_path, source, j, told):
    monkeypatch.setitem(kills.READERS, "a.pt", lambda path: path.read_text(encoding="utf-8").index("e"))
    monkeypatch.setattr(kills, "READERS", dict(reversed(kills.READERS.items())))  # a.pt before *.pt
    victim, folder, variables = fake(source), tmp_path / "work", dict(os.environ)
    kills.watch(victim, 0, folder, variables)
    kill = kills.kill_once(victim, j, folder, variables, AtSecondChange(0))
    assert not kill.late
    assert any(told in fault for fault in kill.faults), kill


def test_the_kill_takes_what_the_command_has_started_with_it(tmp_path):
    source = "import subprocess, sys, time; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    child = "import os, time, pathlib; pathlib.Path('id').write_text(str(os.getpid())); time.sleep(600)"
    with running([sys.executable, "-c", source, child], tmp_path, dict(os.environ)) as (process, _):
        while not (tmp_path / "id").exists() or not (tmp_path / "id").read_text(encoding="utf-8"):
            assert process.poll() is None
    assert process.returncode
    status = Path("/proc") / (tmp_path / "id").read_text(encoding="utf-8") / "stat"
    if Path("/proc/self/stat").exists():
        for _ in range(500):
            if not status.exists() or status.read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "Z":
                return
            time.sleep(0.01)
        pytest.fail("it is still there after five seconds")


def test_a_row_of_the_grades_is_not_lost_and_not_there_before_its_feedback(tmp_path):
    (tmp_path / "feedback").mkdir()
    grades, header = tmp_path / "grades.csv", "name,task1,seconds\n"
    rows = {name: f"{name},15,{i}\n" for i, name in enumerate(("ana", "ben"))}
    for name in rows:
        (tmp_path / "feedback" / f"{name}.txt").touch()
    grades.write_text(header + rows["ana"] + rows["ben"], encoding="utf-8")
    before = kills.contents(tmp_path)
    victim = Victim("grade.py", [], right={name: kills.read(tmp_path / name) for name in before})

    grades.write_text(header + rows["ben"], encoding="utf-8")
    assert kills.damage(tmp_path, before, victim) == ["grades.csv: the row of ana is lost"]
    grades.write_text(header + rows["ana"].replace("0", "3") + rows["ben"], encoding="utf-8")  # it was graded again
    assert kills.damage(tmp_path, before, victim) == ["grades.csv: the row of ana is lost"]
    grades.write_text(header + rows["ana"] + rows["ben"][:4], encoding="utf-8")  # it was not finished
    assert kills.damage(tmp_path, {}, victim) == []
    grades.write_text(header + rows["ana"].replace("15", "14"), encoding="utf-8")
    assert "is not what grade.py writes" in kills.damage(tmp_path, {}, victim)[0]
    grades.write_text(header + rows["ana"] + rows["ben"], encoding="utf-8")
    (tmp_path / "feedback" / "ben.txt").unlink()
    assert kills.damage(tmp_path, {}, victim) == ["grades.csv is damaged: it has ben's row, but there is no feedback"]


# The real commands ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def quick_lab(tmp_path_factory):
    """A copy of the lab with few tests, whose starting policy is trained in no time."""
    lab = copy_whole_lab(tmp_path_factory.mktemp("stress") / "lab")
    lab.parent.chmod(0o755)
    with (lab / "test_grpo.py").open("a", encoding="utf-8") as file:
        file.write(kills.CUT.replace("startswith((", "startswith(('test_task2', 'test_task3', "))
    text = (lab / "tinylm.py").read_text(encoding="utf-8")
    assert text.count("target: float = 0.51") == 1
    (lab / "tinylm.py").write_text(text.replace("target: float = 0.51", "target: float = 0.0"), encoding="utf-8")
    return lab


def test_the_reference_passes_under_warnings_as_errors(quick_lab):
    assert suite.run_suite(quick_lab, 3, suite.Circumstance("from another folder", elsewhere=True)) == ""


@pytest.fixture(scope="module")
def watched(quick_lab, tmp_path_factory):
    """(the real commands, a folder for each, the environment); each has run to its end once."""
    root = tmp_path_factory.mktemp("watched")
    commands, variables = kills.victims(quick_lab, root / "submissions"), environment(root)
    (root / "submissions" / "unwritten.py").unlink()  # one is enough here
    with ThreadPoolExecutor(2) as pool:  # two at a time, for they take seconds
        list(pool.map(lambda victim: kills.watch(victim, 0, root / victim.name, variables), commands))
    return commands, root, variables


@pytest.mark.slow
def test_a_file_cut_short_is_found_whichever_command_wrote_it(watched):
    commands, root, _ = watched
    assert [len(victim.right) for victim in commands] == [1, 3, 2, 1]
    assert [len(victim.starts[1]) for victim in commands] == [1, 3, 2, 1]
    for victim in commands:
        folder = root / victim.name
        assert kills.damage(folder, {}, victim) == []
        for name, content in kills.contents(folder).items():
            sizes = (0, len(content) // 2, len(content) - 2)
            for size in sizes if name != "grades.csv" else ():  # which may end anywhere
                (folder / name).write_bytes(content[:size])
                assert len(kills.damage(folder, {}, victim)) == 1, (name, size)
            (folder / name).write_bytes(content)


@pytest.mark.slow
def test_sft_stands_a_kill_as_it_writes_over_half_a_policy(watched, tmp_path):
    (victim, *_), _, variables = watched
    victim.seconds[1], victim.changes[1] = victim.seconds[0], victim.changes[0]
    kill = kills.kill_once(victim, FROM_ALL, tmp_path / "work", variables, random.Random(0))
    assert kill.faults == [] and (kill.again or kill.late)
    assert tinylm.load_checkpoint(tmp_path / "work" / SFT)
