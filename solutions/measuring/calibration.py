"""The calibration: what the default run gives on other machines, as the tables of the README.

Another machine rounds otherwise, and SFT turns that into another starting policy. So other seeds are taken, and all
instruction sets and modes of torch's matrix library that this machine has. Of each figure the range is from the lowest
to the highest of the runs: an order statistic, which needs 93 of them to say, with 95% confidence, that 95% of all
machines lie within.
"""
# ruff: noqa: PLC0415  torch takes seconds to import: only where it is needed, so that --help is quick

import copy
import multiprocessing
import os
from collections.abc import Iterable
from statistics import fmean, stdev

LAST = 30  # iterations that a mean "at the start" or "at the end" is taken over
GAIN = "gain of the first 100 iterations"
CONFIDENCE = 0.95  # of the ranges

Seeds = tuple[int | None, int]  # that of the starting policy (None: this machine's own), and that of GRPO
Batch = tuple[dict[str, str], list[Seeds]]  # environment variables, and the runs of the processes that have them


def ahead(sft, model, ks: Iterable[int]) -> list[float]:
    """The exact pass@k of `model` less that of `sft`, for each k."""
    import tinylm

    _, held_out = tinylm.problems()
    wrong_before, wrong_after = (1 - tinylm.success_probability(p, held_out).double() for p in (sft, model))
    return [(wrong_before**k - wrong_after**k).mean().item() for k in ks]


def figures(sft, model, history: list[dict[str, float]]) -> dict[str, float]:
    """What the README's table tells of one run: from the policies before and after it, and its history."""
    first, *_, last = (row for row in history if "entropy" in row)
    start, end, ks = history[1:][:LAST], history[1:][-LAST:], (1, 2, 16, 64)

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
    } | {f"pass@{k}, GRPO - SFT": gain for k, gain in zip(ks, ahead(sft, model, ks), strict=True)}


def measure(seeds: Seeds) -> dict[str, float]:
    """One default run."""
    import grpo
    import tinylm

    sft_seed, grpo_seed = seeds
    sft = tinylm.load_or_train_sft() if sft_seed is None else tinylm.train_sft(sft_seed)
    model = copy.deepcopy(sft)
    history = grpo.train_grpo(model, grpo.GRPOConfig(seed=grpo_seed, eval_every=100))
    gain = history[100]["sampled_accuracy"] - history[0]["sampled_accuracy"]
    return figures(sft, model, history) | {GAIN: gain}


def roundings() -> list[dict[str, str]]:
    """Environment variables under which torch rounds otherwise, as far as this machine can."""
    import torch

    known, here = ["default", "avx2", "avx512"], torch.backends.cpu.get_cpu_capability().lower()
    sets = known[: known.index(here) + 1] if here in known else [here]
    modes = [{}, {"MKL_CBWR": "COMPATIBLE"}] if torch.backends.mkl.is_available() else [{}]
    return [{"ATEN_CPU_CAPABILITY": name} | mode for name in sets for mode in modes]


def set_variables(variables: dict[str, str]) -> None:
    """In a new process, before `measure` imports torch, which then reads them."""
    os.environ.update(variables)


def batches_of(policies: int, grpo_seeds: int | None) -> list[Batch]:
    """Starting policies with a GRPO seed each, under all roundings in turn; or GRPO seeds from this machine's own."""
    if grpo_seeds:
        return [({}, [(None, seed) for seed in range(grpo_seeds)])]
    each = roundings()
    return [(each[i], [(n, n) for n in range(i, policies, len(each))]) for i in range(len(each))]


def measure_all(batches: list[Batch], jobs: int) -> list[dict[str, float]]:
    """The figures of all runs, in so many processes at a time."""
    from tqdm import tqdm

    import tinylm

    if any(policy is None for _, seeds in batches for policy, _ in seeds):
        tinylm.load_or_train_sft()  # once, before the processes all look for it
    results = []
    with tqdm(total=sum(len(seeds) for _, seeds in batches), unit="run", disable=None) as bar:
        for environment, seeds in batches:
            with multiprocessing.get_context("spawn").Pool(jobs, set_variables, (environment,)) as pool:
                for result in pool.imap(measure, seeds):
                    results.append(result)
                    bar.update()
    return results


def print_table(results: list[dict[str, float]]) -> None:
    """A row for each figure, what its range means, and how far task 5's threshold lies below the mean gain."""
    from scipy.stats import beta

    n = len(results)
    print(f"| over {n} runs | mean | sd | lowest | highest |\n{'|---' * 5}|")
    for name in results[0]:
        values = [result[name] for result in results]
        cells = fmean(values), stdev(values), min(values), max(values)
        print(f"| {name} | " + " | ".join(f"{cell:.3f}" for cell in cells) + " |")
    # What n draws leave outside of their lowest and highest is two of n + 1 equivalent blocks: a beta distribution.
    share = beta.ppf(1 - CONFIDENCE, n - 1, 2)
    print(f"\nfrom lowest to highest: {share:.1%} of all machines, with {CONFIDENCE:.0%} confidence")
    gains = [result[GAIN] for result in results]
    print(f"task 5 asks for a gain of 0.06: {(fmean(gains) - 0.06) / stdev(gains):.1f} sd below the mean gain")


def print_roundings(batches: list[Batch]) -> None:
    named = (" ".join(f"{name}={value}" for name, value in environment.items()) for environment, _ in batches)
    print("roundings:", *(words or "as it is" for words in named), sep="\n  ")
