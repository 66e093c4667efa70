"""The stress test: the graded tests again and again under other circumstances, and every command killed as it works.

    python solutions/stress.py --suite 50     the reference through test_grpo.py, under 50 seeds
    python solutions/stress.py --kills 200    200 times SIGKILL: SFT, run.py, grade.py, release.py in turn

All of it happens in copies of the lab, in a temporary folder.
"""

import signal
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

from measuring.kills import stress_kills
from measuring.suite import stress_suite

from lab.flags import Parser, number


def build_parser() -> Parser:
    parser = Parser(description="Run the graded tests, or kill the lab's commands, many times.", allow_abbrev=False)
    count = number(int, 1, 100_000)
    parser.add_argument("--suite", type=count, metavar="N", help="run the graded tests N times, as N seeds")
    parser.add_argument("--kills", type=count, metavar="N", help="kill the lab's commands N times")
    seed = "the first of the seeds, and that of the kills' moments (default: %(default)s)"
    parser.add_argument("--seed", type=number(int, 0, 2**31), default=0, help=seed, metavar="N")
    return parser


def main() -> int:
    """Returns the exit status: 1 if anything failed."""
    parser = build_parser()
    args = parser.parse_args()
    if args.suite is None and args.kills is None:
        parser.error("give --suite N, --kills N, or both")
    if hasattr(signal, "SIGTERM"):  # as Ctrl-C: nothing that was started may go on alone
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        good = [stress_suite(args.suite, args.seed)] if args.suite else []
        good += [stress_kills(args.kills, args.seed)] if args.kills else []
    except RuntimeError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    return 0 if all(good) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
