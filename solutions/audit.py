"""The audit: do the tests reject every wrong solution, name its mistake, and accept every right one?

    python solutions/audit.py                     all entries, a table, and exit status 1 if the tests fall short
    python solutions/audit.py --only "task4 clip" the entries whose task and name hold all of these words
    python solutions/audit.py --show "k2 for k3"  one entry: its difference from the reference, and what the tests say
    python solutions/audit.py --leave-one-out     what a student would read if the tables did not know the mistake

Three catalogues, each entry a small change to the reference, `solutions/grpo.py`. A `Mistake` must be rejected by a
test of its task, with a first line that holds the words `says`. A `Variation` is right, only written another way, and
must be accepted. A `Combination` of mistakes is run through all tests: every task with a mistake must be rejected, one
mistake named, and the other tasks still accepted. To add an entry, append it to its list; never change a test to fit
an entry's text: the tests must know a mistake by the values it gives.
"""

import argparse
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

from auditing.catalogue import chosen
from auditing.report import leave_one_out, print_list, print_table, show
from auditing.runner import audit, missing_files
from auditing.worker import work

from lab.flags import Parser, number


def main() -> int:
    """Audit, and return the exit status."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--only", metavar="WORDS", default="", help="entries whose 'taskN name' holds all these words")
    parser.add_argument("--show", metavar="NAME", help="this entry alone: its change and the full failures")
    parser.add_argument("--list", action="store_true", help="list the entries and run nothing")
    parser.add_argument("--full", action="store_true", help="run all tests on each: no mistake may cost another task")
    parser.add_argument("--jobs", type=number(int, 1, 1000), metavar="N", help="processes (default: one per core)")
    parser.add_argument("--leave-one-out", action="store_true", help="then each again, its own name unknown")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work()
        return 0
    entries = chosen(options.only, options.show)
    if not entries:
        parser.error("no entry has that name: --list shows them all")
    if options.list:
        print_list(entries)
        return 0
    if missing := missing_files():
        parser.error(f"missing beside solutions/: {', '.join(missing)}")
    try:
        verdicts = audit(entries, options.full, options.show is not None, options.jobs)
    except ValueError as error:
        parser.error(str(error))
    if options.show is not None:
        show(verdicts[0])
    good = print_table(verdicts)
    if options.leave_one_out:
        good = leave_one_out(verdicts, options.jobs) and good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
