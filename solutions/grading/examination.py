"""One submission's grade: every test, asked through the door to its process. What decides stands on this side."""

import functools
import time
from pathlib import Path

import tinylm
from grading.book import Grade, readable
from grading.confinement import Confinement
from grading.exam import Exam, Test, functions
from grading.process import Ended, Hung, RemoteDoor, Workshop
from lab.door import BUILDS_ON, NAMES
from lab.examine import Examiner, Memory, run

HANGS = 2  # after so many tests of a task that hang, its others are not run


@functools.cache
def starting_policy() -> tinylm.TinyLM:
    return tinylm.load_or_train_sft().requires_grad_(False)


def run_test(test: Test, door: RemoteDoor, memory: Memory) -> str:
    """Run one test: "" if it passes, or what it says. Raises Ended or Hung."""
    door.line.allow(door.timeout)
    try:
        return run(functions()[test.name], Examiner(door, starting_policy(), memory))
    except (Ended, Hung):
        raise
    except Exception as error:  # of a test that a strange answer has upset: no point for that
        return f"Task {test.task} ({NAMES[test.task]}): the test could make nothing of it: {type(error).__name__}"


def grade_submission(name: str, source: bytes, exam: Exam, workshop: Workshop) -> Grade:
    """Run every test, with as many processes as it takes: after a test that ends or hangs its process, a new one."""
    grade, started, memory = Grade(name), time.monotonic(), Memory()
    hangs, over, statuses = dict.fromkeys(exam.tasks, 0), "", []
    with RemoteDoor(workshop, source, exam.timeout) as door:
        for test in exam.tests:
            if not over and time.monotonic() - started > exam.seconds:
                over = f"the submission used up its {exam.seconds:g} seconds"
                statuses.append(over)
            if over or hangs[test.task] >= HANGS:
                grade.messages[test.name] = f"not run: {over or f'task {test.task} hung before'}"
                continue
            try:
                # Where an earlier task is right, it is the student's own function that this one builds on, as at home.
                earlier = BUILDS_ON.get(test.task, ())
                wrong = [NAMES[task] for task in earlier if grade.of_task(exam, task) < exam.points_of(task)]
                door.begin_task(exam.stand_ins[test.task], wrong)
                if door.line is None and (problem := door.load()):
                    over = " ".join(readable(problem).split())
                    statuses.append(over)
                    grade.messages[test.name] = over
                    continue
                grade.messages[test.name] = readable(run_test(test, door, memory))
                if not grade.messages[test.name]:
                    grade.points[test.name] = test.points
            except (Ended, Hung) as error:
                what = str(error) or f"took longer than {exam.timeout:g} seconds"
                where = f"in {test.name}" if door.imported else "when imported"
                hangs[test.task] += isinstance(error, Hung)
                over = "" if door.imported else f"grpo.py {what} {where}"
                statuses.append(f"{what} {where}")
                grade.messages[test.name] = readable(f"grpo.py {what} {where}")
                door.close()
    grade.status = "; ".join(statuses[:4]) or "graded"
    grade.seconds = time.monotonic() - started
    return grade


# In a process of the pool ------------------------------------------------------------------------------------------

_place: tuple[Exam, Workshop] | None = None


def prepare(exam: Exam, confinement: Confinement, kit: Path, jobs) -> None:
    """Once in each process of the pool: what it needs to grade. `jobs` counts the processes."""
    global _place  # noqa: PLW0603
    with jobs.get_lock():
        jobs.value += 1
        job = jobs.value
    _place = exam, Workshop(confinement, kit, exam.seconds, job)


def grade_here(name: str, source: bytes) -> Grade:
    """grade_submission in a process of the pool."""
    exam, workshop = _place
    return grade_submission(name, source, exam, workshop)
