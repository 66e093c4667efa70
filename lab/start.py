"""What a command has around its work: the environment, which grpo.py it is, and how it is stopped from outside."""

import argparse
import importlib.util
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, ModuleType, TracebackType
from typing import NoReturn, TextIO

from lab.flags import Parser

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "solutions" / "grpo.py"


# The environment -------------------------------------------------------------------------------------------------


def whole_number(name: str, default: int) -> int:
    """The environment variable `name`, a whole number from 0 to 10^9; one line and exit status 2 if it is not."""
    text = os.environ.get(name)
    if text is None:
        return default
    if not re.fullmatch(r"[0-9]{1,9}|10{9}", text):
        refuse(f"{name}={text!a} in the environment: it must be a whole number from 0 to 1000000000")
    return int(text)


def wants_reference() -> bool:
    """Whether RL_SOLUTIONS=1 is in the environment; one line and exit status 2 if it is neither 1 nor 0."""
    text = os.environ.get("RL_SOLUTIONS", "")
    if text not in ("", "0", "1"):
        refuse(f"RL_SOLUTIONS={text!a} in the environment: 1 runs the reference, 0 or nothing your grpo.py")
    return text == "1"


def refuse(message: str) -> NoReturn:
    """End the program: the message on stderr, and exit status 2."""
    print(message, file=sys.stderr)
    raise SystemExit(2)


# Which grpo.py ---------------------------------------------------------------------------------------------------


def load_module(path: Path, name: str) -> ModuleType:
    """The module in the file `path`, as it is now, under `name`: in a notebook an older one may be loaded already."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def find_grpo(solutions: bool) -> Path:
    """The student's grpo.py or, if asked for, the reference. Raises ValueError if it is not there."""
    path = REFERENCE if solutions else ROOT / "grpo.py"
    if not path.exists():
        why = ", which --solutions and RL_SOLUTIONS=1 ask for" if solutions else ""
        raise ValueError(f"there is no {path.relative_to(ROOT).as_posix()} here{why}")
    return path


def load_grpo(path: Path) -> ModuleType:
    """The module in that file, which is named on the screen."""
    print(f"running {path.relative_to(ROOT).as_posix()}", flush=True)
    return load_module(path, "grpo")


# How it is stopped -----------------------------------------------------------------------------------------------


class Stopped(KeyboardInterrupt):
    """A signal asks the process to end: SIGTERM, or SIGHUP, when its terminal is closed. Handled like Ctrl-C."""

    def __init__(self, number: int):
        self.number = number


def reason_and_status(stop: KeyboardInterrupt) -> tuple[str, int]:
    """What stopped the process, and the exit status that says so."""
    number = stop.number if isinstance(stop, Stopped) else signal.SIGINT
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name, 128 + number


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Within the block SIGTERM and SIGHUP raise Stopped; signals that are ignored, as under nohup, stay so."""

    def stop(number: int, _: FrameType | None) -> None:
        raise Stopped(number)

    names = [name for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]  # Windows has no SIGHUP
    numbers = [getattr(signal, name) for name in names if signal.getsignal(getattr(signal, name)) != signal.SIG_IGN]
    if threading.current_thread() is not threading.main_thread():
        numbers = []  # where handlers cannot be set
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Patient:
    """A stream that survives its reader: when a pipe or a terminal is closed, what follows goes nowhere."""

    def __init__(self, stream: TextIO):
        self.stream = stream

    def __getattr__(self, name: str):
        return getattr(self.stream, name)

    def attempt(self, act: Callable[[], object]) -> None:
        try:
            act()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.stream.fileno())  # where Python's last flush goes, too
            os.close(nowhere)

    def write(self, text: str) -> int:
        self.attempt(lambda: self.stream.write(text))
        return len(text)

    def flush(self) -> None:
        self.attempt(self.stream.flush)


@contextmanager
def outliving_readers() -> Iterator[None]:
    """Within the block, a closed pipe or terminal does not end the work."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(Patient, before)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stdout, sys.stderr = before


def begin(parser: Parser) -> argparse.Namespace:
    """The flags. From here on, Ctrl-C that nobody handles, as while torch is imported, ends in one line."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            print(f"{parser.prog}: stopped by {reason_and_status(error)[0]}, nothing was saved", file=sys.stderr)
        else:
            before(kind, error, trace)

    sys.excepthook = hook
    return parser.parse_args()
