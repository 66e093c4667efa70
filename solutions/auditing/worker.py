"""In a worker process: an entry's source in a folder of its own, the tests run on it, and what each of them said.

`import torch` takes longer than most entries' tests, so each process imports it once and runs many entries.
"""

import gc
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

from auditing.verdicts import names, task_of


class Recorder:
    """A pytest plugin: what every test said, as a student would read it.

    It skips what can add nothing: the tests of a task whose mistake is named already; and the last test of all, which
    trains for seconds, where it is not wanted or task 5 is rejected already.
    """

    def __init__(self, says: list[tuple[int, tuple[str, ...]]], train: bool):
        self.says = says
        self.train = train
        self.reports = []

    def pytest_runtest_setup(self, item):
        task = task_of(item.name)
        failures = [r for r in self.reports if r["outcome"] == "failed" and task_of(r["test"]) == task]
        named = any(names(r["message"], says) for r in failures for of_task, says in self.says if of_task == task)
        training = task == 5 and item is item.session.items[-1]
        if named or (training and (failures or not self.train)):
            import pytest  # noqa: PLC0415 (this line runs in workers only)

            pytest.skip("nothing to add")

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            self.record(report.nodeid.split("::")[-1], report)

    def pytest_collectreport(self, report):
        if report.outcome == "failed":
            self.record("(collection)", report)

    def record(self, test: str, report) -> None:
        # Of a failure with a traceback, only the message: the code of the test is not what names a mistake.
        crash = getattr(report.longrepr, "reprcrash", None)
        message = "" if report.longrepr is None else crash.message if crash else str(report.longrepr)
        self.reports.append({"test": test, "outcome": report.outcome, "message": message})


def tables_of_mistakes() -> list[dict]:
    """The tables of known mistakes, name -> how to compute it; in a worker, those of the entry's own folder."""
    from lab.diagnose import advantages, arguments, k3, loss, samples, step  # noqa: PLC0415 (torch: not before needed)

    tables = [samples.REWARDS, samples.MASKS, *advantages.PARTS, k3.WRONG, *loss.PARTS, loss.METRICS]
    tables += [loss.CLIP_FRACTION, *step.PARTS, step.METRICS, arguments.TOGETHER, arguments.TEMPERATURES]
    return tables + [stand_ins for _, stand_ins in arguments.ARGUMENTS.values()]


class Forgetful:
    """A pytest plugin: the tests without some names in their tables of known mistakes."""

    def __init__(self, forgotten: list[str]):
        self.forgotten = forgotten

    def pytest_collection_finish(self):
        for table in tables_of_mistakes():
            for name in self.forgotten:
                table.pop(name, None)


def run_tests(
    kit: str, source: str, select: str, says: list[tuple[int, tuple[str, ...]]], train: bool, forget: list[str]
) -> list[dict[str, str]]:
    """Run `pytest -k select` in a fresh folder with the files of `kit` and `source` as grpo.py."""
    import pytest  # noqa: PLC0415 (this and torch: in workers only)
    import torch  # noqa: PLC0415

    home, path, recorder = Path.cwd(), list(sys.path), Recorder(says, train)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary).resolve() / "lab"
        shutil.copytree(kit, folder)
        (folder / "grpo.py").write_text(source, encoding="utf-8")
        os.chdir(folder)
        sys.path[0] = str(folder)  # as `python -m pytest` has it
        torch.manual_seed(0)
        try:
            plugins = [recorder, Forgetful(forget)] if forget else [recorder]
            pytest.main(["-q", "-p", "no:cacheprovider", "-k", select, "test_grpo.py"], plugins=plugins)
        finally:
            os.chdir(home)
            sys.path[:] = path
            for name, module in list(sys.modules.items()):
                places = [vars(module).get("__file__") or "", *(vars(module).get("__path__") or [])]
                if any(str(place).startswith(str(folder)) for place in places):
                    del sys.modules[name]
    return recorder.reports


def work() -> None:
    """A worker process: reads jobs from stdin and answers on stdout, each one line of JSON."""
    import pytest  # noqa: PLC0415, F401 (not once per entry)
    import torch  # noqa: PLC0415, F401

    for name in [name for name in sys.modules if name.partition(".")[0] == "lab"]:
        del sys.modules[name]  # each entry brings its own, which stands beside its own tinylm
    gc.freeze()  # pytest collects garbage after each run: that is quick without torch's own objects
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # pytest's own output must not mix with the answers
    for line in sys.stdin:
        print(json.dumps(run_tests(**json.loads(line))), file=answers, flush=True)
