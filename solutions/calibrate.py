"""The calibration: what the default run gives over many seeds, as the table of the README.

    python solutions/calibrate.py                    twenty starting policies, a GRPO seed each: as if on other machines
    python solutions/calibrate.py --grpo-seeds 10    ten GRPO seeds, all from this machine's own starting policy

Another machine rounds otherwise, and SFT turns that into another starting policy: what a student sees lies within the
spread of the first form. A process per core, about 10 s a run and core.
"""

import copy
import os
import sys
from pathlib import Path
from statistics import fmean, stdev

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

from lab.flags import Parser, number

LAST = 30  # iterations that a mean "at the start" or "at the end" is taken over
GAIN = "gain of the first 100 iterations"


def figures(sft, model, history: list[dict[str, float]]) -> dict[str, float]:
    """What the README's table tells of one run: from the policies before and after it, and its history."""
    import tinylm  # noqa: PLC0415  here, so that --help is quick

    first, *_, last = (row for row in history if "entropy" in row)
    _, held_out = tinylm.problems()
    wrong_before, wrong_after = (1 - tinylm.success_probability(p, held_out).double() for p in (sft, model))
    start, end = history[1:][:LAST], history[1:][-LAST:]

    def ahead(k: int) -> float:
        return (wrong_before**k - wrong_after**k).mean().item()

    def zero_signal(rows: list[dict]) -> float:
        return fmean(row["all_right"] + row["all_wrong"] for row in rows)

    return {
        "sampled accuracy before": first["sampled_accuracy"],
        "sampled accuracy after": last["sampled_accuracy"],
        "greedy accuracy before": first["greedy_accuracy"],
        "greedy accuracy after": last["greedy_accuracy"],
        "entropy before, nats per token": first["entropy"],
        "entropy after, nats per token": last["entropy"],
        f"zero-signal groups, first {LAST} iterations": zero_signal(start),
        f"zero-signal groups, last {LAST} iterations": zero_signal(end),
        f"k3 KL, first {LAST} iterations": fmean(row["kl"] for row in start),
        f"k3 KL, last {LAST} iterations": fmean(row["kl"] for row in end),
        "pass@1, GRPO - SFT": ahead(1),
        "pass@2, GRPO - SFT": ahead(2),
        "pass@16, GRPO - SFT": ahead(16),
        "pass@64, GRPO - SFT": ahead(64),
    }


def measure(seeds: tuple[int | None, int]) -> dict[str, float]:
    """One default run. `seeds`: that of the starting policy (None: this machine's own), and that of GRPO."""
    import grpo  # noqa: PLC0415
    import tinylm  # noqa: PLC0415

    sft_seed, grpo_seed = seeds
    sft = tinylm.load_or_train_sft() if sft_seed is None else tinylm.train_sft(sft_seed)
    model = copy.deepcopy(sft)
    history = grpo.train_grpo(model, grpo.GRPOConfig(seed=grpo_seed, eval_every=100))
    gain = history[100]["sampled_accuracy"] - history[0]["sampled_accuracy"]
    return figures(sft, model, history) | {GAIN: gain}


def main() -> None:
    parser = Parser(description="What the default run gives over many seeds: the table of the README.")
    several = number(int, 2, 10_000)
    policies, seeds = (
        "starting policies, each with a GRPO seed of its own",
        "GRPO seeds, from this machine's own policy",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--policies", type=several, default=20, metavar="N", help=f"{policies} (default: %(default)s)")
    which.add_argument("--grpo-seeds", type=several, metavar="N", help=f"instead: {seeds}")
    parser.flag("--jobs", os.cpu_count(), number(int, 1, 1000), "processes")
    args = parser.parse_args()

    import multiprocessing  # noqa: PLC0415

    from tqdm import tqdm  # noqa: PLC0415

    import tinylm  # noqa: PLC0415

    if args.grpo_seeds:
        tinylm.load_or_train_sft()  # once, before the processes all look for it
    jobs = (
        [(None, seed) for seed in range(args.grpo_seeds)] if args.grpo_seeds else [(n, n) for n in range(args.policies)]
    )
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        results = list(tqdm(pool.imap(measure, jobs), total=len(jobs), unit="run", disable=None))
    print(f"| over {len(jobs)} runs | mean | sd | lowest | highest | mean - 3 sd | mean + 3 sd |\n{'|---' * 7}|")
    for name in results[0]:
        values = [result[name] for result in results]
        mean, sd = fmean(values), stdev(values)
        cells = (mean, sd, min(values), max(values), mean - 3 * sd, mean + 3 * sd)
        print(f"| {name} | " + " | ".join(f"{cell:.3f}" for cell in cells) + " |")
    gains = [result[GAIN] for result in results]
    print(f"\ntask 5 asks for a gain of 0.06: {(fmean(gains) - 0.06) / stdev(gains):.1f} sd below the mean gain")


if __name__ == "__main__":
    main()
