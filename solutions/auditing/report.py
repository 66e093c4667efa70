"""What is printed of the verdicts."""

import difflib
import re
import textwrap

from auditing.entries import REFERENCE, Entry, Variation, changed_source, tasks
from auditing.runner import audit
from auditing.verdicts import Verdict, headline
from auditing.worker import tables_of_mistakes

NAMED_AT_LEAST = 0.95  # of the wrong solutions
VAGUE = re.compile(r"(is|are) wrong(, first at| of its gradient|$)|its gradient is not")  # says nothing of what it is


def print_list(entries: list[Entry]) -> None:
    for entry in entries:
        print(f"{type(entry).__name__:<12} {'+'.join(map(str, tasks(entry))):<8} {entry.name}")


def print_table(verdicts: list[Verdict]) -> bool:
    """Print a row per verdict, what is wrong, and the totals; True if the tests are as good as they must be."""
    width = min(72, max(len(verdict.entry.name) for verdict in verdicts))
    for verdict in verdicts:
        wrong = not isinstance(verdict.entry, Variation)
        named = ("named" if verdict.named_by else "UNNAMED") if wrong and verdict.failures else ""
        task = "+".join(str(task) for task in tasks(verdict.entry))
        name = verdict.entry.name[:width]
        print(f"{task:<8}{name:<{width}}  {verdict.outcome:<18} {named:<8} {verdict.test}".rstrip())
        if named == "UNNAMED" or not verdict.good:
            for test, message in verdict.failures[:1]:
                print(textwrap.indent("\n".join([test, *message.splitlines()[:3]]), " " * 8))
    wrong = [verdict for verdict in verdicts if not isinstance(verdict.entry, Variation)]
    right = [verdict for verdict in verdicts if isinstance(verdict.entry, Variation)]
    named = sum(verdict.named_by is not None for verdict in wrong)
    print()
    if wrong:
        print(f"wrong solutions: {sum(verdict.good for verdict in wrong)} of {len(wrong)} rejected, {named} named")
    if right:
        print(f"right solutions: {sum(verdict.good for verdict in right)} of {len(right)} accepted")
    return all(verdict.good for verdict in verdicts) and named >= NAMED_AT_LEAST * len(wrong)


def sentence_of(verdict: Verdict) -> str:
    """What the first failure says, without the task in front."""
    return headline(verdict.failures[0][1]) if verdict.failures else ""


def known_in(sentence: str) -> list[str]:
    """The names of known mistakes of which a first line consists: "metrics['kl'] is a sum ..." holds one of them."""
    from lab.diagnose import AND  # noqa: PLC0415 (it imports torch, which takes seconds)

    known = {name for table in tables_of_mistakes() for name in table} - {""}
    return [
        name
        for part in sentence.split(AND)
        for name in known
        if part == name or part.endswith(f"] {name}") or part.startswith(f"{name} ")
    ]


def leave_one_out(verdicts: list[Verdict], jobs: int | None) -> bool:
    """For each mistake that a table names: what would be read if it did not. Returns whether few are vague."""
    named = {v.entry.name: known_in(sentence_of(v)) for v in verdicts if v.failures}
    forget = {name: forgotten for name, forgotten in named.items() if forgotten}
    again = audit([v.entry for v in verdicts if v.entry.name in forget], jobs=jobs, forget=forget)
    kinds: dict[str, list[Verdict]] = {"named, as another mistake": [], "seen": [], "vague": [], "ACCEPTED": []}
    for verdict in again:
        sentence = sentence_of(verdict)
        kind = "ACCEPTED" if not verdict.failures else "vague" if VAGUE.search(sentence) else "seen"
        kinds["named, as another mistake" if known_in(sentence) else kind].append(verdict)
    for kind, of_it in kinds.items():
        print(f"\n{kind}: {len(of_it)} of {len(again)}")
        for verdict in of_it:
            print(f"  {verdict.entry.name}: {sentence_of(verdict)}")
    return len(kinds["vague"]) + len(kinds["ACCEPTED"]) <= 0.1 * len(again)


def show(verdict: Verdict) -> None:
    """Print an entry's difference from the reference, and every failure in full."""
    reference = REFERENCE.read_text(encoding="utf-8")
    old, new = (text.splitlines() for text in (reference, changed_source(verdict.entry, reference)))
    print("\n".join(difflib.unified_diff(old, new, "reference", verdict.entry.name, lineterm="")))
    for test, message in verdict.failures:
        print(f"\n--- {test}\n{message}")
    print()
