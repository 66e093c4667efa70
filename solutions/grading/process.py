"""The process of the students' code, from outside: started, asked, ended. Whatever comes from it is only data."""

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from grading import wire
from grading.confinement import FIRST_UID, MEMORY, Confinement
from lab.door import SAMPLES

START = 120  # seconds to import torch


class Ended(Exception):
    """The process is gone, or speaks nonsense; says how."""


class Hung(Exception):
    """It took longer than it may."""


class Workshop:
    """Where processes for submissions come from, one at a time: forks of one process, where that can be."""

    def __init__(self, confinement: Confinement, kit: Path, seconds: float, job: int):
        self.confinement, self.kit = confinement, kit
        self.limits = [str(MEMORY), str(int(seconds))]
        self.forks = hasattr(os, "fork") and confinement.name != "container"
        self.uid = FIRST_UID + os.getppid() % 64 * 64 + job if confinement.name == "user" else None
        self.process = self.control = None

    def start(self, arguments: list[str], **pipes) -> subprocess.Popen:
        """worker.py, with nothing of the instructor's in its environment but what Python needs to start."""
        kept = ("PATH", "SYSTEMROOT", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TMPDIR")
        ours = {"TINYLM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "LANG": "C.UTF-8"}
        environment = {name: os.environ[name] for name in kept if name in os.environ} | ours
        command = self.confinement.command(self.kit, [*self.limits, *arguments])
        errors = {"stderr": subprocess.DEVNULL}
        return subprocess.Popen(command, env=environment, start_new_session=True, cwd=self.kit, **errors, **pipes)

    def open(self) -> "Line":
        """A line to a new process for one submission."""
        ours, theirs = socket.socketpair()
        with theirs:
            if not self.forks:
                return Line(ours, self.start_alone(theirs))
            if self.process is None or self.process.poll() is not None:
                self.start_forking()
            try:
                socket.send_fds(self.control, [b"f"], [theirs.fileno()])
            except OSError:
                raise Ended("could not be started: the process that forks is gone") from None
        return Line(ours, self)

    def start_forking(self) -> None:
        self.close()
        self.control, theirs = socket.socketpair()
        alone = "1" if self.confinement.name == "bubblewrap" else "0"
        nothing = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "pass_fds": [theirs.fileno()]}
        with theirs:
            arguments = [str(theirs.fileno()), "-" if self.uid is None else str(self.uid), alone]
            self.process = self.start(arguments, **nothing)

    def end_fork(self) -> int | None:
        """End the fork. Returns its exit status, or minus the signal that ended it; None if it is not known."""
        self.control.settimeout(10)
        try:
            self.control.sendall(b"e")
            return int(self.control.recv(20))
        except (OSError, ValueError):
            self.close()
            return None

    def start_alone(self, theirs: socket.socket) -> subprocess.Popen:
        """A process for one submission, with the other end of its line on its standard input and output."""
        process = self.start([], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        far = theirs.dup()

        def pump(receive, send, stop) -> None:
            with suppress(OSError, ValueError):
                while data := receive(65536):
                    send(data)
            with suppress(OSError):
                stop()

        def write(data: bytes) -> None:
            process.stdin.write(data)
            process.stdin.flush()

        hang_up = lambda: far.shutdown(socket.SHUT_RDWR)  # noqa: E731
        threading.Thread(target=pump, args=(far.recv, write, process.stdin.close), daemon=True).start()
        threading.Thread(target=pump, args=(process.stdout.read1, far.sendall, hang_up), daemon=True).start()
        return process

    def close(self) -> None:
        if self.process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.control.close()
            self.process = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class Line:
    """What is said to one submission's process, and what it answers."""

    def __init__(self, ours: socket.socket, other: Workshop | subprocess.Popen):
        self.socket, self.other, self.status = ours, other, None
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
        status = self.close()
        if status is None:
            return "ended its process"
        if status < 0:
            name = signal.Signals(-status).name if -status in set(signal.Signals) else str(-status)
            return f"was killed by the signal {name}" if name != "SIGKILL" else "closed the grader's channel"
        return f"ended the process (exit status {status})"

    def close(self) -> int | None:
        """End the process. Returns its exit status, or minus the signal that ended it."""
        if self.socket is not None:
            self.socket.close()
            self.socket = None
            if isinstance(self.other, Workshop):
                self.status = self.other.end_fork()
            else:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.other.pid, signal.SIGKILL) if hasattr(os, "killpg") else self.other.kill()
                self.status = self.other.wait()
        return self.status


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
        """From here on these functions are those of `stand_ins`."""
        self.stand_ins = (stand_ins, functions)
        if self.line:
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
        return problem

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
