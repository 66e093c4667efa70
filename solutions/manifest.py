"""Which of the lab's files are handed out, and which of them the tests need; copies of them."""

import shutil
from pathlib import Path

LAB = Path(__file__).resolve().parent.parent
SFT = "tinylm_sft.pt"  # the starting policy, which is trained where it is missing
MODULES = sorted(path.relative_to(LAB).as_posix() for path in (LAB / "lab").rglob("*.py"))
TESTS = ["conftest.py", "pyproject.toml", "test_grpo.py", "tinylm.py", *MODULES]
STUDENT = [*TESTS, ".gitignore", "LICENSE", "README.md", "colab_grpo_trl.md", "grpo.py", "passk.py", "requirements.txt"]
STUDENT += ["run.py", *sorted(path.relative_to(LAB).as_posix() for path in (LAB / "figures").glob("*.png"))]
AUTOGRADER = [*TESTS, "requirements.txt"]
AUTOGRADER += [f"solutions/{name}" for name in ("grade.py", "grpo.py", "manifest.py")]
AUTOGRADER += sorted(path.relative_to(LAB).as_posix() for path in (LAB / "solutions" / "grading").glob("*.py"))


def solutions_files() -> list[str]:
    """What `--with-solutions` adds: the commands, their rooms and the tests."""
    paths = [*(LAB / "solutions").glob("*"), *(LAB / "solutions").glob("*/*")]
    return sorted(path.relative_to(LAB).as_posix() for path in paths if path.suffix in (".py", ".md", ".txt"))


def copy_lab(names: list[str], folder: Path) -> Path:
    """A copy of some of the lab's files in `folder`, which is returned."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(LAB / name, folder / name)
    return folder
