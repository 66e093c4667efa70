"""Where the lab's time goes, beside what the hardware allows: counting and timing, the work, how its cost grows.

Every time is a median. Beside it stands the floor: the matrix products that the work does, counted as it runs and then
timed alone, on the same shapes and layouts and with the same threads, the best of several. What is above the floor is
attention's softmax, GELU, copies, the optimizer, Python. Machines differ and so do their moods: compare ratios, of one
run.
"""
# ruff: noqa: PLC0415  torch takes seconds to import: only where it is needed, so that --help is quick

import copy
import math
import time
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from statistics import median
from unittest import mock

Products = Counter  # (name of the operation, its operands' sizes and strides) -> how often
Work = Callable[[], object]

# Counting and timing ---------------------------------------------------------------------------------------------


def count_products(work: Work) -> Products:
    """The matrix products that `work` does, forward and backward."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    aten = torch.ops.aten
    matrices = {aten.mm.default: 0, aten.bmm.default: 0, aten.addmm.default: 1, aten.baddbmm.default: 1}
    products: Products = Counter()

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            if operation in matrices:  # in addmm and baddbmm, the matrices come after what they are added to
                left, right = args[matrices[operation] :][:2]
                products[left.shape, left.stride(), right.shape, right.stride()] += 1
            return operation(*args, **(kwargs or {}))

    with Recorder():
        work()
    return products


def flop(products: Products) -> float:
    """Floating-point operations: two (multiply, add) for each of rows * inner * columns, in each matrix of a batch."""
    return sum(2 * math.prod(left) * right[-1] * times for (left, _, right, _), times in products.items())


def floor_of(products: Products) -> float:
    """Seconds that the products take by themselves: for each shape and layout the best of ten, times its count."""
    import torch

    total = 0.0
    for (left, left_stride, right, right_stride), times in products.items():
        a = torch.empty_strided(left, left_stride).normal_()
        b = torch.empty_strided(right, right_stride).normal_()
        out = torch.matmul(a, b)
        multiply = torch.bmm if a.dim() == 3 else torch.mm
        total += times * min(seconds(lambda a=a, b=b, out=out, f=multiply: f(a, b, out=out), 10))
    return total


def seconds(work: Work, repeats: int) -> list[float]:
    """The time of each of `repeats` calls. The first call of all is slower: make one before."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return times


# The work --------------------------------------------------------------------------------------------------------


class Iteration:
    """One GRPO iteration at `prompts` and `G`, whole and in its parts, from the SFT checkpoint."""

    def __init__(self, sft, prompts: int = 16, G: int = 8):
        import torch

        import grpo
        import tinylm

        self.model, self.ref_model = copy.deepcopy(sft), copy.deepcopy(sft).requires_grad_(False)
        self.config = grpo.GRPOConfig(P=prompts, G=G)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=self.config.lr, fused=True)
        self.generator = torch.Generator().manual_seed(0)
        self.train_prompts, _ = tinylm.problems()
        self.samples = grpo.sample_group(self.model, self.draw(), G, generator=self.generator)
        self.old_logp, _ = self.log_probs()

    def draw(self):
        import torch

        return self.train_prompts[torch.randint(len(self.train_prompts), (self.config.P,))]

    def whole(self):
        import grpo

        grpo.grpo_step(self.model, self.ref_model, self.optimizer, self.draw(), self.config, self.generator)

    def sampling(self):
        import grpo

        grpo.sample_group(self.model, self.draw(), self.config.G, generator=self.generator)

    def log_probs(self):
        """(old, reference), as in step 3 of `grpo_step`."""
        import torch

        import tinylm

        with torch.no_grad():
            models = self.model, self.ref_model
            return [tinylm.token_logp(model, self.samples.prompts, self.samples.responses) for model in models]

    def inner_steps(self):
        """As in step 4 of `grpo_step`, from the second sampling on always on the same samples."""
        import grpo
        import tinylm

        samples = self.samples
        advantages = grpo.group_advantages(samples.rewards, self.config.G)
        for _ in range(self.config.inner_steps):
            logp = tinylm.token_logp(self.model, samples.prompts, samples.responses)
            loss, _ = grpo.grpo_loss(logp, self.old_logp, self.old_logp, advantages, samples.mask)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()


@contextmanager
def no_sharing():
    """Every row is read, as if no two were equal."""
    import tinylm

    def every_row(model, tokens, logits_to_keep, temperature=1.0):
        return model(tokens, logits_to_keep) / temperature

    with mock.patch.object(tinylm, "policy_logits", every_row):
        yield


def unshared(iteration: Iteration) -> None:
    with no_sharing():
        iteration.whole()


def core_rows(sft) -> dict[str, Work]:
    """The rows of the table that take milliseconds."""
    one = Iteration(sft)
    return {
        "GRPO iteration": one.whole,
        "  sampling": one.sampling,
        "  old and reference log-probs": one.log_probs,
        "  inner steps": one.inner_steps,
        "iteration without sharing": lambda: unshared(one),
    }


def long_rows(sft, quick: bool) -> dict[str, Work]:
    """The rows that take seconds. With `quick` they do as little as they can."""
    import grpo
    import passk
    import tinylm

    config = grpo.GRPOConfig(iters=2 if quick else 300)
    _, held_out = tinylm.problems()
    n, problems = (16, held_out[:20]) if quick else (256, held_out)
    return {
        f"evaluation on {len(problems)} problems": lambda: grpo.evaluate(sft, problems, config),
        "SFT": lambda: tinylm.train_sft(target=0.0 if quick else 0.51),
        f"run of {config.iters} iterations": lambda: grpo.train_grpo(copy.deepcopy(sft), config),
        f"pass@k, {len(problems)} problems, n = {n}": lambda: passk.count_right(sft, problems, n, 1.0, None),
    }


def print_row(name: str, work: Work, repeats: int) -> float:
    """Count, time, print. Returns the median in seconds."""
    products = count_products(work)  # and so the work has been done once before it is timed
    took, floor = median(seconds(work, repeats)), floor_of(products)
    operations = flop(products) / 1e9
    cells = f"{1e3 * took:10.1f}{operations:10.3f}{operations / floor:10.0f}{1e3 * floor:10.1f}{took / floor:8.2f}"
    print(f"{name:36}{cells}", flush=True)
    return took


def print_table(rows: dict[str, Work], repeats: int) -> dict[str, float]:
    """A line for each row; the medians in seconds."""
    print(f"{'':36}{'ms':>10}{'GFLOP':>10}{'GFLOP/s':>10}{'floor ms':>10}{'ratio':>8}")
    return {name: print_row(name, work, repeats) for name, work in rows.items()}


# Growth ----------------------------------------------------------------------------------------------------------


def print_growth(sft, name: str, sizes: list[dict[str, int]], repeats: int) -> float:
    """The cost of an iteration as one of P and G grows. Returns the exponent fitted to cost ~ rows ** exponent."""
    import numpy as np

    works = [Iteration(sft, **size) for size in sizes]
    # Round by round, so that a slow moment of the machine meets all sizes; the first round warms up.
    rounds = [[seconds(work.whole, 1)[0] for work in works] for _ in range(1 + repeats)][1:]
    cost = [median(times) for times in zip(*rounds, strict=True)]
    rows = [size["prompts"] * size["G"] for size in sizes]
    exponent = np.polyfit(np.log(rows), np.log(cost), 1)[0]
    print(f"\n{name:>6}{'rows':>8}{'ms':>10}{'us a row':>10}")
    for size, n, took in zip(sizes, rows, cost, strict=True):
        print(f"{size['G' if name == 'G' else 'prompts']:6}{n:8}{1e3 * took:10.1f}{1e6 * took / n:10.1f}")
    print(f"cost ~ rows ** {exponent:.2f}")
    return exponent
