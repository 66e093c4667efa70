"""Every entry through the tests: worker processes side by side, and the verdicts in the entries' order."""

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from manifest import LAB, SFT, TESTS, copy_lab

from auditing.entries import FUNCTIONS, REFERENCE, Combination, Entry, Mistake, changed_source, parts, tasks
from auditing.verdicts import Verdict, judge

COMMAND = LAB / "solutions" / "audit.py"  # with --worker it is a worker process
HANDED_OUT = [*TESTS, SFT, "solutions/grpo.py"]  # what the tests need
TIMEOUT = 180.0  # seconds for one entry


def missing_files() -> list[str]:
    """What the tests need and is not here. The starting policy is trained where it is missing."""
    return [name for name in HANDED_OUT if name != SFT and not (LAB / name).exists()]


class Worker:
    """A worker process that is started when first needed, and again after it died."""

    def __init__(self):
        self.process = None

    def run(self, **job) -> list[dict[str, str]] | None:
        """The reports of one job, or None if it took longer than TIMEOUT or killed the process."""
        if self.process is None or self.process.poll() is not None:
            environment = {k: v for k, v in os.environ.items() if k not in ("RL_SOLUTIONS", "PYTEST_ADDOPTS")}
            self.process = subprocess.Popen(
                [sys.executable, str(COMMAND), "--worker"],
                env=environment | {"PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                encoding="utf-8",
            )
        timer = threading.Timer(TIMEOUT, self.process.kill)
        timer.start()
        try:
            print(json.dumps(job), file=self.process.stdin, flush=True)
            answer = self.process.stdout.readline()
        except OSError:
            answer = ""
        finally:
            timer.cancel()
        if answer:
            return json.loads(answer)
        self.process.kill()
        self.process.communicate()  # waits, and closes the pipes
        return None

    def stop(self) -> None:
        if self.process is not None:
            self.process.communicate()  # closes its stdin, which ends it


def audit(
    entries: Iterable[Entry],
    full: bool = False,
    every_test: bool = False,
    jobs: int | None = None,
    forget: dict[str, list[str]] | None = None,
) -> list[Verdict]:
    """Run every entry through the tests of its tasks (of all tasks if `full`), in parallel; the order is kept.

    A task's tests stop at the failure that names the mistake, unless `every_test`. `forget`: entry -> what the tables
    of known mistakes shall not know. Raises ValueError, before anything runs, if an entry's change does not apply.
    """
    from tqdm import tqdm  # noqa: PLC0415 (here, --help needs nothing installed)

    entries = list(entries)
    reference = REFERENCE.read_text(encoding="utf-8")
    sources = [changed_source(entry, reference) for entry in entries]

    import tinylm  # noqa: PLC0415 (it imports torch, which takes seconds)

    tinylm.load_or_train_sft()  # once here, not once per entry

    workers = [Worker() for _ in range(min(jobs or os.cpu_count() or 1, len(entries)))]
    idle = queue.SimpleQueue()
    for worker in workers:
        idle.put(worker)

    def run(kit: str, entry: Entry, source: str) -> Verdict:
        job = {"kit": kit, "source": source, "train": full or 5 in tasks(entry)}
        graded = FUNCTIONS if full or isinstance(entry, Combination) else tasks(entry)
        job["select"] = " or ".join(f"task{task}" for task in graded)
        job["says"] = [] if every_test else [(p.task, p.says) for p in parts(entry) if isinstance(p, Mistake)]
        job["forget"] = (forget or {}).get(entry.name, [])
        worker = idle.get()
        try:
            return judge(entry, worker.run(**job))
        finally:
            idle.put(worker)

    with tempfile.TemporaryDirectory() as kit, ThreadPoolExecutor(len(workers)) as pool:
        copy_lab(HANDED_OUT, Path(kit))
        # From the back: what takes long, the training of right solutions, starts first.
        pairs = list(zip(entries, sources, strict=True))
        futures = [pool.submit(run, kit, entry, source) for entry, source in reversed(pairs)]
        try:
            for _ in tqdm(as_completed(futures), total=len(futures), unit="entry", leave=False):
                pass
        finally:
            pool.shutdown(cancel_futures=True)
            for worker in workers:
                worker.stop()
    return [future.result() for future in reversed(futures)]
