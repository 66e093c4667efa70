"""The process of one submission's code. It holds this file, `wire.py`, `lab/door/` and what that needs, `tinylm.py`
and the starting policy: no test and no solution.

    python worker.py MEMORY SECONDS    bytes and seconds of computing that the submission may take

It answers messages (`wire.py`) on its standard input and output:

    {"hello": ""}                             {"problem": ""}, as soon as it is there
    {"load": source}                          the submission; {"problem": ""} or why it cannot be imported
    {"stand_ins": source, "functions": [..]}  functions that stand in for the student's own, as earlier tasks
    {"ask": question}                         as `lab/door/` describes them
"""

import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

KIT = Path(__file__).resolve().parent
sys.path[:] = [str(KIT), *(entry for entry in sys.path if entry not in ("", str(KIT)))]
sys.dont_write_bytecode = True

import wire

from lab.door import answer
from lab.door.loading import load_student
from lab.start import load_module

FILE_SIZE = 128 * 2**20  # bytes to which a file may grow


def serve(receive: Callable[[int], bytes], send: Callable[[bytes], None], home: Path) -> None:
    """Answer messages until there are no more."""
    module = None
    while True:
        try:
            message = wire.read(receive)
        except EOFError:
            return
        reply = {"problem": ""}
        if "load" in message:
            path = home / "grpo.py"
            path.write_bytes(bytes(message["load"].tolist()))
            module, problem = load_student(path)
            reply = {"problem": problem}
        elif "stand_ins" in message:
            path = home / "stand_ins.py"
            path.write_text(message["stand_ins"], encoding="utf-8")
            stand_ins = load_module(path, "stand_ins")
            for name in message["functions"]:
                setattr(module, name, getattr(stand_ins, name))
        elif "ask" in message:
            reply = answer(module, message["ask"])
        try:
            encoded = wire.encode(reply)
        except wire.Malformed as error:
            encoded = wire.encode({"problem": f"what it returned cannot be looked at: {error}"})
        send(encoded)


def limit(memory: int, seconds: int) -> None:
    """Limits that the system enforces, as far as it has them."""
    try:
        import resource  # noqa: PLC0415  (Windows has none)
    except ImportError:
        return
    limits = {"CORE": 0, "FSIZE": FILE_SIZE, "CPU": seconds}
    with suppress(OSError):  # not Linux
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text("ascii").splitlines())
        limits["DATA"] = memory + 1024 * int(status["VmData"].split()[0])
        Path("/proc/self/oom_score_adj").write_text("1000", "ascii")  # should memory run out, this process goes first
    for name, value in limits.items():
        which = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)  # noqa: PLW2901
        resource.setrlimit(which, (value, value))


def enter(home: Path) -> None:
    """Make `home` the only place there is, and keep what is printed from everyone."""
    names = ("HOME", "TMPDIR", "TEMP", "TMP", "USERPROFILE", "MPLCONFIGDIR", "XDG_CACHE_HOME")
    os.environ.update(dict.fromkeys(names, str(home)))
    tempfile.tempdir = None
    os.chdir(home)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nowhere, standard)


def write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def main() -> None:
    """Serve the submission, and leave on no way that leads through what its code has registered."""
    memory, seconds = map(int, sys.argv[1:])
    questions, answers = os.dup(0), os.dup(1)
    status = 1
    home = Path(tempfile.mkdtemp(prefix="home-"))
    try:
        enter(home)
        limit(memory, seconds)
        serve(lambda count: os.read(questions, count), lambda data: write_all(answers, data), home)
        status = 0
    finally:
        os._exit(status)


if __name__ == "__main__":
    main()
