"""Train TinyLM with GRPO from the SFT checkpoint; save a plot, the metrics as CSV, and the trained checkpoint.

    python run.py                                                      the default run
    python run.py --G 2 --out pairs.png --versus grpo_tinylm.csv       an experiment, drawn beside an earlier run
    python run.py --redraw grpo_tinylm.csv pairs.csv --out both.png    earlier runs alone, without training
    python run.py --show 3                                             three groups to look at, again and again
    python run.py --help                                               every flag with its default

Read `main`, at the end, first. Above it: flags, files, training, table and plot.
"""
# ruff: noqa: PLC0415  torch and matplotlib take seconds to import: only where they are needed, so that --help is quick

import argparse
import csv
import gc
import hashlib
import math
import os
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple, NoReturn

DEFAULT_OUT = Path("grpo_tinylm.png")
PICTURES = (".png", ".pdf", ".svg", ".jpg")
METRICS = ["reward", "all_right", "all_wrong", "clip_fraction", "kl", "ratio", "loss"]  # of every iteration from 1 on
EVALUATED = ["sampled_accuracy", "greedy_accuracy", "entropy", "expected_zero_signal"]  # blank between evaluations
COLUMNS = ["iteration", *METRICS, *EVALUATED]
MARK = "drawn by run.py --redraw"  # kept inside such a picture: one that carries it may be replaced
# Okabe and Ito's colours: the colour-blind can tell them from one another.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#555555")
BLUE, ORANGE, GREEN, *_ = COLOURS
History = list[dict[str, float]]  # what `grpo.train_grpo` returns: a row per iteration


class Run(NamedTuple):
    """A run as it is drawn: its file's name, its settings, as `settings_of` gives them, and its history."""

    name: str
    settings: list[str]
    history: History


# 1. Flags ------------------------------------------------------------------------------------------------------


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

    def flag(self, name: str, default, convert, help: str, metavar: str = "N"):
        """A flag that takes a value, with its default in the help."""
        self.add_argument(name, type=convert, default=default, help=f"{help} (default: %(default)s)", metavar=metavar)

    def check_device(self, name: str) -> None:
        """Complain if torch cannot compute on the device `name`."""
        import torch

        try:
            torch.zeros(1, device=name).item()
        except Exception:  # of a type that depends on the device
            self.error(f"--device {name}: there is no such device here; cpu always works")


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


def build_parser() -> Parser:
    """Every field of `grpo.GRPOConfig`, with its name and default (a test holds them equal), and what a run needs."""
    parser = Parser(
        description="Train TinyLM with GRPO, and save a plot, the metrics (CSV) and the trained checkpoint.",
        epilog="The files go to the current folder. A run replaces those of a run with the same settings, no others.",
        allow_abbrev=False,
    )

    flag = parser.flag

    many = 1_000_000
    flag("--iters", 300, number(int, 1, many), "training iterations")
    flag("--prompts", 16, number(int, 1, many), "prompts per iteration (P)")
    flag("--G", 8, number(int, 2, many), "responses per prompt, the group size")
    flag("--inner-steps", 2, number(int, 1, many), "gradient steps on each batch of samples")
    flag("--lr", 3e-4, number(float, 0, many, above=True), "Adam's learning rate")
    flag("--clip", 0.2, number(float, 0, many, above=True), "the ratio is clipped to [1-N, 1+N]; 1000: no clip")
    flag("--beta", 0.04, number(float, 0, many), "weight of the KL penalty that ties the policy to the reference")
    no_std = "do not divide the advantages by the group's standard deviation, as in Dr. GRPO (default: divide)"
    parser.add_argument("--no-std", dest="std", action="store_false", help=no_std)
    flag("--temperature", 1.0, number(float, 0.01, 100), "the policy is softmax(logits / N), sampled and trained alike")
    flag("--seed", 0, number(int, 0, 2**63 - 1), "seed of the prompts drawn and the responses sampled")
    flag("--eval-every", 10, number(int, 1, many), "iterations between two evaluations on the held-out problems")
    flag("--device", "cpu", str, "where to train: cpu, cuda, cuda:1, mps", "NAME")
    flag("--out", DEFAULT_OUT, Path, "the plot; CSV and checkpoint beside it: clip.png, clip.csv, clip.pt", "FILE")
    flag("--show", 0, number(int, 0, 100), "groups of answers to print at every evaluation, with their advantages")
    several = parser.add_mutually_exclusive_group()
    csvs = {"type": Path, "nargs": "+", "default": [], "metavar": "CSV"}
    several.add_argument("--versus", help="draw these earlier runs into the same plot", **csvs)
    several.add_argument("--redraw", help="train nothing, draw these earlier runs alone", **csvs)
    solutions = "run the reference, solutions/grpo.py; so does RL_SOLUTIONS=1 in the environment (default: grpo.py)"
    default = os.environ.get("RL_SOLUTIONS") == "1"
    parser.add_argument("--solutions", action="store_true", default=default, help=solutions)
    return parser


def settings_of(args: argparse.Namespace) -> list[str]:
    """The flags that repeat the run, every setting spelled out: ["--iters 300", "--prompts 16", ...]."""
    no_settings = ("out", "show", "versus", "redraw", "solutions")  # where to, what else to look at, and whose code
    flags = {name: value for name, value in vars(args).items() if name not in no_settings}
    no_std = [] if flags.pop("std") else ["--no-std"]
    return [f"--{name.replace('_', '-')} {value}" for name, value in flags.items()] + no_std


# 2. Files ------------------------------------------------------------------------------------------------------


def files_of(out: Path) -> tuple[Path, Path, Path]:
    """(plot, CSV, checkpoint) of the run that plots to `out`."""
    checkpoint = out.with_name("tinylm_grpo.pt") if out == DEFAULT_OUT else out.with_suffix(".pt")
    return out, out.with_suffix(".csv"), checkpoint


def check_picture(out: Path) -> None:
    """Raise ValueError if `out` has no picture's ending, or its folder is not there or cannot be written to."""
    if out.suffix.lower() not in PICTURES:
        raise ValueError(f"--out {out}: the name must end in one of {', '.join(PICTURES)}")
    probe = out.with_name(f".{os.getpid()}.{out.name}")  # the name that `tinylm.whole_file` will use
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(f"--out {out}: cannot write to the folder {out.parent}: {error.strerror}") from error


def check_marked(out: Path, mark: str) -> None:
    """Raise ValueError if the picture `out` cannot be written, or is there already and does not carry `mark`."""
    check_picture(out)
    try:
        foreign = out.exists() and (out.is_dir() or mark.encode() not in out.read_bytes())
    except OSError as error:
        raise ValueError(f"--out {out}: cannot read what is there: {error.strerror}") from error
    if foreign:
        raise ValueError(f"{out} is there already, and not {mark}: name another --out, or delete that file")


def save_figure(figure, path: Path, mark: str = "run.py") -> None:
    """Save the matplotlib figure with `mark` inside the file, where `check_marked` finds it."""
    inside = {"pil_kwargs": {"comment": mark}} if path.suffix.lower() == ".jpg" else {"metadata": {"Creator": mark}}
    figure.savefig(path, dpi=110, **inside)


def first_line(settings: list[str]) -> str:
    """The first line of a run's CSV, which says whose it is."""
    return f"# run.py {' '.join(settings)}\n"


def check_files(out: Path, settings: list[str]) -> None:
    """Raise ValueError, before any training, if the files can't be written or would replace what is not this run's."""
    check_picture(out)
    if out.stem.lower() in ("tinylm_sft", "passk"):
        raise ValueError(f"--out {out}: the lab has another file of that name")
    picture, table, checkpoint = files_of(out)
    try:
        with table.open(encoding="utf-8") as file:
            same_settings = file.readline() == first_line(settings)
    except (OSError, UnicodeDecodeError):
        same_settings = False
    for path in (picture, table, checkpoint):
        if path.exists() and not (same_settings and path.is_file()):
            reason = "is there already, and not from a run with these settings"
            raise ValueError(f"{path} {reason}: name this run with --out NAME.png, or delete that file")


def lock_on(out: Path):
    """A lock that only one run at a time can hold on the files beside `out`. It ends with its process at the latest."""
    from filelock import FileLock  # which torch needs, so it is there

    name = hashlib.sha256(str(out.resolve().with_suffix("")).encode()).hexdigest()[:16]
    return FileLock(Path(tempfile.gettempdir()) / f"grpo-lab-{name}.lock", timeout=0)


def write_csv(run: Run, stopped: bool, path: Path) -> None:
    """The settings in a comment line, one more such line if the run was stopped early, then a row per iteration."""
    from tinylm import whole_file

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
    parser = build_parser()

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


# 3. Training ---------------------------------------------------------------------------------------------------


def call_tasks(model) -> None:
    """Call tasks 1 to 4 once, on two rows: of several stubs, the first one shall say that it is not written yet."""
    import torch

    import grpo
    import tinylm

    device = next(model.parameters()).device
    two, rows = torch.ones(2, device=device), torch.ones(2, 1, device=device)
    grpo.sample_group(model, tinylm.encode(["37+48="]).to(device), 2, generator=torch.Generator(device))
    grpo.group_advantages(two, 2)
    grpo.k3_kl(rows, rows)
    grpo.grpo_loss(rows, rows, rows, two, rows)


def shown_prompts(model, n: int, temperature: float):
    """n held-out prompts [n, Tp], spread from hard to easy for the policy as it is now."""
    import torch

    import tinylm

    prompts = tinylm.problems()[1].to(next(model.parameters()).device)
    from_hard_to_easy = tinylm.success_probability(model, prompts, temperature).argsort()
    return prompts[from_hard_to_easy[((torch.arange(n) + 0.5) / n * len(prompts)).long()]]


def paint(colour: str, text: str) -> str:
    """The text in a colour, "#RRGGBB", if it goes to a terminal; otherwise as it is."""
    if not sys.stdout.isatty() or "NO_COLOR" in os.environ:
        return text
    red, green, blue = bytes.fromhex(colour[1:])
    return f"\033[38;2;{red};{green};{blue}m{text}\033[0m"


def show_groups(model, prompts, config) -> str:
    """A group of answers to each of the prompts, as text: equal answers in one line, with reward and advantage."""
    import torch

    import grpo
    import tinylm

    generator = torch.Generator(prompts.device).manual_seed(config.seed)  # its own: to look changes no training
    samples = grpo.sample_group(model, prompts, config.G, config.temperature, generator)
    advantages = grpo.group_advantages(samples.rewards, config.G, config.std)
    answered = list(zip(samples.texts, samples.rewards.tolist(), advantages.tolist(), strict=True))
    rights = tinylm.decode_and_strip_padding(tinylm.answers(prompts))
    lines = []
    for i, (prompt, right) in enumerate(zip(tinylm.decode(prompts), rights, strict=True)):
        group = answered[i * config.G : (i + 1) * config.G]
        n = sum(reward == 1 for _, reward, _ in group)
        lines.append(f"  {prompt}  right is {right}  {n} of {config.G} answers are right")
        for (text, reward, advantage), times in sorted(Counter(group).items(), key=lambda counted: -counted[0][2]):
            line = f"    {times:2} x {text:6} reward {reward:.0f}  advantage {advantage:+.2f}"
            lines.append(paint(GREEN if reward else ORANGE, line))
        if n in (0, config.G):
            equal = f"all answers are {'right' if n else 'wrong'}, none is better than its group: nothing to learn here"
            lines.append(paint(BLUE, f"    NO SIGNAL: {equal}"))
    return "\n".join(lines)


def train(model, args: argparse.Namespace) -> tuple[History, int]:
    """Train `model` in place. Returns the history so far and the exit status; tells on stderr why it stopped early."""
    from tqdm import tqdm

    import grpo

    config = grpo.GRPOConfig(**{field.name: getattr(args, field.name) for field in fields(grpo.GRPOConfig)})
    prompts = shown_prompts(model, args.show, args.temperature) if args.show else None
    history: History = []

    def report(row: dict[str, float]) -> None:
        history.append(row)
        evaluated = "sampled_accuracy" in row
        line = f"iteration {row['iteration']} of {args.iters}"
        if row["iteration"] > 0:
            metrics = f"reward {row['reward']:.2f}, KL {row['kl']:.3f}"
            line += f": {metrics}"
            bar.set_postfix_str(metrics, refresh=False)
            bar.update()
        if evaluated and (args.show or (bar.disable and row["iteration"] > 0)):
            accuracy = f"accuracy {row['sampled_accuracy']:.3f} sampled, {row['greedy_accuracy']:.3f} greedy"
            bar.write(f"{line}, {accuracy}")
        if evaluated and args.show:
            bar.write(show_groups(model, prompts, config))
        sys.stdout.flush()

    try:
        call_tasks(model)
        # `disable=None` switches the bar off where there is no terminal: there, `report` prints lines instead.
        with tqdm(total=args.iters, disable=None, leave=False) as bar:
            grpo.train_grpo(model, config, report)
        return history, 0
    except NotImplementedError as error:
        if not str(error).startswith("Task"):  # not one of the lab's stubs: show where it comes from
            raise
        print(error, file=sys.stderr)
    except FloatingPointError as error:
        print(f"run.py: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        if len(history) < 2:
            raise
        print(f"run.py: stopped by Ctrl-C after iteration {len(history) - 1} of {args.iters}", file=sys.stderr)
        return history, 130
    return history, 2


# 4. Table and plot ---------------------------------------------------------------------------------------------


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


def smooth(values: list[float], middle: Callable[[list[float]], float] = fmean) -> list[float]:
    """`middle` (the mean or the median) of each value and its ten neighbours on either side, fewer at the two ends."""
    return [middle(values[max(0, i - 10) : i + 11]) for i in range(len(values))]


def labels(runs: list[Run]) -> list[str]:
    """For each run the settings that not all of them have; its name, where that leaves nothing or is not its alone."""
    own = [" ".join(word for word in run.settings if any(word not in other.settings for other in runs)) for run in runs]
    return [
        words if words and own.count(words) == 1 else f"{words} {run.name}".strip()
        for words, run in zip(own, runs, strict=True)
    ]


def draw(run: Run, colour: str, alone: bool, panels: list, tops: dict) -> None:
    """Draw one run into the six panels, and raise their `tops` to what it needs."""
    accuracy, reward, zero_signal, kl, entropy, clip = panels

    def evaluations(panel, name: str, **style):
        panel.plot(
            *series(run.history, name),
            **{"color": colour, "marker": "o", "markersize": 3.5 - 1.5 * (not alone)} | style,
        )

    def iterations(panel, name: str, middle=fmean):
        """A smooth line; of a run alone also dots, up to a height that cuts off nothing but spikes."""
        x, values = series(run.history, name)
        line = smooth(values, middle)
        panel.plot(x, line, color=colour, linewidth=2, label=f"{middle.__name__.removeprefix('f')} of 21")
        if tops[panel] < 1:
            tops[panel] = max(tops[panel], 1.3 * max(line), 1.3 * sorted(values)[int(0.95 * len(values))] * alone)
        if alone:
            panel.plot(x, values, "o", color=colour, alpha=0.35, markersize=4, markeredgewidth=0, label="one iteration")
        spikes = [i for i, value in zip(x, values, strict=True) if value > tops[panel]]
        if alone and spikes:
            edge, label = [1.02 * tops[panel]] * len(spikes), f"up to {max(values):.3g}"
            panel.plot(spikes, edge, "^", color=ORANGE, clip_on=False, markersize=5, label=label)

    evaluations(accuracy, "sampled_accuracy", label="sampled")
    evaluations(accuracy, "greedy_accuracy", label="greedy", **{"color": ORANGE} if alone else {"linestyle": "--"})
    iterations(reward, "reward")
    # k3 of single samples is heavy-tailed: one spike would lift a mean for 21 iterations, but not the median.
    iterations(kl, "kl", median)
    evaluations(entropy, "entropy", label="on sampled responses")
    tops[entropy] = max(tops[entropy], 1.15 * max(series(run.history, "entropy")[1]))
    iterations(clip, "clip_fraction")
    x, right = series(run.history, "all_right")
    right, wrong = smooth(right), smooth(series(run.history, "all_wrong")[1])
    either = [a + b for a, b in zip(right, wrong, strict=True)]
    if alone:
        edges = [i - 0.5 for i in [*x, x[-1] + 1]]
        zero_signal.stairs(right, edges, fill=True, color=GREEN, label="all right")
        zero_signal.stairs(either, edges, baseline=right, fill=True, color=ORANGE, label="all wrong")
    else:
        zero_signal.plot(x, either, color=colour, linewidth=2, label="measured")
    dotted = {"color": "black" if alone else colour, "linestyle": ":", "linewidth": 2, "marker": ""}
    evaluations(zero_signal, "expected_zero_signal", label="expected: $p^G + (1-p)^G$", **dotted)


def plot(runs: list[Run], path: Path, mark: str = "run.py") -> None:
    """Six panels over the iterations, written to `path` in the format that its ending names, with `mark` inside.

    A run alone is drawn with its single iterations. Of several, each has a colour, and smooth lines alone.
    """
    from matplotlib.figure import Figure  # and not pyplot: no window, no global state
    from matplotlib.lines import Line2D

    alone = len(runs) == 1
    figure = Figure(figsize=(14, 8.4))
    figure.subplots_adjust(left=0.05, right=0.985, bottom=0.065, top=0.86 if alone else 0.82, wspace=0.19, hspace=0.36)
    shared = [word for word in runs[0].settings if all(word in run.settings for run in runs)]
    title = textwrap.fill(f"run.py {' '.join(shared)}", 150, break_on_hyphens=False)
    figure.suptitle(f"GRPO on TinyLM\n{title}", fontsize=11, y=0.99)
    panels = list(figure.subplots(2, 3).flat)
    tops = dict(zip(panels, (1, 1, 1, 0.005, 0.01, 0.005), strict=True))
    for run, colour in zip(runs, COLOURS, strict=False):
        draw(run, colour, alone, panels, tops)
    if not alone:
        handles = [Line2D([], [], color=colour, linewidth=3) for _, colour in zip(runs, COLOURS, strict=False)]
        figure.legend(handles, labels(runs), loc="upper center", bbox_to_anchor=(0.5, 0.925), ncols=4, frameon=False)

    last = max(run.history[-1]["iteration"] for run in runs)
    legend = {"frameon": False, "borderpad": 0, "borderaxespad": 0.2, "handlelength": 1.6, "columnspacing": 1.2}
    names = ("Accuracy", "Training reward", "Groups without signal", "KL to the reference", "Entropy", "Clip fraction")
    units = ("share of the 500 held-out problems", "mean reward of the batch", "share of the groups, mean of 21")
    units += ("nats per token", "nats per token", "share of the tokens")
    for panel, name, unit in zip(panels, names, units, strict=True):
        panel.set_title(name, loc="left", fontweight="bold", pad=24)
        once = {label: handle for handle, label in reversed([*zip(*panel.get_legend_handles_labels(), strict=True)])}
        handles = {"handles": list(reversed(once.values())), "labels": list(reversed(once))}  # those of the first run
        drawn = panel.legend(**handles, loc="lower left", bbox_to_anchor=(0, 1.01), ncols=3, fontsize=9, **legend)
        for handle in [] if alone else drawn.legend_handles:
            handle.set_color(COLOURS[-1])  # here it is the line's style that counts
        panel.set(xlabel="iteration", xlim=(-0.02 * last, 1.02 * last), ylabel=unit)
        panel.set_ylim(-0.02 * tops[panel], 1.02 * tops[panel])
        panel.locator_params(axis="x", integer=True)
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path, mark)


# 5. The run ----------------------------------------------------------------------------------------------------


def redraw(runs: list[Run], out: Path) -> None:
    """Draw earlier runs, and nothing else."""
    from tinylm import whole_file

    with whole_file(out) as temporary:
        plot(runs, temporary, MARK)
    print(f"saved {out}")


def save(model, runs: list[Run], files: tuple[Path, Path, Path], stopped: bool, trained: bool) -> None:
    """Write the CSV of the first of the runs, if `trained` its checkpoint, and the plot of all."""
    from tinylm import save_checkpoint, whole_file

    picture, table, checkpoint = files
    write_csv(runs[0], stopped, table)
    if trained:
        save_checkpoint(model, checkpoint)
    with whole_file(picture) as temporary:
        plot(runs, temporary)
    print(f"saved {picture}, {table}" + (f", {checkpoint}" if trained else "; no checkpoint"))


def main() -> int:
    """Check, train, show, save. Returns the exit status."""
    parser = build_parser()
    args = parser.parse_args()
    settings = settings_of(args)
    earlier = args.versus + args.redraw
    try:
        if len(earlier) + bool(not args.redraw) > len(COLOURS):
            raise ValueError(f"one picture holds {len(COLOURS)} runs at most")
        if args.redraw and settings != settings_of(parser.parse_args([])):
            raise ValueError("--redraw trains nothing: beside it only --out has a meaning")
        earlier = [read_csv(path) for path in earlier]
        if args.redraw:
            check_marked(args.out, MARK)
            redraw(earlier, args.out)
            return 0
        check_files(args.out, settings)
    except ValueError as error:
        parser.error(str(error))
    if args.solutions:
        solutions = Path(__file__).resolve().parent / "solutions"
        if not (solutions / "grpo.py").exists():
            parser.error("--solutions: there is no solutions/grpo.py here")
        sys.path.insert(0, str(solutions))

    import grpo  # noqa: F401  here, so that a mistake in your file shows before anything else happens
    import tinylm

    gc.freeze()  # torch's objects are many, and stay: collecting garbage is quicker without going through them
    parser.check_device(args.device)
    try:
        with lock_on(args.out):
            model = tinylm.load_or_train_sft().to(args.device)
            history, status = train(model, args)
            if len(history) > 1:
                print_table(history)
                runs = [Run(args.out.stem, settings, history), *earlier]
                stopped = len(history) <= args.iters
                try:
                    save(model, runs, files_of(args.out), stopped, trained=status != 2)
                except OSError as error:
                    parser.error(f"could not save: {error}")
    except TimeoutError:  # of the lock
        parser.error(f"--out {args.out}: another run is writing these files: wait for it, or name this run otherwise")
    return status


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("run.py: stopped by Ctrl-C before the results were saved", file=sys.stderr)
        sys.exit(130)
