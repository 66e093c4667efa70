"""A run: its name, its settings, its history, and the CSV that holds them."""

import csv
import math
from pathlib import Path
from statistics import fmean
from typing import NamedTuple, NoReturn

from lab.files import whole_file
from lab.flags import run_parser, settings_of

METRICS = ["reward", "all_right", "all_wrong", "clip_fraction", "kl", "ratio", "loss"]  # of every iteration from 1 on
EVALUATED = ["sampled_accuracy", "greedy_accuracy", "entropy", "expected_zero_signal"]  # blank between evaluations
COLUMNS = ["iteration", *METRICS, *EVALUATED]
History = list[dict[str, float]]  # what `grpo.train_grpo` returns: a row per iteration


class Run(NamedTuple):
    """A run as it is drawn: its file's name, its settings, as `settings_of` gives them, and its history."""

    name: str
    settings: list[str]
    history: History


def series(history: History, name: str) -> tuple[list[float], list[float]]:
    """(iterations, values) of the rows in which `name` was measured."""
    measured = [row for row in history if name in row]
    return [row["iteration"] for row in measured], [row[name] for row in measured]


def print_table(history: History) -> None:
    """Before against after: the first and the last evaluation; means over the first and the last 30 iterations."""

    def line(label: str, values: list[float], n: int = 1):
        print(f"  {label:38}{fmean(values[:n]):8.3f}{fmean(values[-n:]):8.3f}")

    evaluated, sampled = series(history, "sampled_accuracy")
    n = min(30, len(history) - 1)
    zero_signal = [row["all_right"] + row["all_wrong"] for row in history[1:]]
    print(f"{f'Evaluated at iterations 0 and {evaluated[-1]}':40}{'before':>8}{'after':>8}")
    line("accuracy, sampled", sampled)
    line("accuracy, greedy", series(history, "greedy_accuracy")[1])
    line("entropy, nats per token", series(history, "entropy")[1])
    print(f"Mean over the first {n} and the last {n} iterations")
    line("KL to the reference, nats per token", series(history, "kl")[1], n)
    line("share of groups without signal", zero_signal, n)


def first_line(settings: list[str]) -> str:
    """The first line of a run's CSV, which says whose it is."""
    return f"# run.py {' '.join(settings)}\n"


def write_csv(run: Run, stopped: bool, path: Path) -> None:
    """The settings in a comment line, one more such line if the run was stopped early, then a row per iteration."""
    with whole_file(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        file.write(first_line(run.settings))
        if stopped:
            file.write(f"# stopped after iteration {len(run.history) - 1}\n")
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(run.history)


def read_csv(path: Path) -> Run:
    """The run whose CSV this is. Raises ValueError, in one line, if it is no CSV of run.py, or not all of one."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError:
        text = ""
    lines = text.splitlines()
    comments = [line for line in lines[:2] if line.startswith("#")]
    if lines[len(comments) :][:1] != [",".join(COLUMNS)] or not comments or not comments[0].startswith("# run.py --"):
        raise ValueError(f"{path}: not a CSV that this run.py wrote")
    parser = run_parser()

    def refuse(message: str) -> NoReturn:
        raise ValueError(f"{path}: its settings are not those of this run.py: {message}")

    parser.error = refuse
    words = comments[0].split()[2:]
    if not {"-h", "--help"}.isdisjoint(words):
        refuse("--help")
    args = parser.parse_args(words)
    history: History = []
    try:
        end = int(comments[1].split()[-1]) if len(comments) == 2 else args.iters
        for i, cells in enumerate(csv.reader(lines[len(comments) + 1 :], strict=True)):
            row = {name: float(value) for name, value in zip(COLUMNS, cells, strict=True) if value}
            evaluated = i % args.eval_every == 0 or i == args.iters
            names = {"iteration", *(METRICS if i else []), *(EVALUATED if evaluated else [])}
            if row.keys() != names or row["iteration"] != i or not all(map(math.isfinite, row.values())):
                raise ValueError("a number is missing, or one too many, or not finite")
            history.append(row)
    except (ValueError, csv.Error):
        end = 0
    if not text.endswith("\n") or not 1 <= end == len(history) - 1 <= args.iters:
        raise ValueError(f"{path}: cut short or damaged: an iteration, or a number in one, is missing")
    return Run(path.stem, settings_of(args), history)
