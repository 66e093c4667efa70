"""Grade a folder of submissions: NAME.py, NAME/grpo.py or NAME.zip, each in a process of its own.

    python solutions/grade.py submissions --out grades.csv            a row for each, and feedback/NAME.txt
    python solutions/grade.py submissions --out grades.csv --resume   go on where it was stopped, or with what changed
    python solutions/grade.py submission --results results.json       one submission, for Gradescope

Of a submission only the bytes of its grpo.py are used. They are run by `sandbox.py` in a temporary folder, beside the
instructor's own tests. A test counts as passed if the sandbox says so, with a signature that the student's code can't
make, and if right afterwards, in the same process, a solution known to be wrong still fails a test of the same task.
In order: submissions, the exam, the process, one submission's grade, what is written, the command.
"""

import argparse
import ast
import csv
import hashlib
import io
import json
import os
import queue
import re
import secrets
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
import unicodedata
import zipfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]
from manifest import LAB, TESTS

from lab.files import whole_file
from lab.flags import Parser, number

SOURCE_LIMIT, ZIP_LIMIT, MEMBERS_LIMIT = 2**20, 50 * 2**20, 10_000  # bytes, bytes, files
MEMORY = 2 * 2**30  # bytes that a submission may allocate, beside what Python and torch take
START = 120  # seconds for a sandbox to import torch and pytest
HANGS = 2  # after so many tests of a task that hang, its others are not run
# Where root grades, submissions run as users of their own, numbered from here: below 65,534, which is nobody, and in
# blocks of 64, so that two graders at once hardly ever share a user, whose processes each of them ends.
FIRST_UID = 61_000 + os.getpid() % 64 * 64

# 1. Submissions ----------------------------------------------------------------------------------------------------


class Refused(Exception):
    """A submission that cannot be graded; says why."""


def find_submissions(folder: Path, ours: list[Path]) -> dict[str, list[Path]]:
    """NAME -> what was handed in under it; more than one entry means that the grader can't know which counts.

    Hidden files and the grader's own output are left out; names that differ in letter case alone are the same.
    """
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.iterdir()):
        if not path.name.startswith((".", "__MACOSX")) and path.resolve() not in ours:
            known = path.suffix.lower() in (".py", ".zip", ".ipynb") and not path.is_dir()
            name = unicodedata.normalize("NFC", path.stem if known else path.name)
            name = name if name.isprintable() else ascii(name).strip("'")
            name = next((other for other in found if other.casefold() == name.casefold()), name)
            found.setdefault(name, []).append(path)
    return found


def read_submission(paths: list[Path]) -> bytes:
    """The bytes of the submission's grpo.py. Raises Refused."""
    if len(paths) != 1:
        raise Refused(f"several submissions of this name: {', '.join(path.name for path in paths)}")
    path = paths[0]
    try:
        if path.is_symlink():
            raise Refused("it is a link")
        if path.is_dir():
            files = [p for p in [*path.iterdir(), *path.glob("*/*")] if not p.is_dir()]
            chosen = choose([p.relative_to(path).as_posix() for p in files])
            if any((path / part).is_symlink() for part in (chosen, PurePosixPath(chosen).parent)):
                raise Refused(f"{chosen} is a link")
            source = read_file(path / chosen)
        elif path.suffix.lower() == ".zip":
            source = read_zip(path)
        elif path.suffix.lower() in (".py", ".ipynb"):
            choose(["grpo.py" if path.suffix.lower() == ".py" else path.name])
            source = read_file(path)
        else:
            raise Refused("neither NAME.py, nor a folder with grpo.py, nor NAME.zip")
    except OSError as error:
        raise Refused(f"it cannot be read: {error.strerror}") from error
    if not source.strip():
        raise Refused("grpo.py is empty")
    if source.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in source:
        raise Refused("grpo.py is not a text in UTF-8 (UTF-16, perhaps): save it as UTF-8")
    if source.lstrip().startswith(b"{") and b'"cells"' in source:
        raise Refused("a notebook was renamed to grpo.py: hand in the module itself")
    return source


def choose(names: list[str]) -> str:
    """Of the names of files, the one grpo.py: at the top, or else one folder down. Raises Refused."""
    modules = [name for name in names if PurePosixPath(name).name == "grpo.py" and name.count("/") <= 1]
    top = [name for name in modules if "/" not in name] or modules
    if len(top) > 1:
        raise Refused(f"{len(top)} files named grpo.py: {', '.join(sorted(top)[:3])}")
    if not top and any(name.endswith(".ipynb") for name in names):
        raise Refused("a notebook instead of a module: hand in grpo.py")
    if not top:
        raise Refused("there is no grpo.py")
    return top[0]


def read_file(path: Path) -> bytes:
    if not stat.S_ISREG(path.lstat().st_mode):
        raise Refused(f"{path.name} is not a regular file")
    if path.stat().st_size > SOURCE_LIMIT:
        raise Refused(f"{path.name} is larger than {SOURCE_LIMIT >> 10} kB")
    return path.read_bytes()


def read_zip(path: Path) -> bytes:
    """grpo.py out of a zip, of which nothing is ever unpacked to the disk. Raises Refused."""
    if path.stat().st_size > ZIP_LIMIT:
        raise Refused(f"the zip is larger than {ZIP_LIMIT >> 20} MB")
    try:
        with zipfile.ZipFile(path) as archive:
            members = {info.filename.replace("\\", "/"): info for info in archive.infolist() if not info.is_dir()}
            if len(members) > MEMBERS_LIMIT:
                raise Refused(f"the zip holds more than {MEMBERS_LIMIT} files")
            for name, info in members.items():
                if name.startswith("/") or name[1:2] == ":" or ".." in name.split("/"):
                    raise Refused(f"the zip holds a path that leads out of its folder: {name[:80]!r}")
                if stat.S_ISLNK(info.external_attr >> 16):
                    raise Refused(f"the zip holds a link: {name[:80]!r}")
            info = members[choose(list(members))]
            with archive.open(info) as file:
                source = file.read(SOURCE_LIMIT + 1)  # whatever size the zip claims
            if len(source) > SOURCE_LIMIT:
                raise Refused(f"grpo.py in the zip is larger than {SOURCE_LIMIT >> 10} kB")
            return source
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, ValueError, zipfile.zlib.error) as error:
        raise Refused(f"the zip is damaged, encrypted or of an unknown kind: {error}") from error


# 2. The exam: the tests, their points, and what stands in for the tasks that come before -----------------------------


@dataclass(frozen=True)
class Test:
    name: str
    task: int
    number: str  # "1.2": the second test of task 1
    points: float


@dataclass
class Exam:
    """What is the same for all submissions of a run."""

    files: dict[str, bytes]  # of the sandbox's folder
    stand_ins: dict[int, bytes]  # task -> a solutions/grpo.py in which that task and later ones are not written
    private: list[str]  # folders that a submission may not read
    timeout: float  # seconds for a test
    seed: str = field(default_factory=lambda: str(secrets.randbelow(10**6)))  # the same inputs for everyone
    tests: list[Test] = field(default_factory=list)
    canaries: dict[int, Test] = field(default_factory=dict)  # task -> its quickest test that a wrong solution fails
    harmless: list[str] = field(default_factory=list)  # what the reference's run replaces, too

    @property
    def digest(self) -> str:
        return hashlib.sha256(b"\0".join([*self.files.values(), *self.stand_ins.values()])).hexdigest()

    @property
    def seconds(self) -> float:
        """The most that one submission may take: two hangs in each of four tasks."""
        return 4 * HANGS * self.timeout


def task_bodies(source: str) -> dict[int, tuple[str, int, int]]:
    """task -> (function, first, last + 1): the lines, counted from 0, that follow its "# TODO(task N)"."""
    bodies, lines = {}, source.splitlines()
    for node in ast.parse(source).body:
        for i in range(node.lineno - 1, node.end_lineno):
            if isinstance(node, ast.FunctionDef) and (found := re.fullmatch(r" *# TODO\(task (\d)\)", lines[i])):
                bodies[int(found[1])] = (node.name, i + 1, node.end_lineno)
    return bodies


def unwritten(source: str, from_task: int) -> str:
    """`source` without the bodies of `from_task` and of later tasks."""
    lines = source.splitlines(keepends=True)
    for task, (_, first, last) in sorted(task_bodies(source).items(), reverse=True):
        if task >= from_task:
            lines[first:last] = ['    raise NotImplementedError("not written")\n']
    return "".join(lines)


def own_user(job: int) -> int | None:
    """The user that the submissions of a job run as: where root grades, one that has nothing else."""
    return FIRST_UID + job if hasattr(os, "geteuid") and os.geteuid() == 0 else None


def prepare_exam(timeout: float, private: list[Path]) -> Exam:
    """Collect the tests and try them: the reference must pass all, and a wrong solution fail in each task.

    Raises Refused, naming the test, if it is not so.
    """
    import tinylm  # noqa: PLC0415  it imports torch, for seconds

    tinylm.load_or_train_sft()
    files = {name: (LAB / name).read_bytes() for name in TESTS}
    files["tinylm_sft.pt"] = tinylm.SFT_PATH.read_bytes()
    reference = (LAB / "solutions" / "grpo.py").read_text(encoding="utf-8")
    stand_ins = {task: unwritten(reference, task).encode() for task in task_bodies(reference)}
    files["handout.py"] = stand_ins[1]
    exam = Exam(files, stand_ins, [str(LAB), *map(str, private)], timeout)
    durations: dict[str, float] = {}
    harmless: set[str] = set()
    with Sandbox(exam, reference.encode(), own_user(0)) as sandbox:
        if own_user(0) is not None and not sandbox.alone:
            print("grading as root, for no other user can read this Python: see README.md", file=sys.stderr)
        for name, points in json.loads(sandbox.ask(None, timeout).message):
            task = int(re.match(r"test_task(\d)_", name)[1])
            of_task = 1 + sum(test.task == task for test in exam.tests)
            exam.tests.append(Test(name, task, f"{task}.{of_task}", points))
        for test in exam.tests:
            started = time.monotonic()
            reply = sandbox.ask(test, timeout)
            durations[test.name] = time.monotonic() - started
            harmless.update(reply.changed)
            if reply.kind != "passed" or reply.refused:
                why = "; ".join([*reply.message.splitlines(), *reply.refused])
                raise Refused(f"the reference does not pass {test.name} here (LAB_SEED={exam.seed}): {why}")
        for task in sorted({test.task for test in exam.tests}):
            quick = sorted((t for t in exam.tests if t.task == task), key=lambda test: durations[test.name])[:4]
            failed = {}
            for test in quick:
                started = time.monotonic()
                if sandbox.ask(test, timeout, wrong=True).kind == "failed":
                    failed[time.monotonic() - started] = test
            if failed:
                exam.canaries[task] = failed[min(failed)]
    missing = {test.task for test in exam.tests} - exam.canaries.keys()
    if missing or not exam.tests:
        raise Refused(f"a wrong solution passes the tests of task {min(missing, default=1)}")
    exam.harmless = sorted(harmless)
    return exam


# 3. The process ------------------------------------------------------------------------------------------------------


class Ended(Exception):
    """The process is gone; says how."""


class Hung(Exception):
    """A test took longer than it may."""


class Stopped(Exception):
    """The grader itself is being stopped."""


stopping = threading.Event()


@dataclass(frozen=True)
class Reply:
    kind: str
    changed: tuple[str, ...]
    refused: tuple[str, ...]
    message: str


class Sandbox:
    """A process of `sandbox.py` in a temporary folder of its own, with one submission. A context manager."""

    def __init__(self, exam: Exam, source: bytes, uid: int | None):
        self.exam, self.uid, self.imported, self.alone = exam, uid, False, False
        self.key, self.replies = secrets.token_hex(16), queue.Queue()
        self.folder = Path(tempfile.mkdtemp(prefix="grade-")).resolve()
        work = self.folder / "work"
        home = work / "home"
        (work / "solutions").mkdir(parents=True)
        home.mkdir()
        for name, content in (exam.files | {"grpo.py": source}).items():
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            (work / name).write_bytes(content)
        if uid is not None:  # may enter, and write in its home alone
            self.folder.chmod(0o755)
            os.chown(home, uid, uid)
        self.stand_in = work / "solutions" / "grpo.py"
        here = {str(LAB), str(LAB / "solutions"), ""}
        path = [str(Path(entry).resolve()) for entry in sys.path if entry not in here]
        config = {"work": str(work), "home": str(home), "path": path, "private": exam.private, "key": self.key}
        config |= {"libraries": [*path, sys.prefix, sys.base_prefix], "uid": uid}
        config |= {"harmless": exam.harmless, "memory": MEMORY, "seconds": int(exam.seconds + START)}
        config["nonce"] = nonce = secrets.token_hex(8)
        with (self.folder / "errors").open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-X", "utf8", str(LAB / "solutions" / "sandbox.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=work,
                env=self.environment(home),
                start_new_session=True,
            )
        threading.Thread(target=self.listen, daemon=True).start()
        try:
            self.say(config)
            self.alone = self.hear(nonce, START).message == "alone"
        except BaseException as error:
            lines = (self.folder / "errors").read_text(encoding="utf-8", errors="replace").splitlines() or [""]
            self.close()
            if isinstance(error, Ended | Hung):
                raise Refused(f"the sandbox does not start: {error or 'it took too long'} {lines[-1]}") from error
            raise

    def environment(self, home: Path) -> dict[str, str]:
        """Nothing of the instructor's own but what Python needs to start."""
        kept = ("PATH", "SYSTEMROOT", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
        folders = ("HOME", "USERPROFILE", "TMPDIR", "TEMP", "TMP", "MPLCONFIGDIR", "XDG_CACHE_HOME")
        ours = {name: str(home) for name in folders} | {"LAB_SEED": self.exam.seed, "USER": "student"}
        ours |= {"TINYLM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        ours |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "LANG": "C.UTF-8"}
        return {name: os.environ[name] for name in kept if name in os.environ} | ours

    def listen(self) -> None:
        """In a thread: hand over the lines that come, and None at the end."""
        while line := self.process.stdout.readline(100_000):
            self.replies.put(line)
        self.replies.put(None)

    def say(self, message: dict) -> None:
        with suppress(OSError):  # it is gone, as `hear` will tell
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()

    def computed_seconds(self) -> float | None:
        """How long the process has kept a core busy so far; None where the system does not tell."""
        try:
            words = Path(f"/proc/{self.process.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
        except (OSError, IndexError):
            return None

    def hear(self, nonce: str, timeout: float) -> Reply:
        """The next reply. Raises Ended, Hung, Stopped; a line without a good signature is as bad as the end.

        It must come within `timeout` seconds of computing, so that a busy machine costs no points, and within three
        times as many by the clock.
        """
        before, started = self.computed_seconds(), time.monotonic()
        while not stopping.is_set():
            try:
                line = self.replies.get(timeout=0.2)
            except queue.Empty:
                elapsed, now = time.monotonic() - started, self.computed_seconds()
                computed = elapsed if None in (before, now) else now - before
                if computed > timeout or elapsed > 3 * timeout:
                    raise Hung from None
                continue
            if line is None:
                raise Ended(self.how_it_ended())
            words = line.decode("ascii", "replace").split()
            body = " ".join(words[:-1])
            signature = hashlib.sha256((self.key + body).encode()).hexdigest()
            if (
                len(words) != 6
                or words[0] != nonce
                or not secrets.compare_digest(words[-1].encode(), signature.encode())
            ):
                raise Ended("wrote into the grader's channel")
            texts = ["" if word == "-" else bytes.fromhex(word).decode("utf-8", "replace") for word in words[2:5]]
            return Reply(words[1], tuple(texts[0].splitlines()), tuple(texts[1].splitlines()), texts[2])
        raise Stopped

    def how_it_ended(self) -> str:
        try:
            code = self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "closed the grader's channel"
        if code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
            return f"was killed by the signal {name}"
        return f"ended the process (exit status {code})"

    def ask(self, test: Test | None, timeout: float, wrong: bool = False) -> Reply:
        """Run one test on the submission, or on the wrong solution; or, without a test, collect them all.

        The first test imports the submission, which may take `timeout` too; if that fails, it says so as "broken".
        """
        if test is not None:
            self.stand_in.unlink(missing_ok=True)
            self.stand_in.write_bytes(self.exam.stand_ins[test.task])
        nonce = secrets.token_hex(8)
        self.say({"nonce": nonce, "test": test and test.name, "wrong": wrong})
        reply = self.hear(nonce, timeout)
        if reply.kind in ("imported", "broken"):
            self.imported = True
            first, reply = reply, self.hear(nonce, timeout)
            changed = tuple(dict.fromkeys(first.changed + reply.changed))
            kind = first.kind if first.kind == "broken" or first.changed else reply.kind
            reply = Reply(kind, changed, reply.refused, reply.message)
        return reply

    def close(self) -> None:
        """End the process, whatever it started, and its folder."""
        self.process.kill()
        self.process.wait()
        for _ in range(100):
            left = list(self.leftovers())
            for pid in left:
                with suppress(OSError):  # it ended by itself
                    os.kill(pid, signal.SIGKILL)
            if not left:
                break
        self.process.stdin.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def leftovers(self):
        """Process ids, on Linux: of the sandbox's session, and of the user that is the submission's alone."""
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                session = int((folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[3])
                if session == self.process.pid or (self.alone and folder.stat().st_uid == self.uid):
                    yield int(folder.name)
            except (OSError, ValueError, IndexError):
                continue  # it ended meanwhile

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


# 4. One submission's grade -------------------------------------------------------------------------------------------


@dataclass
class Grade:
    """What a submission earned: per test the points and what the student may read, and a status for the instructor."""

    name: str
    digest: str = ""
    points: dict[str, float] = field(default_factory=dict)
    messages: dict[str, str] = field(default_factory=dict)
    status: str = "graded"
    seconds: float = 0.0

    def of_task(self, exam: Exam, task: int) -> float:
        return sum(self.points.get(test.name, 0) for test in exam.tests if test.task == task)

    @property
    def total(self) -> float:
        return sum(self.points.values())


def readable(message: str) -> str:
    """A message without what is none of the student's business: folders of this machine, control characters."""
    message = re.sub(r"(/|[A-Za-z]:\\)[^\s'\"]*[/\\]", "", message)
    lines = ["".join(c if c.isprintable() else " " for c in line)[:300] for line in message.splitlines()]
    return "\n".join(lines[:30])


def grade_submission(name: str, source: bytes, exam: Exam, uid: int | None) -> Grade:
    """Run every test, in as many processes as it takes: after a test that ends or hangs its process, a new one."""
    grade, started, hangs = Grade(name), time.monotonic(), dict.fromkeys(exam.canaries, 0)
    sandbox, over, statuses, refused = None, None, [], []
    try:
        for test in exam.tests:
            if not over and time.monotonic() - started > exam.seconds:
                over = f"the submission used up its {exam.seconds:g} seconds"
                statuses.append(over)
            if over or hangs[test.task] >= HANGS:
                grade.messages[test.name] = f"not run: {over or f'task {test.task} hung before'}"
                continue
            try:
                sandbox = sandbox or Sandbox(exam, source, uid)
                reply = sandbox.ask(test, exam.timeout)
                canary = None
                if reply.kind == "passed" and not reply.changed:
                    canary = sandbox.ask(exam.canaries[test.task], exam.timeout, wrong=True)
            except (Ended, Hung) as error:
                what = str(error) or f"took longer than {exam.timeout:g} seconds"
                where = "when imported" if not sandbox.imported else f"in {test.name}"
                hangs[test.task] += isinstance(error, Hung)
                statuses.append(f"{what} {where}")
                grade.messages[test.name] = f"grpo.py {what} {where}"
                over = None if sandbox.imported else f"grpo.py {what} {where}"
                sandbox.close()
                sandbox = None
                continue
            refused += reply.refused
            grade.messages[test.name] = readable(reply.message)
            if reply.changed or (canary and canary.kind != "failed"):
                what = f"replaced {', '.join(reply.changed)}" if reply.changed else "made a wrong solution pass"
                over = f"grpo.py tampered with the tests: it {what}"
                statuses.append(f"tampered: {what} ({'on import' if reply.kind == 'imported' else test.name})")
                grade.messages[test.name] = over
            elif reply.kind == "broken":
                over = " ".join(readable(reply.message).split())
                statuses.append(over)
            elif reply.kind == "passed":
                grade.points[test.name], grade.messages[test.name] = test.points, ""
    finally:
        if sandbox:
            sandbox.close()
    if refused:
        statuses.append(f"tried what the grader refuses: {', '.join(list(dict.fromkeys(refused))[:3])}")
    grade.status = "; ".join(statuses[:4]) or "graded"
    grade.seconds = time.monotonic() - started
    return grade


# 5. What is written --------------------------------------------------------------------------------------------------


def columns(exam: Exam) -> list[str]:
    return ["name", *(f"task{task}" for task in exam.canaries), "total", "seconds", "status", "submission"]


def cell(name: str) -> str:
    """A name that a spreadsheet won't take for a formula."""
    return f"'{name}" if name.startswith(("=", "+", "-", "@")) else name


def row_of(grade: Grade, exam: Exam) -> dict[str, str]:
    points = {f"task{task}": f"{grade.of_task(exam, task):g}" for task in exam.canaries}
    told = " ".join(readable(grade.status).split())[:300]
    return {"name": cell(grade.name), **points, "total": f"{grade.total:g}", "seconds": f"{grade.seconds:.1f}",
            "status": told, "submission": grade.digest}  # fmt: skip


def feedback(grade: Grade, exam: Exam) -> str:
    """What the student may read: points, and for each test that failed why."""
    lines = [f"Lab 15: {grade.name}", f"{grade.total:g} of {sum(t.points for t in exam.tests):g} points", ""]
    if grade.status != "graded":
        lines[2:2] = [readable(grade.status)]
    for task in exam.canaries:
        possible = sum(test.points for test in exam.tests if test.task == task)
        lines.append(f"task {task}: {grade.of_task(exam, task):g} of {possible:g}")
    for test in exam.tests:
        earned = grade.points.get(test.name, 0)
        lines += ["", f"{test.number}  {test.name}: {earned:g} of {test.points:g}"]
        lines += [f"     {line}" for line in grade.messages.get(test.name, "").splitlines()]
    return "\n".join(lines) + "\n"


def gradescope(grade: Grade, exam: Exam) -> dict:
    """The same as Gradescope's results.json."""
    tests = [
        {
            "name": test.name,
            "number": test.number,
            "score": grade.points.get(test.name, 0),
            "max_score": test.points,
            "status": "passed" if test.name in grade.points else "failed",
            "output": grade.messages.get(test.name, ""),
            "visibility": "visible",
        }
        for test in exam.tests
    ]
    return {
        "tests": tests,
        "execution_time": round(grade.seconds),
        "output": "" if grade.status == "graded" else readable(grade.status),
        "output_format": "text",
        "visibility": "visible",
        "stdout_visibility": "hidden",
    }


def write_whole(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as temporary, temporary.open("w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def table(rows: list[dict[str, str]], names: list[str], header: bool = True) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def finished_rows(out: Path) -> list[dict[str, str]]:
    """The rows of an earlier run; a last one that was cut short is left out. Raises ValueError on a foreign file."""
    content = out.read_bytes()
    whole, _, _ = content.rpartition(b"\n")  # what follows is cut before it is decoded: perhaps within a letter
    lines = whole.decode("utf-8").splitlines(keepends=True)
    try:
        rows = list(csv.DictReader(lines))
        foreign = bool(content) and not content.startswith(b"name,task1,")
    except csv.Error:
        foreign = True
    if foreign:
        raise ValueError(f"{out} is not a table of grades")
    return [row for row in rows if None not in row and None not in row.values()]


class Book:
    """grades.csv and what lies beside it. A grade is on the disk before the next one is awaited."""

    def __init__(self, out: Path, with_gradescope: bool):
        self.out, self.with_gradescope = out, with_gradescope
        self.rows: dict[str, dict[str, str]] = {}

    def files(self, name: str) -> list[Path]:
        files = [self.out.parent / "feedback" / f"{name}.txt"]
        return files + [self.out.parent / "gradescope" / name / "results.json"] * self.with_gradescope

    def done(self, name: str, digest: str) -> bool:
        row = self.rows.get(cell(name))
        return bool(row and row["submission"] == digest and all(path.exists() for path in self.files(name)))

    def write(self, exam: Exam) -> None:
        """The whole table, in the order of the names."""
        write_whole(self.out, table([self.rows[name] for name in sorted(self.rows)], columns(exam)))

    def enter(self, grade: Grade, exam: Exam) -> None:
        texts = [feedback(grade, exam), json.dumps(gradescope(grade, exam), indent=1, ensure_ascii=False)]
        for path, text in zip(self.files(grade.name), texts, strict=False):
            write_whole(path, text)
        row = row_of(grade, exam)
        self.rows[row["name"]] = row
        with self.out.open("a", encoding="utf-8", newline="") as file:
            file.write(table([row], columns(exam), header=False))
            file.flush()
            os.fsync(file.fileno())


# 6. The command ------------------------------------------------------------------------------------------------------


def submission_digest(source: bytes, exam: Exam) -> str:
    """Changes with the submission, and with the tests."""
    return hashlib.sha256(exam.digest.encode() + source).hexdigest()[:16]


def grade_all(submissions: dict[str, list[Path]], exam: Exam, book: Book, jobs: int) -> None:
    """Grade what is not graded yet, `jobs` at a time."""
    from tqdm import tqdm  # noqa: PLC0415

    sources: dict[str, bytes] = {}
    refused = []
    for name, paths in submissions.items():
        try:
            sources[name] = read_submission(paths)
        except Refused as why:
            refused.append(Grade(name, status=f"refused: {why}"))
    digests = {name: submission_digest(source, exam) for name, source in sources.items()}
    waiting = [name for name in sources if not book.done(name, digests[name])]
    book.write(exam)  # old rows stay until the new ones are there, of which `enter` adds each at the end
    for grade in refused:
        grade.messages = dict.fromkeys((test.name for test in exam.tests), grade.status)
        book.enter(grade, exam)
    users = queue.Queue()
    for job in range(jobs):
        users.put(own_user(job))

    def work(name: str) -> Grade:
        uid = users.get()
        try:
            grade = grade_submission(name, sources[name], exam, uid)
        except Refused as why:
            grade = Grade(name, status=f"not graded: {why}")
        finally:
            users.put(uid)
        # What the grader could not do is tried again by --resume.
        grade.digest = "" if grade.status.startswith("not graded") else digests[name]
        return grade

    with ThreadPoolExecutor(jobs) as pool:
        try:
            futures = [pool.submit(work, name) for name in waiting]
            for future in tqdm(as_completed(futures), total=len(futures), unit="submission", disable=None):
                book.enter(future.result(), exam)
        except BaseException:
            stopping.set()
            pool.shutdown(cancel_futures=True)
            raise
        finally:
            book.write(exam)


def grade_one(path: Path, timeout: float) -> dict:
    """Gradescope's results.json for one submission, whatever comes."""
    total = {
        "name": "grpo.py",
        "number": "1",
        "score": 0,
        "max_score": 100,
        "status": "failed",
        "visibility": "visible",
    }
    try:
        exam = prepare_exam(timeout, [path])
    except (Refused, Ended, Hung) as error:
        print(f"the grader is not in order: {error}", file=sys.stderr)
        return {"tests": [total | {"output": "The grader is not in order. Please tell your instructor."}]}
    try:
        grade = grade_submission("submission", read_submission([path] if path.exists() else []), exam, own_user(0))
    except Refused as why:
        why = "there is no grpo.py" if not path.exists() else why
        grade = Grade("submission", status=f"refused: {why}")
        grade.messages = dict.fromkeys((test.name for test in exam.tests), grade.status)
    return gradescope(grade, exam)


def build_parser() -> Parser:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("submissions", type=Path, metavar="SUBMISSIONS", help="the folder; with --results, one of them")
    parser.add_argument("--out", type=Path, metavar="FILE.csv", help="the table; feedback/ is written beside it")
    parser.add_argument("--resume", action="store_true", help="keep the grades that FILE.csv holds, and do the rest")
    parser.add_argument("--gradescope", action="store_true", help="also write gradescope/NAME/results.json")
    parser.add_argument("--results", type=Path, metavar="FILE.json", help="grade one submission, for Gradescope")
    parser.add_argument("--jobs", type=number(int, 1, 1000), default=os.cpu_count() or 1, help="default: one per core")
    parser.add_argument("--timeout", type=number(float, 1, 10_000), default=60, help="seconds per test (default: 60)")
    return parser


def main() -> int:
    """Grade, and return the exit status."""
    parser = build_parser()
    args = parser.parse_args()
    if (args.out is None) == (args.results is None):
        parser.error("give either --out FILE.csv or --results FILE.json")
    if hasattr(signal, "SIGTERM"):
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if args.results is not None:
            write_whole(args.results, json.dumps(grade_one(args.submissions.resolve(), args.timeout), indent=1))
            return 0
        if not args.submissions.is_dir():
            parser.error(f"{args.submissions} is not a folder")
        out = args.out.resolve()
        if out.exists() and not args.resume:
            parser.error(f"{args.out} is there already: add --resume to go on with it, or choose another name")
        book = Book(out, args.gradescope)
        if out.exists():
            book.rows = {row["name"]: row for row in finished_rows(out)}
        ours = [out, out.parent / "feedback", out.parent / "gradescope"]
        submissions = find_submissions(args.submissions, ours)
        if not submissions:
            parser.error(f"{args.submissions} holds no submission")
        exam = prepare_exam(args.timeout, [args.submissions.resolve(), out.parent])
        grade_all(submissions, exam, book, args.jobs)
    except (Refused, Ended, Hung, ValueError, OSError) as error:
        parser.error(str(error) or "the sandbox did not answer in time")
    except KeyboardInterrupt:
        parser.exit(130, f"{parser.prog}: stopped; --resume goes on from here\n")
    print(f"{len(book.rows)} submissions, in {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
