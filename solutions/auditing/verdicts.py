"""What the tests made of an entry, and whether that is what they should."""

import re
from dataclasses import dataclass

from auditing.entries import Entry, Variation, parts, tasks


def task_of(test: str) -> int | None:
    match = re.match(r"test_task(\d)_", test)
    return int(match[1]) if match else None


def headline(message: str) -> str:
    """The first line of a message, without the names of the exception, the task and its function.

    The lines after it quote values and settings: a word found there names nothing.
    """
    first = message.strip().split("\n")[0]
    return re.sub(r"^(\w+: )?(Task \d \(\w+\): )?", "", first)


def names(message: str, says: tuple[str, ...]) -> bool:
    """Does this failure name the mistake, in its first line?"""
    text = headline(message).lower()
    return all(any(word in text for word in words.lower().split("|")) for words in says)


@dataclass(frozen=True)
class Verdict:
    """What the tests made of an entry, and whether that is what they should."""

    entry: Entry
    good: bool
    outcome: str
    failures: tuple[tuple[str, str], ...] = ()  # (test, message)
    named_by: str | None = None  # the first test that names the mistake

    @property
    def test(self) -> str:
        return self.named_by or (self.failures[0][0] if self.failures else "")


def judge(entry: Entry, reports: list[dict[str, str]] | None) -> Verdict:
    if reports is None:
        return Verdict(entry, False, "NO ANSWER")
    failures = tuple((report["test"], report["message"]) for report in reports if report["outcome"] == "failed")
    skipped = [report["test"] for report in reports if report["outcome"] == "skipped"]
    if not reports or any(test == "(collection)" for test, _ in failures):
        return Verdict(entry, False, "NOT RUN", failures)
    if isinstance(entry, Variation):
        outcome = "REJECTED" if failures else "SKIPPED" if skipped else "accepted"
        return Verdict(entry, outcome == "accepted", outcome, failures)
    failed = {task_of(test) for test, _ in failures}
    accepted = [task for task in tasks(entry) if task not in failed]
    spoiled = failed.difference(tasks(entry))
    named_by = next(
        (
            test
            for part in parts(entry)
            for test, message in failures
            if task_of(test) == part.task and names(message, part.says)
        ),
        None,
    )
    if accepted:
        outcome = "ACCEPTED" + (f" in task {accepted[0]}" if len(tasks(entry)) > 1 else "")
    elif spoiled:
        outcome = f"SPOILS task {min(spoiled)}"
    else:
        outcome = "rejected"
    return Verdict(entry, outcome == "rejected", outcome, failures, named_by)
