"""Train TinyLM with GRPO from the SFT checkpoint; save a plot, the metrics as CSV, and the trained checkpoint.

    python run.py                                   the default run
    python run.py --inner-steps 8 --out reuse.png   an experiment, with files of its own
    python run.py --help                            every flag with its default

Read `main`, at the end, first. Above it: flags, files, training, table and plot.
"""
# ruff: noqa: PLC0415  torch and matplotlib take seconds to import: only where they are needed, so that --help is quick

import argparse
import csv
import math
import os
import sys
import textwrap
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from statistics import fmean, median

DEFAULT_OUT = Path("grpo_tinylm.png")
PICTURES = (".png", ".pdf", ".svg", ".jpg")
COLUMNS = ["iteration", "reward", "all_right", "all_wrong", "clip_fraction", "kl", "ratio", "loss"]
COLUMNS += ["sampled_accuracy", "greedy_accuracy", "entropy"]  # blank where there was no evaluation
History = list[dict[str, float]]  # what `grpo.train_grpo` returns: a row per iteration

# 1. Flags ------------------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose complaint is one line, without the usage, and exit status 2."""

    def error(self, message: str):
        self.exit(2, f"{self.prog}: {' '.join(message.split())}\n")

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
    solutions = "run the reference, solutions/grpo.py; so does RL_SOLUTIONS=1 in the environment (default: grpo.py)"
    default = os.environ.get("RL_SOLUTIONS") == "1"
    parser.add_argument("--solutions", action="store_true", default=default, help=solutions)
    return parser


def settings_of(args: argparse.Namespace) -> str:
    """The command that repeats the run, every setting spelled out. Whose code ran, and where to, are no settings."""
    words = ["run.py"]
    for name, value in vars(args).items():
        if name == "std":
            words += [] if value else ["--no-std"]
        elif name not in ("out", "solutions"):
            words.append(f"--{name.replace('_', '-')} {value}")
    return " ".join(words)


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


def check_files(out: Path, settings: str) -> None:
    """Raise ValueError, before any training, if the files can't be written or would replace what is not this run's."""
    check_picture(out)
    if out.stem.lower() in ("tinylm_sft", "passk"):
        raise ValueError(f"--out {out}: the lab has another file of that name")
    picture, table, checkpoint = files_of(out)
    try:
        with table.open(encoding="utf-8") as file:
            same_settings = file.readline() == f"# {settings}\n"
    except (OSError, UnicodeDecodeError):
        same_settings = False
    for path in (picture, table, checkpoint):
        if path.exists() and not (same_settings and path.is_file()):
            reason = "is there already, and not from a run with these settings"
            raise ValueError(f"{path} {reason}: name this run with --out NAME.png, or delete that file")


def save(model, history: History, settings: str, files: tuple[Path, Path, Path], trained: bool) -> None:
    """Write plot, CSV (the settings in a comment line, then a row per iteration) and, if `trained`, the checkpoint."""
    from tinylm import save_checkpoint, whole_file

    picture, table, checkpoint = files
    with whole_file(table) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        file.write(f"# {settings}\n")
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(history)
    if trained:
        save_checkpoint(model, checkpoint)
    with whole_file(picture) as temporary:
        plot(history, settings, temporary)
    print(f"saved {picture}, {table}" + (f", {checkpoint}" if trained else "; no checkpoint"))


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


def train(model, args: argparse.Namespace) -> tuple[History, int]:
    """Train `model` in place. Returns the history so far and the exit status; tells on stderr why it stopped early."""
    from tqdm import tqdm

    import grpo

    config = grpo.GRPOConfig(**{field.name: getattr(args, field.name) for field in fields(grpo.GRPOConfig)})
    history: History = []

    def report(row: dict[str, float]) -> None:
        history.append(row)
        if row["iteration"] == 0:
            return
        metrics = f"reward {row['reward']:.2f}, KL {row['kl']:.3f}"
        bar.set_postfix_str(metrics, refresh=False)
        bar.update()
        if bar.disable and "sampled_accuracy" in row:
            accuracy = f"accuracy {row['sampled_accuracy']:.3f} sampled, {row['greedy_accuracy']:.3f} greedy"
            print(f"iteration {row['iteration']} of {args.iters}: {metrics}, {accuracy}", flush=True)

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


def plot(history: History, settings: str, path: Path) -> None:
    """Six panels over the iterations of one run, written to `path` in the format that its ending names."""
    from matplotlib.figure import Figure  # and not pyplot: no window, no global state

    blue, orange, green = "#0072B2", "#D55E00", "#009E73"  # Okabe and Ito's colours: the colour-blind can tell them
    figure = Figure(figsize=(14, 8.4), layout="constrained")
    figure.get_layout_engine().set(h_pad=0.1)
    figure.suptitle(f"GRPO on TinyLM\n{textwrap.fill(settings, 150, break_on_hyphens=False)}", fontsize=11)
    accuracy, reward, zero_signal, kl, entropy, clip = figure.subplots(2, 3).flat

    def evaluations(panel, name: str, colour: str, label: str):
        panel.plot(*series(history, name), color=colour, marker="o", markersize=3.5, label=label)

    def iterations(panel, name: str, middle=fmean, top: float | None = None) -> float:
        """Dots and a smooth line, up to `top`, by default a height that cuts off nothing but spikes. Returns `top`."""
        x, values = series(history, name)
        line = smooth(values, middle)
        panel.plot(x, values, "o", color=blue, alpha=0.35, markersize=4, markeredgewidth=0, label="one iteration")
        panel.plot(x, line, color=blue, linewidth=2, label=f"{middle.__name__.removeprefix('f')} of 21")
        top = top or 1.3 * max(sorted(values)[int(0.95 * len(values))], *line, 0.005)
        spikes = [i for i, value in zip(x, values, strict=True) if value > top]
        if spikes:
            edge, label = [1.02 * top] * len(spikes), f"up to {max(values):.3g}"
            panel.plot(spikes, edge, "^", color=orange, clip_on=False, markersize=5, label=label)
        return top

    evaluations(accuracy, "sampled_accuracy", blue, "sampled")
    evaluations(accuracy, "greedy_accuracy", orange, "greedy")
    evaluations(entropy, "entropy", blue, "on sampled responses")
    entropy_top = 1.15 * max(0.01, *series(history, "entropy")[1])
    iterations(reward, "reward", top=1)
    # k3 of single samples is heavy-tailed: one spike would lift a mean for 21 iterations, but not the median.
    kl_top = iterations(kl, "kl", median)
    clip_top = iterations(clip, "clip_fraction")
    x, right = series(history, "all_right")
    right, wrong = smooth(right), smooth(series(history, "all_wrong")[1])
    edges = [i - 0.5 for i in [*x, x[-1] + 1]]
    zero_signal.stairs(right, edges, fill=True, color=green, label="all right")
    both = [a + b for a, b in zip(right, wrong, strict=True)]
    zero_signal.stairs(both, edges, baseline=right, fill=True, color=orange, label="all wrong")

    end = history[-1]["iteration"]
    legend = {"frameon": False, "borderpad": 0, "borderaxespad": 0.2, "handlelength": 1.4, "columnspacing": 1.2}
    for panel, title, unit, top in (
        (accuracy, "Accuracy", "share of the 500 held-out problems", 1),
        (reward, "Training reward", "mean reward of the batch", 1),
        (zero_signal, "Groups without signal", "share of the groups, mean of 21", 1),
        (kl, "KL to the reference", "nats per token", kl_top),
        (entropy, "Entropy", "nats per token", entropy_top),
        (clip, "Clip fraction", "share of the tokens", clip_top),
    ):
        panel.set_title(title, loc="left", fontweight="bold", pad=24)
        panel.legend(loc="lower left", bbox_to_anchor=(0, 1.01), ncols=3, fontsize=9, **legend)  # above all curves
        panel.set(xlabel="iteration", xlim=(-0.02 * end, 1.02 * end), ylabel=unit, ylim=(-0.02 * top, 1.02 * top))
        panel.locator_params(axis="x", integer=True)
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


# 5. The run ----------------------------------------------------------------------------------------------------


def main() -> int:
    """Check, train, show, save. Returns the exit status."""
    parser = build_parser()
    args = parser.parse_args()
    settings = settings_of(args)
    try:
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

    parser.check_device(args.device)
    model = tinylm.load_or_train_sft().to(args.device)
    history, status = train(model, args)
    if len(history) > 1:
        print_table(history)
        try:
            save(model, history, settings, files_of(args.out), trained=status != 2)
        except OSError as error:
            parser.error(f"could not save: {error}")
    return status


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("run.py: stopped by Ctrl-C before the results were saved", file=sys.stderr)
        sys.exit(130)
