"""The process of the students' code. It holds this file, `wire.py`, `lab/door/` and what that needs, `tinylm.py` and
the starting policy: no test and no solution.

    python worker.py FD     waits on the socket FD; for each socket that comes over it, a fork serves one submission
    python worker.py        serves one submission on its standard input and output: where there is no fork

A fork has all that takes long to import, and nothing of the submissions before it. It answers messages (`wire.py`):

    {"hello": ""}                             {"problem": ""}, as soon as it is there
    {"load": source}                          the submission; {"problem": ""} or why it cannot be imported
    {"stand_ins": source, "functions": [..]}  functions that stand in for the student's own, as earlier tasks
    {"ask": question}                         as `lab/door/` describes them
"""

import gc
import os
import shutil
import signal
import socket
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

FILE_SIZE = 16 * 2**20  # bytes to which a file may grow


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


def limit(memory: int, seconds: int, uid: int | None) -> None:
    """Limits that the system enforces, as far as it has them. With a user of its own, the process becomes that user."""
    try:
        import resource  # noqa: PLC0415  (Windows has none)
    except ImportError:
        return
    limits = {"CORE": 0, "FSIZE": FILE_SIZE, "CPU": seconds} | ({} if uid is None else {"NPROC": 64})
    with suppress(OSError):  # not Linux
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text("ascii").splitlines())
        limits["DATA"] = memory + 1024 * int(status["VmData"].split()[0])
        Path("/proc/self/oom_score_adj").write_text("1000", "ascii")  # should memory run out, this process goes first
    for name, value in limits.items():
        which = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)  # noqa: PLW2901
        resource.setrlimit(which, (value, value))
    if uid is not None:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)


def enter(home: Path) -> None:
    """Make `home` the only place there is, and keep what is printed from everyone."""
    names = ("HOME", "TMPDIR", "TEMP", "TMP", "USERPROFILE", "MPLCONFIGDIR", "XDG_CACHE_HOME")
    os.environ.update(dict.fromkeys(names, str(home)))
    tempfile.tempdir = None
    os.chdir(home)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nowhere, standard)


def be_a_fork(channel: socket.socket, home: Path, memory: int, seconds: int, uid: int | None) -> None:
    """What the fork does; it never returns."""
    status = 1
    try:
        os.setsid()
        enter(home)
        limit(memory, seconds, uid)
        serve(channel.recv, channel.sendall, home)
        status = 0
    finally:
        os._exit(status)  # no way out that leads through what the student's code has registered


def end(pid: int, uid: int | None, alone: bool) -> int:
    """End the fork and what it left behind: its group; where it had a user of its own, or a namespace, everything else
    in there. Returns its exit status, or minus the signal that ended it.
    """
    for stop in (lambda: os.kill(pid, signal.SIGKILL), lambda: os.killpg(pid, signal.SIGKILL)):
        with suppress(ProcessLookupError, PermissionError):
            stop()
    _, status = os.waitpid(pid, 0)
    if alone:
        with suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)  # all that is here, but for the first process and this one
    elif uid is not None and not (killer := os.fork()):
        os.setuid(uid)
        with suppress(OSError):
            os.kill(-1, signal.SIGKILL)
        os._exit(0)
    elif uid is not None:
        os.waitpid(killer, 0)
    return os.waitstatus_to_exitcode(status)


def fork_for_each(control: socket.socket, memory: int, seconds: int, uid: int | None, alone: bool) -> None:
    """Serve the submissions whose sockets come over `control`, one after another. The next byte ends the fork; how it
    ended is the reply.
    """
    gc.freeze()
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            return
        home = Path(tempfile.mkdtemp(prefix="home-"))
        if uid is not None:
            os.chown(home, uid, uid)
        channel = socket.socket(fileno=descriptors[0])
        if not (pid := os.fork()):
            control.close()
            be_a_fork(channel, home, memory, seconds, uid)
        channel.close()
        go_on = control.recv(1)  # nothing comes if the parent itself was ended
        status = end(pid, uid, alone)
        shutil.rmtree(home, ignore_errors=True)
        if alone:  # what it wrote elsewhere in the only folder that it can write in
            for path in Path(tempfile.gettempdir()).iterdir():
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        if not go_on:
            return
        control.sendall(b"%d\n" % status)


def main() -> None:
    """Arguments: the bytes of memory and the seconds that a submission may take, and, to fork, the socket's number, the
    user's number or -, and whether all processes around are the submission's: 1 or 0.
    """
    memory, seconds, *others = sys.argv[1:]
    if others:
        descriptor, uid, alone = others
        control = socket.socket(fileno=int(descriptor))
        fork_for_each(control, int(memory), int(seconds), None if uid == "-" else int(uid), alone == "1")
        return
    questions, answers = os.dup(0), os.dup(1)
    with tempfile.TemporaryDirectory(prefix="home-") as home:
        enter(Path(home))
        limit(int(memory), int(seconds), None)
        serve(lambda count: os.read(questions, count), lambda data: write_all(answers, data), Path(home))


def write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


if __name__ == "__main__":
    main()
