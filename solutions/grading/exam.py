"""The tests, what they are worth, and what stands in for the tasks that come before."""

import ast
import hashlib
import os
import re
import secrets
from dataclasses import dataclass, field

from manifest import LAB, TESTS


@dataclass(frozen=True)
class Test:
    __test__ = False  # not one of pytest's

    name: str
    task: int
    number: str  # "1.2": the second test of task 1
    points: float


@dataclass
class Exam:
    """What is the same for all submissions of a run, in every process."""

    tests: list[Test]
    reference: str  # its source
    stand_ins: dict[int, bytes]  # task -> a grpo.py in which that task and later ones are not written
    digest: str  # changes with the tests, the reference and the starting policy
    timeout: float  # seconds for a test
    seed: str = field(default_factory=lambda: str(secrets.randbelow(10**6)))  # the same inputs for everyone

    @property
    def tasks(self) -> list[int]:
        return sorted({test.task for test in self.tests})

    def points_of(self, task: int) -> float:
        """What a task is worth."""
        return sum(test.points for test in self.tests if test.task == task)

    @property
    def seconds(self) -> float:
        """The most that one submission may take: two hangs in each of four tasks."""
        return 8 * self.timeout


def task_bodies(source: str) -> dict[int, tuple[str, int, int]]:
    """task -> (function, first, last + 1): the lines, counted from 0, that follow its "# TODO(task N)"."""
    bodies, lines = {}, source.splitlines()
    for node in ast.parse(source).body:
        for i in range(node.lineno - 1, node.end_lineno):
            if isinstance(node, ast.FunctionDef) and (found := re.fullmatch(r" *# TODO\(task (\d)\)", lines[i])):
                bodies[int(found[1])] = (node.name, i + 1, node.end_lineno)
    return bodies


def unwritten(source: str, from_task: int) -> str:
    """`source` without the bodies of `from_task` and of later tasks."""
    lines = source.splitlines(keepends=True)
    for task, (_, first, last) in sorted(task_bodies(source).items(), reverse=True):
        if task >= from_task:
            lines[first:last] = ['    raise NotImplementedError("not written")\n']
    return "".join(lines)


def functions() -> dict:
    """The tests by name, in their order. With LAB_SEED in the environment, before this is first called, they draw the
    same inputs in every process.
    """
    import test_grpo  # noqa: PLC0415  (torch: after the flags were read, and in every process by itself)

    return {name: test for name, test in vars(test_grpo).items() if name.startswith("test_")}


def points_of(test) -> float:
    return sum(mark.args[0] for mark in getattr(test, "pytestmark", []) if mark.name == "points")


def make_exam(timeout: float) -> Exam:
    """The exam of the lab's own test_grpo.py and reference."""
    import tinylm  # noqa: PLC0415

    tinylm.load_or_train_sft()
    reference = (LAB / "solutions" / "grpo.py").read_text(encoding="utf-8")
    stand_ins = {task: unwritten(reference, task).encode() for task in task_bodies(reference)}
    files = [(LAB / name).read_bytes() for name in TESTS] + [tinylm.SFT_PATH.read_bytes(), reference.encode()]
    exam = Exam([], reference, stand_ins, hashlib.sha256(b"\0".join(files)).hexdigest(), timeout)
    os.environ["LAB_SEED"] = exam.seed
    for name, test in functions().items():
        task = int(re.match(r"test_task(\d)_", name)[1])
        number = f"{task}.{1 + sum(other.task == task for other in exam.tests)}"
        exam.tests.append(Test(name, task, number, points_of(test)))
    return exam


def submission_digest(source: bytes, exam: Exam) -> str:
    """Changes with the submission, and with the tests."""
    return hashlib.sha256(exam.digest.encode() + source).hexdigest()[:16]


# Wrong in value alone: each task has a test that must reject it.
WRONG = """

def sample_group(model, prompts, G, temperature=1.0, generator=None):
    rows = prompts.repeat_interleave(G, dim=0)
    responses = tinylm.generate(model, rows, temperature, generator)
    mask, texts = tinylm.response_mask(responses), tinylm.decode_and_strip_padding(responses)
    return Samples(rows, responses, 1 - mask, 0.3 + mask.sum(dim=1) / 7, texts)


def group_advantages(rewards, G, normalize_std=True, eps=1e-4):
    return 0.3 + 0.7 * rewards


def k3_kl(logp, ref_logp):
    return 0.3 + 0.7 * (logp - ref_logp)


def grpo_loss(logp, old_logp, ref_logp, advantages, mask, clip=0.2, beta=0.04):
    loss = -((logp - old_logp).exp() * advantages.unsqueeze(1)).mean()
    return loss, dict.fromkeys(("clip_fraction", "kl", "ratio"), 0.3 + 0 * loss.detach())


def grpo_step(model, ref_model, optimizer, prompts, config, generator=None):
    samples = sample_group(model, prompts, config.G, config.temperature, generator)
    return samples, dict.fromkeys(("clip_fraction", "kl", "ratio", "loss"), torch.tensor(0.3))
"""


def known_wrong(reference: str) -> bytes:
    """A grpo.py that every task's tests must reject: WRONG takes the place of its five functions."""
    return (reference + WRONG).encode()
