"""Build what is handed out: lab15.zip for the students, or with --gradescope autograder.zip for Gradescope.

    python solutions/release.py                     lab15.zip, the students' files and the TRL guide as a notebook
    python solutions/release.py --with-solutions    lab15.zip with solutions/ in it
    python solutions/release.py --gradescope        autograder.zip, to upload as the autograder of an assignment

Before anything is written, four things are checked: the handout and the reference differ in the five bodies alone, the
handout's five are not written, and in the unpacked archive the first commands of its README do what it says and the
reference passes all tests. The same files give the same archive, byte for byte: fixed times, order and permissions, and
no compression, which differs between machines.
"""

import argparse
import ast
import os
import re
import shlex
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]
from grading.exam import task_bodies
from guiding.document import GUIDE, notebook
from manifest import AUTOGRADER, LAB, STUDENT, solutions_files

from lab.files import whole_file
from lab.flags import Parser

INSTALL = "pip install -r requirements.txt"
NOT_WRITTEN = "Task 1 (sample_group) is not written yet: open grpo.py"  # what a student's first command must say
TESTS_OF_THE_REFERENCE = "python -m pytest -q -p no:cacheprovider --solutions"
OURS = b"Lab 15, by solutions/release.py"  # the archive's comment, by which it is known again

SETUP = """\
#!/usr/bin/env bash
# Gradescope runs this once, as root, when it builds the image.
set -euo pipefail
apt-get update
apt-get install -y --no-install-recommends python3 python3-venv bubblewrap
python3 -m venv /autograder/venv
# The graders need no GPU. To keep the image small, have pip take torch's CPU build: see Gradescope in README.md.
/autograder/venv/bin/pip install --no-cache-dir -r /autograder/source/requirements.txt
chmod -R go-rwx /autograder/source  # where bubblewrap may not be used, submissions run as another user
"""
RUN = """\
#!/usr/bin/env bash
# Gradescope runs this for each submission, and reads results/results.json. Whatever happens, that file is there.
root="${AUTOGRADER_ROOT:-/autograder}"
python="${AUTOGRADER_PYTHON:-$root/venv/bin/python}"
results="$root/results/results.json"
mkdir -p "$root/results"
rm -f "$results"
# 25 seconds for a test that the reference passes in 5: with all that can hang, below Gradescope's 10 minutes.
timeout -k 10 560 "$python" "$root/source/solutions/grade.py" "$root/submission" --results "$results" --timeout 25 \\
    ${AUTOGRADER_FLAGS:-}
if [ ! -s "$results" ]; then
    cat > "$results" <<'JSON'
{"tests": [{"name": "grpo.py", "number": "1", "score": 0, "max_score": 100, "status": "failed",
            "output": "The grader did not finish. Please tell your instructor."}]}
JSON
fi
"""


class Unfit(Exception):
    """What was to be handed out is not in order; says why."""


def outside(source: str) -> list[tuple[int, str]]:
    """(line number, line) of what is not the body of a task."""
    inside = {i for _, first, last in task_bodies(source).values() for i in range(first, last)}
    return [(i + 1, line) for i, line in enumerate(source.splitlines()) if i not in inside]


def first_difference(handout: str, reference: str) -> str | None:
    """The first line outside of the five bodies in which the two files differ, or None."""
    if list(task_bodies(handout)) != [1, 2, 3, 4, 5] or list(task_bodies(reference)) != [1, 2, 3, 4, 5]:
        return 'the five lines "# TODO(task N)" are not all there, in order'
    ours, theirs = outside(handout), outside(reference)
    for (n, line), (m, other) in zip(ours, theirs, strict=False):
        if line != other:
            return f"grpo.py, line {n}: {line.strip()!r}; solutions/grpo.py, line {m}: {other.strip()!r}"
    if len(ours) != len(theirs):
        return f"{'grpo.py' if len(ours) > len(theirs) else 'solutions/grpo.py'} has more lines at its end"
    return None


def written_tasks(handout: str) -> list[int]:
    """The tasks of the handout whose body is more than a NotImplementedError that names the task and its function."""
    bodies = {node.name: node.body for node in ast.parse(handout).body if isinstance(node, ast.FunctionDef)}
    written = []
    for task, (name, _, _) in task_bodies(handout).items():
        _, *statements = bodies[name]  # after the docstring
        text = ast.unparse(statements[0]) if len(statements) == 1 else ""
        if not re.match(rf"raise NotImplementedError\(['\"]Task {task} \({name}\) is not written yet", text):
            written.append(task)
    return written


def files_of(names: list[str]) -> dict[str, bytes]:
    """The content of the lab's files, of texts with the line ends of Unix. Raises Unfit if one is missing."""
    missing = [name for name in names if not (LAB / name).is_file()]
    if missing:
        raise Unfit(f"missing in the lab: {', '.join(missing)}")
    contents = {name: (LAB / name).read_bytes() for name in names}
    return {n: data if n.endswith(".png") else data.replace(b"\r\n", b"\n") for n, data in contents.items()}


def notebook_bytes() -> bytes:
    """The TRL guide as a notebook, so that no student needs jupytext. Raises Unfit where jupytext is not installed."""
    try:
        import nbformat  # noqa: PLC0415  of jupytext's

        cells = notebook()
    except ModuleNotFoundError as error:
        raise Unfit(f"{error.name} is not installed: pip install -r solutions/requirements.txt") from error
    for number, cell in enumerate(cells.cells):
        cell.id = f"block-{number}"  # a random one otherwise, and another archive each time
    return nbformat.writes(cells).encode()


def write_zip(path: Path, files: dict[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.comment = OURS
        for name in sorted(files):
            info = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
            info.create_system = 3  # Unix, wherever this runs: the permissions count
            info.external_attr = (0o100755 if files[name].startswith(b"#!") else 0o100644) << 16
            archive.writestr(info, files[name])


def readme_commands(readme: str) -> tuple[list[str], list[str]]:
    """The commands under "Set-up": the student's, and those of somebody who has solutions/ too. Raises Unfit."""
    section = readme.partition("## Set-up\n")[2].partition("\n## ")[0]
    blocks = [block.splitlines() for block in re.findall(r"^```bash\n(.*?)^```", section, re.MULTILINE | re.DOTALL)]
    if len(blocks) != 2:
        raise Unfit(f"README.md has {len(blocks)} blocks of commands under Set-up, not two")
    return blocks[0], blocks[1]


def run_command(line: str, folder: Path) -> subprocess.CompletedProcess:
    """Run a line of the README in `folder`, but for what it installs: that is here already."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTEST_ADDOPTS", "RL_SOLUTIONS")}
    words = shlex.split(line.removeprefix(INSTALL).removeprefix(" && ")) or ["python", "-c", ""]
    while "=" in words[0]:
        name, _, environment[name] = words.pop(0).partition("=")
    if words.pop(0) != "python":
        raise Unfit(f"README.md: cannot run {line!r} here")
    pipes = {"capture_output": True, "encoding": "utf-8", "errors": "replace"}
    return subprocess.run([sys.executable, *words], cwd=folder, env=environment, check=False, **pipes)


def check_passes(done: subprocess.CompletedProcess, what: str) -> None:
    """Raise Unfit unless the command ended well."""
    if done.returncode:
        lines = list(dict.fromkeys(line for line in done.stdout.splitlines() if line.startswith("Task ")))
        why = lines or done.stdout.splitlines()[-1:] or done.stderr.splitlines()[-1:]
        raise Unfit(f"in the unpacked archive {what}: {'; '.join(why[:3])}")


def check_archive(path: Path, inside: str) -> None:
    """Unpack it, run there what its README says, and the tests on the reference, added if need be. Raises Unfit."""
    with tempfile.TemporaryDirectory() as temporary:
        with zipfile.ZipFile(path) as archive:
            archive.extractall(temporary)
        folder = Path(temporary) / inside
        reference = folder / "solutions" / "grpo.py"
        if (LAB / "tinylm_sft.pt").exists():  # spares the tests its training
            (folder / "tinylm_sft.pt").write_bytes((LAB / "tinylm_sft.pt").read_bytes())
        if (folder / "README.md").exists():
            students, with_solutions = readme_commands((folder / "README.md").read_text(encoding="utf-8"))
            for line in students:
                done = run_command(line, folder)
                if done.returncode and NOT_WRITTEN not in done.stdout:
                    raise Unfit(f"in the unpacked archive {line!r} does not say {NOT_WRITTEN!r}")
            for line in with_solutions if reference.exists() else []:
                check_passes(run_command(line, folder), f"{line!r} fails")
        if not reference.exists():
            reference.parent.mkdir(exist_ok=True)
            reference.write_bytes((LAB / "solutions" / "grpo.py").read_bytes())
        check_passes(run_command(TESTS_OF_THE_REFERENCE, folder), "the reference does not pass")


def release(out: Path, gradescope: bool, with_solutions: bool) -> str:
    """Check, then write the archive, whole or not at all. Returns what was done, for the screen. Raises Unfit."""
    if out.exists():
        if not zipfile.is_zipfile(out):
            raise Unfit(f"{out} is there already, and not by this command: delete it, or choose another --out")
        with zipfile.ZipFile(out) as archive:
            if archive.comment != OURS:
                raise Unfit(f"{out} is there already, and not by this command: delete it, or choose another --out")
    handout, reference = ((LAB / name).read_text(encoding="utf-8") for name in ("grpo.py", "solutions/grpo.py"))
    if difference := first_difference(handout, reference):
        raise Unfit(f"handout and reference differ outside of the five bodies: {difference}")
    if written := written_tasks(handout):
        raise Unfit(f"grpo.py: task {written[0]} is not left unwritten as it should be")
    if gradescope:
        files, inside = files_of(AUTOGRADER), ""
        files |= {"setup.sh": SETUP.encode(), "run_autograder": RUN.encode()}
    else:
        files, inside = files_of(STUDENT + (solutions_files() if with_solutions else [])), "lab15"
        files[GUIDE.with_suffix(".ipynb").name] = notebook_bytes()
        files = {f"{inside}/{name}": content for name, content in files.items()}

    replaced = out.exists()
    with whole_file(out) as temporary:
        write_zip(temporary, files)
        check_archive(temporary, inside)
        size = temporary.stat().st_size
    holds = ", the solutions among them" if with_solutions or gradescope else ""
    return f"{out}{' (replaced)' if replaced else ''}: {len(files)} files{holds}, {size // 1000} kB"


def build_parser() -> Parser:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--with-solutions", action="store_true", help="put solutions/ into lab15.zip")
    kind.add_argument("--gradescope", action="store_true", help="build autograder.zip")
    parser.add_argument("--out", type=Path, metavar="FILE.zip", help="another name (default: in the current folder)")
    return parser


def main() -> int:
    """Build the archive, and return the exit status."""
    parser = build_parser()
    args = parser.parse_args()
    out = args.out or Path("autograder.zip" if args.gradescope else "lab15.zip")
    try:
        if out.suffix != ".zip" or not out.parent.is_dir():
            raise Unfit(f"--out {out}: it must be named NAME.zip, in a folder that is there")
        print(release(out, args.gradescope, args.with_solutions))
    except (Unfit, OSError, SyntaxError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
