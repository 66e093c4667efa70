"""The pictures: six curves of a run or of several, and pass@k."""

import functools
import textwrap
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median

import numpy as np
from matplotlib import style
from matplotlib.figure import Figure  # and not pyplot: no window, no global state
from matplotlib.lines import Line2D

from lab.files import whole_file
from lab.history import Run, series

# Kept inside a picture: one that carries its mark may be replaced.
REDRAW_MARK, PASSK_MARK = "drawn by run.py --redraw", "drawn by passk.py"
# Okabe and Ito's colours: the colour-blind can tell them from one another.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#555555")
BLUE, ORANGE, GREEN, *_ = COLOURS
KS = (1, 2, 4, 8, 16, 32, 64)
EVERY_K = range(1, max(KS) + 1)
Curves = dict[str, np.ndarray]  # "SFT" and "GRPO": pass@k [64] at every k from 1 on


def in_its_own_style(draw: Callable) -> Callable:
    """Decorates a function that draws: matplotlib's own defaults, whatever style the user has chosen, as the pictures
    rely on black on white; and no text is a formula, as file names may hold dollar signs.
    """

    @functools.wraps(draw)
    def drawn(*args, **kwargs) -> None:
        with style.context(["default", {"text.parse_math": False}]):
            draw(*args, **kwargs)

    return drawn


def save_figure(figure: Figure, path: Path, mark: str = "run.py", dpi: int = 110) -> None:
    """Save the matplotlib figure, whole or not at all, with `mark` inside, where `check_marked` finds it."""
    inside = {"pil_kwargs": {"comment": mark}} if path.suffix.lower() == ".jpg" else {"metadata": {"Creator": mark}}
    with whole_file(path) as temporary:
        figure.savefig(temporary, dpi=dpi, **inside)


# A run, or several ----------------------------------------------------------------------------------------------


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
    evaluations(zero_signal, "expected_zero_signal", label="expected: p^G + (1-p)^G", **dotted)


@in_its_own_style
def plot(runs: list[Run], path: Path, mark: str = "run.py") -> None:
    """Six panels over the iterations, written to `path` in the format that its ending names, with `mark` inside.

    A run alone is drawn with its single iterations. Of several, each has a colour, and smooth lines alone.
    """
    alone = len(runs) == 1
    figure = Figure(figsize=(14, 8.4))
    figure.subplots_adjust(left=0.055, right=0.985, bottom=0.065, top=0.86 if alone else 0.82, wspace=0.19, hspace=0.36)
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


# pass@k ----------------------------------------------------------------------------------------------------------


def leaders(low: np.ndarray, high: np.ndarray) -> str:
    """Who is ahead from which k on, given the band of GRPO - SFT at k = 1, 2, 3 ...: "GRPO from k = 1, neither from
    k = 13". Neither is where the band holds 0.
    """
    signs = (low > 0).astype(int) - (high < 0)
    changes = [k for k in range(1, len(signs) + 1) if k == 1 or signs[k - 1] != signs[k - 2]]
    return ", ".join(f"{('neither', 'GRPO', 'SFT')[signs[k - 1]]} from k = {k}" for k in changes)


@in_its_own_style
def plot_passk(estimate: Curves, exact: Curves, low: np.ndarray, high: np.ndarray, title: str, path: Path) -> None:
    """Left the two curves, right their difference, as points (estimates at KS) on lines (exact).

    `low` and `high` [64] bound the band of the difference.
    """
    figure = Figure(figsize=(12, 5), layout="constrained")
    curves, difference = figure.subplots(1, 2)
    figure.suptitle(title, fontsize=10)

    def draw(panel, line: np.ndarray, points: np.ndarray, colour: str, marker: str, name: str = ""):
        panel.plot(EVERY_K, 100 * line, color=colour, label=f"{name}exact: mean of 1 - (1 - p)^k")
        points = [100 * points[k - 1] for k in KS]
        panel.plot(KS, points, marker, color=colour, markersize=7, label=f"{name}estimate from samples")

    draw(curves, exact["GRPO"], estimate["GRPO"], ORANGE, "s", "GRPO, ")
    draw(curves, exact["SFT"], estimate["SFT"], BLUE, "o", "SFT, ")
    curves.set(title="pass@k on held-out problems", ylabel="pass@k (% of problems)")
    curves.legend(frameon=False)

    difference.axhline(0, color="#555555", linewidth=1)
    band = "95% band, resampling the problems"
    difference.fill_between(EVERY_K, 100 * low, 100 * high, color=GREEN, alpha=0.2, linewidth=0, label=band)
    draw(difference, exact["GRPO"] - exact["SFT"], estimate["GRPO"] - estimate["SFT"], GREEN, "D")
    difference.set(title=f"ahead: {leaders(low, high)}")
    # Nearly linear up to half a point, logarithmic beyond: the lead at k = 1 is some fifty times that at k = 64.
    difference.set_yscale("asinh", linear_width=0.5)
    difference.set_ylabel("GRPO - SFT (percentage points, stretched near 0)")
    difference.set_yticks(ticks := [-30, -10, -3, -1, -0.3, 0, 0.3, 1, 3, 10, 30], [f"{tick:g}" for tick in ticks])
    difference.minorticks_off()
    difference.set_ylim(min(-2, 130 * low.min()), max(2, 130 * high.max()))
    difference.legend(frameon=False)

    for panel in (curves, difference):
        panel.set_xscale("log", base=2)
        panel.set_xticks(KS, [str(k) for k in KS])
        panel.set_xlabel("k (samples that a problem gets)")
        panel.grid(alpha=0.3)
    save_figure(figure, path, PASSK_MARK)
