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

from manifest import LAB, MODULES, SFT

MEMORY = 2 * 2**30  # bytes that a submission may allocate, beside what Python and torch take
DISK = 512 * 2**20  # bytes that it may write, where bubblewrap confines it
WITHHELD = ("lab/examine.py", "lab/inputs.py", "lab/diagnose/")  # of lab/: what the tests alone need
KIT = ["tinylm.py", SFT, *(name for name in MODULES if not name.startswith(WITHHELD))]
# Where root grades, submissions run as users of their own, each as another one: below 65,534, which is nobody.
FIRST_UID, MOST_UIDS, MOST_JOBS = 61_000, 63 * 64, 64
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
ETC = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")


class Unsafe(Exception):
    """Submissions would run with more rights than they may have; says what to do."""


@dataclass(frozen=True)
class Confinement:
    """One way to start the process of the students' code."""

    name: str  # "bubblewrap", "user", "container" or "none"
    told: str  # what is in force, and what is not
    image: str = ""  # of the container
    hidden: tuple[str, ...] = ()  # folders that bubblewrap shows empty, should they lie where Python does

    def command(self, kit: Path, arguments: list[str], uid: int) -> list[str]:
        """The command line of worker.py with these arguments. uid: the user, where it has one of its own."""
        python = [sys.executable, "-I", "-X", "utf8"]
        if self.name == "container":
            limits = ["--network", "none", "--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--pids-limit", "256"]
            limits += ["--security-opt", "no-new-privileges", "--user", "65534:65534", "--memory", f"{2 * MEMORY}"]
            limits += ["--volume", f"{kit}:/kit:ro", "--env", "TINYLM_THREADS=1", "--env", "OMP_NUM_THREADS=1"]
            run = ["docker", "run", "--rm", "--interactive", *limits, self.image]
            return [*run, "python", "-I", "/kit/worker.py", *arguments]
        if self.name == "bubblewrap":
            return [*bubblewrap(kit, self.hidden), *python, "/kit/worker.py", *arguments]
        command = [*python, str(kit / "worker.py"), *arguments]
        return as_user(uid, command) if self.name == "user" else command


def bubblewrap(kit: Path, hidden: tuple[str, ...]) -> list[str]:
    """bwrap with its flags: the system and Python to be read, an empty /tmp, the kit, and nothing else: no network, no
    other process, no capability. What is written is gone with the process.
    """
    python = {sys.prefix, sys.base_prefix, *sysconfig.get_paths().values()} - {*hidden}
    outside = sorted(folder for folder in python if not folder.startswith(SYSTEM) and Path(folder).is_dir())
    flags = ["--unshare-all", "--uid", "65534", "--gid", "65534", "--die-with-parent", "--new-session"]
    flags += ["--cap-drop", "ALL", "--proc", "/proc", "--dev", "/dev"]
    for folder in ("/tmp", "/dev/shm"):
        flags += ["--size", str(DISK), "--tmpfs", folder]
    for folder in (*SYSTEM, *ETC, *outside):  # outer folders come before inner ones: a Python in a hidden one is seen
        flags += ["--ro-bind-try", folder, folder]
        for secret in hidden:
            flags += ["--tmpfs", secret] if secret.startswith(f"{folder}/") else []
    flags += ["--ro-bind", str(kit), "/kit"]
    flags += ["--remount-ro", "/dev", "--remount-ro", "/"]  # of each this mount alone, not what lies on it
    return ["bwrap", *flags, "--chdir", "/tmp", "--"]


def is_root() -> bool:
    return hasattr(os, "geteuid") and os.geteuid() == 0


def works(command: list[str]) -> bool:
    """Whether a command ends well."""
    try:
        return subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def find_confinement(kit: Path, image: str = "", unconfined: bool = False, hidden: tuple[str, ...] = ()) -> Confinement:
    """The best that this machine has, or what is asked for. Raises Unsafe where root has nothing.

    hidden: folders that no submission may see, besides the lab's.
    """
    hidden = (str(LAB), *hidden)
    if image:
        return Confinement("container", f"each submission runs in a container of {image}, without network", image)
    nothing = "not confined: submissions can read your files and use the network; only time and memory are limited"
    if unconfined:
        return Confinement("none", f"{nothing} (--unconfined)")
    if shutil.which("bwrap") and works([*bubblewrap(kit, hidden), sys.executable, "-I", "-c", "import torch"]):
        told = "in bubblewrap: no network, a read-only system, none of your files"
        return Confinement("bubblewrap", told, hidden=hidden)
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
