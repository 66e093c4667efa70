"""What grading one submission costs, beside one run of the same tests at home."""
# ruff: noqa: PLC0415  torch takes seconds to import: only where it is needed, so that --help is quick

import os
import subprocess
import sys
from statistics import median

from grading.confinement import Unsafe, find_confinement, kit
from manifest import LAB

from measuring.bench import seconds


def print_grading(repeats: int) -> None:
    """Both, in turns, on one core each: the reference through the door, as grade.py does it for every submission after
    the first; and `RL_SOLUTIONS=1 python -m pytest -q`, which starts anew every time.
    """
    from grading.exam import make_exam
    from grading.examination import grade_submission
    from grading.process import Workshop

    exam = make_exam(timeout=600)
    source = (LAB / "solutions" / "grpo.py").read_bytes()
    command = [sys.executable, "-m", "pytest", "-q"]
    home = {"cwd": LAB, "env": os.environ | {"RL_SOLUTIONS": "1"}, "stdout": subprocess.DEVNULL}
    with kit() as folder:
        try:
            confinement = find_confinement(folder)
        except Unsafe:
            confinement = find_confinement(folder, unconfined=True)
        workshop = Workshop(confinement, folder, exam.seconds, job=0)
        grade = lambda: grade_submission("reference", source, exam, workshop)  # noqa: E731
        if grade().total != 100:
            raise ValueError("the reference does not pass all tests here")
        graded, tested = [], []
        for _ in range(repeats):
            graded += seconds(grade, 1)
            tested += seconds(lambda: subprocess.run(command, check=True, **home), 1)
    print(f"\ngrading one submission ({confinement.name})   {median(graded):6.1f} s")
    print(f"one run of its tests by pytest          {median(tested):6.1f} s")
