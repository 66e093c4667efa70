"""The answer key's pictures: of each experiment, its variants beside the default run."""

from pathlib import Path
from statistics import median

from matplotlib.figure import Figure

import grpo
import tinylm
from answering.questions import command
from answering.runs import policy_of
from lab.explain import explain_step
from lab.explained import draw_parts, draw_step
from lab.parts import each_part
from lab.pictures import BLUE, EVERY_K, KS, OTHERS, draw_band, save_figure, smooth

LINES = "lines: means over the seeds; bands: from the lowest to the highest"


def curves_of(results: list[dict]) -> list[tuple[list[float], list[list[float]]]]:
    """(iterations, a curve for each seed) of the five panels."""
    histories = [result["history"] for result in results]
    evaluated = [row["iteration"] for row in histories[0] if "entropy" in row]
    trained = [row["iteration"] for row in histories[0][1:]]
    return [
        (trained, [smooth([row["reward"] for row in h[1:]]) for h in histories]),
        (evaluated, [[h[i]["sampled_accuracy"] for i in evaluated] for h in histories]),
        (evaluated, [[h[i]["greedy_accuracy"] for i in evaluated] for h in histories]),
        (trained, [smooth([row["kl"] for row in h[1:]], median) for h in histories]),
        (trained, [smooth([row["all_right"] + row["all_wrong"] for row in h[1:]]) for h in histories]),
    ]


def picture(variants: list[str], results: dict[str, list[dict]], path: Path) -> None:
    """A row of panels for each variant, beside the default run in its blue."""
    figure = Figure(figsize=(17, 0.6 + 2.6 * len(variants)), layout="constrained")
    rows = figure.subplots(len(variants), 5, squeeze=False)
    names = ("Training reward", "Sampled accuracy", "Greedy accuracy", "KL, nats per token, median of 21")
    names += ("Groups without signal",)
    tops = [1.0, 1.0, 1.0, 0.05, 1.0]
    for row, variant in zip(rows, variants, strict=True):
        default = curves_of(results["default"])
        for i, (panel, (x, seeds)) in enumerate(zip(row, curves_of(results[variant]), strict=True)):
            draw_band(panel, *default[i], BLUE)
            draw_band(panel, x, seeds, OTHERS[0])
            tops[i] = max(tops[i], min(1.0, 1.1 * max(map(max, seeds)))) if i == 3 else 1.0
            panel.set_title(names[i], loc="left", fontsize=9)
            panel.grid(alpha=0.25)
        row[0].set_ylabel(command(variant).replace("`", "").replace("run.py ", "").replace(" --", "\n--"), fontsize=8)
    for row in rows:
        for panel, top in zip(row, tops, strict=True):
            panel.set_ylim(0, top)
    for panel in rows[-1]:
        panel.set_xlabel("iteration")
    figure.suptitle(f"{LINES}; blue: the default run", fontsize=9)
    save_figure(figure, path, dpi=80)


def picture_of_passk(variants: list[str], results: dict[str, list[dict]], path: Path) -> None:
    """GRPO - SFT in pass@k, a panel for each variant beside the default run in its blue."""
    figure = Figure(figsize=(7 * len(variants), 4.2), layout="constrained")
    panels = figure.subplots(1, len(variants), squeeze=False)[0]
    for panel, variant in zip(panels, variants, strict=True):
        for name, colour in (("default", BLUE), (variant, OTHERS[0])):
            seeds = [[100 * value for value in result["ahead"]] for result in results[name]]
            draw_band(panel, EVERY_K, seeds, colour, command(name).replace("`", ""))
        panel.axhline(0, color="black", linewidth=0.8)
        panel.set_xscale("log", base=2)
        panel.set_xticks(KS, [str(number) for number in KS])
        panel.set_yscale("asinh", linear_width=0.5)
        panel.set_yticks(ticks := [-10, -3, -1, -0.3, 0, 0.3, 1, 3, 10, 30], [f"{tick:g}" for tick in ticks])
        panel.minorticks_off()
        panel.set(xlabel="k", ylabel="GRPO - SFT in pass@k, points (stretched near 0)")
        panel.set_title(LINES, loc="left", fontsize=9)
        panel.legend(frameon=False, fontsize=8)
        panel.grid(alpha=0.25)
    save_figure(figure, path, dpi=80)


def picture_of_step(variants: list[str], results: dict[str, list[dict]], path: Path) -> None:
    """One step on 37+48=, from the starting policy of seed 0."""
    config = grpo.GRPOConfig()
    draw_step(explain_step(grpo, tinylm.load_checkpoint(policy_of(0)), tinylm.encode(["37+48="]), config), config, path)


def picture_of_advantages(variants: list[str], results: dict[str, list[dict]], path: Path) -> None:
    """|A| against the number of right answers, with the std and without."""
    draw_parts(*each_part(grpo, [2], G=8, clip=0.2), path)


# Of these experiments; of the others: picture.
DRAWN = {"passk": picture_of_passk, "credit": picture_of_step, "louder": picture_of_advantages}
