"""Where a command writes: whole files or none, its own and no others, one run at a time."""

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from filelock import FileLock  # comes with torch

from lab.flags import DEFAULT_OUT

PICTURES = (".png", ".pdf", ".svg", ".jpg")


def temporary_beside(path: Path) -> Path:
    """The name under which a file is written before it is whole."""
    return path.with_name(f".{os.getpid()}.{path.name}")


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A temporary path to write to; it becomes `path` only if the block ends well, so no file is ever half there."""
    temporary = temporary_beside(path)
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def files_of(out: Path) -> tuple[Path, Path, Path]:
    """(plot, CSV, checkpoint) of the run that plots to `out`."""
    checkpoint = out.with_name("tinylm_grpo.pt") if out == DEFAULT_OUT else out.with_suffix(".pt")
    return out, out.with_suffix(".csv"), checkpoint


# Before the work: may it be written? -----------------------------------------------------------------------------


def check_picture(out: Path) -> None:
    """Raise ValueError if `out` has no picture's ending, or its folder is not there or cannot be written to."""
    if out.suffix.lower() not in PICTURES:
        raise ValueError(f"--out {out}: the name must end in one of {', '.join(PICTURES)}")
    probe = temporary_beside(out)
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(f"--out {out}: cannot write to the folder {out.parent}: {error.strerror}") from error


def check_marked(out: Path, mark: str) -> None:
    """Raise ValueError if the picture `out` cannot be written, or is there already and does not carry `mark`."""
    check_picture(out)
    try:
        foreign = out.exists() and (out.is_dir() or mark.encode() not in out.read_bytes())
    except OSError as error:
        raise ValueError(f"--out {out}: cannot read what is there: {error.strerror}") from error
    if foreign:
        raise ValueError(f"{out} is there already, and not {mark}: name another --out, or delete that file")


def check_run(out: Path, first_line: str) -> None:
    """Raise ValueError, before any training, if a run's files can't be written, or would replace what is not its own:
    files beside a CSV that begins with another line than this run's will.
    """
    check_picture(out)
    if out.stem.lower() in ("tinylm_sft", "tinylm_grpo", "passk"):
        raise ValueError(f"--out {out}: the lab has another file of that name")
    picture, table, checkpoint = files_of(out)
    try:
        with table.open(encoding="utf-8") as file:
            same_settings = file.readline() == first_line
    except (OSError, UnicodeDecodeError):
        same_settings = False
    for path in (picture, table, checkpoint):
        if path.exists() and not (same_settings and path.is_file()):
            reason = "is there already, and not from a run with these settings"
            raise ValueError(f"{path} {reason}: name this run with --out NAME.png, or delete that file")


@contextmanager
def lock_on(out: Path) -> Iterator[None]:
    """Only one run at a time can hold it on the files beside `out`; raises TimeoutError if another does. It ends with
    its process at the latest, and leaves nothing behind when it ends well.
    """
    name = hashlib.sha256(str(out.resolve().with_suffix("")).encode()).hexdigest()[:16]
    path = Path(tempfile.gettempdir()) / f"grpo-lab-{name}.lock"
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
        except PermissionError as error:  # it is another user's
            raise TimeoutError from error
        try:
            with FileLock(path, timeout=0):
                # A run that ended just now may have deleted the file before we had the lock, and another have made it
                # anew: we hold the lock only if it is still the file that we opened.
                if is_at(path, descriptor):
                    try:
                        yield
                        return
                    finally:
                        with suppress(PermissionError):  # Windows keeps a file that is open
                            path.unlink(missing_ok=True)
        finally:
            os.close(descriptor)


def is_at(path: Path, descriptor: int) -> bool:
    """Whether the open file `descriptor` is the one at `path`."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


# After the work: each file by itself -----------------------------------------------------------------------------


def free_name(path: Path) -> Path:
    """The first of name-2.png, name-3.png ... that is not there, nor any other file of that name."""
    names = (path.with_stem(f"{path.stem}-{i}") for i in count(2))
    return next(other for other in names if not any(part.exists() for part in {other, *files_of(other)}))


def save_each(writers: dict[Path, Callable[[Path], None]]) -> tuple[list[Path], list[str], list[str]]:
    """Let each writer write its file; one that can't be written goes under a free name beside it, for a run's results
    must not be lost because a spreadsheet holds one of three files. Returns (the files that were saved, remarks on
    those of another name, problems with those that could not be saved at all). Ctrl-C ends it, and is such a problem.
    """
    saved, remarks, problems = [], [], []
    for path, write in writers.items():
        try:
            write(path)
            saved.append(path)
        except OSError as error:
            other = free_name(path)
            try:
                write(other)
                saved.append(other)
                remarks.append(f"{path} cannot be written ({error.strerror or error}): it is in {other}")
            except OSError as second:
                problems.append(f"{path} ({second.strerror or second})")
        except KeyboardInterrupt:
            problems += [f"{left} (stopped)" for left in writers if left not in saved]
            break
    return saved, remarks, problems
