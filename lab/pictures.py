"""The pictures of runs, and of pass@k; and what all pictures have in common."""

import functools
import math
import textwrap
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

import numpy as np
from matplotlib import rc_context, style
from matplotlib.axes import Axes
from matplotlib.figure import Figure  # and not pyplot: no window, no global state
from matplotlib.lines import Line2D
from PIL import Image  # comes with matplotlib
from PIL.PngImagePlugin import PngInfo

from lab.files import whole_file
from lab.flags import run_parser, settings_of
from lab.history import Run, series

# Kept inside a picture: one that carries its mark may be replaced.
REDRAW_MARK, PASSK_MARK = "drawn by run.py --redraw", "drawn by passk.py"
# Okabe and Ito's colours: the colour-blind can tell them from one another. Each means one thing in every picture.
GREEN, VERMILLION = "#009E73", "#D55E00"  # right, and made likelier; wrong, and made less likely
BLUE = "#0072B2"  # the lab's default: its run, its estimator
OTHERS = ("#E69F00", "#CC79A7", "#56B4E9", "#000000")  # other runs, in order
GREY = "#777777"  # what is compared with: the starting policy, other formulas; a style, whatever its colour
MOST_RUNS = 1 + len(OTHERS)  # in a picture
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
    """Save the matplotlib figure, whole or not at all, with `mark` inside, where `check_marked` finds it. A PNG gets a
    palette of 64 colours, which is a quarter of the bytes; the same figure gives the same bytes.
    """
    kind = path.suffix.lower()
    inside = {"pil_kwargs": {"comment": mark}} if kind == ".jpg" else {"metadata": {"Creator": mark}}
    if kind in (".svg", ".pdf"):
        inside["metadata"] |= {"Date": None} if kind == ".svg" else {"CreationDate": None}
    with whole_file(path) as temporary, rc_context({"svg.hashsalt": "lab"}):
        figure.savefig(temporary, dpi=dpi, **inside)
        if kind == ".png":
            with Image.open(temporary) as image:
                palette = image.convert("RGB").quantize(64, kmeans=2, dither=Image.Dither.NONE)
            written = PngInfo()
            written.add_text("Creator", mark)
            palette.save(temporary, "PNG", optimize=True, pnginfo=written)


def tidy(panel: Axes, label: str = "") -> None:
    """A panel without its upper and right edge, with a pale grid, and a label below."""
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(alpha=0.25)
    panel.set_axisbelow(True)
    panel.set_xlabel(label)


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


def draw_band(panel: Axes, x: list[float], seeds: list[list[float]], colour: str, label: str = "", **style) -> None:
    """The mean over the seeds as a line, from the lowest to the highest as a band."""
    columns = list(zip(*seeds, strict=True))
    panel.plot(x, [fmean(c) for c in columns], color=colour, label=label, **style)
    if len(seeds) > 1:
        panel.fill_between(
            x, [min(c) for c in columns], [max(c) for c in columns], color=colour, alpha=0.2, linewidth=0
        )


def is_default(run: Run) -> bool:
    """Whether all that its learning depends on, but for the seeds, has the default value."""
    no_matter = ("--seed", "--seeds", "--eval-every", "--device", "--solutions")
    default = settings_of(run_parser().parse_args([]))
    return all(word in default or word.split()[0] in no_matter for word in run.settings)


def colours(runs: list[Run]) -> list[str]:
    """A colour for each run: blue for the first that has the default settings, alone as in company."""
    default = next((i for i, run in enumerate(runs) if is_default(run)), None)
    others = iter((*OTHERS, BLUE))
    return [BLUE if i == default else next(others) for i in range(len(runs))]


class Panel(NamedTuple):
    """One of the nine: what it shows, its unit, and its axis, which grows until all but spikes have their place."""

    title: str
    unit: str
    low: float
    high: float
    grows: bool = True


PANELS = {
    "accuracy": Panel("Accuracy", "share of the 500 held-out problems", 0, 1, grows=False),
    "reward": Panel("Training reward", "mean reward of the batch", 0, 1, grows=False),
    "zero_signal": Panel("Groups without signal", "share; expected: p^G + (1-p)^G", 0, 1, grows=False),
    "kl": Panel("KL to the reference", "nats per token", 0, 0.005),
    "entropy": Panel("Entropy", "nats per token", 0, 0.01),
    "clip_fraction": Panel("Clip fraction", "share of the tokens", 0, 0.005),
    "ratio": Panel("Ratio", "mean over the tokens", 0.999, 1.001),
    "loss": Panel("Loss", "", -0.001, 0.001),
    "gradient": Panel("Gradient", "norm over all weights", 0, 0.01),
}


class Nine:
    """The nine panels, and how far the axis of each must reach."""

    def __init__(self, figure: Figure, alone: bool):
        self.panels = dict(zip(PANELS, figure.subplots(3, 3).flat, strict=True))
        self.limits = {name: [panel.low, panel.high] for name, panel in PANELS.items()}
        self.alone = alone  # one run of one seed: its single iterations are drawn, too

    def reach(self, name: str, low: float, high: float) -> None:
        """Make the axis of a panel reach from low to high at least."""
        if PANELS[name].grows:
            limits = self.limits[name]
            limits[:] = min(limits[0], low), max(limits[1], high)

    def evaluations(self, run: Run, name: str, column: str, colour: str, **style) -> None:
        """What is measured now and then: points, joined."""
        x, _ = series(run.history, column)
        seeds = [series(history, column)[1] for history in run.whole]
        style = {"marker": "o", "markersize": 3.5 if self.alone else 2} | style
        draw_band(self.panels[name], x, seeds, colour, **style)
        self.reach(name, 0, 1.15 * max(map(max, seeds)))

    def iterations(self, run: Run, name: str, colour: str, middle: Callable = fmean) -> None:
        """A smooth line; of a run alone also dots, and triangles at the edge for the spikes beyond it."""
        panel = self.panels[name]
        x, values = series(run.history, name)
        seeds = [smooth(series(history, name)[1], middle) for history in run.whole]
        draw_band(panel, x, seeds, colour, f"{middle.__name__.removeprefix('f')} of 21", linewidth=2)
        ordered = sorted(values)[len(values) // 20 : len(values) - len(values) // 20] if self.alone else []
        seen = [*ordered, *(value for line in seeds for value in line)]
        middle_of_axis = 1 if name == "ratio" else 0
        self.reach(name, *(middle_of_axis + 1.3 * (edge - middle_of_axis) for edge in (min(seen), max(seen))))
        if not self.alone:
            return
        low, high = self.limits[name]
        inside = [value if low <= value <= high else math.nan for value in values]
        dots = {"alpha": 0.35, "markersize": 4, "markeredgewidth": 0, "label": "one iteration"}
        panel.plot(x, inside, "o", color=colour, **dots)
        label = f"{min(values):.3g} to {max(values):.3g}" if min(values) < low else f"up to {max(values):.3g}"
        for marker, edge, sign in (("^", high, 1), ("v", low, -1)):
            spikes = [i for i, value in zip(x, values, strict=True) if sign * value > sign * edge]
            if spikes:
                y = [edge - sign * 0.02 * (high - low)] * len(spikes)
                panel.plot(spikes, y, marker, color=colour, markersize=6, label=label)
                label = ""

    def groups_without_signal(self, run: Run, colour: str) -> None:
        """Their share, and the share to expect; of a run alone also how many are all right, and all wrong."""
        panel = self.panels["zero_signal"]
        x, _ = series(run.history, "all_right")
        right, wrong = ([smooth(series(h, name)[1]) for h in run.whole] for name in ("all_right", "all_wrong"))
        either = [[a + b for a, b in zip(*both, strict=True)] for both in zip(right, wrong, strict=True)]
        if self.alone:
            panel.fill_between(x, right[0], color=GREEN, alpha=0.5, linewidth=0, label="all right")
            panel.fill_between(x, right[0], either[0], color=VERMILLION, alpha=0.5, linewidth=0, label="all wrong")
        draw_band(panel, x, either, colour, "measured", linewidth=2)
        dotted = {"linestyle": ":", "linewidth": 2, "marker": "", "label": "expected"}
        self.evaluations(run, "zero_signal", "expected_zero_signal", colour, **dotted)

    def draw(self, run: Run, colour: str) -> None:
        """Draw one run into the nine panels."""
        self.evaluations(run, "accuracy", "sampled_accuracy", colour, label="sampled")
        self.evaluations(run, "accuracy", "greedy_accuracy", colour, label="greedy", linestyle="--")
        self.iterations(run, "reward", colour)
        self.groups_without_signal(run, colour)
        # k3 of single samples is heavy-tailed: one spike would lift a mean for 21 iterations, but not the median.
        self.iterations(run, "kl", colour, median)
        self.evaluations(run, "entropy", "entropy", colour, label="on sampled responses")
        for name in ("clip_fraction", "ratio", "loss", "gradient"):
            self.iterations(run, name, colour)

    def finish(self, last: float) -> None:
        """Titles, legends and axes; `last` is the last iteration."""
        legend = {"frameon": False, "borderpad": 0, "borderaxespad": 0.2, "handlelength": 1.5, "columnspacing": 0.9}
        for name, panel in self.panels.items():
            panel.set_title(PANELS[name].title, loc="left", fontweight="bold", pad=24)
            found = zip(*panel.get_legend_handles_labels(), strict=True)
            once = {label: handle for handle, label in reversed([*found])}  # those of the first run
            handles = {"handles": list(reversed(once.values())), "labels": list(reversed(once))}
            drawn = panel.legend(**handles, loc="lower left", bbox_to_anchor=(0, 1.01), ncols=4, fontsize=9, **legend)
            for handle in [] if self.alone else drawn.legend_handles:
                handle.set_color(GREY)  # here it is the line's style that counts
            tidy(panel, "iteration")
            low, high = self.limits[name]
            edge = 0.02 * (high - low)
            panel.set(xlim=(-0.02 * last, 1.02 * last), ylim=(low - edge, high + edge), ylabel=PANELS[name].unit)
            panel.locator_params(axis="x", integer=True)
            panel.ticklabel_format(axis="y", useOffset=False)


@in_its_own_style
def plot(runs: list[Run], path: Path, mark: str = "run.py") -> None:
    """Nine panels over the iterations, written to `path` in the format that its ending names, with `mark` inside.

    One run of one seed is drawn with its single iterations. Of several runs each has a colour, and smooth lines alone;
    of several seeds the mean is drawn and a band from the lowest to the highest.
    """
    alone = len(runs) == 1 and len(runs[0].whole) == 1
    figure = Figure(figsize=(14, 12.4))
    figure.subplots_adjust(left=0.055, right=0.985, bottom=0.045, top=0.9 if len(runs) == 1 else 0.875, wspace=0.21)
    figure.subplots_adjust(hspace=0.38)
    shared = [word for word in runs[0].settings if all(word in run.settings for run in runs)]
    title = textwrap.fill(f"run.py {' '.join(shared)}", 150, break_on_hyphens=False)
    seeds = "" if alone else "; lines: means over the seeds, bands: from the lowest to the highest"
    figure.suptitle(f"GRPO on TinyLM{seeds if any(run.further for run in runs) else ''}\n{title}", fontsize=11, y=0.993)
    nine = Nine(figure, alone)
    for run, colour in zip(runs, colours(runs), strict=True):
        nine.draw(run, colour)
    if len(runs) > 1:
        handles = [Line2D([], [], color=colour, linewidth=3) for colour in colours(runs)]
        figure.legend(handles, labels(runs), loc="upper center", bbox_to_anchor=(0.5, 0.95), ncols=4, frameon=False)
    nine.finish(max(run.history[-1]["iteration"] for run in runs))
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

    draw(curves, exact["GRPO"], estimate["GRPO"], BLUE, "s", "GRPO, ")
    draw(curves, exact["SFT"], estimate["SFT"], GREY, "o", "SFT, ")
    curves.set(title="pass@k on held-out problems", ylabel="pass@k (% of problems)")
    curves.legend(frameon=False)

    difference.axhline(0, color=GREY, linewidth=2)
    band = "95% band, resampling the problems"
    difference.fill_between(EVERY_K, 100 * low, 100 * high, color=BLUE, alpha=0.2, linewidth=0, label=band)
    draw(difference, exact["GRPO"] - exact["SFT"], estimate["GRPO"] - estimate["SFT"], BLUE, "D")
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
