"""Every command killed as it works: after each kill, is every file absent or whole, and nothing finished lost?

Half of the kills come at a random moment, half right after a random one of the changes that the command makes on the
disk, for that is where files break. Of each command's kills every fifth is followed by the same command, which must end
with the right result. Temporary files left behind are counted; they are no fault.
"""

import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import IO

from grading.book import finished_rows
from manifest import SFT

from lab.history import read_csv
from measuring.processes import TIMEOUT, copy_whole_lab, end, environment, printed, running

# The copy's tests are cut down to three tasks: grade.py and release.py shall spend their time on files, not on tests.
CUT = """

for name in [name for name in globals() if name.startswith(("test_task4", "test_task5"))]:
    del globals()[name]
"""
PAUSE = 0.003  # seconds at most between a change on the disk and the kill that it calls for
Contents = dict[str, bytes]  # of a folder: a file's path in it -> what it holds


def checkpoint(path: Path):
    from tinylm import load_checkpoint  # noqa: PLC0415

    return [(name, weights.tolist()) for name, weights in load_checkpoint(path).state_dict().items()]


def table(path: Path) -> frozenset:
    """The finished rows, without the seconds. Raises ValueError if one of them is there before its feedback."""
    rows = finished_rows(path)
    missing = [row["name"] for row in rows if not (path.parent / "feedback" / f"{row['name']}.txt").exists()]
    if missing:
        raise ValueError(f"it has {missing[0]}'s row, but there is no feedback")
    return frozenset(tuple(value for name, value in row.items() if name != "seconds") for row in rows)


def picture(path: Path):
    from PIL import Image  # noqa: PLC0415  which matplotlib needs, so it is there

    if not path.read_bytes().endswith(b"IEND\xaeB`\x82"):  # pillow does without the end of a PNG
        raise ValueError("the end is missing")
    with Image.open(path) as image:
        return image.size, image.convert("RGBA").tobytes()  # which decodes all of it


def archive(path: Path):
    with zipfile.ZipFile(path) as opened:
        if broken := opened.testzip():
            raise ValueError(f"{broken} in it is broken")
        return opened.comment, {name: opened.read(name) for name in opened.namelist()}


READERS = {
    "*.pt": checkpoint,
    "grades.csv": table,
    "*.csv": read_csv,
    "*.png": picture,
    "*.zip": archive,
    "*.txt": Path.read_bytes,
}


def read(path: Path):
    """What the file says, by the lab's own reader. Raises whatever that raises if it is damaged."""
    for pattern, reader in READERS.items():
        if fnmatch(path.name, pattern):
            return reader(path)
    raise ValueError("no command of the lab writes a file of this name")


def empty_and_finished(done: Contents) -> list[Contents]:
    return [{}, done]


def none_and_half_a_policy(done: Contents) -> list[Contents]:
    return [{}, {SFT: done[SFT][: len(done[SFT]) // 2]}]


def empty_and_one_row(done: Contents) -> list[Contents]:
    header, first, *_ = done["grades.csv"].splitlines(keepends=True)
    feedback = f"feedback/{first.decode().split(',')[0]}.txt"
    return [{}, {"grades.csv": header + first, feedback: done[feedback]}]


@dataclass
class Victim:
    """A command that is killed. It writes into the current folder."""

    name: str
    command: list
    resume: tuple[str, ...] = ()  # flags that it needs once its files are there
    starts_of: Callable[[Contents], list[Contents]] = empty_and_finished  # from what it wrote: where it starts
    # What `watch` finds out, first from the empty folder:
    starts: list[Contents] = field(default_factory=lambda: [{}])
    right: dict = field(default_factory=dict)  # file -> what `read` gives
    seconds: dict[int, float] = field(default_factory=dict)  # start -> that it takes from there
    changes: dict[int, int] = field(default_factory=dict)  # start -> that it makes on the disk, as far as they are seen

    def command_in(self, folder: Path) -> list:
        return [*self.command, *(self.resume if finished(contents(folder)) else ())]


def victims(lab: Path, submissions: Path) -> list[Victim]:
    """The four commands, in a copy of the lab. Two submissions are written into `submissions`."""
    submissions.mkdir()
    shutil.copyfile(lab / "solutions" / "grpo.py", submissions / "right.py")
    shutil.copyfile(lab / "grpo.py", submissions / "unwritten.py")
    sft = "import pathlib, sys; sys.path.insert(0, sys.argv[1]); import tinylm\n"
    sft += f"tinylm.load_or_train_sft(pathlib.Path('{SFT}'))"
    short = ["--solutions", "--iters", "5", "--prompts", "2", "--G", "2", "--out", "short.png"]
    solutions = lab / "solutions"
    return [
        Victim("SFT", [sys.executable, "-c", sft, lab], starts_of=none_and_half_a_policy),
        Victim("run.py", [sys.executable, lab / "run.py", *short]),
        Victim(
            "grade.py",
            [sys.executable, solutions / "grade.py", submissions, "--out", "grades.csv", "--unconfined"],
            ("--resume",),
            empty_and_one_row,
        ),
        Victim("release.py", [sys.executable, solutions / "release.py"]),
    ]


def contents(folder: Path) -> Contents:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def finished(files: Contents) -> Contents:
    """Without the temporary files of `lab.files.whole_file`, .PID.NAME."""
    return {name: content for name, content in files.items() if not re.match(r"\.\d+\.", Path(name).name)}


def put(folder: Path, files: Contents) -> None:
    """Let `folder` hold these files and no others."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)


def state_of(folder: str) -> set[tuple]:
    """(name, size, time of the last change) of all files: differs after every change on the disk."""
    found = set()
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # it was renamed meanwhile
                if entry.is_dir():
                    found |= state_of(entry.path)
                else:
                    found.add((entry.path, entry.stat().st_size, entry.stat().st_mtime_ns))
    return found


def wait_for_changes(process: subprocess.Popen, folder: Path, changes: float) -> int:
    """Wait until so many changes were seen in the folder, or the process has ended. Returns how many they were."""
    state, seen, started = state_of(str(folder)), 0, time.monotonic()
    while seen < changes and process.poll() is None and time.monotonic() - started < TIMEOUT:
        time.sleep(0.0005)
        before, state = state, state_of(str(folder))
        seen += state != before
    return seen


def is_whole(value, right) -> bool:
    """Of a table of grades, some rows are whole too."""
    return value <= right if isinstance(value, frozenset) else value == right


def damage(folder: Path, before: Contents, victim: Victim) -> list[str]:
    """What is wrong in the folder after a kill; `before` is what it held before the command."""
    after, faults = finished(contents(folder)), []
    for name, content in after.items():
        if content == before.get(name):
            continue
        try:
            value = read(folder / name)
        except Exception as error:  # of many types
            faults.append(f"{name} is damaged: {' '.join(str(error).split())}")
        else:
            if name not in victim.right or not is_whole(value, victim.right[name]):
                faults.append(f"{name} is read as good, and is not what {victim.name} writes when nobody kills it")
    faults += [f"{name} is lost" for name in before if name not in after]
    rows = [set(csv_file.get("grades.csv", b"").splitlines()) for csv_file in (before, after)]
    faults += [f"grades.csv: the row of {row.decode().split(',')[0]} is lost" for row in rows[0] - rows[1]]
    return faults


def unfinished(folder: Path, process: subprocess.Popen, output: IO[bytes], victim: Victim) -> list[str]:
    """Wait for the command's end. What is wrong with its result."""
    try:
        process.wait(TIMEOUT)
    except subprocess.TimeoutExpired:
        return [f"it does not end within {TIMEOUT} seconds"]
    if process.returncode:
        last_line = (printed(output).splitlines() or [""])[-1]
        return [f"it ends with exit status {process.returncode}: {last_line}"]
    faults = []
    for name, right in victim.right.items():
        try:
            if read(folder / name) != right:
                faults.append(f"it ends with another {name}")
        except Exception as error:  # of many types
            faults.append(f"it ends with no good {name}: {' '.join(str(error).split())}")
    return faults


def watch(victim: Victim, start: int, folder: Path, variables: dict[str, str]) -> None:
    """Let the command run to its end once, from this start. Raises RuntimeError if that fails."""
    put(folder, victim.starts[start])
    started = time.monotonic()
    with running(victim.command_in(folder), folder, variables) as (process, output):
        victim.changes[start] = wait_for_changes(process, folder, float("inf"))
        victim.seconds[start] = time.monotonic() - started
        faults = unfinished(folder, process, output, victim)
        if faults:
            raise RuntimeError(f"{victim.name} fails although nobody kills it: {'; '.join(faults)}\n{printed(output)}")
    if not victim.right:
        done = finished(contents(folder))
        try:
            victim.right = {name: read(folder / name) for name in done}
            victim.starts = victim.starts_of(done)
        except Exception as error:  # of many types
            raise RuntimeError(f"{victim.name} leaves files that are not in order, although nobody kills it") from error


@dataclass
class Kill:
    """What one kill did."""

    moment: str
    late: bool  # the command was done before
    left: int  # temporary files that it left
    again: bool  # whether the command was started again
    faults: list[str]


def kill_once(victim: Victim, j: int, folder: Path, variables: dict[str, str], chance: random.Random) -> Kill:
    """The victim's kill number j: start, kill, look; every fifth time, start again to the end."""
    start, at_change = j % len(victim.starts), j // len(victim.starts) % 2
    if start not in victim.seconds:
        watch(victim, start, folder, variables)
    all_seconds, all_changes = victim.seconds[start], victim.changes[start]
    seconds, change, pause = chance.uniform(0, all_seconds), chance.randint(1, max(1, all_changes)), chance.random()
    before = victim.starts[start]
    put(folder, before)
    with running(victim.command_in(folder), folder, variables) as (process, output):
        if at_change:
            wait_for_changes(process, folder, change)
            time.sleep(pause**3 * PAUSE)  # mostly at once: the lab's files are small, and written in no time
        else:
            with suppress(subprocess.TimeoutExpired):
                process.wait(seconds)
        late = process.poll() is not None
        end(process)
        faults = damage(folder, before, victim)
        faults += unfinished(folder, process, output, victim) if late else []
    files = contents(folder)
    left, again = len(files) - len(finished(files)), j % 5 == 0
    if again and not late:
        with running(victim.command_in(folder), folder, variables) as (process, output):
            faults += unfinished(folder, process, output, victim)
        faults += damage(folder, finished(files), victim)
    moment = f"change {change} of {all_changes}" if at_change else f"{seconds:.2f} of {all_seconds:.1f} s"
    return Kill(moment, late, left, again and not late, faults)


def stress_kills(count: int, seed: int) -> bool:
    """Kill `count` times; a line for each and a table. Returns whether all was in order."""
    chance, kills = random.Random(seed), {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as root:
        Path(root).chmod(0o755)  # where root grades, submissions run as another user, who must get in
        lab, folder, temporary = (Path(root) / name for name in ("lab", "work", "temporary"))
        temporary.mkdir(mode=0o755)
        copy_whole_lab(lab)
        with (lab / "test_grpo.py").open("a", encoding="utf-8") as tests:
            tests.write(CUT)
        variables = environment(temporary)
        targets = victims(lab, Path(root) / "submissions")
        for victim in targets[:count]:
            watch(victim, 0, folder / victim.name, variables)
            kills[victim.name] = []
            changes = f"{victim.changes[0]} changes on the disk"
            print(f"{victim.name:12}{victim.seconds[0]:6.1f} s, {changes}, when nobody kills it", flush=True)
        print(f"\n{'kill':>6}  {'command':12}{'at':20}{'outcome':16}{'temporary':>10}")
        for i in range(count):
            victim = targets[i % len(targets)]
            kill = kill_once(victim, i // len(targets), folder / victim.name, variables, chance)
            kills[victim.name].append(kill)
            outcome = "came too late" if kill.late else "started again" if kill.again else "killed"
            verdict = "  FAULTY" if kill.faults else ""
            print(f"{i:6}  {victim.name:12}{kill.moment:20}{outcome:16}{kill.left:10}{verdict}", flush=True)
            for fault in kill.faults:
                print(f"        {fault}", flush=True)
        left = sum(path.is_dir() for path in temporary.iterdir())
    words = ("kills", "too late", "started again", "temporary files left", "faults")
    print("\n" + f"{'command':12}" + "".join(f"{word:>{len(word) + 3}}" for word in words))
    rows = {**kills, "all": [kill for done in kills.values() for kill in done]}
    for name, done in rows.items():
        counted = [
            len(done),
            *(sum(getattr(kill, what) for kill in done) for what in ("late", "again", "left")),
            sum(len(kill.faults) for kill in done),
        ]
        cells = (f"{value:{len(word) + 3}}" for value, word in zip(counted, words, strict=True))
        print(f"{name:12}" + "".join(cells))
    print(f"left in the system's folder for temporary files: {left} folders")
    return not any(kill.faults for kill in rows["all"])
