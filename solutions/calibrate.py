"""The calibration: what the default run gives on other machines, as the tables of the README.

    python solutions/calibrate.py                    93 starting policies, a GRPO seed each, under several roundings
    python solutions/calibrate.py --grpo-seeds 10    ten GRPO seeds, all from this machine's own starting policy

`measuring/calibration.py` says what the ranges mean.
"""

import os
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

from measuring.calibration import batches_of, measure_all, print_roundings, print_table

from lab.flags import Parser, number


def main() -> None:
    parser = Parser(description="What the default run gives over many machines: the table of the README.")
    several = number(int, 2, 10_000)
    policies = "starting policies, each with a GRPO seed of its own, under all roundings in turn"
    seeds = "GRPO seeds, from this machine's own policy"
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--policies", type=several, default=93, metavar="N", help=f"{policies} (default: %(default)s)")
    which.add_argument("--grpo-seeds", type=several, metavar="N", help=f"instead: {seeds}")
    parser.flag("--jobs", os.cpu_count(), number(int, 1, 1000), "processes")
    args = parser.parse_args()

    batches = batches_of(args.policies, args.grpo_seeds)
    print_table(measure_all(batches, args.jobs))
    print_roundings(batches)


if __name__ == "__main__":
    main()
