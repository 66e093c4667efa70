"""The figures of the runs under the names that the answers use, and which claims they bear out."""

import random
from statistics import fmean, median

from measuring.calibration import LAST

from answering import questions

Figures = dict[str, dict[str, list[float]]]  # variant -> key -> a value for each seed
Means = dict[str, dict[str, float]]  # variant -> key -> mean over some of the seeds


def figures_of(result: dict) -> dict[str, float]:
    """The figures of one run under the names that the answers use; those of the tables, and of the way there."""
    history, measured = result["history"], result["figures"]
    evaluated = [row for row in history if "entropy" in row]
    kl = [row["kl"] for row in history[1:]]
    tenth = next(row for row in evaluated if row["iteration"] >= min(10, history[-1]["iteration"]))
    return {
        "sampled": measured["sampled accuracy after"],
        "greedy": measured["greedy accuracy after"],
        "entropy": measured["entropy after, nats per token"],
        "zero": measured[f"zero-signal groups, last {LAST} iterations"],
        "kl": measured["k3 KL after, nats per token"],
        "pass1": measured["pass@1, GRPO - SFT"],
        "pass64": measured["pass@64, GRPO - SFT"],
        "lowest": min(row["sampled_accuracy"] for row in evaluated),
        "train_kl": median(kl),
        "clip": fmean(row["clip_fraction"] for row in history[1:][:LAST]),
        "start": evaluated[0]["sampled_accuracy"],
        "greedy_start": evaluated[0]["greedy_accuracy"],
        "sampled10": tenth["sampled_accuracy"],
        "greedy10": tenth["greedy_accuracy"],
        "kl10": fmean(kl[:10]),
        "best": max(row["sampled_accuracy"] for row in evaluated),
        "expected_zero": evaluated[-1]["expected_zero_signal"],
        "worst_kl": max(kl),
        "reward": fmean(row["reward"] for row in history[1:][-LAST:]),
    } | result.get("one_step", {})


def all_figures(results: dict[str, list[dict]]) -> Figures:
    """Of all variants, each figure as a list over the seeds."""
    rows = {variant: [figures_of(result) for result in runs] for variant, runs in results.items()}
    return {variant: {key: [row[key] for row in of_it] for key in of_it[0]} for variant, of_it in rows.items()}


def means_of(figures: Figures, seeds: list[int]) -> Means:
    """The means over some of the seeds, under the names that the answers use."""
    return {
        variant: {key: fmean(values[seed] for seed in seeds) for key, values in keys.items()}
        for variant, keys in figures.items()
    }


def key_means(figures: Figures) -> Means:
    """Those over the first half of the seeds, from which the key is written."""
    return means_of(figures, list(range(len(figures["default"]["sampled"]) // 2)))


def true_of(claim: str, means: Means) -> bool:
    """Whether these means bear the claim out."""
    return bool(eval(claim, {"__builtins__": {"abs": abs, "min": min, "max": max}}, means))


def halves(seeds: int) -> list[list[int]]:
    """Ten halves of the seeds: five random ways to cut them in two, always the same."""
    generator, found = random.Random(0), []
    for _ in range(5):
        order = generator.sample(range(seeds), seeds)
        found += [sorted(order[: seeds // 2]), sorted(order[seeds // 2 :])]
    return found


def support(claim: str, figures: Figures) -> tuple[bool, int]:
    """(whether the half of the seeds bears it out that the key is not written from, how many of ten halves do)."""
    seeds = len(figures["default"]["sampled"])
    fresh = true_of(claim, means_of(figures, list(range(seeds // 2, seeds))))
    return fresh, sum(true_of(claim, means_of(figures, half)) for half in halves(seeds))


def unsupported(figures: Figures) -> list[str]:
    """What is wrong with the claims, a line for each that too few halves bear out."""
    lines = []
    for experiment in questions.EXPERIMENTS:
        for claim in experiment.claims:
            fresh, of_ten = support(claim, figures)
            if not fresh or of_ten < 9:
                lines.append(f"{experiment.name}: {claim}: on the fresh half {fresh}, on {of_ten} of ten halves")
    return lines
