"""The answer key: what each experiment of the README gives over several seeds, written to experiments.md.

    python solutions/experiments.py              everything that is missing, then solutions/experiments.md and pictures
    python solutions/experiments.py --seeds 20   more seeds; what is there already is not run again

A run is one variant of the settings with one seed, which is that of its starting policy and of GRPO alike. So the runs
of one seed begin at the same policy, and differences to the default are taken between those. A process per core; each
finished run is kept in solutions/experiments/runs/, so that the command, stopped and started again, goes on.

The key is written from the first half of the seeds. Every claim in an answer is an expression that is checked on the
other half, and on ten random halves of all, of which nine must bear it out: what one set of seeds happened to show is
no answer. The figures of all runs are kept in experiments/figures.json, from which a test checks the claims again.

`answering/` has the parts; the experiments themselves are in its `questions.py`.
"""
# ruff: noqa: PLC0415  torch and matplotlib take seconds to import: only where they are needed, so that --help is quick

import os
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

from lab.flags import Parser, number


def main() -> int:
    """Run what is missing, then write. Returns the exit status: 1 if a claim does not hold."""
    parser = Parser(description="Run every experiment of the README over seeds, and write the answer key.")
    parser.flag("--seeds", 10, number(int, 2, 1000), "seeds 0 to N-1: half to write the key, half to check it")
    parser.flag("--jobs", os.cpu_count(), number(int, 1, 1000), "processes")
    args = parser.parse_args()

    from answering.key import OUT, write
    from answering.questions import EXPERIMENTS
    from answering.runs import run_missing

    try:
        run_missing(args.seeds, args.jobs)
        failed = write(args.seeds)
    except OSError as error:
        parser.error(f"cannot write: {error}")
    for line in failed:
        print(line, file=sys.stderr)
    print(f"saved {OUT.name} and {len(EXPERIMENTS)} pictures")
    return int(bool(failed))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
