"""Tests of the audit itself: does it notice when the tests let a wrong solution pass, or reject a right one?"""

import pytest
from auditing import entries, runner
from auditing.catalogue import COMBINATIONS, ENTRIES, MISTAKES, VARIATIONS
from auditing.entries import Combination, Mistake, Variation, changed_source
from auditing.report import print_table
from auditing.verdicts import judge, names
from helpers import finish, start
from manifest import LAB, copy_lab

REFERENCE = entries.REFERENCE.read_text(encoding="utf-8")
NO_CHANGE = [("log_u = ref_logp - logp\n", "log_u = ref_logp - logp  # the same\n")]
REVERSED = [("log_u = ref_logp - logp\n", "log_u = logp - ref_logp\n")]


def test_every_change_applies_once_and_compiles():
    for entry in ENTRIES:
        assert changed_source(entry, REFERENCE) != REFERENCE


def test_names_are_unique():
    found = [entry.name for entry in ENTRIES]
    assert sorted(found) == sorted(set(found))


def test_catalogue_is_large_enough():
    assert len(MISTAKES) >= 70
    assert len(VARIATIONS) >= 20
    assert len(COMBINATIONS) >= 8


def test_every_mistake_asks_for_its_name():
    for mistake in MISTAKES:
        assert mistake.says
        assert all(words.strip() for words in mistake.says)


@pytest.mark.parametrize(
    "change, complaint",
    [
        ([("no such line", "")], "occurs 0 times"),
        ([("ref_logp", "")], "not once"),
        ([("log_u = ref_logp - logp", "log_u = ref_logp - logp")], "changes nothing"),
        ([("log_u = ref_logp - logp", "log_u = ref_logp -")], "does not compile"),
        ("return (logp", "does not compile"),
    ],
)
def test_change_that_does_not_apply_is_an_error(change, complaint):
    with pytest.raises(ValueError, match=complaint):
        changed_source(Variation(3, "broken", change), REFERENCE)


def test_replacement_body_keeps_signature_docstring_and_neighbours():
    source = changed_source(Variation(3, "another body", "return logp"), REFERENCE)
    before, rest = REFERENCE.split("    # TODO(task 3)\n")
    _, after = rest.split("    return log_u.exp() - log_u - 1\n")
    assert source.replace("    # TODO(task 3)\n", "") == f"{before}    return logp\n{after}"


@pytest.mark.parametrize(
    "says, named",
    [
        (("sample standard",), True),
        (("bessel|G - 1", "divides"), True),
        (("G - 1", "population"), False),
        (("eps",), False),  # only among the settings
        (("advantages",), False),  # only the name of the function
    ],
)
def test_mistake_is_named_by_all_words_of_the_first_line_in_any_of_their_forms(says, named):
    message = "Failed: Task 2 (group_advantages): a SAMPLE standard deviation divides by G - 1\n  with eps 0.0001"
    assert names(message, says) is named


def report(test: str, outcome: str = "passed", message: str = "") -> dict[str, str]:
    return {"test": test, "outcome": outcome, "message": message}


def test_judging_without_running():
    wrong = Mistake(4, "wrong", NO_CHANGE, ("clip",))
    right = Variation(4, "right", NO_CHANGE)
    pair = Combination((wrong, Mistake(5, "also wrong", NO_CHANGE, ("beta",))))
    passed, failed = report("test_task4_a"), report("test_task4_a", "failed", "the clip is missing")
    other = report("test_task5_a", "failed", "something")
    assert judge(wrong, [failed]).outcome == "rejected"
    assert judge(wrong, [failed]).named_by == "test_task4_a"
    assert judge(wrong, [report("test_task4_a", "failed", "?")]).named_by is None
    assert judge(wrong, [passed]).outcome == "ACCEPTED"
    assert judge(wrong, [passed, other]).outcome == "ACCEPTED"
    assert judge(wrong, [failed, other]).outcome == "SPOILS task 5"
    assert judge(pair, [failed, report("test_task5_a")]).outcome == "ACCEPTED in task 5"
    assert judge(pair, [failed, other]).good
    assert judge(right, [passed]).good
    assert judge(right, [failed]).outcome == "REJECTED"
    assert judge(right, [passed, report("test_task4_b", "skipped")]).outcome == "SKIPPED"
    for entry in (wrong, right, pair):
        assert not judge(entry, None).good
        assert not judge(entry, []).good
        assert not judge(entry, [report("(collection)", "failed", "ImportError")]).good


def test_audit_turns_red_when_the_tests_fall_short(capsys):
    entries = [
        Mistake(3, "reversed and named", REVERSED, ("revers|upside|swap|wrong way|other way|on top",)),
        Variation(3, "right", NO_CHANGE),
        Mistake(3, "reversed and not named", REVERSED, ("words that no message holds",)),
        Mistake(3, "wrong and accepted", NO_CHANGE, ("k3",)),
        Variation(3, "right and rejected", REVERSED),
        Mistake(3, "kills the process", "import os\nos._exit(0)", ("k3",)),
    ]
    verdicts = runner.audit(entries, jobs=1)
    assert [verdict.entry for verdict in verdicts] == entries
    assert [verdict.good for verdict in verdicts] == [True, True, True, False, False, False]
    assert [verdict.named_by is not None for verdict in verdicts] == [True, False, False, False, False, False]
    green, unnamed, accepted, rejected, killed = (
        print_table(verdicts[:2]),
        print_table(verdicts[:3]),
        print_table([*verdicts[:2], verdicts[3]]),
        print_table([*verdicts[:2], verdicts[4]]),
        print_table([*verdicts[:2], verdicts[5]]),
    )
    assert (green, unnamed, accepted, rejected, killed) == (True, False, False, False, False)
    table = capsys.readouterr().out
    assert "wrong solutions: 1 of 1 rejected, 1 named" in table
    assert "ACCEPTED" in table
    assert "REJECTED" in table
    assert "UNNAMED" in table


def test_slow_entry_is_stopped_and_the_next_one_runs(monkeypatch, tmp_path):
    copy_lab(runner.HANDED_OUT, tmp_path)
    job = {"kit": str(tmp_path), "select": "task3", "says": [], "train": False, "forget": []}
    worker = runner.Worker()
    monkeypatch.setattr(runner, "TIMEOUT", 8.0)
    endless = Variation(3, "endless", "while True:\n    pass")
    assert worker.run(source=changed_source(endless, REFERENCE), **job) is None
    monkeypatch.undo()
    reports = worker.run(source=REFERENCE, **job)
    worker.stop()
    assert {report["outcome"] for report in reports} == {"passed"}


def run_audit(folder, *flags: str, **changes: str):
    return finish(start(folder, LAB / "solutions" / "audit.py", *flags, **changes))


def test_list_and_only_without_torch(tmp_path, no_torch):
    listed = run_audit(tmp_path, "--list", "--only", "TASK3 k2", PYTHONPATH=no_torch)
    assert listed.returncode == 0, listed.stderr
    assert "k2 for k3" in listed.stdout
    assert "k1 for k3" not in listed.stdout
    nothing = run_audit(tmp_path, "--list", "--only", "no such entry")
    assert nothing.returncode == 2
    assert "Traceback" not in nothing.stderr


def test_leave_one_out_shows_what_is_read_of_a_mistake_nobody_knows(tmp_path):
    shown = run_audit(tmp_path, "--leave-one-out", "--only", "task1 mask the wrong way round")
    assert shown.returncode == 0, shown.stderr
    assert "samples.mask drops every own token and keeps every token after the end" in shown.stdout
    assert "ACCEPTED: 0 of" in shown.stdout


def test_show_prints_the_change_and_the_failures(tmp_path):
    shown = run_audit(tmp_path, "--show", "k2 for k3")
    assert shown.returncode == 0, shown.stderr
    assert "-    return log_u.exp() - log_u - 1" in shown.stdout
    assert "+    return 0.5 * log_u**2" in shown.stdout
    assert "--- test_task3_" in shown.stdout
