"""Where the lab's time goes, beside what the hardware allows, and beside TRL.

    python solutions/bench.py           one table, and how the cost of an iteration grows with G and with P
    python solutions/bench.py --busy    the core rows once more, beside a process that keeps one core busy
    python solutions/bench.py --grade   what grading one submission costs
    python solutions/bench.py --trl     TRL's GRPOTrainer on the same weights and settings, iteration by iteration

`measuring/bench.py` says what a time and its floor are.
"""
# ruff: noqa: PLC0415  torch takes seconds to import: only where it is needed, so that --help is quick

import importlib.util
import os
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

from measuring.bench import core_rows, long_rows, print_growth, print_table
from measuring.beside_trl import print_trl
from measuring.grading_cost import print_grading
from measuring.processes import busy_core

from lab.flags import Parser, number


def build_parser() -> Parser:
    """The flags."""
    parser = Parser(
        description="Time the lab's work beside the floor that its matrix products set, and beside TRL.",
        epilog="TINYLM_THREADS=2 in the environment: with two threads.",
        allow_abbrev=False,
    )
    repeats = "calls of each row that takes seconds; ten times as many of the others (default: %(default)s)"
    parser.add_argument("--repeats", type=number(int, 1, 1000), default=3, help=repeats, metavar="N")
    parser.add_argument("--quick", action="store_true", help="little work in every row: does it run at all?")
    parser.add_argument("--busy", action="store_true", help="the core rows again, beside a process on one core")
    parser.add_argument("--grade", action="store_true", help="grading one submission, beside one run of the tests")
    parser.add_argument("--trl", action="store_true", help="TRL too, in turns; needs what the guide installs")
    return parser


def main() -> int:
    """Check, then print table after table. Returns the exit status."""
    parser = build_parser()
    args = parser.parse_args()
    missing = [name for name in ("trl", "jupytext") if importlib.util.find_spec(name) is None]
    if args.trl and missing:
        parser.error(f"--trl: not installed here: {', '.join(missing)} (python solutions/guide.py --install)")
    import torch

    import tinylm

    short = args.repeats if args.quick else 10 * args.repeats
    sft = tinylm.load_or_train_sft()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} thread(s) of {os.cpu_count()} cores; medians\n")
    core = core_rows(sft)
    idle = print_table(core, short)
    print_table(long_rows(sft, args.quick), args.repeats)
    if args.busy:
        print("\nBeside a process that keeps one core busy")
        with busy_core():
            busy = print_table(core, short)
        print(f"slower than idle: {', '.join(f'{busy[name] / idle[name]:.2f}' for name in core)}")
    groups, prompts = ([2, 4], [4, 8]) if args.quick else ([2, 4, 8, 16, 32, 64], [4, 8, 16, 32, 64, 128, 256])
    print_growth(sft, "G", [{"prompts": 16, "G": g} for g in groups], args.repeats)
    print_growth(sft, "P", [{"prompts": p, "G": 8} for p in prompts], args.repeats)
    if args.grade:
        print_grading(args.repeats)
    if args.trl:
        print_trl(sft, short)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
