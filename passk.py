"""pass@k of the starting policy (SFT) against the policy that `run.py` trained from it (GRPO).

pass@k is the chance that at least one of k sampled answers is right. GRPO makes the answers that the policy already
finds now and then much likelier, so it is far ahead at k = 1. Does it also learn answers that the starting policy
would not find in many tries? The curves at large k tell.

    python run.py                                            first: trains, and saves tinylm_grpo.pt
    python passk.py                                          prints the table, draws passk.png
    python passk.py --grpo reuse.pt --out reuse_passk.png    another run's checkpoint
"""
# ruff: noqa: PLC0415  torch and matplotlib take seconds to import: only where they are needed, so that --help is quick

import sys
from pathlib import Path

import numpy as np

from run import BLUE, GREEN, ORANGE, Parser, check_marked, number, save_figure

KS = (1, 2, 4, 8, 16, 32, 64)
EVERY_K = range(1, max(KS) + 1)
MIN_N = 2 * max(KS)  # with n close to k all subsets of k samples are nearly the same: the estimate is all noise
MARK = "drawn by passk.py"  # kept inside the picture: one that carries it may be replaced
Curves = dict[str, np.ndarray]  # "SFT" and "GRPO": pass@k [64] at every k from 1 on

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


def count_right(model, prompts, n: int, temperature: float, generator) -> np.ndarray:
    """How many of n sampled answers to each prompt [P, Tp] are right, that is, equal to the verifier's sum: [P]."""
    import tinylm

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


def leaders(difference: np.ndarray) -> str:
    """Who is ahead from which k on, given GRPO - SFT at k = 1, 2, 3 ...: "GRPO from k = 1, SFT from k = 13"."""
    signs = np.sign(difference.round(6)).astype(int)  # the probabilities are float32: no more digits than that
    changes = [k for k in range(1, len(signs) + 1) if k == 1 or signs[k - 1] != signs[k - 2]]
    return ", ".join(f"{('neither', 'GRPO', 'SFT')[signs[k - 1]]} from k = {k}" for k in changes)


# 3. Picture and table ------------------------------------------------------------------------------------------


def print_table(estimate: Curves, exact: Curves, low: np.ndarray, high: np.ndarray) -> None:
    """A row for each of KS: estimates, in brackets the exact values, and the band. Arguments as for `plot`."""
    print(f"{'k':>3}  {'SFT':<15}{'GRPO':<15}{'GRPO - SFT':<19}95% band")
    for k in KS:
        cells = [f"{estimate[name][k - 1]:.3f} ({exact[name][k - 1]:.3f})" for name in ("SFT", "GRPO")]
        difference, truth = (values["GRPO"][k - 1] - values["SFT"][k - 1] for values in (estimate, exact))
        cells += [f"{difference:+.3f} ({truth:+.3f})", f" {low[k - 1]:+.3f} to {high[k - 1]:+.3f}"]
        print(f"{k:>3}  {'  '.join(cells)}")


def plot(estimate: Curves, exact: Curves, low: np.ndarray, high: np.ndarray, title: str, path: Path) -> None:
    """Left the two curves, right their difference, as points (estimates at KS) on lines (exact).

    `low` and `high` [64] bound the band of the difference.
    """
    from matplotlib.figure import Figure  # no pyplot: no window, no global state

    figure = Figure(figsize=(12, 5), layout="constrained")
    curves, difference = figure.subplots(1, 2)
    figure.suptitle(title, fontsize=10)

    def draw(panel, line: np.ndarray, points: np.ndarray, colour: str, marker: str, name: str = ""):
        panel.plot(EVERY_K, 100 * line, color=colour, label=f"{name}exact: mean of $1 - (1 - p)^k$")
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
    difference.set(title=f"ahead: {leaders(exact['GRPO'] - exact['SFT'])}")
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
    save_figure(figure, path, MARK)


# 4. The command ------------------------------------------------------------------------------------------------


def build_parser() -> Parser:
    """The flags."""
    parser = Parser(
        description="Estimate pass@k of the SFT model and of a GRPO model on the held-out problems, and draw both.",
        epilog="The picture goes to the current folder. It replaces a picture that passk.py drew, and nothing else.",
        allow_abbrev=False,
    )

    flag = parser.flag

    flag("--grpo", Path("tinylm_grpo.pt"), Path, "the trained checkpoint: clip.pt of `run.py --out clip.png`", "FILE")
    flag("--n", 256, number(int, MIN_N, 100_000), f"samples per problem, at least {MIN_N}: twice the largest k")
    flag("--temperature", 1.0, number(float, 0.01, 100), "answers are drawn from softmax(logits / N)")
    flag("--seed", 0, number(int, 0, 2**63 - 1), "seed of the samples and of the band")
    flag("--device", "cpu", str, "where to sample: cpu, cuda, cuda:1, mps", "NAME")
    flag("--out", Path("passk.png"), Path, "the picture", "FILE")
    return parser


def main() -> int:
    """Check, sample, show, save. Returns the exit status."""
    parser = build_parser()
    args = parser.parse_args()
    try:
        check_marked(args.out, MARK)
        if not args.grpo.exists():
            raise ValueError(f"{args.grpo} is not there: run `python run.py` first, or name another checkpoint: --grpo")
    except (ValueError, OSError) as error:
        parser.error(str(error))

    import torch

    import tinylm

    parser.check_device(args.device)
    try:
        grpo_model = tinylm.load_checkpoint(args.grpo)
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
    print(f"ahead, by the exact curves: {leaders(exact['GRPO'] - exact['SFT'])}")
    try:
        with tinylm.whole_file(args.out) as temporary:
            plot(estimate, exact, low, high, title, temporary)
    except OSError as error:
        parser.error(f"could not save: {error}")
    print(f"saved {args.out}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("passk.py: stopped by Ctrl-C before the picture was saved", file=sys.stderr)
        sys.exit(130)
