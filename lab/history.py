"""A run: its name, its settings, its history, and the CSV that holds them."""

import csv
import math
from pathlib import Path
from statistics import fmean
from typing import NamedTuple, NoReturn

from lab.files import whole_file
from lab.flags import run_parser, settings_of

# Of every iteration from 1 on; "gradient" is the norm of the gradient of the loss, over all weights, at the last inner
# step, as the other metrics of the loss.
METRICS = ["reward", "all_right", "all_wrong", "clip_fraction", "kl", "ratio", "loss", "gradient"]
EVALUATED = ["sampled_accuracy", "greedy_accuracy", "entropy", "expected_zero_signal"]  # blank between evaluations
COLUMNS = ["iteration", *METRICS, *EVALUATED, "seed"]
History = list[dict[str, float]]  # what `grpo.train_grpo` returns: a row per iteration


class Run(NamedTuple):
    """A run as it is drawn: its file's name, its settings, as `settings_of` gives them, and its history; with --seeds
    also those of the further seeds, of which the last may have been stopped early.
    """

    name: str
    settings: list[str]
    history: History
    further: tuple[History, ...] = ()

    @property
    def histories(self) -> list[History]:
        """One for each seed."""
        return [self.history, *self.further]

    @property
    def whole(self) -> list[History]:
        """Those that went as far as the first: a mean over seeds needs the same iterations of each."""
        return [history for history in self.histories if len(history) == len(self.history)]


def series(history: History, name: str) -> tuple[list[float], list[float]]:
    """(iterations, values) of the rows in which `name` was measured."""
    measured = [row for row in history if name in row]
    return [row["iteration"] for row in measured], [row[name] for row in measured]


def print_table(run: Run) -> None:
    """Before against after: the first and the last evaluation; means over the first and the last 30 iterations. Of
    several seeds the mean and, in brackets, the lowest and the highest.
    """
    n = min(30, len(run.history) - 1)
    several = len(run.whole) > 1
    width = 24 if several else 8

    def line(label: str, seeds: list[list[float]], n: int = 1):
        cells = []
        for part in (slice(None, n), slice(-n, None)):
            means = [fmean(values[part]) for values in seeds]
            spread = f" ({min(means):.3f} to {max(means):.3f})" if several else ""
            cells.append(f"{fmean(means):.3f}{spread}".rjust(width))
        print(f"  {label:38}{''.join(cells)}")

    def of_each(name: str) -> list[list[float]]:
        return [series(history, name)[1] for history in run.whole]

    last = series(run.history, "sampled_accuracy")[0][-1]
    print(f"{f'Evaluated at iterations 0 and {last}':40}{'before':>{width}}{'after':>{width}}")
    line("accuracy, sampled", of_each("sampled_accuracy"))
    line("accuracy, greedy", of_each("greedy_accuracy"))
    line("entropy, nats per token", of_each("entropy"))
    print(f"Mean over the first {n} and the last {n} iterations")
    line("KL to the reference, nats per token", of_each("kl"), n)
    line(
        "share of groups without signal", [[row["all_right"] + row["all_wrong"] for row in h[1:]] for h in run.whole], n
    )


def first_line(settings: list[str]) -> str:
    """The first line of a run's CSV, which says whose it is."""
    return f"# run.py {' '.join(settings)}\n"


def write_csv(run: Run, stopped: bool, path: Path) -> None:
    """The settings in a comment line, one more such line if the run was stopped early, then a row per iteration, one
    seed after the other.
    """
    with whole_file(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        file.write(first_line(run.settings))
        if stopped:
            file.write(f"# stopped after iteration {len(run.histories[-1]) - 1}\n")
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        for seed, history in enumerate(run.histories, seed_of(run.settings)):
            writer.writerows(row | {"seed": seed} for row in history)


def seed_of(settings: list[str]) -> int:
    """The first seed of a run with these settings."""
    return next((int(word.split()[1]) for word in settings if word.startswith("--seed ")), 0)


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
    histories: list[History] = []
    try:
        end = int(comments[1].split()[-1]) if len(comments) == 2 else args.iters
        for cells in csv.reader(lines[len(comments) + 1 :], strict=True):
            row = {name: float(value) for name, value in zip(COLUMNS, cells, strict=True) if value}
            if row.get("iteration") == 0:
                histories.append([])
            i, seed = len(histories[-1]), args.seed + len(histories) - 1
            evaluated = i % args.eval_every == 0 or i == args.iters
            names = {"iteration", *(METRICS if i else []), *(EVALUATED if evaluated else []), "seed"}
            whole = row.keys() == names and all(map(math.isfinite, row.values()))
            if not whole or row["iteration"] != i or row.pop("seed") != float(seed):
                raise ValueError("a number is missing, or one too many, or not finite")
            histories[-1].append(row)
        lengths = [len(history) - 1 for history in histories]
        right = [args.iters] * (len(lengths) - 1) + [end]
        if lengths != right or not 1 <= end <= args.iters or not (len(comments) == 2 or len(lengths) == args.seeds):
            raise ValueError("an iteration is missing, or a seed")
    except (ValueError, IndexError, csv.Error):
        histories = []
    if not text.endswith("\n") or not 1 <= len(histories) <= args.seeds:
        raise ValueError(f"{path}: cut short or damaged: an iteration, or a number in one, is missing")
    return Run(path.stem, settings_of(args), histories[0], tuple(histories[1:]))
