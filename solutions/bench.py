"""Where the lab's time goes, beside what the hardware allows, and beside TRL.

    python solutions/bench.py           one table, and how the cost of an iteration grows with G and with P
    python solutions/bench.py --busy    the core rows once more, beside a process that keeps one core busy
    python solutions/bench.py --trl     TRL's GRPOTrainer on the same weights and settings, iteration by iteration

Every time is a median. Beside it stands the floor: the matrix products that the work does, counted as it runs and then
timed alone, on the same shapes and layouts and with the same threads, the best of several. What is above the floor is
attention's softmax, GELU, copies, the optimizer, Python. Machines differ and so do their moods: compare ratios, of one
run. In order: counting and timing, the work, growth, TRL, the command.
"""
# ruff: noqa: PLC0415  torch takes seconds to import: only where it is needed, so that --help is quick

import copy
import importlib.util
import math
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from unittest import mock

LAB = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(LAB / "solutions"), str(LAB)]  # `import grpo` is the reference
from lab.flags import Parser, number

Products = Counter  # (name of the operation, its operands' sizes and strides) -> how often
Work = Callable[[], object]

# 1. Counting and timing ------------------------------------------------------------------------------------------


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


# 2. The work -----------------------------------------------------------------------------------------------------


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


@contextmanager
def busy_core():
    """Another process, which computes without end while the block runs."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


# 3. Growth -------------------------------------------------------------------------------------------------------


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


# 4. TRL ----------------------------------------------------------------------------------------------------------


def save_gpt2(model, folder: Path):
    """Save the TinyLM as a transformers GPT-2, with its tokenizer, to `folder`, as the guide does. Returns both."""
    from guide import block

    convert = block("convert")
    gpt2, tokenizer = convert["to_gpt2"](model), convert["character_tokenizer"]()
    gpt2.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return gpt2, tokenizer


def against_trl(sft, iterations: int, threads: int) -> tuple[list[float], list[float]]:
    """Seconds of each iteration: (the lab's, TRL's with `threads` threads), taken in turn, after one that warms up."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore", FutureWarning)
    import torch
    from datasets import Dataset
    from transformers import GPT2LMHeadModel, PrinterCallback, TrainerCallback
    from transformers.utils import logging
    from trl import GRPOConfig, GRPOTrainer

    import tinylm

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    lab = Iteration(sft)
    config = lab.config
    lab_times, trl_times = [], []
    lab_threads = torch.get_num_threads()

    class TakeTurns(TrainerCallback):
        """After each of TRL's iterations, which are `inner_steps` optimizer steps, one of the lab's."""

        def on_train_begin(self, *args, **kwargs):
            self.start = time.perf_counter()

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step % config.inner_steps == 0:
                trl_times.append(time.perf_counter() - self.start)
                torch.set_num_threads(lab_threads)
                lab_times.extend(seconds(lab.whole, 1))
                torch.set_num_threads(threads)
                self.start = time.perf_counter()

    def verifier(prompts, completion_ids, **kwargs):
        return [tinylm.reward(p, tokenizer.decode(ids)) for p, ids in zip(prompts, completion_ids, strict=True)]

    with tempfile.TemporaryDirectory() as folder:
        _, tokenizer = save_gpt2(sft, Path(folder) / "sft")
        settings = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=config.P * config.G,
            num_generations=config.G,
            num_iterations=config.inner_steps,
            max_steps=config.inner_steps * (iterations + 1),
            max_completion_length=tinylm.RESPONSE_LEN,
            learning_rate=config.lr,
            epsilon=config.clip,
            beta=config.beta,
            temperature=config.temperature,
            loss_type="grpo",
            use_bias_correction_kl=False,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            bf16=False,  # from here on: what makes it quick on a CPU, and quiet
            gradient_checkpointing=False,
            use_cpu=True,
            dataloader_pin_memory=False,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            GPT2LMHeadModel.from_pretrained(Path(folder) / "sft"),  # from disk: TRL reads its reference there too
            verifier,
            args=settings,
            train_dataset=Dataset.from_dict({"prompt": tinylm.decode(lab.train_prompts)}),
            processing_class=tokenizer,
            callbacks=[TakeTurns()],
        )
        trainer.remove_callback(PrinterCallback)
        torch.set_num_threads(threads)
        trainer.train()
        torch.set_num_threads(lab_threads)
    return lab_times[1:], trl_times[1:]


def print_trl(sft, iterations: int) -> None:
    """TRL with as many threads as the lab has, and with all cores."""
    import torch

    print(f"\n{'one iteration, in turns':36}{'ms':>10}{'TRL ms':>10}{'TRL/lab':>10}")
    for threads in sorted({torch.get_num_threads(), os.cpu_count() or 1}):
        lab, trl = (median(times) for times in against_trl(sft, iterations, threads))
        print(f"{f'  TRL with {threads} thread(s)':36}{1e3 * lab:10.1f}{1e3 * trl:10.1f}{trl / lab:10.2f}", flush=True)


# 5. The command --------------------------------------------------------------------------------------------------


def build_parser() -> Parser:
    """The flags."""
    parser = Parser(
        description="Time the lab's work beside the floor that its matrix products set, and beside TRL.",
        epilog="TINYLM_THREADS=2 in the environment: with two threads.",
        allow_abbrev=False,
    )
    repeats = "calls of each row that takes seconds; ten times as many of the others (default: %(default)s)"
    parser.add_argument("--repeats", type=number(int, 1, 1000), default=3, help=repeats, metavar="N")
    parser.add_argument("--quick", action="store_true", help="little work in every row: does it run at all?")
    parser.add_argument("--busy", action="store_true", help="the core rows again, beside a process on one core")
    parser.add_argument("--trl", action="store_true", help="TRL too, in turns; needs what the guide installs")
    return parser


def main() -> int:
    """Check, then print table after table. Returns the exit status."""
    parser = build_parser()
    args = parser.parse_args()
    missing = [name for name in ("trl", "jupytext") if importlib.util.find_spec(name) is None]
    if args.trl and missing:
        parser.error(f"--trl: not installed here: {', '.join(missing)} (python solutions/guide.py --install)")
    import torch

    import tinylm

    short = args.repeats if args.quick else 10 * args.repeats
    sft = tinylm.load_or_train_sft()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} thread(s) of {os.cpu_count()} cores; medians\n")
    core = core_rows(sft)
    idle = print_table(core, short)
    print_table(long_rows(sft, args.quick), args.repeats)
    if args.busy:
        print("\nBeside a process that keeps one core busy")
        with busy_core():
            busy = print_table(core, short)
        print(f"slower than idle: {', '.join(f'{busy[name] / idle[name]:.2f}' for name in core)}")
    groups, prompts = ([2, 4], [4, 8]) if args.quick else ([2, 4, 8, 16, 32, 64], [4, 8, 16, 32, 64, 128, 256])
    print_growth(sft, "G", [{"prompts": 16, "G": g} for g in groups], args.repeats)
    print_growth(sft, "P", [{"prompts": p, "G": 8} for p in prompts], args.repeats)
    if args.trl:
        print_trl(sft, short)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
