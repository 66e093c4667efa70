"""What the operating system keeps the student's process from, by its own well-kept parts: bubblewrap, a container, a
user of its own; and the kit, the folder of files that is all of the lab that the process gets to see.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from manifest import LAB

MEMORY = 2 * 2**30  # bytes that a submission may allocate, beside what Python and torch take
KIT = ["tinylm.py", "tinylm_sft.pt", "lab/__init__.py", "lab/flags.py", "lab/start.py"]
KIT += [path.relative_to(LAB).as_posix() for path in sorted((LAB / "lab" / "door").glob("*.py"))]
# Where root grades, submissions run as users of their own, numbered from here: below 65,534, which is nobody, and in
# blocks of 64, so that two graders at once hardly ever share a user, whose processes each of them ends.
FIRST_UID = 61_000
SYSTEM = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/etc/ld.so.cache",
    "/etc/alternatives",
    "/etc/localtime",
)


class Unsafe(Exception):
    """Submissions would run with more rights than they may have; says what to do."""


@dataclass(frozen=True)
class Confinement:
    """One way to start the process of the students' code."""

    name: str  # "bubblewrap", "user", "container" or "none"
    told: str  # what is in force, and what is not
    image: str = ""  # of the container

    def command(self, kit: Path, arguments: list[str]) -> list[str]:
        """The command line of worker.py with these arguments."""
        python = [sys.executable, "-I", "-X", "utf8"]
        if self.name == "container":
            limits = ["--network", "none", "--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--pids-limit", "64"]
            limits += ["--security-opt", "no-new-privileges", "--user", "65534:65534", "--memory", f"{2 * MEMORY}"]
            limits += ["--volume", f"{kit}:/kit:ro", "--env", "TINYLM_THREADS=1", "--env", "OMP_NUM_THREADS=1"]
            run = ["docker", "run", "--rm", "--interactive", *limits, self.image]
            return [*run, "python", "-I", "/kit/worker.py", *arguments]
        if self.name == "bubblewrap":
            return [*bubblewrap(kit), *python, "/kit/worker.py", *arguments]
        return [*python, str(kit / "worker.py"), *arguments]


def bubblewrap(kit: Path) -> list[str]:
    """bwrap with its flags: the system and Python to be read, an empty /tmp, the kit, and nothing else: no network, no
    other process, no capability.
    """
    folders = {sys.prefix, sys.base_prefix, *sysconfig.get_paths().values()} - {str(LAB)}
    outside = sorted(folder for folder in folders if not folder.startswith(SYSTEM[:6]) and Path(folder).is_dir())
    flags = ["--unshare-all", "--uid", "65534", "--gid", "65534", "--die-with-parent", "--new-session"]
    flags += ["--cap-drop", "ALL", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    for folder in (*SYSTEM, *outside):
        flags += ["--ro-bind-try", folder, folder]
    return ["bwrap", *flags, "--ro-bind", str(kit), "/kit", "--chdir", "/tmp", "--"]


def is_root() -> bool:
    return hasattr(os, "geteuid") and os.geteuid() == 0


def works(command: list[str]) -> bool:
    """Whether a command ends well."""
    try:
        return subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def find_confinement(kit: Path, image: str = "", unconfined: bool = False) -> Confinement:
    """The best that this machine has, or what is asked for. Raises Unsafe where root has nothing."""
    if image:
        return Confinement("container", f"each submission runs in a container of {image}, without network", image)
    nothing = "not confined: submissions can read your files and use the network; only time and memory are limited"
    if unconfined:
        return Confinement("none", f"{nothing} (--unconfined)")
    if shutil.which("bwrap") and works([*bubblewrap(kit), sys.executable, "-I", "-c", "import torch"]):
        return Confinement("bubblewrap", "in bubblewrap: no network, a read-only system, none of your files")
    if is_root():
        readable = [sys.executable, "-I", "-c", "import torch, sys; open(sys.argv[1])", str(kit / "worker.py")]
        if works(as_user(FIRST_UID, readable)):
            seen = works(as_user(FIRST_UID, [sys.executable, "-I", "-c", OPENS, str(LAB / "solutions" / "grpo.py")]))
            lacking = "files that everyone may read" + (", solutions/ among them (chmod o-rwx it)" if seen else "")
            told = f"as users of their own, but not in bubblewrap: not kept from the network, nor from {lacking}"
            return Confinement("user", told)
        raise Unsafe(
            "this is root, and no other user can read this Python: install bubblewrap, or grade as another user, or "
            "give --unconfined, and submissions may do what root may"
        )
    return Confinement("none", f"{nothing} (bubblewrap, where installed, does the rest)")


OPENS = "import sys; open(sys.argv[1])"
BECOME = "import os, sys; os.setgroups([]); os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1])); "
BECOME += "os.execv(sys.argv[2], sys.argv[2:])"


def as_user(uid: int, command: list[str]) -> list[str]:
    return [sys.executable, "-I", "-c", BECOME, str(uid), *command]


@contextmanager
def kit() -> Iterator[Path]:
    """A folder with the files of the student's process."""
    folder = Path(tempfile.mkdtemp(prefix="grade-kit-")).resolve()
    try:
        folder.chmod(0o755)
        for name in KIT:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(LAB / name, folder / name)
        for name in ("worker.py", "wire.py"):
            shutil.copyfile(Path(__file__).with_name(name), folder / name)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
