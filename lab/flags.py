"""The flags of every command. Imports neither torch nor matplotlib: --help and a wrong flag answer at once."""

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

DEFAULT_OUT = Path("grpo_tinylm.png")
MIN_N = 128  # samples per problem for pass@64: with n close to k all subsets of k are nearly the same, and all is noise


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose complaint is one line, without the usage, and exit status 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {' '.join(message.split())}\n")

    def parse_args(self, args=None, namespace=None):
        """As argparse does it; but two things come out of there in a form that nothing here can work with."""
        words = sys.argv[1:] if args is None else args
        for word in words:
            if word.startswith("-") and word.endswith("=--"):
                self.error(f"{word}: the value is missing")
            if any("\ud800" <= char <= "\udfff" for char in word):  # how Python passes on what is not UTF-8
                self.error(f"{word!a} is not UTF-8")
        return super().parse_args(words, namespace)

    def flag(self, name: str, default, convert, help: str, metavar: str = "N", **more):
        """A flag that takes a value, with its default in the help."""
        help = f"{help} (default: %(default)s)"
        self.add_argument(name, type=convert, default=default, help=help, metavar=metavar, **more)


def number(kind: type, low: float, high: float, above: bool = False) -> Callable[[str], float]:
    """The type of a flag: an int or a float from `low` (or only above it) to `high`."""

    def convert(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high or (above and value == low):  # nan fails every comparison
            name = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text!r} is not {name} {'above' if above else 'from'} {low} to {high}")
        return value

    return convert


SEED = number(int, 0, 2**63 - 1)
TEMPERATURE = number(float, 0.01, 100)


def run_parser() -> Parser:
    """Every field of `grpo.GRPOConfig`, with its default (a test holds them equal), and what else a run needs."""
    parser = Parser(
        prog="run.py",
        description="Train TinyLM with GRPO, and save a plot, the metrics (CSV) and the trained checkpoint.",
        epilog="The files go to the current folder. A run replaces those of a run with the same settings, no others.",
        allow_abbrev=False,
    )
    flag = parser.flag
    many = 1_000_000
    flag("--iters", 300, number(int, 1, many), "training iterations")
    flag("--prompts", 16, number(int, 1, many), "prompts per iteration (P)", dest="P")
    flag("--G", 8, number(int, 2, many), "responses per prompt, the group size")
    flag("--inner-steps", 2, number(int, 1, many), "gradient steps on each batch of samples")
    flag("--lr", 3e-4, number(float, 0, many, above=True), "Adam's learning rate")
    flag("--clip", 0.2, number(float, 0, many, above=True), "the ratio is clipped to [1-N, 1+N]; 1000: no clip")
    flag("--beta", 0.04, number(float, 0, many), "weight of the KL penalty that ties the policy to the reference")
    no_std = "do not divide the advantages by the group's standard deviation, as in Dr. GRPO (default: divide)"
    parser.add_argument("--no-std", dest="std", action="store_false", help=no_std)
    flag("--temperature", 1.0, TEMPERATURE, "the policy is softmax(logits / N), sampled and trained alike")
    flag("--seed", 0, SEED, "seed of the prompts drawn and the responses sampled")
    flag("--eval-every", 10, number(int, 1, many), "iterations between two evaluations on the held-out problems")
    flag("--device", "cpu", str, "where to train: cpu, cuda, cuda:1, mps", "NAME")
    flag("--out", DEFAULT_OUT, Path, "the plot; CSV and checkpoint beside it: clip.png, clip.csv, clip.pt", "FILE")
    flag("--show", 0, number(int, 0, 100), "groups of answers to print at every evaluation, with their advantages")
    several = parser.add_mutually_exclusive_group()
    csvs = {"action": "extend", "type": Path, "nargs": "+", "default": [], "metavar": "CSV"}
    several.add_argument("--versus", help="draw these earlier runs into the same plot", **csvs)
    several.add_argument("--redraw", help="train nothing, draw these earlier runs alone", **csvs)
    solutions = "run the reference, solutions/grpo.py; so does RL_SOLUTIONS=1 in the environment (default: grpo.py)"
    parser.add_argument("--solutions", action="store_true", help=solutions)
    return parser


def settings_of(args: argparse.Namespace) -> list[str]:
    """The flags that repeat the run, every setting spelled out: ["--iters 300", "--prompts 16", ...]."""
    no_settings = ("out", "show", "versus", "redraw")  # where to, and what else to look at
    flags = {name: value for name, value in vars(args).items() if name not in no_settings}
    bare = [] if flags.pop("std") else ["--no-std"]
    bare += ["--solutions"] if flags.pop("solutions") else []
    return [f"--{'prompts' if n == 'P' else n.replace('_', '-')} {value}" for n, value in flags.items()] + bare


def passk_parser() -> Parser:
    """The flags of passk.py."""
    parser = Parser(
        prog="passk.py",
        description="Estimate pass@k of the SFT model and of a GRPO model on the held-out problems, and draw both.",
        epilog="The picture goes to the current folder. It replaces a picture that passk.py drew, and nothing else.",
        allow_abbrev=False,
    )
    flag = parser.flag
    flag("--grpo", Path("tinylm_grpo.pt"), Path, "the trained checkpoint: clip.pt of `run.py --out clip.png`", "FILE")
    flag("--n", 256, number(int, MIN_N, 100_000), f"samples per problem, at least {MIN_N}: twice the largest k")
    flag("--temperature", 1.0, TEMPERATURE, "answers are drawn from softmax(logits / N)")
    flag("--seed", 0, SEED, "seed of the samples and of the band")
    flag("--device", "cpu", str, "where to sample: cpu, cuda, cuda:1, mps", "NAME")
    flag("--out", Path("passk.png"), Path, "the picture", "FILE")
    return parser
