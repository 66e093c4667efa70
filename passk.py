"""pass@k of the starting policy (SFT) against the policy that `run.py` trained from it (GRPO).

pass@k is the chance that at least one of k sampled answers is right. GRPO makes the answers that the policy already
finds now and then much likelier, so it is far ahead at k = 1. Does it also learn answers that the starting policy
would not find in many tries? The curves at large k tell.

    python run.py                                            first: trains, and saves tinylm_grpo.pt
    python passk.py                                          prints the table, draws passk.png
    python passk.py --grpo reuse.pt --out reuse_passk.png    another run's checkpoint
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # -P and -I leave it out

from lab.flags import passk_parser
from lab.start import begin

if __name__ == "__main__":  # before the imports that take seconds: a wrong flag is told at once
    PARSER = passk_parser()
    ARGS = begin(PARSER)

import argparse

import numpy as np
import torch
from torch import Tensor

import tinylm
from lab.device import check_device
from lab.files import check_marked
from lab.flags import Parser
from lab.pictures import EVERY_K, KS, PASSK_MARK, Curves, leaders, plot_passk

# 1. The estimator ----------------------------------------------------------------------------------------------


def pass_at_k(n: int, c: np.ndarray | int, k: int) -> np.ndarray:
    """The unbiased estimate of pass@k from n samples of which c are right: 1 - C(n - c, k) / C(n, k).

    That is the share of the k-element subsets of the n samples that hold at least one right answer (Chen et al.
    2021, arXiv 2107.03374, equation 1). `c` is an integer or an array of integers, one for each problem; the result
    has its shape. The plug-in 1 - (1 - c/n)^k would be too low: it is biased for every k > 1.

    The binomials overflow long before n = 10,000, their ratio does not: it is the product of 1 - k/i over
    i = n - c + 1 ... n.

    Raises ValueError unless 1 <= k <= n and all c are whole numbers from 0 to n: n samples have no subset of k > n.

    Example: n = 4, c = 1, k = 2 gives 1 - C(3, 2) / C(4, 2) = 1 - 3/6 = 0.5.
    """
    c = np.asarray(c)
    if not 1 <= k <= n:
        raise ValueError(f"pass@k needs 1 <= k <= n, got k = {k} and n = {n}")
    if not np.issubdtype(c.dtype, np.integer) or (c < 0).any() or (c > n).any():
        raise ValueError(f"the numbers of right samples must be whole and from 0 to n = {n}")
    all_wrong = np.cumprod(1 - k / np.arange(n, 0, -1))  # entry c - 1: the product for c right samples
    return 1 - np.concatenate([[1.0], all_wrong])[c]


# 2. Samples, and what they say ---------------------------------------------------------------------------------


def count_right(
    model: tinylm.TinyLM, prompts: Tensor, n: int, temperature: float, generator: torch.Generator | None
) -> np.ndarray:
    """How many of n sampled answers to each prompt [P, Tp] are right, that is, equal to the verifier's sum: [P]."""
    counts = []
    for chunk in prompts.split(max(1, 25_000 // n)):  # some 25,000 samples a call: more would only take memory
        responses = tinylm.generate(model, chunk.repeat_interleave(n, dim=0), temperature, generator)
        right = tinylm.answers(chunk).unsqueeze(1)  # [problems, 1, Tr]
        counts.append((responses.view(len(chunk), n, -1) == right).all(dim=2).sum(dim=1).cpu().numpy())
    return np.concatenate(counts)


def bootstrap_band(values: np.ndarray, seed: int, draws: int = 2000) -> tuple[np.ndarray, np.ndarray]:
    """The 95% interval (low [K], high [K]) of the mean of `values` [P, K] over problems, resampled with replacement."""
    problems = len(values)
    times_drawn = np.random.default_rng(seed).multinomial(problems, np.full(problems, 1 / problems), size=draws)
    low, high = np.percentile(times_drawn @ values / problems, [2.5, 97.5], axis=0)
    return low, high


# 3. The command ------------------------------------------------------------------------------------------------


def print_table(estimate: Curves, exact: Curves, low: np.ndarray, high: np.ndarray) -> None:
    """A row for each of KS: estimates, in brackets the exact values, and the band. Arguments as for `plot_passk`."""
    print(f"{'k':>3}  {'SFT':<15}{'GRPO':<15}{'GRPO - SFT':<19}95% band")
    for k in KS:
        cells = [f"{estimate[name][k - 1]:.3f} ({exact[name][k - 1]:.3f})" for name in ("SFT", "GRPO")]
        difference, truth = (values["GRPO"][k - 1] - values["SFT"][k - 1] for values in (estimate, exact))
        cells += [f"{difference:+.3f} ({truth:+.3f})", f" {low[k - 1]:+.3f} to {high[k - 1]:+.3f}"]
        print(f"{k:>3}  {'  '.join(cells)}")


def check(args: argparse.Namespace) -> tinylm.TinyLM:
    """The trained model. Raises ValueError, before anything is sampled, if it, the picture or the device won't do."""
    check_marked(args.out, PASSK_MARK)
    check_device(args.device)
    try:
        return tinylm.load_checkpoint(args.grpo)
    except FileNotFoundError as error:
        reason = "is not there: run `python run.py` first, or name another checkpoint: --grpo"
        raise ValueError(f"{args.grpo} {reason}") from error


def main(parser: Parser, args: argparse.Namespace) -> int:
    """Check, sample, show, save. Returns the exit status."""
    try:
        grpo_model = check(args)
    except ValueError as error:
        parser.error(str(error))

    _, prompts = tinylm.problems()
    prompts = prompts.to(args.device)
    estimates, estimate, exact = {}, {}, {}
    for name, model in (("SFT", tinylm.load_or_train_sft()), ("GRPO", grpo_model)):
        model.to(args.device)
        generator = torch.Generator(args.device).manual_seed(args.seed)  # the same random numbers for both models
        right = count_right(model, prompts, args.n, args.temperature, generator)
        p = tinylm.success_probability(model, prompts, args.temperature).double().cpu().numpy()
        estimates[name] = np.stack([pass_at_k(args.n, right, k) for k in EVERY_K], axis=1)  # [problems, 64]
        estimate[name] = estimates[name].mean(axis=0)
        exact[name] = np.array([(1 - (1 - p) ** k).mean() for k in EVERY_K])
    low, high = bootstrap_band(estimates["GRPO"] - estimates["SFT"], args.seed)

    title = f"{len(prompts)} problems, {args.n} samples each, temperature {args.temperature:g}, {args.grpo.name}"
    print(f"pass@k: {title}; in brackets the exact values")
    print_table(estimate, exact, low, high)
    print(f"ahead, where the band leaves out 0: {leaders(low, high)}")
    try:
        plot_passk(estimate, exact, low, high, title, args.out)
    except OSError as error:
        parser.error(f"could not save: {error}")
    print(f"saved {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(PARSER, ARGS))
