"""The calibration: what the default run gives over many seeds, as the table of the README.

    python solutions/calibrate.py                  ten GRPO seeds, all from the lab's own starting policy
    python solutions/calibrate.py --sft-seeds 6    six starting policies, a GRPO seed each: as if on other machines

Another machine rounds otherwise, and SFT turns that into another starting policy; so the second form says how far the
lab's figures hold elsewhere. A process per core, about 20 s a seed and core.
"""

import os
import sys
from pathlib import Path
from statistics import fmean, stdev

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

from run import Parser  # noqa: E402

LAST = 30  # iterations that a mean "at the start" or "at the end" is taken over
ROWS = {
    "sampled accuracy before": "3f",
    "sampled accuracy after 100 iterations": "3f",
    "sampled accuracy after 300 iterations": "3f",
    "gain of the first 100 iterations": "3f",
    "greedy accuracy before": "3f",
    "greedy accuracy after": "3f",
    "entropy before, nats per token": "3f",
    "entropy after, nats per token": "3f",
    f"zero-signal groups, first {LAST} iterations": "3f",
    f"zero-signal groups, last {LAST} iterations": "3f",
    f"k3 KL, first {LAST} iterations": "3f",
    f"k3 KL, last {LAST} iterations": "3f",
    "pass@1, GRPO - SFT": "3f",
    "pass@16, GRPO - SFT": "3f",
    "pass@64, GRPO - SFT": "3f",
}


def measure(seeds: tuple[int | None, int]) -> dict[str, float]:
    """One default run. `seeds`: that of the starting policy (None: the lab's own), and that of GRPO."""
    import grpo  # noqa: PLC0415  here, so that --help is quick
    import tinylm  # noqa: PLC0415

    sft_seed, grpo_seed = seeds
    sft, model = ((tinylm.load_or_train_sft() if sft_seed is None else tinylm.train_sft(sft_seed)) for _ in range(2))
    history = grpo.train_grpo(model, grpo.GRPOConfig(seed=grpo_seed, eval_every=100))
    evaluated = [row for row in history if "entropy" in row]
    _, held_out = tinylm.problems()
    before, after = (tinylm.success_probability(policy, held_out).double() for policy in (sft, model))

    def pass_at(k: int) -> float:
        return ((1 - before) ** k - (1 - after) ** k).mean().item()

    def mean(rows: list[dict], *names: str) -> float:
        return fmean(sum(row[name] for name in names) for row in rows)

    start, end = history[1 : LAST + 1], history[-LAST:]
    sampled = [row["sampled_accuracy"] for row in evaluated]
    values = [sampled[0], sampled[1], sampled[-1], sampled[1] - sampled[0]]
    values += [evaluated[0]["greedy_accuracy"], evaluated[-1]["greedy_accuracy"]]
    values += [evaluated[0]["entropy"], evaluated[-1]["entropy"]]
    values += [mean(rows, "all_right", "all_wrong") for rows in (start, end)]
    values += [mean(rows, "kl") for rows in (start, end)]
    values += [pass_at(k) for k in (1, 16, 64)]
    return dict(zip(ROWS, values, strict=True))


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
    for name, digits in ROWS.items():
        values = [result[name] for result in results]
        figures = (fmean(values), stdev(values), min(values), max(values))
        print(f"| {name} | " + " | ".join(f"{figure:.{digits}}" for figure in figures) + " |")
    gains = [result["gain of the first 100 iterations"] for result in results]
    print(f"\ntask 5 asks for a gain of 0.06: {(fmean(gains) - 0.06) / stdev(gains):.1f} sd below the mean gain")


if __name__ == "__main__":
    main()
