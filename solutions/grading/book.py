"""What is written of a grade: a row of the table, the feedback, Gradescope's results.json."""

import csv
import io
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from grading.exam import Exam
from lab.files import whole_file


@dataclass
class Grade:
    """What a submission earned: per test the points and what the student may read, and a status for the instructor."""

    name: str
    digest: str = ""
    points: dict[str, float] = field(default_factory=dict)
    messages: dict[str, str] = field(default_factory=dict)
    status: str = "graded"
    seconds: float = 0.0

    def of_task(self, exam: Exam, task: int) -> float:
        return sum(self.points.get(test.name, 0) for test in exam.tests if test.task == task)

    @property
    def total(self) -> float:
        return sum(self.points.values())


def readable(message: str) -> str:
    """A message without what is none of the student's business: folders of this machine, control characters."""
    message = re.sub(r"(/|[A-Za-z]:\\)[^\s'\"]*[/\\]", "", message)
    lines = ["".join(c if c.isprintable() else " " for c in line)[:300] for line in message.splitlines()]
    return "\n".join(lines[:30])


def columns(exam: Exam) -> list[str]:
    return ["name", *(f"task{task}" for task in exam.tasks), "total", "seconds", "status", "submission"]


def cell(name: str) -> str:
    """A name that a spreadsheet won't take for a formula."""
    return f"'{name}" if name.startswith(("=", "+", "-", "@")) else name


def row_of(grade: Grade, exam: Exam) -> dict[str, str]:
    points = {f"task{task}": f"{grade.of_task(exam, task):g}" for task in exam.tasks}
    told = " ".join(readable(grade.status).split())[:300]
    return {"name": cell(grade.name), **points, "total": f"{grade.total:g}", "seconds": f"{grade.seconds:.1f}",
            "status": cell(told), "submission": grade.digest}  # fmt: skip


def feedback(grade: Grade, exam: Exam) -> str:
    """What the student may read: points, and for each test that failed why."""
    lines = [f"Lab 15: {grade.name}", f"{grade.total:g} of {sum(t.points for t in exam.tests):g} points", ""]
    if grade.status != "graded":
        lines[2:2] = [readable(grade.status)]
    for task in exam.tasks:
        possible = exam.points_of(task)
        lines.append(f"task {task}: {grade.of_task(exam, task):g} of {possible:g}")
    for test in exam.tests:
        earned = grade.points.get(test.name, 0)
        lines += ["", f"{test.number}  {test.name}: {earned:g} of {test.points:g}"]
        lines += [f"     {line}" for line in grade.messages.get(test.name, "").splitlines()]
    return "\n".join(lines) + "\n"


def gradescope(grade: Grade, exam: Exam) -> dict:
    """The same as Gradescope's results.json."""
    tests = [
        {
            "name": test.name,
            "number": test.number,
            "score": grade.points.get(test.name, 0),
            "max_score": test.points,
            "status": "passed" if test.name in grade.points else "failed",
            "output": grade.messages.get(test.name, ""),
            "visibility": "visible",
        }
        for test in exam.tests
    ]
    return {
        "tests": tests,
        "execution_time": round(grade.seconds),
        "output": "" if grade.status == "graded" else readable(grade.status),
        "output_format": "text",
        "visibility": "visible",
        "stdout_visibility": "hidden",
    }


def write_whole(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as temporary, temporary.open("w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def table(rows: list[dict[str, str]], names: list[str], header: bool = True) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def finished_rows(out: Path) -> list[dict[str, str]]:
    """The rows of an earlier run; a last one that was cut short is left out. Raises ValueError on a foreign file."""
    content = out.read_bytes()
    whole, _, _ = content.rpartition(b"\n")  # what follows is cut before it is decoded: perhaps within a letter
    lines = whole.decode("utf-8").splitlines(keepends=True)
    try:
        rows = list(csv.DictReader(lines))
        foreign = bool(content) and not content.startswith(b"name,task1,")
    except csv.Error:
        foreign = True
    if foreign:
        raise ValueError(f"{out} is not a table of grades")
    return [row for row in rows if None not in row and None not in row.values()]


class Book:
    """grades.csv and what lies beside it. A grade is on the disk before the next one is awaited."""

    def __init__(self, out: Path, with_gradescope: bool):
        self.out, self.with_gradescope = out, with_gradescope
        self.rows: dict[str, dict[str, str]] = {}

    def files(self, name: str) -> list[Path]:
        files = [self.out.parent / "feedback" / f"{name}.txt"]
        return files + [self.out.parent / "gradescope" / name / "results.json"] * self.with_gradescope

    def done(self, name: str, digest: str) -> bool:
        row = self.rows.get(cell(name))
        return bool(row and row["submission"] == digest and all(path.exists() for path in self.files(name)))

    def write(self, exam: Exam) -> None:
        """The whole table, in the order of the names."""
        write_whole(self.out, table([self.rows[name] for name in sorted(self.rows)], columns(exam)))

    def enter(self, grade: Grade, exam: Exam) -> None:
        texts = [feedback(grade, exam), json.dumps(gradescope(grade, exam), indent=1, ensure_ascii=False)]
        for path, text in zip(self.files(grade.name), texts, strict=False):
            write_whole(path, text)
        row = row_of(grade, exam)
        self.rows[row["name"]] = row
        with self.out.open("a", encoding="utf-8", newline="") as file:
            file.write(table([row], columns(exam), header=False))
            file.flush()
            os.fsync(file.fileno())
