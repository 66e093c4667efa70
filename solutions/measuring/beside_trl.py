"""The lab's iteration beside that of TRL's GRPOTrainer, on the same weights and settings."""
# ruff: noqa: PLC0415  torch and TRL take seconds to import: only where they are needed, so that --help is quick

import os
import tempfile
import time
import warnings
from pathlib import Path
from statistics import median

from guiding.document import block

from measuring.bench import Iteration, seconds


def save_gpt2(model, folder: Path):
    """Save the TinyLM as a transformers GPT-2, with its tokenizer, to `folder`, as the guide does. Returns both."""
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
