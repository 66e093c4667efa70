"""The flags of every command. Imports neither torch nor matplotlib: --help and a wrong flag answer at once."""

import argparse
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

DEFAULT_OUT = Path("grpo_tinylm.png")
VERIFIERS = ("strict", "lenient")
MOST_ANSWERS, MOST_STEPS = 32, 8  # that a picture of one step holds
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


def addition(text: str) -> str:
    """The type of a flag: a problem of the task, such as "37+48="; the last character may be left out."""
    if not re.fullmatch(r"[1-9][0-9]\+[1-9][0-9]=?", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r} is no sum of two two-digit numbers such as 37+48=")
    return f"{text.rstrip('=')}="


# What run.py does instead of training: its picture, and which flags have a meaning beside it.
SAMPLING = ("G", "inner_steps", "lr", "clip", "beta", "std", "temperature", "seed", "verifier", "device")
INSTEAD = {
    "redraw": (DEFAULT_OUT, ()),
    "explain": (Path("explain.png"), ("text", *SAMPLING)),
    "explain_parts": (Path("parts.png"), ("G", "clip")),
}


class RunParser(Parser):
    """run.py's: it trains, or does something else instead, beside which only some flags have a meaning."""

    def parse_args(self, args=None, namespace=None):
        found = super().parse_args(args, namespace)
        actions = {action.dest: action for action in self._actions}
        given = [name for name, value in vars(found).items() if value != actions[name].default]
        what = next((name for name in INSTEAD if name in given), None)
        picture, beside = INSTEAD.get(what, (DEFAULT_OUT, [name for name in given if name != "text"]))
        for name in given:
            if name not in (what, "out", "solutions", *beside):
                instead = actions[what].option_strings[0] if what else "training"
                self.error(f"{actions[name].option_strings[0]} has no meaning beside {instead}")
        if what in ("explain", "explain_parts") and (found.G > MOST_ANSWERS or found.inner_steps > MOST_STEPS):
            self.error(f"a picture of one step holds {MOST_ANSWERS} answers (--G) and {MOST_STEPS} --inner-steps")
        found.out = found.out or picture
        return found


SEED = number(int, 0, 2**63 - 1)
TEMPERATURE = number(float, 0.01, 100)


def run_parser() -> RunParser:
    """Every field of `grpo.GRPOConfig`, with its default (a test holds them equal), and what else a run needs."""
    parser = RunParser(
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
    flag("--seeds", 1, number(int, 1, 1000), "train so often, with --seed, --seed + 1 ...: mean and band are drawn")
    lenient = "that scores the answers: lenient also takes what never ended, or has a leading zero"
    flag("--verifier", "strict", str, f"the verifier {lenient}", "NAME", choices=VERIFIERS)
    flag("--eval-every", 10, number(int, 1, many), "iterations between two evaluations on the held-out problems")
    flag("--device", "cpu", str, "where to train: cpu, cuda, cuda:1, mps", "NAME")
    out = f"the plot; CSV and checkpoint beside it: clip.png, clip.csv, clip.pt (default: {DEFAULT_OUT}, and {{}})"
    others = " or ".join(str(picture) for picture, _ in INSTEAD.values() if picture != DEFAULT_OUT)
    parser.add_argument("--out", type=Path, metavar="FILE", help=out.format(others))
    flag("--show", 0, number(int, 0, 100), "groups of answers to print at every evaluation, with their chances")
    several = parser.add_mutually_exclusive_group()
    csvs = {"action": "extend", "type": Path, "nargs": "+", "default": [], "metavar": "CSV"}
    several.add_argument("--versus", help="draw these earlier runs into the same plot", **csvs)
    several.add_argument("--redraw", help="train nothing, draw these earlier runs alone", **csvs)
    step = "train nothing, draw one step on a sum such as 37+48= (default: one that is right about half the time)"
    several.add_argument("--explain", type=addition, nargs="?", const=True, metavar="SUM", help=step)
    parts = "train nothing, draw what the functions of these tasks compute (default: all that are written)"
    tasks = {"type": number(int, 2, 4), "nargs": "*", "metavar": "TASK"}
    several.add_argument("--explain-parts", help=parts, **tasks)
    parser.add_argument("--text", action="store_true", help="with --explain: print it instead")
    solutions = "run the reference, solutions/grpo.py; so does RL_SOLUTIONS=1 in the environment (default: grpo.py)"
    parser.add_argument("--solutions", action="store_true", help=solutions)
    return parser


def settings_of(args: argparse.Namespace) -> list[str]:
    """The flags that repeat the run, every setting spelled out: ["--iters 300", "--prompts 16", ...]."""
    no_settings = ("out", "show", "versus", "redraw", "explain", "explain_parts", "text")  # where to, what to look at
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
