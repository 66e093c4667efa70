"""What was handed in: NAME.py, NAME/grpo.py or NAME.zip. Of each only the bytes of its grpo.py are used."""

import stat
import unicodedata
import zipfile
from pathlib import Path, PurePosixPath

SOURCE_LIMIT, ZIP_LIMIT, MEMBERS_LIMIT = 2**20, 50 * 2**20, 10_000  # bytes, bytes, files


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
