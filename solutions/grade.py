"""Grade a folder of submissions: NAME.py, NAME/grpo.py or NAME.zip, each in a process of its own.

    python solutions/grade.py submissions --out grades.csv            a row for each, and feedback/NAME.txt
    python solutions/grade.py submissions --out grades.csv --resume   go on where it was stopped, or with what changed
    python solutions/grade.py submission --results results.json       one submission, for Gradescope

The tests run here, the student's functions there: what comes from their process are values, and what counts is whether
they are right. `grading/` has the parts.
"""

import argparse
import json
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

from grading.book import Book, Grade, finished_rows, gradescope, write_whole
from grading.confinement import Confinement, Unsafe, find_confinement, kit
from grading.exam import Exam, known_wrong, make_exam, submission_digest
from grading.submissions import Refused, find_submissions, read_submission

from lab.flags import Parser, number


class NotInOrder(Exception):
    """The grader itself does not work here; says why."""


def build_parser() -> Parser:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("submissions", type=Path, metavar="SUBMISSIONS", help="the folder; with --results, one of them")
    parser.add_argument("--out", type=Path, metavar="FILE.csv", help="the table; feedback/ is written beside it")
    parser.add_argument("--resume", action="store_true", help="keep the grades that FILE.csv holds, and do the rest")
    parser.add_argument("--gradescope", action="store_true", help="also write gradescope/NAME/results.json")
    parser.add_argument("--results", type=Path, metavar="FILE.json", help="grade one submission, for Gradescope")
    parser.add_argument("--jobs", type=number(int, 1, 1000), default=os.cpu_count() or 1, help="default: one per core")
    parser.add_argument("--timeout", type=number(float, 1, 10_000), default=60, help="seconds per test (default: 60)")
    parser.add_argument("--container", default="", metavar="IMAGE", help="each submission in a container (docker)")
    parser.add_argument("--unconfined", action="store_true", help="with all the rights of this account")
    return parser


class Pool:
    """The processes that grade. A context manager; on the way out, whatever still runs is ended."""

    def __init__(self, exam: Exam, confinement: Confinement, folder: Path, jobs: int):
        context = multiprocessing.get_context("spawn")
        counter = context.Value("i", 0)
        self.executor = ProcessPoolExecutor(jobs, context, begin, (exam, confinement, folder, counter))

    def grade(self, name: str, source: bytes):
        """A future of the Grade."""
        return self.executor.submit(grade_here, name, source)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.executor.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():
            process.kill()


def begin(exam: Exam, confinement: Confinement, folder: Path, counter) -> None:
    """At the start of a process of the pool, which ends with the command, whatever ends that."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the command's own business

    def follow() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
    from grading.examination import prepare  # noqa: PLC0415  (torch, where it is needed)

    prepare(exam, confinement, folder, counter)


def grade_here(name: str, source: bytes) -> Grade:
    from grading import examination  # noqa: PLC0415

    return examination.grade_here(name, source)


def check_exam(exam: Exam, pool: Pool, reference: str) -> None:
    """Raise NotInOrder unless the reference passes all tests, and a wrong solution fails in each task."""
    right, wrong = pool.grade("reference", reference.encode()), pool.grade("wrong", known_wrong(reference))
    for test in exam.tests:
        if test.name not in right.result().points:
            why = " ".join([right.result().status, *right.result().messages.get(test.name, "").split()])
            raise NotInOrder(f"the reference does not pass {test.name} here (LAB_SEED={exam.seed}): {why}")
    for task in exam.tasks:
        if wrong.result().status != "graded" or wrong.result().of_task(exam, task) == exam.points_of(task):
            raise NotInOrder(f"a wrong solution passes the tests of task {task}: {wrong.result().status}")


def grade_all(
    submissions: dict[str, list[Path]], exam: Exam, book: Book, pool: Pool, fresh: Callable[[], Pool]
) -> None:
    """Grade what is not graded yet. `fresh` makes another pool, of one process."""
    from tqdm import tqdm  # noqa: PLC0415

    sources: dict[str, bytes] = {}
    refused = []
    for name, paths in submissions.items():
        try:
            sources[name] = read_submission(paths)
        except Refused as why:
            refused.append(Grade(name, status=f"refused: {why}"))
    digests = {name: submission_digest(source, exam) for name, source in sources.items()}
    waiting = [name for name in sources if not book.done(name, digests[name])]
    book.write(exam)  # old rows stay until the new ones are there, of which `enter` adds each at the end
    for grade in refused:
        grade.messages = dict.fromkeys((test.name for test in exam.tests), grade.status)
        book.enter(grade, exam)

    def enter(name: str, future: Future) -> None:
        try:
            grade = future.result()
            grade.digest = digests[name]
        except Exception as error:  # the grader's own: without a digest it is tried again by --resume
            grade = Grade(name, status=f"not graded: {type(error).__name__}: {error}")
        book.enter(grade, exam)

    lost = []
    try:
        futures = {pool.grade(name, sources[name]): name for name in waiting}
        for future in tqdm(as_completed(futures), total=len(futures), unit="submission", disable=None):
            if isinstance(future.exception(), BrokenProcessPool):
                lost.append(futures[future])
            else:
                enter(futures[future], future)
        for name in lost:  # with a process of the pool that ends, all that waited is lost: once more, one by one
            with fresh() as alone:
                enter(name, alone.grade(name, sources[name]))
    finally:
        book.write(exam)


def grade_one(path: Path, exam: Exam, pool: Pool) -> Grade:
    """The grade of one submission."""
    try:
        return pool.grade("submission", read_submission([path] if path.exists() else [])).result()
    except Refused as why:
        grade = Grade("submission", status=f"refused: {why if path.exists() else 'there is no grpo.py'}")
        grade.messages = dict.fromkeys((test.name for test in exam.tests), grade.status)
        return grade


NO_GRADE = {
    "name": "grpo.py",
    "number": "1",
    "score": 0,
    "max_score": 100,
    "status": "failed",
    "visibility": "visible",
    "output": "The grader is not in order. Please tell your instructor.",
}


def work(parser: Parser, args: argparse.Namespace) -> None:
    """Check, grade, write."""
    if (args.out is None) == (args.results is None):
        parser.error("give either --out FILE.csv or --results FILE.json")
    if args.container and args.unconfined:
        parser.error("give either --container or --unconfined")
    book, submissions = None, {}
    if args.out is not None:
        if not args.submissions.is_dir():
            parser.error(f"{args.submissions} is not a folder")
        out = args.out.resolve()
        if out.exists() and not args.resume:
            parser.error(f"{args.out} is there already: add --resume to go on with it, or choose another name")
        book = Book(out, args.gradescope)
        if out.exists():
            book.rows = {row["name"]: row for row in finished_rows(out)}
        ours = [out, out.parent / "feedback", out.parent / "gradescope"]
        submissions = find_submissions(args.submissions, ours)
        if not submissions:
            parser.error(f"{args.submissions} holds no submission")
    exam = make_exam(args.timeout)
    with kit() as folder:
        hidden = str(args.submissions.resolve()), str((args.out or args.results).resolve().parent)
        confinement = find_confinement(folder, args.container, args.unconfined, hidden)
        print(confinement.told, file=sys.stderr)
        jobs = min(args.jobs, max(2, len(submissions))) if args.out else 1
        with Pool(exam, confinement, folder, jobs) as pool:
            check_exam(exam, pool, exam.reference)
            if args.out is None:
                grade = grade_one(args.submissions.resolve(), exam, pool)
                write_whole(args.results, json.dumps(gradescope(grade, exam), indent=1))
                return
            grade_all(submissions, exam, book, pool, lambda: Pool(exam, confinement, folder, 1))
    print(f"{len(book.rows)} submissions, in {args.out}")
    if lacking := sum(row["status"].startswith("not graded") for row in book.rows.values()):
        raise NotInOrder(f"{lacking} of them not graded: see their status; --resume tries again")


def main() -> int:
    """Grade, and return the exit status."""
    parser = build_parser()
    args = parser.parse_args()
    if hasattr(signal, "SIGTERM"):
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        work(parser, args)
    except (NotInOrder, Unsafe, ValueError, OSError, BrokenProcessPool) as error:
        if args.results is not None and not isinstance(error, OSError):  # Gradescope wants a result, whatever comes
            print(f"the grader is not in order: {error}", file=sys.stderr)
            write_whole(args.results, json.dumps({"tests": [NO_GRADE]}, indent=1))
            return 0
        parser.error(str(error))
    except KeyboardInterrupt:
        parser.exit(130, f"{parser.prog}: stopped; --resume goes on from here\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
