"""The calibration: what the default run gives over many seeds, as the table of the README.

    python solutions/calibrate.py                  ten GRPO seeds, all from the lab's own starting policy
    python solutions/calibrate.py --sft-seeds 6    six starting policies, a GRPO seed each: as if on other machines

Another machine rounds otherwise, and SFT turns that into another starting policy; so the second form says how far the
lab's figures hold elsewhere. A process per core, about 20 s a seed and core.
"""

import copy
import os
import sys
from pathlib import Path
from statistics import fmean, stdev

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

from run import Parser  # noqa: E402

LAST = 30  # iterations that a mean "at the start" or "at the end" is taken over
GAIN = "gain of the first 100 iterations"


def measure(seeds: tuple[int | None, int]) -> dict[str, float]:
    """One default run. `seeds`: that of the starting policy (None: the lab's own), and that of GRPO."""
    import grpo  # noqa: PLC0415  here, so that --help is quick
    import tinylm  # noqa: PLC0415

    sft_seed, grpo_seed = seeds
    sft = tinylm.load_or_train_sft() if sft_seed is None else tinylm.train_sft(sft_seed)
    model = copy.deepcopy(sft)
    history = grpo.train_grpo(model, grpo.GRPOConfig(seed=grpo_seed, eval_every=100))
    first, second, *_, last = (row for row in history if "entropy" in row)
    _, held_out = tinylm.problems()
    wrong_before, wrong_after = (1 - tinylm.success_probability(p, held_out).double() for p in (sft, model))
    start, end = history[1 : LAST + 1], history[-LAST:]

    def ahead(k: int) -> float:
        return (wrong_before**k - wrong_after**k).mean().item()

    def zero_signal(rows: list[dict]) -> float:
        return fmean(row["all_right"] + row["all_wrong"] for row in rows)

    return {
        "sampled accuracy before": first["sampled_accuracy"],
        "sampled accuracy after 100 iterations": second["sampled_accuracy"],
        "sampled accuracy after 300 iterations": last["sampled_accuracy"],
        GAIN: second["sampled_accuracy"] - first["sampled_accuracy"],
        "greedy accuracy before": first["greedy_accuracy"],
        "greedy accuracy after": last["greedy_accuracy"],
        "entropy before, nats per token": first["entropy"],
        "entropy after, nats per token": last["entropy"],
        f"zero-signal groups, first {LAST} iterations": zero_signal(start),
        f"zero-signal groups, last {LAST} iterations": zero_signal(end),
        f"k3 KL, first {LAST} iterations": fmean(row["kl"] for row in start),
        f"k3 KL, last {LAST} iterations": fmean(row["kl"] for row in end),
        "pass@1, GRPO - SFT": ahead(1),
        "pass@16, GRPO - SFT": ahead(16),
        "pass@64, GRPO - SFT": ahead(64),
    }


def main() -> None:
    parser = Parser(description="What the default run gives over many seeds: the table of the README.")
    parser.add_argument("--seeds", type=int, default=10, metavar="N", help="GRPO seeds 0 to N-1 (default: %(default)s)")
    parser.add_argument("--sft-seeds", type=int, metavar="N", help="N starting policies instead, a GRPO seed each")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), metavar="N", help="processes (default: %(default)s)"
    )
    args = parser.parse_args()
    if min(args.seeds, args.jobs, args.sft_seeds or 2) < 1 or (args.sft_seeds or args.seeds) < 2:
        parser.error("a mean and a range need at least two seeds, and one process")
    jobs = (
        [(seed, seed) for seed in range(args.sft_seeds)] if args.sft_seeds else [(None, s) for s in range(args.seeds)]
    )

    import multiprocessing  # noqa: PLC0415

    from tqdm import tqdm  # noqa: PLC0415

    import tinylm  # noqa: PLC0415

    tinylm.load_or_train_sft()  # once, before the processes all look for it
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        results = list(tqdm(pool.imap(measure, jobs), total=len(jobs), unit="run", disable=None))
    print(f"| over {len(jobs)} runs | mean | sd | lowest | highest |\n|---|---|---|---|---|")
    for name in results[0]:
        values = [result[name] for result in results]
        figures = (fmean(values), stdev(values), min(values), max(values))
        print(f"| {name} | " + " | ".join(f"{figure:.3f}" for figure in figures) + " |")
    gains = [result[GAIN] for result in results]
    print(f"\ntask 5 asks for a gain of 0.06: {(fmean(gains) - 0.06) / stdev(gains):.1f} sd below the mean gain")


if __name__ == "__main__":
    main()
