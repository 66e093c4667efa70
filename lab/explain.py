"""What GRPO does to a few groups of answers, to look at."""

import os
import sys
from collections import Counter
from types import ModuleType

import torch
from torch import Tensor

import tinylm
from lab.pictures import BLUE, GREEN, ORANGE


def shown_prompts(model: tinylm.TinyLM, n: int, temperature: float) -> Tensor:
    """n held-out prompts [n, Tp], spread from hard to easy for the policy as it is now."""
    prompts = tinylm.problems()[1].to(next(model.parameters()).device)
    from_hard_to_easy = tinylm.success_probability(model, prompts, temperature).argsort()
    return prompts[from_hard_to_easy[((torch.arange(n) + 0.5) / n * len(prompts)).long()]]


def paint(colour: str, text: str) -> str:
    """The text in a colour, "#RRGGBB", if it goes to a terminal; otherwise as it is."""
    if not sys.stdout.isatty() or "NO_COLOR" in os.environ:
        return text
    red, green, blue = bytes.fromhex(colour[1:])
    return f"\033[38;2;{red};{green};{blue}m{text}\033[0m"


def show_groups(grpo: ModuleType, model: tinylm.TinyLM, prompts: Tensor, config) -> str:
    """A group of answers to each of the prompts, as text: equal answers in one line, with reward and advantage. `grpo`
    is the module whose functions sample and score, `config` its GRPOConfig.
    """
    generator = torch.Generator(prompts.device).manual_seed(config.seed)  # its own: to look changes no training
    samples = grpo.sample_group(model, prompts, config.G, config.temperature, generator)
    advantages = grpo.group_advantages(samples.rewards, config.G, config.std)
    answered = list(zip(samples.texts, samples.rewards.tolist(), advantages.tolist(), strict=True))
    rights = tinylm.decode_and_strip_padding(tinylm.answers(prompts))
    lines = []
    for i, (prompt, right) in enumerate(zip(tinylm.decode(prompts), rights, strict=True)):
        group = answered[i * config.G : (i + 1) * config.G]
        n = sum(reward == 1 for _, reward, _ in group)
        lines.append(f"  {prompt}  right is {right}  {n} of {config.G} answers are right")
        for (text, reward, advantage), times in sorted(Counter(group).items(), key=lambda counted: -counted[0][2]):
            line = f"    {times:2} x {text:6} reward {reward:.0f}  advantage {advantage:+.2f}"
            lines.append(paint(GREEN if reward else ORANGE, line))
        if n in (0, config.G):
            equal = f"all answers are {'right' if n else 'wrong'}, none is better than its group: nothing to learn here"
            lines.append(paint(BLUE, f"    NO SIGNAL: {equal}"))
    return "\n".join(lines)
