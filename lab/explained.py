"""Two pictures that explain: one step of GRPO, and its parts by themselves."""

import argparse
import math
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from torch import Tensor

import tinylm
from lab.explain import Step, explain_step, prompt_of, step_as_text
from lab.parts import REPEATS, SAMPLES, Advantages, Estimators, Objective, each_part
from lab.pictures import BLUE, GREEN, GREY, VERMILLION, in_its_own_style, save_figure, tidy
from lab.tasks import call_tasks, config_of, is_the_labs

STEP_MARK, PARTS_MARK = "drawn by run.py --explain", "drawn from its parts by run.py"
PADDING = "#DDDDDD"
CELL, ROW = 0.84, 0.42  # inches
FULL = math.log(2)  # a token twice or half as likely as before has the full colour


def tint(value: float, largest: float) -> tuple[float, float, float]:
    """White at 0; greener the higher the value, redder the lower; full at `largest` and beyond."""
    strength = min(1.0, abs(value) / largest) if largest > 0 and np.isfinite(value) else 0.0
    colour = np.array(to_rgb(GREEN if value > 0 else VERMILLION))
    return tuple(1 - 0.85 * strength * (1 - colour))


def shade(colour: str, i: int, of: int) -> tuple[float, float, float]:
    """The i-th of several shades of a colour, from pale to full."""
    return tuple(1 - (0.3 + 0.7 * i / max(1, of - 1)) * (1 - np.array(to_rgb(colour))))


# One step --------------------------------------------------------------------------------------------------------


def draw_cells(panel: Axes, step: Step, values: Tensor, largest: float, clipped: Tensor, told: list) -> None:
    """A cell per token, coloured by its value: full colour at `largest`; a frame where it is clipped, grey where it is
    padding, unless a wrong function gives that a value, too. Token and `told[row][column]`, two numbers or one, are
    written into it.
    """
    rows, columns = values.shape
    for i in range(rows):
        for t in range(columns):
            padding = not step.mask[i, t] and values[i, t] == 0
            colour = PADDING if padding else tint(values[i, t].item(), largest)
            panel.add_patch(Rectangle((t, i), 1, 1, facecolor=colour, edgecolor="white", linewidth=2))
            if clipped[i, t]:
                frame = {"fill": False, "edgecolor": "black", "linewidth": 1.8, "zorder": 3}
                panel.add_patch(Rectangle((t + 0.05, i + 0.06), 0.9, 0.88, **frame))
            first, *second = [""] if padding else told[i][t]
            style = {"va": "center", "color": "#888888" if padding else "black"}
            panel.text(t + 0.14, i + 0.5, step.tokens[i][t], fontsize=13, weight="bold", **style)
            panel.text(t + 0.9, i + (0.3 if second else 0.5), first, fontsize=9.5, ha="right", **style)
            panel.text(t + 0.9, i + 0.72, "".join(second), fontsize=9.5, ha="right", **style)
    panel.set(xlim=(0, columns), ylim=(rows, 0))
    panel.axis("off")


def draw_chances(panel: Axes, step: Step) -> None:
    """A group of bars for each answer, one for each moment, from pale to full."""
    n, height = len(step.moments), 0.84 / len(step.moments)
    for row, answer in enumerate(step.answers):
        colour = GREEN if answer == step.right else VERMILLION
        for k, chance in enumerate(step.chances[:, row].tolist()):
            y = row - 0.42 + (k + 0.5) * height
            panel.barh(y, chance, 0.94 * height, color=shade(colour, k, n))
            panel.text(chance + 0.012, y, f"{chance:.3f}", va="center", fontsize=10)
    names = [f"{answer}\n{'right' if answer == step.right else 'wrong'}" for answer in step.answers]
    panel.set_yticks(range(len(names)), names, fontsize=12)
    panel.set(xlim=(0, 1.1), ylim=(len(names) - 0.45, -0.55))
    panel.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "0.25", "0.5", "0.75", "1"])
    tidy(panel)
    panel.grid(visible=False, axis="y")
    names = ["before", *(f"after step {k}" for k in range(1, n))]
    panel.legend([Patch(color=shade(GREY, k, n)) for k in range(n)], names, loc="lower right", frameon=False)


class Sheet:
    """A figure whose places are inches from its upper left corner."""

    def __init__(self, width: float, height: float):
        self.width, self.height = width, height
        self.figure = Figure(figsize=(width, height))

    def axes(self, x: float, y: float, w: float, h: float) -> Axes:
        """Axes of w by h, their upper left corner at (x, y)."""
        return self.figure.add_axes((x / self.width, 1 - (y + h) / self.height, w / self.width, h / self.height))

    def write(self, x: float, y: float, text: str, **style) -> None:
        self.figure.text(x / self.width, 1 - y / self.height, text, **{"va": "center", "fontsize": 11} | style)


def draw_head(sheet: Sheet, step: Step, config) -> None:
    """What it is, its settings, and what the colours mean."""
    sheet.write(0.15, 0.28, f"One step of GRPO on {step.prompt}", fontsize=17, weight="bold")
    settings = (
        f"right is {step.right}; G = {config.G}, clip {config.clip:g}, beta {config.beta:g}, Adam at {config.lr:g}"
    )
    settings += f", temperature {config.temperature:g}, seed {config.seed}{'' if config.std else ', mean only'}"
    settings += "" if step.advantages.any() else "; no signal: no answer is better than its group"
    sheet.write(0.15, 0.6, settings, color="#444444")
    patches = [Patch(color=tint(1, 1)), Patch(color=tint(-1, 1))]
    patches += [Patch(facecolor="white", edgecolor="black", linewidth=1.8), Patch(color=PADDING)]
    names = [
        "pushed up, became likelier",
        "pushed down, became less likely",
        "clipped: only the KL term pushes",
        "padding",
    ]
    where = {"loc": "center left", "bbox_to_anchor": (0.05 / sheet.width, 1 - 0.97 / sheet.height), "ncols": 4}
    sheet.figure.legend(patches, names, frameon=False, columnspacing=1.4, handlelength=1.4, fontsize=11, **where)


def draw_entropies(panel: Axes, step: Step) -> None:
    """A bar for each moment."""
    n = len(step.entropies)
    for k, entropy in enumerate(step.entropies):
        panel.barh(k, entropy, 0.9, color=shade(GREY, k, n))
        panel.text(entropy, k, f" {entropy:.2f}", va="center", fontsize=10)
    panel.set_yticks(range(n), ["before", *(f"after {k}" for k in range(1, n))])
    panel.set_xlim(0, 1.15 * max(step.entropies))
    panel.invert_yaxis()
    tidy(panel)
    panel.grid(visible=False, axis="y")


@in_its_own_style
def draw_step(step: Step, config, path: Path) -> None:
    """One step: above how each token is pushed, below what has moved, a column for each inner step; at the right the
    exact chances of the answers, and the entropy. `config` is the GRPOConfig of it.
    """
    rows, columns = step.mask.shape
    inner = len(step.moments) - 1
    block, left, top, gap, title = columns * CELL, 1.9, 1.65, 0.3, 0.75  # inches
    right, tall = left + inner * (block + gap) + 0.8, rows * ROW
    upper, lower = top, top + tall + title
    sheet = Sheet(max(right + 4.3, 10), lower + tall + 0.3)
    draw_head(sheet, step, config)

    pushes = torch.cat([moment.gradient for moment in step.moments[:-1]])
    hardest = pushes[pushes.isfinite()].abs().max().item() if pushes.isfinite().any() else 0.0
    for k, (before, after) in enumerate(pairwise(step.moments)):
        x = left + k * (block + gap)
        sheet.write(x, upper - 0.17, f"Inner step {k + 1}: gradient x 1000", weight="bold")
        pushed = [[[f"{1000 * cell:+.1f}"] for cell in row] for row in before.gradient.tolist()]
        draw_cells(sheet.axes(x, upper, block, tall), step, before.gradient, hardest, before.clipped, pushed)
        sheet.write(x, lower - 0.17, f"After step {k + 1}: ratio, k3 below it", weight="bold")
        pairs = torch.stack([after.ratio, after.k3], dim=-1).tolist()
        moved = [[[f"{number:.2f}" for number in cell] for cell in row] for row in pairs]
        draw_cells(sheet.axes(x, lower, block, tall), step, after.ratio.log() * step.mask, FULL, after.clipped, moved)
    for y in (upper, lower):
        sheet.write(1.05, y - 0.17, "reward", ha="right")
        sheet.write(1.75, y - 0.17, "A", ha="right", weight="bold")
        for i in range(rows):
            colour = GREEN if step.rewards[i] == 1 else VERMILLION
            style = {"ha": "right", "color": colour, "weight": "bold", "fontsize": 12}
            sheet.write(1.05, y + (i + 0.5) * ROW, f"{step.rewards[i]:g}", **style)
            sheet.write(1.75, y + (i + 0.5) * ROW, f"{step.advantages[i]:+.2f}", **style)

    low = 0.3 + 0.2 * len(step.moments)  # the height of the panel of entropies
    bars = 2 * tall + title - low - 0.95
    sheet.write(right - 0.6, upper - 0.17, "What it did: the exact chance of each answer", weight="bold")
    draw_chances(sheet.axes(right, upper, 4.1, bars), step)
    sheet.write(right - 0.6, upper + bars + 0.75, "Entropy of all answers, nats", weight="bold")
    draw_entropies(sheet.axes(right, upper + bars + 0.92, 4.1, low), step)
    save_figure(sheet.figure, path, STEP_MARK)


# The parts -------------------------------------------------------------------------------------------------------


def draw_advantages(above: Axes, below: Axes, parts: list[Advantages]) -> None:
    """Task 2: the advantages of right and wrong answers; and how much louder the std makes a group."""
    G = len(parts[0].right) - 1
    x = np.arange(G + 1)
    for part, line, name in zip(parts, ("o-", "o:"), ("with the std", "mean only"), strict=True):
        for values, colour, which in ((part.right, GREEN, "right answer"), (part.wrong, VERMILLION, "wrong answer")):
            above.plot(x, values, line, color=colour, markersize=4, label=f"{which}, {name}")
    above.axhline(0, color=GREY, linewidth=0.8)
    above.set_title("Task 2: the advantage")
    tidy(above, f"right answers of {G}")
    above.set_ylim(top=1.6 * above.get_ylim()[1])
    above.legend(fontsize=9, frameon=False, loc="upper right")
    with_std, without = (np.nanmean(np.abs(np.stack([part.right, part.wrong])), axis=0) for part in parts)
    louder = np.divide(with_std, without, out=np.full(G + 1, np.nan), where=without > 0)
    below.bar(x, louder, 0.7, color=GREY)
    for k in x[np.isfinite(louder)]:
        below.text(k, louder[k], f"{louder[k]:.1f}", ha="center", va="bottom", fontsize=9)
    below.set_title("The std makes it so many times louder")
    below.set_xlim(above.get_xlim())
    tidy(below, f"right answers of {G}")
    for panel in (above, below):
        panel.locator_params(axis="x", integer=True)


def draw_estimators(above: Axes, below: Axes, parts: list[Estimators]) -> None:
    """Task 3: k1, k2, k3 of a token; and the spread of their means."""
    (part,) = parts
    styles = {"k1": (GREY, "--"), "k2": (GREY, ":"), "k3": (BLUE, "-")}
    for name, (colour, line) in styles.items():
        above.plot(part.log_u, part.values[name], line, color=colour, label=name, linewidth=2)
    above.axhline(0, color=GREY, linewidth=0.8)
    above.set_title("Task 3: the estimators of one token")
    tidy(above, "log u = log(pi_ref / pi_theta)")
    above.legend(frameon=False)
    low, high = np.quantile(np.concatenate([*part.means.values()]), [0.002, 0.998])
    edges = np.linspace(low, high, 41)
    for name, (colour, line) in styles.items():
        values = part.means[name]
        label = f"{name}: mean {values.mean():.3f}, sd {values.std():.3f}"
        below.hist(values, edges, histtype="step", color=colour, linestyle=line, linewidth=2, label=label)
    below.axvline(part.kl, color="black", linewidth=1, label=f"the exact KL: {part.kl:.3f}")
    below.set_title(f"{REPEATS} means over {SAMPLES} tokens each")
    below.set_ylim(0, 1.55 * below.get_ylim()[1])
    tidy(below, "mean, nats")
    below.legend(fontsize=9, framealpha=1, edgecolor="none")


def draw_objective(above: Axes, below: Axes, parts: list[Objective]) -> None:
    """Task 4: the objective against the ratio; and its slope, shaded where the clip leaves none."""
    for panel in (above, below):
        panel.axvline(1, color=GREY, linewidth=0.8)
        panel.axhline(0, color=GREY, linewidth=0.8)
        tidy(panel, "ratio = pi_theta / pi_old")
    for part, A, colour in zip(parts, ("+1", "-1"), (GREEN, VERMILLION), strict=True):
        offset = (6, -16 if A == "+1" else 6)
        x, flat = part.ratio.numpy(), (part.slope == 0).numpy()
        for panel, y in ((above, part.value.numpy()), (below, part.slope.numpy())):
            panel.plot(x, y, color=colour, linewidth=2.5)
            panel.fill_between(
                x, 0, 1, where=flat, transform=panel.get_xaxis_transform(), color=colour, alpha=0.15, linewidth=0
            )
            middle = len(x) // 2
            panel.annotate(f"A = {A}", (x[middle], y[middle]), offset, textcoords="offset points", color=colour)
        if flat.any():
            place = (x[flat].mean(), 0.74 if A == "+1" else 0.26)
            style = {"ha": "center", "color": colour, "transform": below.get_xaxis_transform()}
            below.text(*place, f"clipped:\nno push\nif A = {A}", va="center", **style)
    above.set_title("Task 4: the objective of one token")
    below.set_title("Its slope: the push that the token gets")


DRAWN = {2: draw_advantages, 3: draw_estimators, 4: draw_objective}


@in_its_own_style
def draw_parts(parts: dict[int, list], missing: list[str], path: Path) -> None:
    """A column of two panels for each task in `parts`; `missing` are the lines that the stubs say."""
    several = len(parts) > 1
    width, height = (4.4 * len(parts), 6.4) if several else (8.8, 3.3)
    figure = Figure(figsize=(width, height + 0.25 * len(missing)), layout="constrained")
    if missing:
        figure.suptitle("\n".join(missing), fontsize=10, x=0.01, ha="left")
    columns = figure.subplots(2, len(parts), squeeze=False).T if several else figure.subplots(1, 2, squeeze=False)
    with rc_context({"axes.titlelocation": "left", "axes.titleweight": "bold", "axes.titlesize": 11}):
        for panels, (task, part) in zip(columns, parts.items(), strict=True):
            DRAWN[task](*panels, part)
    save_figure(figure, path, PARTS_MARK)


# The command -----------------------------------------------------------------------------------------------------


def look(grpo: ModuleType, args: argparse.Namespace) -> int:
    """Do what run.py's --explain or --explain-parts asks for, with the functions of `grpo`. Returns the exit status."""
    try:
        if args.explain:
            model = tinylm.load_or_train_sft().to(args.device)
            call_tasks(grpo, model)
            config = config_of(grpo, args)
            step = explain_step(grpo, model, prompt_of(args.explain, model, args.temperature), config)
            if args.text:
                print(step_as_text(step))
                return 0
            draw_step(step, config, args.out)
        else:
            parts, stubs = each_part(grpo, args.explain_parts or [2, 3, 4], args.G, args.clip)
            if stubs:
                print("; ".join(stubs), file=sys.stderr)
            if not parts:
                return 2
            draw_parts(parts, stubs, args.out)
    except (NotImplementedError, ValueError) as error:
        if not is_the_labs(error):
            raise
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(f"run.py: could not save: {error}", file=sys.stderr)
        return 2
    print(f"saved {args.out}")
    return 0
