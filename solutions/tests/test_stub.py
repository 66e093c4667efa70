"""grpo.py and solutions/grpo.py are one file, but for the five bodies, which in grpo.py are not written."""

from pathlib import Path

import pytest
import release

LAB = Path(__file__).resolve().parents[2]

HANDOUT = (LAB / "grpo.py").read_text(encoding="utf-8")
REFERENCE = (LAB / "solutions" / "grpo.py").read_text(encoding="utf-8")


def test_handout_and_reference_agree_outside_of_the_bodies():
    assert release.first_difference(HANDOUT, REFERENCE) is None


def test_nothing_is_written_in_the_handout():
    assert release.written_tasks(HANDOUT) == []
    assert release.written_tasks(REFERENCE) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("G: int = 8", "G: int = 9", "'G: int = 9"),  # code above the tasks
        ("Hints:", "Hint:", "'Hint:'"),  # a docstring
        ("ref_logp: Tensor) -> Tensor:", "ref_logp):", "def k3_kl"),  # a signature
        ("def evaluate", "def assess", "def assess"),  # code below
    ],
)
def test_the_first_line_that_differs_is_named(old, new, told):
    assert old in HANDOUT
    changed = HANDOUT.replace(old, new, 1)
    number = next(i for i, line in enumerate(changed.splitlines(), start=1) if new in line)
    difference = release.first_difference(changed, REFERENCE)
    assert f"grpo.py, line {number}: " in difference and told in difference


def test_more_lines_and_missing_markers_are_told():
    assert "solutions/grpo.py has more lines" in release.first_difference(HANDOUT, REFERENCE + "\nx = 1\n")
    assert "TODO(task N)" in release.first_difference(HANDOUT.replace("# TODO(task 3)", "# here"), REFERENCE)


@pytest.mark.parametrize("task", [1, 2, 3, 4, 5])
def test_a_written_body_is_noticed(task):
    _, first, last = release.task_bodies(REFERENCE)[task]
    body = "".join(REFERENCE.splitlines(keepends=True)[first:last])
    lines = HANDOUT.splitlines(keepends=True)
    _, first, last = release.task_bodies(HANDOUT)[task]
    written = "".join([*lines[:first], body, *lines[last:]])
    assert release.first_difference(written, REFERENCE) is None
    assert release.written_tasks(written) == [task]
