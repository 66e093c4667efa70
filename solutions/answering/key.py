"""The answer key as a whole: its text, its tables, and what is kept beside it."""

import json
import textwrap
from statistics import fmean

from manifest import LAB
from measuring.calibration import LAST

from answering import questions
from answering.claims import Figures, all_figures, key_means, unsupported
from answering.drawings import DRAWN, picture
from answering.runs import read_runs
from lab.files import whole_file

OUT = LAB / "solutions" / "experiments.md"
FOLDER = LAB / "solutions" / "experiments"  # the pictures, and the figures of all runs
COLUMNS = {  # in the tables: the key in an answer -> (heading, decimals)
    "sampled": ("sampled", 2),
    "greedy": ("greedy", 2),
    "entropy": ("entropy", 2),
    "zero": ("zero-signal", 2),
    "kl": ("KL", 2),
    "pass64": ("pass@64 - SFT", 3),
    "lowest": ("lowest sampled", 2),
    "train_kl": ("KL in training", 2),
    "clip": ("clip fraction", 3),
}
INTRO = """# The answer key

Written by `python solutions/experiments.py` from {half} seeds, each figure as the mean (lowest to highest). Every claim
of an answer was checked on {half} other seeds, and on ten random halves of all, of which at least nine bear it out.

A seed is that of the starting policy and of GRPO alike, so the runs of one seed begin at the same policy; the last
column of a table is the difference to the default run, seed by seed. The KL is the mean k3, in nats per token, of the
trained policy on the held-out problems; "KL in training" the median over all iterations of what the loss uses. The
share of groups without signal is that of the last {last} iterations, the clip fraction that of the first {last};
"lowest sampled" is that of all evaluations.

## The default run
"""


def paragraph(text: str) -> str:
    """The text in lines of at most 120 characters, without its own line breaks and indentation."""
    return textwrap.fill(" ".join(text.split()), 120, break_on_hyphens=False)


def cell(values: list[float], decimals: int, sign: str = "") -> str:
    """The mean and, in brackets, the lowest and the highest."""
    mean, low, high = (f"{value:{sign}.{decimals}f}" for value in (fmean(values), min(values), max(values)))
    return f"{mean} ({low} to {high})"


def table(variants: list[str], figures: Figures) -> list[str]:
    """Markdown: a line for each variant; last the difference to the default run, seed by seed."""
    headings = [heading for heading, _ in COLUMNS.values()]
    lines = [f"| run | {' | '.join(headings)} | sampled - default |", "|---" * (len(headings) + 2) + "|"]
    for variant in variants:
        cells = [cell(figures[variant][key], decimals) for key, (_, decimals) in COLUMNS.items()]
        pairs = zip(figures[variant]["sampled"], figures["default"]["sampled"], strict=True)
        cells.append("" if variant == "default" else cell([one - other for one, other in pairs], 2, "+"))
        lines.append(f"| {questions.command(variant)} | {' | '.join(cells)} |")
    return lines


def anatomy_tables(runs: list[dict]) -> list[str]:
    """Markdown: what the default run did to the answers, by kind of problem and by mistake; means over the seeds."""
    lines = []
    for title, name in (("kind of problem: sampled accuracy", "kinds"), ("mistake: share of all answers", "mistakes")):
        lines += ["", f"| {title} | before | after |", "|---|---|---|"]
        rows = {row for run in runs for when in ("before", "after") for row in run[when][name]}
        mean = {
            row: [fmean(run[when][name].get(row, 0.0) for run in runs) for when in ("before", "after")] for row in rows
        }
        for row, values in sorted(mean.items(), key=lambda item: -item[1][0]):
            lines.append(f"| {row} | {values[0]:.3f} | {values[1]:.3f} |")
    return lines


def write(seeds: int) -> list[str]:
    """Write experiments.md, its pictures and the figures. Returns what is wrong with the claims."""
    results = read_runs(seeds)
    figures = all_figures(results)
    half = seeds // 2
    written = {variant: {key: values[:half] for key, values in keys.items()} for variant, keys in figures.items()}
    drawn = {variant: runs[:half] for variant, runs in results.items()}
    means = key_means(figures)
    lines = [*INTRO.format(half=half, last=LAST).splitlines(), *table(["default"], written)]
    lines += [*anatomy_tables(drawn["default"]), ""]
    for experiment in questions.EXPERIMENTS:
        image = FOLDER / f"{experiment.name}.png"
        DRAWN.get(experiment.name, picture)(experiment.variants, drawn, image)
        lines += [f"## {experiment.title}", "", *table(experiment.variants, written), ""]
        lines += [f"![{experiment.title}]({image.relative_to(OUT.parent).as_posix()})", ""]
        lines += [paragraph(experiment.answer.format(**means)), "", paragraph(f"*Marking:* {experiment.hint}"), ""]
    with whole_file(OUT) as temporary:
        temporary.write_text("\n".join(lines), encoding="utf-8")
    rounded = {v: {key: [round(x, 4) for x in values] for key, values in keys.items()} for v, keys in figures.items()}
    with whole_file(FOLDER / "figures.json") as temporary:
        rows = [f"{json.dumps(variant)}: {json.dumps(keys)}" for variant, keys in rounded.items()]
        temporary.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")
    return unsupported(figures)


def tips(figures: Figures) -> dict[str, str]:
    """The tip to each experiment, and below it the numbers, as they stand in the README, each folded away."""
    means, found = key_means(figures), {}
    for experiment in questions.EXPERIMENTS:
        tip, numbers = (paragraph(text.format(**means)) for text in (experiment.tip, experiment.numbers))
        inner = f"<details><summary>Numbers to compare with</summary>\n\n{numbers}\n\n</details>"
        found[experiment.name] = f"<details><summary>{experiment.title}</summary>\n\n{tip}\n\n{inner}\n</details>\n"
    return found
