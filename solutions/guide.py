"""Run the guide, `colab_grpo_trl.md`: every Python block of it, as a notebook; then what is said there of TRL.

    python solutions/guide.py --requirements       print what the guide's own install line names, one package a line
    python solutions/guide.py --install --run      install that into this environment, then run every block
    LAB_STEPS=200 python solutions/guide.py --run --out pictures     at full length, and keep what it drew

`--run` reads the guide with jupytext and executes it with nbclient, in a folder of its own, with the reference
solution. Nothing is downloaded: the 0.5B model's name is replaced by a tiny model of the same architecture, made on
the spot, with a reward that it can earn. It fails when a block raises, was not run, or is in the file but not in the
notebook; when that reward does not rise; and when a test of what it says of TRL fails, which needs this environment.

`guiding/` has the parts.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

from guiding.document import requirements
from guiding.running import CHECKS, SHORT, needed, run_blocks, run_checks, unmet

from lab.flags import Parser, number


def main() -> int:
    """Parse the flags; returns the exit status."""
    parser = Parser(description="Run every Python block of colab_grpo_trl.md.", allow_abbrev=False)
    parser.add_argument("--requirements", action="store_true", help="print what the guide's install line names")
    parser.add_argument("--install", action="store_true", help="install that into this environment first")
    parser.add_argument("--run", action="store_true", help=f"run every block; LAB_STEPS in the environment, or {SHORT}")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="keep the executed notebook and the pictures there")
    args = parser.parse_args()
    if not (args.requirements or args.install or args.run):
        parser.error("nothing to do: --requirements, --install or --run")
    steps = os.environ.get("LAB_STEPS", SHORT)
    try:
        number(int, 1, 1_000_000)(steps)
    except argparse.ArgumentTypeError as error:
        parser.error(f"LAB_STEPS: {error}")
    if args.requirements:
        print(*requirements(), sep="\n")
    if args.install:
        done = subprocess.run([sys.executable, "-m", "pip", "install", "-q", *needed()], check=False)
        if done.returncode:
            return done.returncode
    if args.run:
        if problems := unmet():
            parser.error(f"this environment is not the guide's, --install makes it so: {', '.join(problems)}")
        started = time.perf_counter()
        checked = run_checks()
        print(f"{time.perf_counter() - started:7.1f} s  {', '.join(CHECKS)}")
        return run_blocks(args.out) or checked
    return 0


if __name__ == "__main__":
    sys.exit(main())
