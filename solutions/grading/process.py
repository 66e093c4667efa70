"""The process of the students' code, from outside: started, asked, ended. Whatever comes from it is only data."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from grading import wire
from grading.confinement import FIRST_UID, MEMORY, MOST_JOBS, MOST_UIDS, Confinement, as_user, works
from lab.door import SAMPLES

START = 120  # seconds to import torch


class Ended(Exception):
    """The process is gone, or speaks nonsense; says how."""


class Hung(Exception):
    """It took longer than it may."""


class Workshop:
    """Where processes for submissions come from: each is new, and sees nothing of those before it."""

    def __init__(self, confinement: Confinement, kit: Path, seconds: float, job: int):
        self.confinement, self.kit, self.job = confinement, kit, job
        self.limits = [str(MEMORY), str(int(seconds))]
        self.started = os.getpid()  # two graders at once hardly ever share a user, whose processes each of them ends

    def open(self) -> "Line":
        """A line to a new process."""
        uid = FIRST_UID + (self.job % MOST_JOBS + MOST_JOBS * self.started) % MOST_UIDS
        self.started += 1
        home = Path(tempfile.mkdtemp(prefix="grade-"))  # the folder in which the process may write, where nothing hides
        if self.confinement.name == "user":
            os.chown(home, uid, uid)
        # Nothing of the instructor's own environment but what Python needs to start.
        kept = ("PATH", "SYSTEMROOT", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
        environment = {name: os.environ[name] for name in kept if name in os.environ}
        environment |= dict.fromkeys(("TINYLM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        environment |= {"LANG": "C.UTF-8", "TMPDIR": "/tmp" if self.confinement.name == "bubblewrap" else str(home)}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        command = self.confinement.command(self.kit, self.limits, uid)
        process = subprocess.Popen(command, env=environment, start_new_session=True, cwd=self.kit, **pipes)
        ours, reader = connected(process)

        def clear() -> None:
            self.clear(uid, home)
            reader.join(timeout=10)

        return Line(ours, process, clear)

    def clear(self, uid: int, home: Path) -> None:
        """End what a process has left running, and its folder."""
        if self.confinement.name == "user":
            works(as_user(uid, [sys.executable, "-I", "-c", "import os; os.kill(-1, 9)"]))
        shutil.rmtree(home, ignore_errors=True)


def connected(process: subprocess.Popen) -> tuple[socket.socket, threading.Thread]:
    """A socket to the process's standard input and output, which can be waited for, as pipes cannot everywhere; and the
    thread that carries the data until the process has ended.
    """
    ours, theirs = socket.socketpair()

    def there() -> None:
        with suppress(OSError, ValueError):
            while data := theirs.recv(2**16):
                process.stdin.write(data)
                process.stdin.flush()
        with suppress(OSError):
            process.stdin.close()

    def back() -> None:
        with theirs, process.stdout:
            with suppress(OSError, ValueError):
                while data := process.stdout.read1(2**16):
                    theirs.sendall(data)
            with suppress(OSError):
                theirs.shutdown(socket.SHUT_RDWR)
            writer.join()

    writer, reader = (threading.Thread(target=pump, daemon=True) for pump in (there, back))
    writer.start()
    reader.start()
    return ours, reader


class Line:
    """What is said to one submission's process, and what it answers."""

    def __init__(self, ours: socket.socket, process: subprocess.Popen, clear: Callable[[], None]):
        self.socket, self.process, self.clear = ours, process, clear
        self.deadline = time.monotonic() + START

    def allow(self, seconds: float) -> None:
        """From now on so many seconds."""
        self.deadline = time.monotonic() + seconds

    def say(self, message: dict) -> dict:
        """Send a message; the reply, a dict with the text "problem". Raises Ended or Hung."""
        try:
            self.patient(self.socket.sendall, wire.encode(message))
            reply = wire.read(lambda count: self.patient(self.socket.recv, count))
        except (EOFError, ConnectionError):
            raise Ended(self.how_it_ended()) from None
        except wire.Malformed as error:
            raise Ended(f"sent something else than an answer ({error})") from None
        if not isinstance(reply, dict) or not isinstance(reply.get("problem"), str):
            raise Ended("sent something else than an answer")
        return {**reply, "problem": reply["problem"][:4000]}

    def patient(self, act, argument):
        """act(argument) on the socket, within the time that is left."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise Hung
        self.socket.settimeout(left)
        try:
            return act(argument)
        except TimeoutError:
            raise Hung from None

    def how_it_ended(self) -> str:
        """In words. It may need a moment to end, after it has closed its line."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=5)
        self.close()
        status = self.process.returncode
        status = 128 - status if status > 128 and os.name != "nt" else status  # as shells and bubblewrap tell a signal
        if status < 0:
            name = signal.Signals(-status).name if -status in set(signal.Signals) else str(-status)
            return f"was killed by the signal {name}" if name != "SIGKILL" else "closed the grader's channel"
        return f"ended the process (exit status {status})"

    def close(self) -> None:
        """End the process, and what it left."""
        if self.socket is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL) if hasattr(os, "killpg") else self.process.kill()
            self.process.wait()
            self.socket.close()
            self.socket = None
            self.clear()


# Answers, as `lab/door/` describes them ------------------------------------------------------------------------------


def is_answer(question: dict, answer: dict) -> bool:
    """Whether an answer without a problem has the parts that it must have; their values a test looks at."""

    def has(part, **kinds) -> bool:
        return isinstance(part, dict) and all(name in part and isinstance(part[name], kinds[name]) for name in kinds)

    def texts(part) -> bool:
        return isinstance(part, list) and all(isinstance(text, str) for text in part)

    def is_samples(part) -> bool:
        return isinstance(part, dict) and set(part) == set(SAMPLES)

    def is_step(part) -> bool:
        return has(part, samples=dict, metrics=dict, attached=list) and is_samples(part["samples"])

    def is_list_of(part, length: int, check: Callable[[object], bool]) -> bool:
        return isinstance(part, list) and len(part) == length and all(map(check, part))

    maybe, anything = Tensor | None, object
    weights = {"policy": Tensor, "reference": Tensor, "reference has gradient": bool}
    return {
        1: lambda: is_list_of(answer.get("samples"), question["times"], is_samples),
        2: lambda: has(answer, value=anything),
        3: lambda: has(answer, value=anything, gradient=maybe),
        4: lambda: has(answer, value=anything, gradient=maybe, metrics=dict, attached=list),
        5: lambda: (
            has(answer, changed=list, calls=dict, **weights)
            and texts(answer["changed"])
            and has(answer["calls"], sampled=list, order=list, losses=list)
            and len(answer["calls"]) == 3
            and is_list_of(answer.get("steps"), len(question["prompts"]), is_step)
        ),
    }[question["task"]]()


class RemoteDoor:
    """A door to a submission in a process of its own, which is started when first asked. A context manager."""

    def __init__(self, workshop: Workshop, source: bytes, timeout: float):
        self.workshop, self.source, self.timeout = workshop, source, timeout
        self.stand_ins = (b"", [])  # (source, the functions that it stands in for)
        self.line, self.imported = None, False

    def begin_task(self, stand_ins: bytes, functions: list[str]) -> None:
        """From here on these functions are those of `stand_ins`. A new time begins."""
        before, self.stand_ins = self.stand_ins, (stand_ins, functions)
        if self.line and self.stand_ins != before:
            self.line.allow(self.timeout)
            self.give_stand_ins()

    def give_stand_ins(self) -> None:
        source, functions = self.stand_ins
        if functions:
            self.line.say({"stand_ins": source.decode(), "functions": functions})

    def load(self) -> str:
        """Start a process with the submission. Returns why it cannot be imported, or ""."""
        self.imported = False
        self.line = self.workshop.open()
        self.line.say({"hello": ""})  # when torch is imported
        self.line.allow(self.timeout)
        source = torch.frombuffer(bytearray(self.source), dtype=torch.uint8)
        problem = self.line.say({"load": source})["problem"]
        self.imported = True
        if not problem:
            self.give_stand_ins()
        return f"grpo.py cannot be imported: {problem}" if problem else ""

    def __call__(self, question: dict) -> dict:
        if self.line is None:
            raise Ended("ended its process before")
        try:
            answer = self.line.say({"ask": question})
            if not answer["problem"] and not is_answer(question, answer):
                raise Ended("sent something else than an answer")
        except (Ended, Hung):
            self.close()
            raise
        return answer

    def close(self) -> None:
        if self.line:
            self.line.close()
            self.line = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
