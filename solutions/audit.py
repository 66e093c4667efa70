"""The audit: do the tests reject every wrong solution, name its mistake, and accept every right one?

    python solutions/audit.py                     all entries, a table, and exit status 1 if the tests fall short
    python solutions/audit.py --only "task4 clip" the entries whose task and name hold all of these words
    python solutions/audit.py --show "k2 for k3"  one entry: its difference from the reference, and what the tests say
    python solutions/audit.py --leave-one-out     what a student would read if the tables did not know the mistake

Three catalogues, each entry a small change to the reference, `solutions/grpo.py`. A `Mistake` must be rejected by a
test of its task, with a first line that holds the words `says`. A `Variation` is right, only written another way, and
must be accepted. A `Combination` of mistakes is run through all tests: every task with a mistake must be rejected, one
mistake named, and the other tasks still accepted. To add an entry, append it to its list; never change a test to fit
an entry's text: the tests must know a mistake by the values it gives.
"""

import argparse
import ast
import difflib
import gc
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]
from manifest import LAB as ROOT
from manifest import TESTS

from lab.diagnose import AND
from lab.flags import Parser, number

REFERENCE = ROOT / "solutions" / "grpo.py"
SFT = "tinylm_sft.pt"
HANDED_OUT = [*TESTS, SFT, "solutions/grpo.py"]
FUNCTIONS = {1: "sample_group", 2: "group_advantages", 3: "k3_kl", 4: "grpo_loss", 5: "grpo_step"}
TIMEOUT = 180.0  # seconds for one entry
NAMED_AT_LEAST = 0.95
VAGUE = re.compile(r"(is|are) wrong(, first at| of its gradient|$)|its gradient is not")  # says nothing of what it is

Pairs = list[tuple[str, str]]


@dataclass(frozen=True)
class Mistake:
    """A wrong solution of one task."""

    task: int
    name: str
    change: Pairs | str  # (find, replace) pairs on the reference's source, or another body for the task's function
    says: tuple[str, ...]  # each must occur in one failure's headline; "a|b" is met by either, in any case


@dataclass(frozen=True)
class Variation:
    """A right solution of one task, in another style."""

    task: int
    name: str
    change: Pairs | str


@dataclass(frozen=True)
class Combination:
    """Several mistakes at once, in one task or in several."""

    parts: tuple[Mistake, ...]

    @property
    def name(self) -> str:
        return " + ".join(part.name for part in self.parts)


Entry = Mistake | Variation | Combination

# Mistakes: task 1 -----------------------------------------------------------------------------------------------

GENERATE = "responses = tinylm.generate(model, prompts, temperature, generator)\n"
MASK = "mask=tinylm.response_mask(responses),"
REWARDS = "rewards=torch.tensor(rewards, dtype=torch.float32, device=prompts.device),"
SCORE = "zip(tinylm.decode(prompts), texts, strict=True)"

STUB = "raise NotImplementedError('Task {} ({}) is not written yet: open grpo.py')"
NOT_WRITTEN = "not written|not implemented|NotImplementedError"

MISTAKES = [
    Mistake(1, "sample_group not written", STUB.format(1, "sample_group"), (NOT_WRITTEN,)),
    Mistake(1, "sample_group returns None", [("return Samples(", "Samples(")], ("None",)),
    Mistake(
        1,
        "sample_group returns a tuple",
        """
        prompts = prompts.repeat_interleave(G, dim=0)
        responses = tinylm.generate(model, prompts, temperature, generator)
        texts = tinylm.decode_and_strip_padding(responses)
        rewards = [tinylm.reward(prompt, text) for prompt, text in zip(tinylm.decode(prompts), texts, strict=True)]
        return prompts, responses, tinylm.response_mask(responses), torch.tensor(rewards), texts
        """,
        ("Samples", "tuple"),
    ),
    Mistake(
        1,
        "repeat for repeat_interleave",
        [("prompts.repeat_interleave(G, dim=0)", "prompts.repeat(G, 1)")],
        ("repeat_interleave|prompt-major|in a row|consecutive",),
    ),
    Mistake(
        1,
        "the prompts as they came in the Samples",
        [
            ("    prompts = prompts.repeat_interleave(G, dim=0)\n", "    rows = prompts.repeat_interleave(G, dim=0)\n"),
            (GENERATE, "responses = tinylm.generate(model, rows, temperature, generator)\n"),
            (SCORE, "zip(tinylm.decode(rows), texts, strict=True)"),
        ],
        ("prompts", "shape|rows|repeat"),
    ),
    Mistake(
        1,
        "one response copied G times",
        [
            (
                GENERATE,
                "responses = tinylm.generate(model, prompts[::G], temperature, generator).repeat_interleave(G, 0)\n",
            )
        ],
        ("copied|copies|same response|same answer|identical|all equal|differ",),
    ),
    Mistake(
        1,
        "greedy for sampling",
        [(GENERATE, "responses = tinylm.generate(model, prompts, temperature, generator, greedy=True)\n")],
        ("greedy|likeliest|argmax",),
    ),
    Mistake(
        1,
        "sampling ignores the temperature",
        [(GENERATE, "responses = tinylm.generate(model, prompts, generator=generator)\n")],
        ("temperature",),
    ),
    Mistake(
        1,
        "sampling at the inverse temperature",
        [(GENERATE, "responses = tinylm.generate(model, prompts, 1 / temperature, generator)\n")],
        ("temperature",),
    ),
    Mistake(
        1,
        "generator not passed on",
        [(GENERATE, "responses = tinylm.generate(model, prompts, temperature)\n")],
        ("generator",),
    ),
    Mistake(
        1,
        "a new generator with a fixed seed",
        [(GENERATE, "responses = tinylm.generate(model, prompts, temperature, torch.Generator().manual_seed(0))\n")],
        ("generator|seed",),
    ),
    Mistake(
        1,
        "the given generator is seeded again",
        [(GENERATE, f"if generator is not None:\n        generator.manual_seed(0)\n    {GENERATE}")],
        ("generator|seed",),
    ),
    Mistake(
        1,
        "one seed for every response of a group",
        [
            (
                GENERATE,
                "seed = int(torch.randint(2**31, (1,), generator=generator))\n"
                "    draws = [torch.Generator().manual_seed(seed) for _ in range(G)]\n"
                "    groups = [tinylm.generate(model, prompts[::G], temperature, draw) for draw in draws]\n"
                "    responses = torch.stack(groups, dim=1).flatten(0, 1)\n",
            )
        ],
        ("copied|copies|same response|same answer|identical|all equal|differ|seed",),
    ),
    Mistake(
        1,
        "mask covers the prompt too",
        [(MASK, "mask=torch.cat([torch.ones_like(prompts).float(), tinylm.response_mask(responses)], dim=1),")],
        ("mask", "prompt"),
    ),
    Mistake(
        1,
        "mask drops the end-of-sequence",
        [(MASK, "mask=((responses != tinylm.EOS) & (responses != tinylm.PAD)).float(),")],
        ("mask", "end-of-sequence|EOS"),
    ),
    Mistake(
        1,
        "mask keeps what follows the end-of-sequence",
        [(MASK, "mask=torch.ones_like(responses).float(),")],
        ("mask", "padding|after"),
    ),
    Mistake(
        1,
        "mask keeps one token after the end-of-sequence",
        [(MASK, "mask=torch.cat([torch.ones(len(responses), 1), tinylm.response_mask(responses)[:, :-1]], dim=1),")],
        ("mask", "shift|by one|one position|one place|one token|too far|padding|after"),
    ),
    Mistake(
        1,
        "mask shifted left by one",
        [(MASK, "mask=torch.cat([tinylm.response_mask(responses)[:, 1:], torch.zeros(len(responses), 1)], dim=1),")],
        ("mask", "shift|by one|one position|one place|one token|end-of-sequence|EOS"),
    ),
    Mistake(
        1,
        "mask rolled right by one",
        [(MASK, "mask=tinylm.response_mask(responses).roll(1, dims=1),")],
        ("mask", "shift|by one|one position|one place|one token"),
    ),
    Mistake(
        1,
        "mask only where the policy wrote no padding",
        [(MASK, "mask=(responses != tinylm.PAD).float(),")],
        ("mask", "padding|PAD|own tokens"),
    ),
    Mistake(
        1,
        "mask the wrong way round",
        [(MASK, "mask=1 - tinylm.response_mask(responses),")],
        ("mask", "invert|wrong way|other way|padding|swap|complement|1 on"),
    ),
    Mistake(
        1,
        "answers scored against the next prompt",
        [(SCORE, "zip(tinylm.decode(prompts.roll(G, 0)), texts, strict=True)")],
        ("reward", "prompt"),
    ),
    Mistake(
        1,
        "answers scored in the order of repeat",
        [(SCORE, "zip(tinylm.decode(prompts[::G].repeat(G, 1)), texts, strict=True)")],
        ("reward", "prompt"),
    ),
    Mistake(
        1,
        "texts with their padding",
        [("tinylm.decode_and_strip_padding(responses)", "tinylm.decode(responses)")],
        ("padding|strip",),
    ),
    Mistake(
        1,
        "texts cut before the end-of-sequence",
        [
            (
                "texts = tinylm.decode_and_strip_padding(responses)",
                "texts = [text.split('$')[0] for text in tinylm.decode(responses)]",
            )
        ],
        ("end-of-sequence|EOS|strip",),
    ),
    Mistake(
        1,
        "an end-of-sequence added to truncated answers",
        [
            (
                "texts = tinylm.decode_and_strip_padding(responses)",
                "texts = [text.split('$')[0] + '$' for text in tinylm.decode(responses)]",
            )
        ],
        ("text",),
    ),
    Mistake(
        1,
        "rewards shaped [P, G]",
        [(REWARDS, "rewards=torch.tensor(rewards, dtype=torch.float32, device=prompts.device).view(-1, G),")],
        ("rewards", "shape"),
    ),
    Mistake(
        1,
        "rewards shaped [N, 1]",
        [(REWARDS, "rewards=torch.tensor(rewards, dtype=torch.float32, device=prompts.device).unsqueeze(1),")],
        ("rewards", "shape"),
    ),
    Mistake(
        1,
        "rewards as int64",
        [(REWARDS, "rewards=torch.tensor([int(value) for value in rewards], device=prompts.device),")],
        ("rewards", "dtype|float32"),
    ),
    Mistake(1, "rewards as a list", [(REWARDS, "rewards=rewards,")], ("rewards", "list|tensor")),
    Mistake(
        1,
        "rewards of +1 and -1",
        [(REWARDS, "rewards=2 * torch.tensor(rewards, dtype=torch.float32, device=prompts.device) - 1,")],
        ("reward", "-1|0 or 1|0.0 or 1.0|0 for"),
    ),
    Mistake(
        1,
        "responses with the prompt in front",
        [("responses=responses,", "responses=torch.cat([prompts, responses], dim=1),")],
        ("responses", "shape|prompt"),
    ),
]

# Mistakes: task 2 -----------------------------------------------------------------------------------------------

GROUPS = "groups = rewards.view(-1, G)\n"
CENTRED = "advantages = groups - groups.mean(dim=1, keepdim=True)\n"
STD = "(groups.std(dim=1, correction=0, keepdim=True) + eps)"
IF_STD = "    if normalize_std:\n"
FLAT = "return advantages.masked_fill(no_signal, 0.0).view(-1)"

MISTAKES += [
    Mistake(2, "group_advantages not written", STUB.format(2, "group_advantages"), (NOT_WRITTEN,)),
    Mistake(2, "group_advantages returns None", [(FLAT, FLAT.replace("return ", ""))], ("None",)),
    Mistake(2, "advantages as a list", [(FLAT, f"{FLAT}.tolist()")], ("list|tensor",)),
    Mistake(
        2,
        "mean over the batch",
        [(CENTRED, "advantages = groups - rewards.mean()\n")],
        ("mean|baseline", "batch|whole|all rewards|all rows|all groups"),
    ),
    Mistake(
        2,
        "std over the batch",
        [(STD, "(rewards.std(correction=0) + eps)")],
        ("std|deviation", "batch|whole|all rewards|all rows|all groups"),
    ),
    Mistake(2, "not centred", [(CENTRED, "advantages = groups\n")], ("centred|centered|subtract|baseline",)),
    Mistake(
        2,
        "baseline subtracted after dividing by the std",
        [
            (CENTRED, "advantages = groups\n"),
            (f"advantages / {STD}\n", f"advantages / {STD} - groups.mean(dim=1, keepdim=True)\n"),
        ],
        ("before|centred|centered|subtract|baseline",),
    ),
    Mistake(
        2,
        "advantages with the sign flipped",
        [(CENTRED, "advantages = groups.mean(dim=1, keepdim=True) - groups\n")],
        ("sign|flipped|negat",),
    ),
    Mistake(2, "variance for std", [(STD, "(groups.var(dim=1, correction=0, keepdim=True) + eps)")], ("variance",)),
    Mistake(
        2,
        "sample std",
        [(STD, "(groups.std(dim=1, keepdim=True) + eps)")],
        ("sample std|sample standard|population|correction|G - 1",),
    ),
    Mistake(
        2,
        "mean absolute deviation for std",
        [(STD, "(advantages.abs().mean(dim=1, keepdim=True) + eps)")],
        ("std|standard deviation|mean absolute",),
    ),
    Mistake(
        2,
        "largest advantage for std",
        [(STD, "(advantages.abs().amax(dim=1, keepdim=True) + eps)")],
        ("std|standard deviation|largest|maximum",),
    ),
    Mistake(
        2,
        "root of the sum of squares, not of the mean",
        [(STD, "(advantages.norm(dim=1, keepdim=True) + eps)")],
        ("std|standard deviation|divided by G|norm",),
    ),
    Mistake(
        2,
        "signs for advantages",
        [(f"advantages = advantages / {STD}", "advantages = advantages.sign()")],
        ("std|standard deviation|sign",),
    ),
    Mistake(
        2,
        "ranks for rewards",
        [(GROUPS, f"{GROUPS}    groups = groups.argsort(dim=1).argsort(dim=1).float()\n")],
        ("rank",),
    ),
    Mistake(
        2,
        "no epsilon, NaN for a group without signal",
        [(STD, "groups.std(dim=1, correction=0, keepdim=True)"), (FLAT, "return advantages.view(-1)")],
        ("NaN|finite", "eps|equal|zero|signal"),
    ),
    Mistake(
        2,
        "an epsilon of 1e-8, a group without signal gets advantages",
        [(STD, "(groups.std(dim=1, correction=0, keepdim=True) + 1e-8)"), (FLAT, "return advantages.view(-1)")],
        ("eps|equal|signal|rounding",),
    ),
    Mistake(
        2,
        "epsilon added to the quotient",
        [(STD, "groups.std(dim=1, correction=0, keepdim=True) + eps"), (FLAT, "return advantages.view(-1)")],
        ("eps|NaN",),
    ),
    Mistake(
        2, "epsilon under the root", [(STD, "(groups.var(dim=1, correction=0, keepdim=True) + eps).sqrt()")], ("eps",)
    ),
    Mistake(
        2,
        "a group without signal keeps its rewards",
        [(FLAT, "return torch.where(no_signal, groups, advantages).view(-1)")],
        ("equal|signal|zero|gets 0|must be 0",),
    ),
    Mistake(
        2,
        "median as the baseline",
        [(CENTRED, "advantages = groups - groups.median(dim=1, keepdim=True).values\n")],
        ("mean|median",),
    ),
    Mistake(
        2,
        "leave-one-out mean as the baseline (RLOO)",
        [(CENTRED, "advantages = groups - (groups.sum(dim=1, keepdim=True) - groups) / (G - 1)\n")],
        ("leave-one-out|RLOO|G - 1|the others|other G|own reward",),
    ),
    Mistake(2, "always divided by the std", [(IF_STD, "    if True:\n")], ("normalize_std",)),
    Mistake(2, "never divided by the std", [(IF_STD, "    if False:\n")], ("normalize_std|std|standard deviation",)),
    Mistake(
        2,
        "normalize_std the wrong way round",
        [(IF_STD, "    if not normalize_std:\n")],
        ("normalize_std|not divided",),
    ),
    Mistake(
        2,
        "groups interleaved",
        [(GROUPS, "groups = rewards.view(G, -1).t()\n"), (FLAT, FLAT.replace(".view(-1)", ".t().reshape(-1)"))],
        ("prompt-major|interleaved|in a row|consecutive|view",),
    ),
    Mistake(
        2,
        "view(G, -1) for view(-1, G)",
        [(GROUPS, "groups = rewards.view(G, -1)\n")],
        ("view|prompt-major|consecutive|in a row|groups of",),
    ),
    Mistake(
        2,
        "mean and std across the prompts",
        [
            (CENTRED, "advantages = groups - groups.mean(dim=0, keepdim=True)\n"),
            (STD, "(groups.std(dim=0, correction=0, keepdim=True) + eps)"),
        ],
        ("dim=|column|across|view|prompt-major|groups of",),
    ),
    Mistake(2, "advantages shaped [P, G]", [(FLAT, FLAT.replace(".view(-1)", ""))], ("shape",)),
    Mistake(2, "advantages shaped [N, 1]", [(FLAT, FLAT.replace(".view(-1)", ".view(-1, 1)"))], ("shape",)),
    Mistake(
        2,
        "rewards changed in place",
        [(CENTRED, "groups -= groups.mean(dim=1, keepdim=True)\n    advantages = groups\n")],
        ("changed|changes|modif|in place|in-place",),
    ),
]

# Mistakes: task 3 -----------------------------------------------------------------------------------------------

LOG_U = "log_u = ref_logp - logp\n"
K3 = "return log_u.exp() - log_u - 1"

MISTAKES += [
    Mistake(3, "k3_kl not written", STUB.format(3, "k3_kl"), (NOT_WRITTEN,)),
    Mistake(3, "k3_kl returns None", [(K3, "log_u.exp() - log_u - 1")], ("None",)),
    Mistake(
        3, "k3 as an array of numpy", [(K3, "return (log_u.exp() - log_u - 1).detach().numpy()")], ("tensor|array",)
    ),
    Mistake(
        3, "reversed ratio", [(LOG_U, "log_u = logp - ref_logp\n")], ("revers|upside|swap|wrong way|other way|on top",)
    ),
    Mistake(3, "k1 for k3", [(K3, "return -log_u")], ("k1",)),
    Mistake(3, "k2 for k3", [(K3, "return 0.5 * log_u**2")], ("k2",)),
    Mistake(3, "the square without the half", [(K3, "return log_u**2")], ("k2|square",)),
    Mistake(3, "the - 1 missing", [(K3, "return log_u.exp() - log_u")], ("- 1|minus 1|minus one",)),
    Mistake(3, "log u added", [(K3, "return log_u.exp() + log_u - 1")], ("log(u)|log u|log_u|sign",)),
    Mistake(3, "u times log u", [(K3, "return log_u.exp() * log_u - log_u.exp() + 1")], ("u * log|u log|times log",)),
    Mistake(3, "policy detached", [(LOG_U, "log_u = ref_logp - logp.detach()\n")], ("detach|gradient",)),
    Mistake(3, "u detached", [(K3, "return log_u.exp().detach() - log_u - 1")], ("gradient|detach",)),
    Mistake(3, "computed under no_grad", [(LOG_U, f"with torch.no_grad():\n        {LOG_U}")], ("gradient|detach",)),
    Mistake(3, "mean over everything", [(K3, "return (log_u.exp() - log_u - 1).mean()")], ("shape|scalar|per token",)),
    Mistake(3, "sum over the tokens", [(K3, "return (log_u.exp() - log_u - 1).sum(dim=1)")], ("shape|per token",)),
    Mistake(3, "k3 negated", [(K3, "return log_u + 1 - log_u.exp()")], ("sign|negat",)),
    Mistake(3, "k3 halved", [(K3, "return 0.5 * (log_u.exp() - log_u - 1)")], ("half|0.5|factor|twice",)),
    Mistake(3, "absolute log-ratio", [(LOG_U, "log_u = (ref_logp - logp).abs()\n")], ("abs|sign|both",)),
    Mistake(3, "log-ratio clamped", [(LOG_U, "log_u = (ref_logp - logp).clamp(-0.5, 0.5)\n")], ("clamp|clip|large",)),
    Mistake(
        3,
        "u from the log-probs' quotient",
        [(LOG_U, "log_u = (ref_logp / logp).log()\n")],
        ("exp|quotient|difference",),
    ),
    Mistake(
        3,
        "ref_logp changed in place",
        [(LOG_U, "log_u = ref_logp.sub_(logp)\n")],
        ("changed|changes|modif|in place|in-place",),
    ),
]

# Mistakes: task 4 -----------------------------------------------------------------------------------------------

RATIO = "ratio = (logp - old_logp).exp()\n"
COLUMN = "advantages = advantages.unsqueeze(1)  # [N, 1]\n"
CLIPPED = "clipped = ratio.clamp(1 - clip, 1 + clip) * advantages\n"
KL = "kl = k3_kl(logp, ref_logp)\n"
MINIMUM = "torch.minimum(unclipped, clipped)"
OBJECTIVE = f"objective = {MINIMUM} - beta * kl  # [N, Tr]\n"
PER_RESPONSE = "per_response = (objective * mask).sum(dim=1) / mask.sum(dim=1)  # [N]\n"
LOSS = "loss = -per_response.mean()\n"
RETURN_LOSS = "return loss, metrics\n"
CLIP_FRACTION = "token_mean(clipped < unclipped)"
LENGTH = "Tr|length|own tokens|number of tokens"

MISTAKES += [
    Mistake(4, "grpo_loss not written", STUB.format(4, "grpo_loss"), (NOT_WRITTEN,)),
    Mistake(4, "grpo_loss returns None", [(RETURN_LOSS, "loss, metrics\n")], ("None",)),
    Mistake(4, "grpo_loss returns the loss alone", [(RETURN_LOSS, "return loss\n")], ("tuple|pair|metrics",)),
    Mistake(4, "loss per response", [(LOSS, "loss = -per_response\n")], ("scalar|shape",)),
    Mistake(4, "loss not negated", [(LOSS, "loss = per_response.mean()\n")], ("sign|negat|minimise|minimize",)),
    Mistake(4, "max for min", [(MINIMUM, "torch.maximum(unclipped, clipped)")], ("maximum|larger|max",)),
    Mistake(4, "only the clipped term", [(MINIMUM, "clipped")], ("clipped", "only|alone|unclipped|minimum")),
    Mistake(
        4, "no clip", [(MINIMUM, "unclipped")], ("clip", "no clip|not clip|never|without|missing|unclipped|nothing")
    ),
    Mistake(4, "minimum replaced by the mean", [(MINIMUM, "0.5 * (unclipped + clipped)")], ("mean|average",)),
    Mistake(
        4,
        "old and new swapped",
        [(RATIO, "ratio = (old_logp - logp).exp()\n")],
        ("swap|revers|upside|wrong way|other way|on top",),
    ),
    Mistake(4, "ratio without the exp", [(RATIO, "ratio = logp - old_logp\n")], ("exp",)),
    Mistake(4, "probability for ratio", [(RATIO, "ratio = logp.exp()\n")], ("ratio|old_logp",)),
    Mistake(
        4, "ratio to the reference", [(RATIO, "ratio = (logp - ref_logp).exp()\n")], ("old_logp|ref_logp|reference",)
    ),
    Mistake(4, "ratio always 1", [(RATIO, "ratio = (logp - logp.detach()).exp()\n")], ("old_logp",)),
    Mistake(4, "ratio detached", [(RATIO, "ratio = (logp - old_logp).exp().detach()\n")], ("gradient|detach",)),
    Mistake(
        4,
        "sequence-level ratio",
        [(RATIO, "ratio = ((logp - old_logp) * mask).sum(dim=1, keepdim=True).exp().expand_as(logp)\n")],
        ("sequence|whole response|per token|per-token|each token",),
    ),
    Mistake(
        4,
        "sequence-level ratio, normalised by length (GSPO)",
        [
            (
                RATIO,
                "log_ratio = ((logp - old_logp) * mask).sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True)\n"
                "    ratio = log_ratio.exp().expand_as(logp)\n",
            )
        ],
        ("sequence|whole response|per token|per-token|each token",),
    ),
    Mistake(
        4,
        "clip in log space",
        [(CLIPPED, "clipped = (logp - old_logp).clamp(-clip, clip).exp() * advantages\n")],
        ("log",),
    ),
    Mistake(
        4,
        "upper bound raised (clip-higher of DAPO)",
        [(CLIPPED, "clipped = ratio.clamp(1 - clip, 1 + 1.4 * clip) * advantages\n")],
        ("1 + clip|upper|higher|interval|bound",),
    ),
    Mistake(
        4,
        "clip only from above",
        [(CLIPPED, "clipped = ratio.clamp(max=1 + clip) * advantages\n")],
        ("1 - clip|lower|below|one side|one-sided|A < 0|negative",),
    ),
    Mistake(
        4,
        "clip only from below",
        [(CLIPPED, "clipped = ratio.clamp(min=1 - clip) * advantages\n")],
        ("1 + clip|upper|above|one side|one-sided|A > 0|positive",),
    ),
    Mistake(
        4,
        "clip only for positive advantages",
        [(MINIMUM, "torch.where(advantages > 0, torch.minimum(unclipped, clipped), unclipped)")],
        ("negative|A < 0|A = -1|positive|A > 0",),
    ),
    Mistake(
        4,
        "minimum of the ratios, then times the advantage",
        [(MINIMUM, "torch.minimum(ratio, ratio.clamp(1 - clip, 1 + clip)) * advantages")],
        ("negative|A < 0|A = -1|positive|A > 0|before|multipl",),
    ),
    Mistake(
        4,
        "bounds of the clip swapped",
        [(CLIPPED, "clipped = ratio.clamp(1 + clip, 1 - clip) * advantages\n")],
        ("1 - clip|swap|bound|interval|constant",),
    ),
    Mistake(
        4,
        "clip around 0",
        [(CLIPPED, "clipped = ratio.clamp(-clip, clip) * advantages\n")],
        ("1 - clip|1 + clip|around|interval|bound",),
    ),
    Mistake(
        4,
        "advantages clipped too",
        [(CLIPPED, "clipped = (ratio * advantages).clamp(1 - clip, 1 + clip)\n")],
        ("clamp|clip", "before|ratio|product|advantage"),
    ),
    Mistake(
        4,
        "clip fixed at 0.2",
        [(CLIPPED, "clipped = ratio.clamp(0.8, 1.2) * advantages\n")],
        ("clip", "fixed|ignored|argument|0.2"),
    ),
    Mistake(
        4,
        "dual clip",
        [
            (
                MINIMUM,
                "torch.minimum(unclipped, clipped).maximum(torch.where(advantages < 0, 2 * advantages, -math.inf))",
            )
        ],
        ("dual|negative|A < 0|bound|unclipped|not clipped|large",),
    ),
    Mistake(4, "mask ignored", [(PER_RESPONSE, "per_response = objective.mean(dim=1)\n")], ("mask|padding",)),
    Mistake(
        4,
        "mask only in the denominator",
        [(PER_RESPONSE, "per_response = objective.sum(dim=1) / mask.sum(dim=1)\n")],
        ("mask|padding",),
    ),
    Mistake(
        4,
        "mask only on the log-ratio, before the exp",
        [
            (RATIO, "ratio = ((logp - old_logp) * mask).exp()\n"),
            (KL, "kl = k3_kl(logp * mask, ref_logp * mask)\n"),
            (PER_RESPONSE, "per_response = objective.sum(dim=1) / mask.sum(dim=1)\n"),
        ],
        ("mask|padding",),
    ),
    Mistake(
        4,
        "mask on the surrogate only, KL over the padding",
        [
            (OBJECTIVE, "objective = torch.minimum(unclipped, clipped)\n"),
            (PER_RESPONSE, "per_response = (objective * mask - beta * kl).sum(dim=1) / mask.sum(dim=1)\n"),
        ],
        ("mask|padding", "KL"),
    ),
    Mistake(
        4,
        "mask the wrong way round in the loss",
        [(PER_RESPONSE, "per_response = (objective * (1 - mask)).sum(dim=1) / mask.sum(dim=1)\n")],
        ("mask|padding",),
    ),
    Mistake(
        4,
        "divided by Tr",
        [(PER_RESPONSE, "per_response = (objective * mask).sum(dim=1) / mask.shape[1]\n")],
        (LENGTH,),
    ),
    Mistake(
        4,
        "divided by the longest length",
        [(PER_RESPONSE, "per_response = (objective * mask).sum(dim=1) / mask.sum(dim=1).max()\n")],
        (f"longest|{LENGTH}",),
    ),
    Mistake(
        4,
        "one average over all tokens of the batch",
        [(LOSS, "loss = -(objective * mask).sum() / mask.sum()\n")],
        ("all tokens|every token|tokens of the batch|token-level|over tokens",),
    ),
    Mistake(
        4,
        "sum over a response's tokens",
        [(PER_RESPONSE, "per_response = (objective * mask).sum(dim=1)\n")],
        ("sum|divide|length|own tokens",),
    ),
    Mistake(4, "sum over responses", [(LOSS, "loss = -per_response.sum()\n")], ("sum|mean over|average over|divide",)),
    Mistake(4, "sum over all tokens", [(LOSS, "loss = -(objective * mask).sum()\n")], ("sum|divide|mean|average",)),
    Mistake(4, "loss scaled by 1.005", [(LOSS, "loss = -1.005 * per_response.mean()\n")], ("factor|scale|times",)),
    Mistake(
        4,
        "loss zero, no gradient",
        [(LOSS, "loss = torch.zeros((), requires_grad=True)\n")],
        ("constant|depend|gradient|zero",),
    ),
    Mistake(4, "loss times zero", [(LOSS, "loss = 0.0 * per_response.mean()\n")], ("constant|depend|gradient|zero",)),
    Mistake(
        4,
        "loss right, gradient lost",
        [(LOSS, "loss = (-per_response.mean()).detach().requires_grad_()\n")],
        ("gradient|detach",),
    ),
    Mistake(4, "KL with the wrong sign", [(OBJECTIVE, OBJECTIVE.replace("-", "+"))], ("KL", "sign|added|subtract")),
    Mistake(4, "beta dropped", [(OBJECTIVE, OBJECTIVE.replace("beta * ", ""))], ("beta",)),
    Mistake(
        4,
        "KL dropped",
        [(OBJECTIVE, OBJECTIVE.replace(" - beta * kl", ""))],
        ("KL|penalty|beta", "missing|drop|subtract|without|no "),
    ),
    Mistake(
        4, "beta applied twice", [(OBJECTIVE, OBJECTIVE.replace("beta *", "beta * beta *"))], ("beta", "twice|square")
    ),
    Mistake(
        4,
        "beta fixed at 0.04",
        [(OBJECTIVE, OBJECTIVE.replace("beta", "0.04"))],
        ("beta", "fixed|ignored|argument|0.04"),
    ),
    Mistake(4, "KL detached", [(OBJECTIVE, OBJECTIVE.replace("kl", "kl.detach()"))], ("gradient|detach",)),
    Mistake(
        4,
        "KL of the policy to the old policy",
        [(KL, "kl = k3_kl(logp, old_logp)\n")],
        ("ref_logp|reference|old_logp",),
    ),
    Mistake(4, "KL of the old policy", [(KL, "kl = k3_kl(old_logp, ref_logp)\n")], ("KL", "logp")),
    Mistake(
        4,
        "arguments of k3_kl swapped",
        [(KL, "kl = k3_kl(ref_logp, logp)\n")],
        ("swap|revers|order|wrong way|other way",),
    ),
    Mistake(4, "k2 inside the loss", [(KL, "kl = 0.5 * (logp - ref_logp) ** 2\n")], ("k2|k3",)),
    Mistake(
        4,
        "KL averaged over all tokens, outside the responses' means",
        [
            (OBJECTIVE, "objective = torch.minimum(unclipped, clipped)\n"),
            (LOSS, "loss = -per_response.mean() + beta * (kl * mask).sum() / mask.sum()\n"),
        ],
        ("KL", "all tokens|response"),
    ),
    Mistake(
        4,
        "KL summed over a response's tokens",
        [
            (OBJECTIVE, "objective = torch.minimum(unclipped, clipped)\n"),
            (LOSS, "loss = -per_response.mean() + beta * (kl * mask).sum(dim=1).mean()\n"),
        ],
        ("KL", "sum"),
    ),
    Mistake(4, "advantages not broadcast", [(f"    {COLUMN}", "")], ("advantages|broadcast|unsqueeze",)),
    Mistake(
        4,
        "advantages broadcast over the rows",
        [(COLUMN, "advantages = advantages.unsqueeze(0)\n")],
        ("advantages|broadcast|unsqueeze",),
    ),
    Mistake(
        4,
        "advantages tiled token-major",
        [(COLUMN, "advantages = advantages.repeat(logp.shape[1]).view_as(logp)\n")],
        ("advantages|broadcast|unsqueeze",),
    ),
    Mistake(
        4,
        "advantages normalised again over the batch",
        [(COLUMN, "advantages = ((advantages - advantages.mean()) / (advantages.std() + 1e-8)).unsqueeze(1)\n")],
        ("advantages|normali",),
    ),
    Mistake(4, "no metrics", [(RETURN_LOSS, "return loss, {}\n")], ("clip_fraction|metrics",)),
    Mistake(4, "metric ratio missing", [(', "ratio": token_mean(ratio)}', "}")], ("ratio",)),
    Mistake(4, "metrics keep the graph", [("mask.sum()).detach()", "mask.sum())")], ("graph|detach|gradient",)),
    Mistake(
        4,
        "clip_fraction counts every ratio outside",
        [(CLIP_FRACTION, "token_mean((ratio - 1).abs() > clip)")],
        ("clip_fraction", "outside|smaller|advantage"),
    ),
    Mistake(
        4,
        "clip_fraction counts ties",
        [(CLIP_FRACTION, "token_mean(clipped <= unclipped)")],
        ("clip_fraction", "tie|equal|inside|smaller"),
    ),
    Mistake(
        4,
        "clip_fraction counts padding",
        [(CLIP_FRACTION, "(clipped < unclipped).float().mean()")],
        ("clip_fraction", "padding|mask|own"),
    ),
    Mistake(
        4,
        "clip_fraction as a count",
        [(CLIP_FRACTION, "((clipped < unclipped) * mask).sum()")],
        ("clip_fraction", "sum|count|mean|share"),
    ),
    Mistake(4, "metric kl times beta", [('"kl": token_mean(kl)', '"kl": token_mean(beta * kl)')], ("kl", "beta")),
    Mistake(
        4,
        "metric kl over the padding too",
        [('"kl": token_mean(kl)', '"kl": kl.mean().detach()')],
        ("kl", "padding|mask|own"),
    ),
    Mistake(
        4,
        "metric ratio over the padding too",
        [('"ratio": token_mean(ratio)', '"ratio": ratio.mean().detach()')],
        ("ratio", "padding|mask|own"),
    ),
    Mistake(
        4,
        "metrics averaged per response first",
        [("((values * mask).sum() / mask.sum())", "((values * mask).sum(dim=1) / mask.sum(dim=1)).mean()")],
        ("response|own tokens",),
    ),
    Mistake(
        4,
        "advantages changed in place",
        [(COLUMN, "advantages.unsqueeze_(1)\n")],
        ("changed|changes|modif|in place|in-place",),
    ),
    Mistake(
        4,
        "old_logp changed in place",
        [(RATIO, f"old_logp.mul_(mask)\n    {RATIO}")],
        ("changed|changes|modif|in place|in-place",),
    ),
]

# Mistakes: task 5 -----------------------------------------------------------------------------------------------

SAMPLE = "samples = sample_group(model, prompts, config.G, config.temperature, generator)\n"
ADVANTAGES = "advantages = group_advantages(samples.rewards, config.G, config.std)\n"
NO_GRAD = "    with torch.no_grad():\n        old_logp ="
OLD = "old_logp = tinylm.token_logp(model, samples.prompts, samples.responses, config.temperature)\n"
REF = "ref_logp = tinylm.token_logp(ref_model, samples.prompts, samples.responses, config.temperature)\n"
LOOP = "    for _ in range(config.inner_steps):\n"
NEW = "        logp = tinylm.token_logp(model, samples.prompts, samples.responses, config.temperature)\n"
CALL = "loss, metrics = grpo_loss(logp, old_logp, ref_logp, advantages, samples.mask, config.clip, config.beta)\n"
ZERO_GRAD = "        optimizer.zero_grad()\n"
BACKWARD = "        loss.backward()\n"
STEP = "        optimizer.step()\n"
RETURN_STEP = 'return samples, metrics | {"loss": loss.detach()}\n'


def at_temperature_one(line: str) -> tuple[str, str]:
    return line, line.replace(", config.temperature", "")


MISTAKES += [
    Mistake(5, "grpo_step not written", STUB.format(5, "grpo_step"), (NOT_WRITTEN,)),
    Mistake(5, "grpo_step returns None", [(RETURN_STEP, "samples\n")], ("None",)),
    Mistake(
        5,
        "grpo_step returns the metrics alone",
        [(RETURN_STEP, RETURN_STEP.replace("samples, ", ""))],
        ("tuple|pair|samples",),
    ),
    Mistake(
        5,
        "grpo_step returns metrics, samples",
        [(RETURN_STEP, 'return metrics | {"loss": loss.detach()}, samples\n')],
        ("order|first|Samples",),
    ),
    Mistake(
        5, "old_logp recomputed inside the loop", [(CALL, f"old_logp = logp.detach()\n        {CALL}")], ("old_logp",)
    ),
    Mistake(
        5,
        "old_logp refreshed after every step",
        [(STEP, f"{STEP}        with torch.no_grad():\n            {OLD}")],
        ("old_logp",),
    ),
    Mistake(
        5,
        "old_logp taken after the first step",
        [
            (LOOP, "    for step in range(config.inner_steps):\n"),
            (STEP, f"{STEP}        if step == 0:\n            with torch.no_grad():\n                {OLD}"),
        ],
        ("old_logp",),
    ),
    Mistake(
        5,
        "old_logp carries gradient",
        [(f"    with torch.no_grad():\n        {OLD}", f"    {OLD}    with torch.no_grad():\n")],
        ("old_logp", "gradient|no_grad|detach|constant"),
    ),
    Mistake(
        5,
        "ref_logp carries gradient",
        [(f"        {REF}", f"    {REF}")],
        ("ref_logp|ref_model|reference", "gradient|no_grad|detach|constant"),
    ),
    Mistake(5, "old_logp under the reference", [(OLD, OLD.replace("(model", "(ref_model"))], ("old_logp",)),
    Mistake(5, "no zero_grad", [(ZERO_GRAD, "")], ("zero_grad|add up|accumulat",)),
    Mistake(
        5,
        "zero_grad outside the loop",
        [(LOOP, f"    optimizer.zero_grad()\n{LOOP}"), (ZERO_GRAD, "")],
        ("zero_grad|add up|accumulat",),
    ),
    Mistake(
        5,
        "zero_grad between backward and step",
        [(ZERO_GRAD, ""), (BACKWARD, BACKWARD + ZERO_GRAD)],
        ("zero_grad|between|did not change|does not change|never changes|unchanged|not moved|not move",),
    ),
    Mistake(
        5,
        "no optimizer step",
        [(STEP, "")],
        ("optimizer.step|optimizer step|no step|did not change|unchanged|not moved|not move",),
    ),
    Mistake(
        5,
        "no backward",
        [(BACKWARD, "")],
        ("backward|gradient|did not change|does not change|unchanged|not moved|not move",),
    ),
    Mistake(
        5,
        "step before backward",
        [(STEP, ""), (ZERO_GRAD, STEP + ZERO_GRAD)],
        ("step", "before|backward|order|gradient|fewer|late"),
    ),
    Mistake(
        5,
        "one step for the sum of all inner gradients",
        [
            (ZERO_GRAD, ""),
            (STEP, ""),
            (
                "    return samples, metrics",
                "    optimizer.step()\n    optimizer.zero_grad()\n    return samples, metrics",
            ),
        ],
        ("step", "each|every|once|one "),
    ),
    Mistake(
        5,
        "a copy of the policy is trained",
        [(SAMPLE, f"model = copy.deepcopy(model)\n    {SAMPLE}")],
        ("copy|in place|did not change|does not change|unchanged|not moved|not move|optimizer",),
    ),
    Mistake(
        5,
        "an optimizer of its own",
        [(SAMPLE, f"optimizer = torch.optim.Adam(model.parameters(), lr=config.lr)\n    {SAMPLE}")],
        ("optimizer",),
    ),
    Mistake(
        5,
        "the policy is its own reference",
        [(REF, REF.replace("(ref_model", "(model"))],
        ("ref_logp|ref_model|reference",),
    ),
    Mistake(
        5,
        "the reference follows the policy",
        [
            (
                "    return samples, metrics",
                "    ref_model.load_state_dict(model.state_dict())\n    return samples, metrics",
            )
        ],
        ("ref_model|reference", "chang|train|moved|never"),
    ),
    Mistake(
        5,
        "ref_logp at every inner step under the policy",
        [(CALL, f"ref_logp = logp.detach()\n        {CALL}")],
        ("ref_logp|ref_model|reference",),
    ),
    Mistake(
        5,
        "old_logp and ref_logp swapped in the call",
        [(CALL, CALL.replace("old_logp, ref_logp", "ref_logp, old_logp"))],
        ("old_logp|ref_logp", "swap|order|ref_logp"),
    ),
    Mistake(
        5,
        "loss keeps the graph alive",
        [(RETURN_STEP, RETURN_STEP.replace(".detach()", ""))],
        ("loss", "detach|graph|gradient"),
    ),
    Mistake(5, "loss missing in the metrics", [(RETURN_STEP, "return samples, metrics\n")], ("loss",)),
    Mistake(
        5,
        "loss of the first inner step",
        [
            (LOOP, "    losses = []\n" + LOOP),
            (ZERO_GRAD, f"        losses.append(loss.detach())\n{ZERO_GRAD}"),
            (RETURN_STEP, 'return samples, metrics | {"loss": losses[0]}\n'),
        ],
        ("loss", "last|first|inner step"),
    ),
    Mistake(
        5,
        "metrics measured again after the last step",
        [
            (
                "    return samples, metrics",
                f"{NEW}    {CALL}    return samples, metrics".replace("        logp", "    logp"),
            )
        ],
        ("after|again",),
    ),
    Mistake(
        5,
        "one inner step, whatever inner_steps says",
        [(LOOP, "    for _ in range(1):\n")],
        ("inner_steps|inner step",),
    ),
    Mistake(
        5,
        "one inner step too many",
        [(LOOP, "    for _ in range(config.inner_steps + 1):\n")],
        ("inner_steps|inner step|gradient step|too many",),
    ),
    Mistake(
        5,
        "one inner step too few",
        [(LOOP, "    for _ in range(max(1, config.inner_steps - 1)):\n")],
        ("inner_steps|inner step|gradient step|too few",),
    ),
    Mistake(
        5,
        "fresh samples at every inner step",
        """
        for _ in range(config.inner_steps):
            samples = sample_group(model, prompts, config.G, config.temperature, generator)
            advantages = group_advantages(samples.rewards, config.G, config.std)
            with torch.no_grad():
                old_logp = tinylm.token_logp(model, samples.prompts, samples.responses, config.temperature)
                ref_logp = tinylm.token_logp(ref_model, samples.prompts, samples.responses, config.temperature)
            logp = tinylm.token_logp(model, samples.prompts, samples.responses, config.temperature)
            loss, metrics = grpo_loss(logp, old_logp, ref_logp, advantages, samples.mask, config.clip, config.beta)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return samples, metrics | {"loss": loss.detach()}
        """,
        ("sampl", "once|again|every|each|same|fresh|inner step"),
    ),
    Mistake(
        5,
        "samples drawn from the reference",
        [(SAMPLE, SAMPLE.replace("(model", "(ref_model"))],
        ("sampl", "reference|ref_model|policy"),
    ),
    Mistake(
        5,
        "other samples returned than trained on",
        [("    return samples, metrics", f"    {SAMPLE}    return samples, metrics")],
        ("sampl",),
    ),
    Mistake(5, "generator not passed to sample_group", [(SAMPLE, SAMPLE.replace(", generator", ""))], ("generator",)),
    Mistake(
        5,
        "a new generator at each call",
        [(SAMPLE, SAMPLE.replace("generator)", "torch.Generator().manual_seed(config.seed))"))],
        ("generator|seed",),
    ),
    Mistake(5, "G fixed at 8", [(SAMPLE, SAMPLE.replace("config.G", "8"))], ("config.G|G = |G responses|rows",)),
    Mistake(
        5,
        "advantages over P rows for G",
        [(ADVANTAGES, ADVANTAGES.replace("config.G", "len(prompts)"))],
        ("config.G|group size|group of|groups of|advantages",),
    ),
    Mistake(5, "rewards for advantages", [(ADVANTAGES, "advantages = samples.rewards\n")], ("advantages|baseline",)),
    Mistake(
        5,
        "config.std ignored",
        [(ADVANTAGES, ADVANTAGES.replace(", config.std", ""))],
        ("config.std|normalize_std",),
    ),
    Mistake(
        5,
        "config.clip ignored",
        [(CALL, CALL.replace("config.clip, config.beta", "beta=config.beta"))],
        ("clip", "config|ignored|default"),
    ),
    Mistake(5, "config.beta ignored", [(CALL, CALL.replace(", config.beta", ""))], ("beta", "config|ignored|default")),
    Mistake(
        5,
        "clip and beta swapped",
        [(CALL, CALL.replace("config.clip, config.beta", "config.beta, config.clip"))],
        ("clip|beta",),
    ),
    Mistake(
        5, "temperature ignored in sampling", [(SAMPLE, SAMPLE.replace("config.temperature", "1.0"))], ("temperature",)
    ),
    Mistake(5, "temperature ignored in old_logp", [at_temperature_one(OLD)], ("temperature", "old_logp|log-prob")),
    Mistake(5, "temperature ignored in ref_logp", [at_temperature_one(REF)], ("temperature", "ref_logp|log-prob")),
    Mistake(5, "temperature ignored in logp", [at_temperature_one(NEW)], ("temperature", "logp|log-prob")),
    Mistake(
        5,
        "temperature missing from all log-probs",
        [at_temperature_one(f"        {OLD}"), at_temperature_one(REF), at_temperature_one(NEW)],
        ("temperature",),
    ),
    Mistake(
        5,
        "temperature ignored everywhere",
        [
            (SAMPLE, SAMPLE.replace("config.temperature", "1.0")),
            at_temperature_one(f"        {OLD}"),
            at_temperature_one(REF),
            at_temperature_one(NEW),
        ],
        ("temperature",),
    ),
    Mistake(5, "mask not passed", [(CALL, CALL.replace("samples.mask", "torch.ones_like(logp)"))], ("mask|padding",)),
    Mistake(
        5,
        "loss averaged over the rows with signal only",
        [
            (CALL, f"kept = advantages != 0\n        {CALL}"),
            (BACKWARD, "        (loss * len(kept) / kept.sum().clamp(min=1)).backward()\n"),
        ],
        ("factor|scale",),
    ),
    Mistake(
        5,
        "gradient ascent on the loss",
        [(BACKWARD, "        (-loss).backward()\n")],
        ("sign|negat|ascent|maximi|minimi|opposite",),
    ),
    Mistake(
        5,
        "loss divided by inner_steps",
        [(BACKWARD, "        (loss / config.inner_steps).backward()\n")],
        ("factor|scale|divided|times|inner_steps|small",),
    ),
    Mistake(
        5,
        "only the first half of the rows is trained on",
        [
            (
                CALL,
                "half = len(logp) // 2\n"
                "        loss, metrics = grpo_loss(\n"
                "            logp[:half], old_logp[:half], ref_logp[:half], advantages[:half], samples.mask[:half],\n"
                "            config.clip, config.beta\n"
                "        )\n",
            )
        ],
        ("rows|half|all samples|batch|expected",),
    ),
    Mistake(
        5,
        "REINFORCE, without the clipped surrogate",
        [
            (
                CALL,
                f"{CALL}        per_response = (logp * samples.mask).sum(dim=1) / samples.mask.sum(dim=1)\n"
                "        loss = -(advantages * per_response).mean() + config.beta * metrics['kl']\n",
            )
        ],
        ("grpo_loss|REINFORCE",),
    ),
]

# Mistakes that once passed: values that no test drew, what a function leaves behind ---------------------------------

REWARD = "rewards = [tinylm.reward(prompt, text) for prompt, text in zip(tinylm.decode(prompts), texts, strict=True)]"
SUM = "sum(map(int, prompt.rstrip('=').split('+')))"

MISTAKES += [
    Mistake(
        1,
        "a verifier that reads the number",
        [
            (
                REWARD,
                f"rewards = [float(text[:-1].isdigit() and int(text[:-1]) == {SUM} and text.endswith('$')) "
                "for prompt, text in zip(tinylm.decode(prompts), texts, strict=True)]",
            )
        ],
        ("reward",),
    ),
    Mistake(
        1,
        "the verifier is given the text without padding",
        [(REWARD, REWARD.replace("tinylm.reward(prompt, text)", "tinylm.reward(prompt, text.replace('_', ''))"))],
        ("reward",),
    ),
    Mistake(
        1,
        "the verifier is given the text with an end",
        [(REWARD, REWARD.replace("(prompt, text)", "(prompt, text.rstrip('_$') + '$')"))],
        ("reward",),
    ),
    Mistake(
        1,
        "the first response of each group is greedy",
        [(GENERATE, GENERATE + "    responses[::G] = tinylm.generate(model, prompts[::G], greedy=True)\n")],
        ("drawn from the policy|temperature|greedy",),
    ),
    Mistake(
        3,
        "k3 cut off at 10",
        [("return log_u.exp() - log_u - 1", "return (log_u.exp() - log_u - 1).clamp(max=10)")],
        ("k3",),
    ),
    Mistake(
        3,
        "the log-ratio cut off at 5",
        [("log_u = ref_logp - logp", "log_u = (ref_logp - logp).clamp(-5, 5)")],
        ("k3",),
    ),
    Mistake(
        4,
        "the clip is never wider than 0.5",
        [("ratio.clamp(1 - clip, 1 + clip)", "ratio.clamp(1 - min(clip, 0.5), 1 + min(clip, 0.5))")],
        ("loss|gradient|clip",),
    ),
    Mistake(
        4,
        "a clip fraction with a fixed 0.2",
        [("token_mean(clipped < unclipped)", "token_mean(ratio.clamp(0.8, 1.2) * advantages < unclipped)")],
        ("clip_fraction",),
    ),
    Mistake(
        5,
        "the optimizer's rate is lowered after the step",
        [("        optimizer.step()\n", "        optimizer.step()\n    optimizer.param_groups[0]['lr'] *= 0.99\n")],
        ("optimizer's settings",),
    ),
    Mistake(
        5,
        "config is changed",
        [("        optimizer.step()\n", "        optimizer.step()\n    config.beta *= 0.9\n")],
        ("config",),
    ),
]

# Variations: right, in other styles --------------------------------------------------------------------------------

IMPORT = "from tinylm import TinyLM\n"

VARIATIONS = [
    Variation(
        1,
        "rows built by expand and reshape",
        [
            (
                "prompts.repeat_interleave(G, dim=0)",
                "prompts.unsqueeze(1).expand(-1, G, -1).reshape(-1, prompts.shape[1])",
            )
        ],
    ),
    Variation(
        1,
        "rows built by a loop",
        """
        rows, texts, rewards = [], [], []
        for prompt in prompts:
            for _ in range(G):
                rows.append(prompt)
        rows = torch.stack(rows)
        responses = tinylm.generate(model, rows, temperature, generator)
        mask = torch.zeros(len(rows), responses.shape[1])
        rewards = torch.zeros(len(rows))
        for i, text in enumerate(tinylm.decode_and_strip_padding(responses)):
            mask[i, : len(text)] = 1.0
            rewards[i] = tinylm.reward(tinylm.decode(rows[i : i + 1])[0], text)
            texts.append(text)
        return Samples(rows, responses, mask, rewards, texts)
        """,
    ),
    Variation(
        1,
        "sampled row by row",
        [
            (
                GENERATE,
                "rows = [tinylm.generate(model, row, temperature, generator) for row in prompts.split(1)]\n"
                "    responses = torch.cat(rows)\n",
            )
        ],
    ),
    Variation(
        1,
        "sampled group by group",
        [
            (
                GENERATE,
                "groups = [tinylm.generate(model, group, temperature, generator) for group in prompts.split(G)]\n"
                "    responses = torch.cat(groups)\n",
            )
        ],
    ),
    Variation(
        1,
        "a sampling loop of its own",
        """
        prompts = prompts.repeat_interleave(G, dim=0)
        responses = torch.full((len(prompts), tinylm.RESPONSE_LEN), tinylm.PAD)
        ended = torch.zeros(len(prompts), dtype=torch.bool)
        for t in range(tinylm.RESPONSE_LEN):
            with torch.no_grad():
                logits = tinylm.response_logits(model, prompts, responses, temperature)[:, t]
            token = torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)[:, 0]
            responses[:, t] = torch.where(ended, tinylm.PAD, token)
            ended = ended | (token == tinylm.EOS)
        texts = tinylm.decode_and_strip_padding(responses)
        rewards = torch.tensor([tinylm.reward(p, r) for p, r in zip(tinylm.decode(prompts), texts, strict=True)])
        return Samples(prompts, responses, tinylm.response_mask(responses), rewards, texts)
        """,
    ),
    Variation(
        1,
        "a sampling loop with Gumbel noise",
        """
        prompts = prompts.repeat_interleave(G, dim=0)
        responses = torch.full((len(prompts), tinylm.RESPONSE_LEN), tinylm.PAD)
        ended = torch.zeros(len(prompts), dtype=torch.bool)
        for t in range(tinylm.RESPONSE_LEN):
            with torch.no_grad():
                logits = tinylm.response_logits(model, prompts, responses, temperature)[:, t]
            noise = -torch.empty_like(logits).exponential_(generator=generator).log()
            token = (logits + noise).argmax(dim=-1)
            responses[:, t] = token.masked_fill(ended, tinylm.PAD)
            ended |= token == tinylm.EOS
        texts = tinylm.decode_and_strip_padding(responses)
        rewards = torch.tensor([tinylm.reward(p, r) for p, r in zip(tinylm.decode(prompts), texts, strict=True)])
        return Samples(prompts, responses, tinylm.response_mask(responses), rewards, texts)
        """,
    ),
    Variation(
        1,
        "inference_mode, its outputs cloned",
        [(GENERATE, f"with torch.inference_mode():\n        {GENERATE}    responses = responses.clone()\n")],
    ),
    Variation(1, "mask of the samples as bool", [(MASK, "mask=tinylm.response_mask(responses).bool(),")]),
    Variation(1, "mask of the samples as int", [(MASK, "mask=tinylm.response_mask(responses).long(),")]),
    Variation(
        1,
        "mask from the lengths of the texts",
        [
            (
                MASK,
                "mask=(torch.arange(responses.shape[1]) < torch.tensor([len(t) for t in texts]).unsqueeze(1)).float(),",
            )
        ],
    ),
    Variation(
        1,
        "mask from a cumulative sum of its own",
        [
            (
                MASK,
                "mask=((responses == tinylm.EOS).int().cumsum(dim=1).roll(1, 1) * (torch.arange(4) > 0) == 0).float(),",
            )
        ],
    ),
    Variation(
        1,
        "rewards by comparing tokens",
        [(REWARDS, "rewards=(responses == tinylm.answers(prompts)).all(dim=1).float(),")],
    ),
    Variation(
        1,
        "functions imported by name",
        [
            (IMPORT, "from tinylm import TinyLM, decode, decode_and_strip_padding, generate, response_mask, reward\n"),
            ("tinylm.decode_and_strip_padding(responses)", "decode_and_strip_padding(responses)"),
            (GENERATE, GENERATE.replace("tinylm.", "")),
            ("[tinylm.reward(prompt, text)", "[reward(prompt, text)"),
            (SCORE, SCORE.replace("tinylm.", "")),
            (MASK, MASK.replace("tinylm.", "")),
        ],
    ),
    Variation(
        2,
        "the formula and nothing else",
        """
        groups = rewards.view(-1, G)
        advantages = groups - groups.mean(dim=1, keepdim=True)
        if normalize_std:
            advantages = advantages / (groups.std(dim=1, correction=0, keepdim=True) + eps)
        return advantages.view(-1)
        """,
    ),
    Variation(
        2,
        "loops over Python numbers",
        """
        advantages = []
        values = rewards.tolist()
        for start in range(0, len(values), G):
            group = values[start : start + G]
            mean = sum(group) / G
            std = math.sqrt(sum((value - mean) ** 2 for value in group) / G)
            for value in group:
                advantages.append((value - mean) / (std + eps) if normalize_std else value - mean)
        return torch.tensor(advantages)
        """,
    ),
    Variation(
        2,
        "a loop over groups",
        """
        advantages = []
        for group in rewards.split(G):
            centred = group - group.mean()
            if normalize_std:
                centred = centred / (group.std(unbiased=False) + eps)
            advantages.append(centred)
        return torch.cat(advantages)
        """,
    ),
    Variation(
        2,
        "std no smaller than eps",
        [(STD, "groups.std(dim=1, correction=0, keepdim=True).clamp_min(eps)"), (FLAT, "return advantages.view(-1)")],
    ),
    Variation(
        2,
        "root of variance and squared eps",
        [
            (STD, "(groups.var(dim=1, correction=0, keepdim=True) + eps**2).sqrt()"),
            (FLAT, "return advantages.view(-1)"),
        ],
    ),
    Variation(
        2,
        "layer_norm",
        """
        groups = rewards.view(-1, G)
        if normalize_std:
            return torch.nn.functional.layer_norm(groups, (G,), eps=eps**2).view(-1)
        return (groups - groups.mean(dim=1, keepdim=True)).view(-1)
        """,
    ),
    Variation(
        2,
        "a guard against a std near zero",
        """
        groups = rewards.view(-1, G)
        centred = groups - groups.mean(dim=1, keepdim=True)
        if normalize_std:
            std = groups.std(dim=1, correction=0, keepdim=True)
            centred = torch.where(std > eps, centred / (std + eps), torch.zeros_like(centred))
        return centred.view(-1)
        """,
    ),
    Variation(
        2,
        "no eps, but a guard for equal rewards",
        """
        groups = rewards.view(-1, G)
        centred = groups - groups.mean(dim=1, keepdim=True)
        equal = groups.amax(dim=1, keepdim=True) == groups.amin(dim=1, keepdim=True)
        if normalize_std:
            centred = centred / groups.std(dim=1, correction=0, keepdim=True).masked_fill(equal, 1.0)
        return torch.where(equal, torch.zeros_like(centred), centred).view(-1)
        """,
    ),
    Variation(2, "float64 inside", [(GROUPS, "groups = rewards.double().view(-1, G)\n"), (FLAT, f"{FLAT}.float()")]),
    Variation(2, "float64 as the result", [(GROUPS, "groups = rewards.double().view(-1, G)\n")]),
    Variation(
        2,
        "numpy",
        """
        groups = rewards.detach().cpu().numpy().reshape(-1, G)
        advantages = groups - groups.mean(axis=1, keepdims=True)
        if normalize_std:
            advantages = advantages / (groups.std(axis=1, keepdims=True) + eps)
        return torch.from_numpy(advantages.reshape(-1))
        """,
    ),
    Variation(
        2,
        "std from the mean of squares",
        [(STD, "(((groups**2).mean(1, True) - groups.mean(1, True) ** 2).clamp(min=0).sqrt() + eps)")],
    ),
    Variation(2, "sample std, corrected", [(STD, "(groups.std(dim=1, keepdim=True) * math.sqrt((G - 1) / G) + eps)")]),
    Variation(3, "expm1", [(K3, "return torch.expm1(log_u) - log_u")]),
    Variation(3, "u as a quotient of probabilities", "u = ref_logp.exp() / logp.exp()\nreturn u - u.log() - 1"),
    Variation(3, "never below zero", [(K3, f"{K3.replace('return ', 'return (')}).clamp(min=0)")]),
    Variation(3, "the absolute value, which changes nothing", [(K3, "return (log_u.exp() - log_u - 1).abs()")]),
    Variation(3, "float64 inside and as the result of k3", [(LOG_U, "log_u = ref_logp.double() - logp.double()\n")]),
    Variation(
        3,
        "F.kl_div for minus u log u",
        """
        # kl_div(input, target, log_target) is exp(target) * (target - input): exp(0) * (0 - log u) = - log u.
        log_u = ref_logp - logp
        zero = torch.zeros_like(log_u)
        return log_u.exp() + torch.nn.functional.kl_div(log_u, zero, reduction="none", log_target=True) - 1
        """,
    ),
    Variation(
        3,
        "piece by piece",
        """
        pieces = []
        for piece, ref_piece in zip(logp.flatten().split(64), ref_logp.flatten().split(64), strict=True):
            u = torch.exp(ref_piece - piece)
            pieces.append(u - torch.log(u) - 1)
        return torch.cat(pieces).view_as(logp)
        """,
    ),
    Variation(
        4,
        "minus the maximum of the negated",
        [(OBJECTIVE, "objective = -torch.max(-unclipped, -clipped) - beta * kl\n")],
    ),
    Variation(
        4,
        "where on the sign of the advantage",
        [(MINIMUM, "torch.where(advantages > 0, ratio.clamp(max=1 + clip), ratio.clamp(min=1 - clip)) * advantages")],
    ),
    Variation(
        4,
        "clipped by min and max",
        [
            (
                CLIPPED,
                "low, high = torch.full_like(ratio, 1 - clip), torch.full_like(ratio, 1 + clip)\n"
                "    clipped = torch.max(torch.min(ratio, high), low) * advantages\n",
            )
        ],
    ),
    Variation(4, "minimum by relu", [(MINIMUM, "(unclipped - torch.relu(unclipped - clipped))")]),
    Variation(4, "ratio as a quotient of probabilities", [(RATIO, "ratio = logp.exp() / old_logp.exp()\n")]),
    Variation(4, "advantages expanded to all tokens", [(COLUMN, "advantages = advantages[:, None].expand_as(logp)\n")]),
    Variation(
        4,
        "mask as bool, where",
        [(PER_RESPONSE, "per_response = torch.where(mask.bool(), objective, 0.0).sum(1) / mask.sum(1)\n")],
    ),
    Variation(4, "mask as int", [(RATIO, f"mask = mask.long()\n    {RATIO}")]),
    Variation(4, "mask as bool", [(RATIO, f"mask = mask.bool()\n    {RATIO}")]),
    Variation(
        4,
        "masked_select row by row, then mean",
        [
            (
                PER_RESPONSE,
                "selected = [row.masked_select(own > 0) for row, own in zip(objective, mask, strict=True)]\n"
                "    per_response = torch.stack([row.mean() for row in selected])\n",
            )
        ],
    ),
    Variation(
        4,
        "denominator no smaller than 1",
        [(PER_RESPONSE, PER_RESPONSE.replace("/ mask.sum(dim=1)", "/ mask.sum(dim=1).clamp(min=1)"))],
    ),
    Variation(
        4,
        "denominator + 1e-8",
        [(PER_RESPONSE, PER_RESPONSE.replace("/ mask.sum(dim=1)", "/ (mask.sum(dim=1) + 1e-8)"))],
    ),
    Variation(
        4,
        "padding zeroed in the log-ratios as well",
        [(RATIO, "ratio = ((logp - old_logp) * mask).exp()\n"), (KL, "kl = k3_kl(logp, ref_logp) * mask\n")],
    ),
    Variation(
        4,
        "padding filled before anything else",
        [
            (
                RATIO,
                "logp, old_logp, ref_logp = (t.masked_fill(mask == 0, 0.0) for t in (logp, old_logp, ref_logp))\n"
                f"    {RATIO}",
            )
        ],
    ),
    Variation(
        4,
        "float64 inside and as the result of the loss",
        [(RATIO, f"logp, old_logp, ref_logp = logp.double(), old_logp.double(), ref_logp.double()\n    {RATIO}")],
    ),
    Variation(
        4,
        "einsum with weights",
        [
            (
                LOSS,
                'loss = -torch.einsum("nt,nt,n->", objective, mask.float(), 1 / mask.sum(dim=1)) / len(mask)\n',
            )
        ],
    ),
    Variation(
        4,
        "loops over rows and tokens",
        """
        row_means, clips, kls, ratios = [], [], [], []
        for i in range(logp.shape[0]):
            terms = []
            for t in range(logp.shape[1]):
                if mask[i, t] == 0:
                    continue
                ratio = torch.exp(logp[i, t] - old_logp[i, t])
                unclipped = ratio * advantages[i]
                clipped = torch.clamp(ratio, 1 - clip, 1 + clip) * advantages[i]
                u = torch.exp(ref_logp[i, t] - logp[i, t])
                kl = u - torch.log(u) - 1
                terms.append(torch.min(unclipped, clipped) - beta * kl)
                clips.append(float(clipped < unclipped))
                kls.append(kl.detach())
                ratios.append(ratio.detach())
            row_means.append(sum(terms) / len(terms))
        loss = -sum(row_means) / len(row_means)
        metrics = {
            "clip_fraction": torch.tensor(clips).mean(),
            "kl": torch.stack(kls).mean(),
            "ratio": torch.stack(ratios).mean(),
        }
        return loss, metrics
        """,
    ),
    Variation(
        4,
        "the loss in two parts",
        [
            (
                LOSS,
                "own = mask / mask.sum(dim=1, keepdim=True)\n"
                "    policy_loss = -(torch.minimum(unclipped, clipped) * own).sum(dim=1).mean()\n"
                "    kl_loss = (kl * own).sum(dim=1).mean()\n"
                "    loss = policy_loss + beta * kl_loss\n",
            )
        ],
    ),
    Variation(
        4,
        "clip_fraction by cases",
        [
            (
                CLIP_FRACTION,
                "token_mean(((advantages > 0) & (ratio > 1 + clip)) | ((advantages < 0) & (ratio < 1 - clip)))",
            )
        ],
    ),
    Variation(
        4,
        "one metric more",
        [(RETURN_LOSS, 'metrics["length"] = mask.sum(dim=1).float().mean()\n    return loss, metrics\n')],
    ),
    Variation(
        4,
        "metrics under no_grad",
        [
            ("    metrics = {", "    with torch.no_grad():\n        metrics = {"),
            ("mask.sum()).detach()", "mask.sum())"),
        ],
    ),
    Variation(5, "gradients set to zero, not None", [(ZERO_GRAD, ZERO_GRAD.replace("()", "(set_to_none=False)"))]),
    Variation(
        5,
        "zero_grad after the step",
        [(LOOP, f"    optimizer.zero_grad()\n{LOOP}"), (ZERO_GRAD, ""), (STEP, STEP + ZERO_GRAD)],
    ),
    Variation(
        5,
        "gradients cleared by hand, a while loop",
        [
            (LOOP, "    done = 0\n    while done < config.inner_steps:\n        done += 1\n"),
            (ZERO_GRAD, "        for parameter in model.parameters():\n            parameter.grad = None\n"),
        ],
    ),
    Variation(
        5,
        "torch.autograd.grad",
        [
            (ZERO_GRAD, ""),
            (
                BACKWARD,
                "        parameters = list(model.parameters())\n"
                "        for parameter, grad in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):\n"
                "            parameter.grad = grad\n",
            ),
        ],
    ),
    Variation(
        5,
        "inference_mode, cloned outside",
        [
            ("    with torch.no_grad():\n        old_logp", "    with torch.inference_mode():\n        old_logp"),
            (f"        {REF}", f"        {REF}    old_logp, ref_logp = old_logp.clone(), ref_logp.clone()\n"),
        ],
    ),
    Variation(
        5,
        "detach for no_grad",
        [
            (
                f"    with torch.no_grad():\n        {OLD}        {REF}",
                f"    {OLD}    {REF}    old_logp, ref_logp = old_logp.detach(), ref_logp.detach()\n",
            )
        ],
    ),
    Variation(
        5,
        "old_logp from the first inner step",
        [
            (f"        {OLD}", ""),
            (LOOP, "    old_logp = None\n" + LOOP),
            (CALL, f"if old_logp is None:\n            old_logp = logp.detach()\n        {CALL}"),
        ],
    ),
    Variation(
        5,
        "ref_logp at every inner step under the reference",
        [(f"        {REF}", ""), (CALL, f"with torch.no_grad():\n            {REF}        {CALL}")],
    ),
    Variation(
        5,
        "log-probs by log_softmax and gather",
        [
            (
                "def grpo_step(",
                "def response_logp(model, samples, temperature):\n"
                "    logits = tinylm.response_logits(model, samples.prompts, samples.responses, temperature)\n"
                "    return logits.log_softmax(dim=-1).gather(-1, samples.responses.unsqueeze(-1)).squeeze(-1)\n"
                "\n\ndef grpo_step(",
            ),
            (f"        {OLD}", "        old_logp = response_logp(model, samples, config.temperature)\n"),
            (REF, "ref_logp = response_logp(ref_model, samples, config.temperature)\n"),
            (NEW, "        logp = response_logp(model, samples, config.temperature)\n"),
        ],
    ),
    Variation(
        5,
        "log-probs by cross_entropy, logsumexp and Categorical",
        [
            (IMPORT, f"import torch.nn.functional as F\n{IMPORT}"),
            (SAMPLE, f"{SAMPLE}    tokens = samples.prompts, samples.responses\n"),
            (
                f"        {OLD}",
                "        logits = tinylm.response_logits(model, *tokens, config.temperature)\n"
                "        old_logp = torch.distributions.Categorical(logits=logits).log_prob(samples.responses)\n",
            ),
            (
                REF,
                "logits = tinylm.response_logits(ref_model, *tokens, config.temperature)\n"
                "        chosen = logits.gather(-1, samples.responses[..., None])[..., 0]\n"
                "        ref_logp = chosen - logits.exp().sum(dim=-1).log()\n",
            ),
            (
                NEW,
                "        logits = tinylm.response_logits(model, *tokens, config.temperature)\n"
                "        logp = -F.cross_entropy(logits.transpose(1, 2), samples.responses, reduction='none')\n",
            ),
        ],
    ),
    Variation(
        5,
        "token_logp imported by name",
        [
            (IMPORT, "from tinylm import TinyLM, token_logp\n"),
            (f"        {OLD}", f"        {OLD.replace('tinylm.', '')}"),
            (REF, REF.replace("tinylm.", "")),
            (NEW, NEW.replace("tinylm.", "")),
        ],
    ),
    Variation(
        5,
        "backward group by group",
        """
        samples = sample_group(model, prompts, config.G, config.temperature, generator)
        advantages = group_advantages(samples.rewards, config.G, config.std)
        with torch.no_grad():
            old_logp = tinylm.token_logp(model, samples.prompts, samples.responses, config.temperature)
            ref_logp = tinylm.token_logp(ref_model, samples.prompts, samples.responses, config.temperature)
        rows = len(samples.rewards)
        for _ in range(config.inner_steps):
            optimizer.zero_grad()
            logps = []
            for start in range(0, rows, config.G):
                part = slice(start, start + config.G)
                logp = tinylm.token_logp(model, samples.prompts[part], samples.responses[part], config.temperature)
                loss, _ = grpo_loss(
                    logp, old_logp[part], ref_logp[part], advantages[part], samples.mask[part], config.clip, config.beta
                )
                (loss * config.G / rows).backward()
                logps.append(logp.detach())
            loss, metrics = grpo_loss(
                torch.cat(logps), old_logp, ref_logp, advantages, samples.mask, config.clip, config.beta
            )
            optimizer.step()
        return samples, {**metrics, "loss": loss.detach()}
        """,
    ),
    Variation(
        5,
        "backward row by row",
        [
            (
                BACKWARD,
                "        leaf = logp.detach().requires_grad_()\n"
                "        for i in range(len(leaf)):\n"
                "            row = slice(i, i + 1)\n"
                "            part, _ = grpo_loss(\n"
                "                leaf[row], old_logp[row], ref_logp[row], advantages[row], samples.mask[row],\n"
                "                config.clip, config.beta\n"
                "            )\n"
                "            (part / len(leaf)).backward()\n"
                "        logp.backward(leaf.grad)\n",
            )
        ],
    ),
    Variation(
        5,
        "a closure for the optimizer",
        [
            (
                f"{ZERO_GRAD}{BACKWARD}{STEP}",
                "\n"
                "        def closure():\n"
                "            optimizer.zero_grad()\n"
                "            loss.backward()\n"
                "            return loss\n"
                "\n"
                "        optimizer.step(closure)\n",
            )
        ],
    ),
    Variation(
        5, "model.train() and ref_model.eval()", [(SAMPLE, f"model.train()\n    ref_model.eval()\n    {SAMPLE}")]
    ),
    Variation(
        5,
        "all arguments by name, the model's zero_grad, metrics written into the dict",
        [
            (ZERO_GRAD, "        model.zero_grad()\n"),
            (STEP, f'{STEP}        metrics["loss"] = loss.detach().clone()\n'),
            (RETURN_STEP, "return samples, metrics\n"),
            (
                SAMPLE,
                "samples = sample_group(\n"
                "        model=model, prompts=prompts, G=config.G,\n"
                "        temperature=config.temperature, generator=generator\n"
                "    )\n",
            ),
            (
                ADVANTAGES,
                "advantages = group_advantages(rewards=samples.rewards, G=config.G, normalize_std=config.std)\n",
            ),
            (
                CALL,
                "loss, metrics = grpo_loss(\n"
                "            logp=logp, old_logp=old_logp, ref_logp=ref_logp, advantages=advantages,\n"
                "            mask=samples.mask, clip=config.clip, beta=config.beta\n"
                "        )\n",
            ),
        ],
    ),
]

# Combinations ---------------------------------------------------------------------------------------------------

# The first five pairs cancel each other when the tasks are graded together: a task's tests must grade it alone.
COMBINED = [
    ("advantages with the sign flipped", "loss not negated"),
    ("reversed ratio", "arguments of k3_kl swapped"),
    ("mask the wrong way round", "mask the wrong way round in the loss"),
    ("loss not negated", "gradient ascent on the loss"),
    ("repeat for repeat_interleave", "groups interleaved"),
    ("rewards shaped [P, G]", "advantages shaped [P, G]"),
    ("repeat for repeat_interleave", "mask drops the end-of-sequence"),
    ("greedy for sampling", "rewards as int64"),
    ("sample std", "mean over the batch"),
    ("max for min", "one average over all tokens of the batch"),
    ("KL with the wrong sign", "mask ignored"),
    ("beta dropped", "no clip"),
    ("old_logp recomputed inside the loop", "no zero_grad"),
    ("temperature missing from all log-probs", "one inner step, whatever inner_steps says"),
    ("k2 for k3", "old_logp refreshed after every step"),
    ("sample_group not written", "group_advantages not written", "k3_kl not written", "grpo_loss not written"),
    ("repeat for repeat_interleave", "view(G, -1) for view(-1, G)", "k3 negated", "loss not negated"),
]
BY_NAME = {mistake.name: mistake for mistake in MISTAKES}
COMBINATIONS = [Combination(tuple(BY_NAME[name] for name in names)) for names in COMBINED]

# Making an entry's source -----------------------------------------------------------------------------------------


def parts(entry: Entry) -> tuple[Mistake | Variation, ...]:
    return entry.parts if isinstance(entry, Combination) else (entry,)


def tasks(entry: Entry) -> list[int]:
    return sorted({part.task for part in parts(entry)})


def replace_body(source: str, function: str, body: str) -> str:
    """`source` with another body for `function`, which keeps its signature and docstring."""
    node = next(node for node in ast.parse(source).body if getattr(node, "name", None) == function)
    lines = source.splitlines(keepends=True)
    new = textwrap.indent(textwrap.dedent(body).strip() + "\n", "    ")
    return "".join([*lines[: node.body[1].lineno - 1], new, *lines[node.end_lineno :]])


def changed_source(entry: Entry, reference: str) -> str:
    """The reference with the entry's changes. Raises ValueError if a change does not apply, or changes nothing."""
    source = reference
    for part in parts(entry):
        if isinstance(part.change, str):
            source = replace_body(source, FUNCTIONS[part.task], part.change)
            continue
        for find, replace in part.change:
            if source.count(find) != 1:
                raise ValueError(f"{entry.name!r}: occurs {source.count(find)} times, not once: {find!r}")
            source = source.replace(find, replace)
    if source == reference:
        raise ValueError(f"{entry.name!r}: changes nothing")
    try:
        compile(source, "grpo.py", "exec")
    except SyntaxError as error:
        raise ValueError(f"{entry.name!r}: does not compile: {error}") from error
    return source


# Running the tests ------------------------------------------------------------------------------------------------

# `import torch` takes longer than most entries' tests, so each worker process imports it once and runs many entries.


def task_of(test: str) -> int | None:
    match = re.match(r"test_task(\d)_", test)
    return int(match[1]) if match else None


def headline(message: str) -> str:
    """The first line of a message, without the names of the exception, the task and its function.

    The lines after it quote values and settings: a word found there names nothing.
    """
    first = message.strip().split("\n")[0]
    return re.sub(r"^(\w+: )?(Task \d \(\w+\): )?", "", first)


def names(message: str, says: tuple[str, ...]) -> bool:
    """Does this failure name the mistake, in its first line?"""
    text = headline(message).lower()
    return all(any(word in text for word in words.lower().split("|")) for words in says)


class Recorder:
    """A pytest plugin: what every test said, as a student would read it.

    It skips what can add nothing: the tests of a task whose mistake is named already; and the last test of all, which
    trains for seconds, where it is not wanted or task 5 is rejected already.
    """

    def __init__(self, says: list[tuple[int, tuple[str, ...]]], train: bool):
        self.says = says
        self.train = train
        self.reports = []

    def pytest_runtest_setup(self, item):
        task = task_of(item.name)
        failures = [r for r in self.reports if r["outcome"] == "failed" and task_of(r["test"]) == task]
        named = any(names(r["message"], says) for r in failures for of_task, says in self.says if of_task == task)
        training = task == 5 and item is item.session.items[-1]
        if named or (training and (failures or not self.train)):
            import pytest  # noqa: PLC0415 (this line runs in workers only)

            pytest.skip("nothing to add")

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            self.record(report.nodeid.split("::")[-1], report)

    def pytest_collectreport(self, report):
        if report.outcome == "failed":
            self.record("(collection)", report)

    def record(self, test: str, report) -> None:
        # Of a failure with a traceback, only the message: the code of the test is not what names a mistake.
        crash = getattr(report.longrepr, "reprcrash", None)
        message = "" if report.longrepr is None else crash.message if crash else str(report.longrepr)
        self.reports.append({"test": test, "outcome": report.outcome, "message": message})


def tables_of_mistakes() -> list[dict]:
    """The tables of known mistakes, name -> how to compute it; in a worker, those of the entry's own folder."""
    from lab.diagnose import advantages, arguments, k3, loss, samples, step  # noqa: PLC0415 (torch: not before needed)

    tables = [samples.REWARDS, samples.MASKS, *advantages.PARTS, k3.WRONG, *loss.PARTS, loss.METRICS]
    tables += [loss.CLIP_FRACTION, *step.PARTS, step.METRICS, arguments.TOGETHER, arguments.TEMPERATURES]
    return tables + [stand_ins for _, stand_ins in arguments.ARGUMENTS.values()]


class Forgetful:
    """A pytest plugin: the tests without some names in their tables of known mistakes."""

    def __init__(self, forgotten: list[str]):
        self.forgotten = forgotten

    def pytest_collection_finish(self):
        for table in tables_of_mistakes():
            for name in self.forgotten:
                table.pop(name, None)


def run_tests(
    kit: str, source: str, select: str, says: list[tuple[int, tuple[str, ...]]], train: bool, forget: list[str]
) -> list[dict[str, str]]:
    """Run `pytest -k select` in a fresh folder with the files of `kit` and `source` as grpo.py."""
    import pytest  # noqa: PLC0415 (this and torch: in workers only)
    import torch  # noqa: PLC0415

    home, path, recorder = Path.cwd(), list(sys.path), Recorder(says, train)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary).resolve() / "lab"
        shutil.copytree(kit, folder)
        (folder / "grpo.py").write_text(source, encoding="utf-8")
        os.chdir(folder)
        sys.path[0] = str(folder)  # as `python -m pytest` has it
        torch.manual_seed(0)
        try:
            plugins = [recorder, Forgetful(forget)] if forget else [recorder]
            pytest.main(["-q", "-p", "no:cacheprovider", "-k", select, "test_grpo.py"], plugins=plugins)
        finally:
            os.chdir(home)
            sys.path[:] = path
            for name, module in list(sys.modules.items()):
                places = [vars(module).get("__file__") or "", *(vars(module).get("__path__") or [])]
                if any(str(place).startswith(str(folder)) for place in places):
                    del sys.modules[name]
    return recorder.reports


def work() -> None:
    """A worker process: reads jobs from stdin and answers on stdout, each one line of JSON."""
    import pytest  # noqa: PLC0415, F401 (not once per entry)
    import torch  # noqa: PLC0415, F401

    for name in [name for name in sys.modules if name.partition(".")[0] == "lab"]:
        del sys.modules[name]  # each entry brings its own, which stands beside its own tinylm
    gc.freeze()  # pytest collects garbage after each run: that is quick without torch's own objects
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # pytest's own output must not mix with the answers
    for line in sys.stdin:
        print(json.dumps(run_tests(**json.loads(line))), file=answers, flush=True)


class Worker:
    """A worker process that is started when first needed, and again after it died."""

    def __init__(self):
        self.process = None

    def run(self, **job) -> list[dict[str, str]] | None:
        """The reports of one job, or None if it took longer than TIMEOUT or killed the process."""
        if self.process is None or self.process.poll() is not None:
            environment = {k: v for k, v in os.environ.items() if k not in ("RL_SOLUTIONS", "PYTEST_ADDOPTS")}
            self.process = subprocess.Popen(
                [sys.executable, __file__, "--worker"],
                env=environment | {"PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                encoding="utf-8",
            )
        timer = threading.Timer(TIMEOUT, self.process.kill)
        timer.start()
        try:
            print(json.dumps(job), file=self.process.stdin, flush=True)
            answer = self.process.stdout.readline()
        except OSError:
            answer = ""
        finally:
            timer.cancel()
        if answer:
            return json.loads(answer)
        self.process.kill()
        self.process.communicate()  # waits, and closes the pipes
        return None

    def stop(self) -> None:
        if self.process is not None:
            self.process.communicate()  # closes its stdin, which ends it


# Judging ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """What the tests made of an entry, and whether that is what they should."""

    entry: Entry
    good: bool
    outcome: str
    failures: tuple[tuple[str, str], ...] = ()  # (test, message)
    named_by: str | None = None  # the first test that names the mistake

    @property
    def test(self) -> str:
        return self.named_by or (self.failures[0][0] if self.failures else "")


def judge(entry: Entry, reports: list[dict[str, str]] | None) -> Verdict:
    if reports is None:
        return Verdict(entry, False, "NO ANSWER")
    failures = tuple((report["test"], report["message"]) for report in reports if report["outcome"] == "failed")
    skipped = [report["test"] for report in reports if report["outcome"] == "skipped"]
    if not reports or any(test == "(collection)" for test, _ in failures):
        return Verdict(entry, False, "NOT RUN", failures)
    if isinstance(entry, Variation):
        outcome = "REJECTED" if failures else "SKIPPED" if skipped else "accepted"
        return Verdict(entry, outcome == "accepted", outcome, failures)
    failed = {task_of(test) for test, _ in failures}
    accepted = [task for task in tasks(entry) if task not in failed]
    spoiled = failed.difference(tasks(entry))
    named_by = next(
        (
            test
            for part in parts(entry)
            for test, message in failures
            if task_of(test) == part.task and names(message, part.says)
        ),
        None,
    )
    if accepted:
        outcome = "ACCEPTED" + (f" in task {accepted[0]}" if len(tasks(entry)) > 1 else "")
    elif spoiled:
        outcome = f"SPOILS task {min(spoiled)}"
    else:
        outcome = "rejected"
    return Verdict(entry, outcome == "rejected", outcome, failures, named_by)


def audit(
    entries: Iterable[Entry],
    full: bool = False,
    every_test: bool = False,
    jobs: int | None = None,
    forget: dict[str, list[str]] | None = None,
) -> list[Verdict]:
    """Run every entry through the tests of its tasks (of all tasks if `full`), in parallel; the order is kept.

    A task's tests stop at the failure that names the mistake, unless `every_test`. `forget`: entry -> what the tables
    of known mistakes shall not know. Raises ValueError, before anything runs, if an entry's change does not apply.
    """
    from tqdm import tqdm  # noqa: PLC0415 (here, --help needs nothing installed)

    entries = list(entries)
    reference = REFERENCE.read_text(encoding="utf-8")
    sources = [changed_source(entry, reference) for entry in entries]

    sys.path.append(str(ROOT))
    import tinylm  # noqa: PLC0415 (it imports torch, which takes seconds)

    tinylm.load_or_train_sft()  # once here, not once per entry

    workers = [Worker() for _ in range(min(jobs or os.cpu_count() or 1, len(entries)))]
    idle = queue.SimpleQueue()
    for worker in workers:
        idle.put(worker)

    def run(kit: str, entry: Entry, source: str) -> Verdict:
        job = {"kit": kit, "source": source, "train": full or 5 in tasks(entry)}
        graded = FUNCTIONS if full or isinstance(entry, Combination) else tasks(entry)
        job["select"] = " or ".join(f"task{task}" for task in graded)
        job["says"] = [] if every_test else [(p.task, p.says) for p in parts(entry) if isinstance(p, Mistake)]
        job["forget"] = (forget or {}).get(entry.name, [])
        worker = idle.get()
        try:
            return judge(entry, worker.run(**job))
        finally:
            idle.put(worker)

    with tempfile.TemporaryDirectory() as kit, ThreadPoolExecutor(len(workers)) as pool:
        for name in HANDED_OUT:
            target = Path(kit) / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target)
        # From the back: what takes long, the training of right solutions, starts first.
        pairs = list(zip(entries, sources, strict=True))
        futures = [pool.submit(run, kit, entry, source) for entry, source in reversed(pairs)]
        try:
            for _ in tqdm(as_completed(futures), total=len(futures), unit="entry", leave=False):
                pass
        finally:
            pool.shutdown(cancel_futures=True)
            for worker in workers:
                worker.stop()
    return [future.result() for future in reversed(futures)]


def print_table(verdicts: list[Verdict]) -> bool:
    """Print a row per verdict, what is wrong, and the totals; True if the tests are as good as they must be."""
    width = min(72, max(len(verdict.entry.name) for verdict in verdicts))
    for verdict in verdicts:
        wrong = not isinstance(verdict.entry, Variation)
        named = ("named" if verdict.named_by else "UNNAMED") if wrong and verdict.failures else ""
        task = "+".join(str(task) for task in tasks(verdict.entry))
        name = verdict.entry.name[:width]
        print(f"{task:<8}{name:<{width}}  {verdict.outcome:<18} {named:<8} {verdict.test}".rstrip())
        if named == "UNNAMED" or not verdict.good:
            for test, message in verdict.failures[:1]:
                print(textwrap.indent("\n".join([test, *message.splitlines()[:3]]), " " * 8))
    wrong = [verdict for verdict in verdicts if not isinstance(verdict.entry, Variation)]
    right = [verdict for verdict in verdicts if isinstance(verdict.entry, Variation)]
    named = sum(verdict.named_by is not None for verdict in wrong)
    print()
    if wrong:
        print(f"wrong solutions: {sum(verdict.good for verdict in wrong)} of {len(wrong)} rejected, {named} named")
    if right:
        print(f"right solutions: {sum(verdict.good for verdict in right)} of {len(right)} accepted")
    return all(verdict.good for verdict in verdicts) and named >= NAMED_AT_LEAST * len(wrong)


def sentence_of(verdict: Verdict) -> str:
    """What the first failure says, without the task in front."""
    return headline(verdict.failures[0][1]) if verdict.failures else ""


def known_names() -> set[str]:
    """Every name in the tables of known mistakes."""
    return {name for table in tables_of_mistakes() for name in table} - {""}


def known_in(sentence: str) -> list[str]:
    """The names of known mistakes of which a first line consists: "metrics['kl'] is a sum ..." holds one of them."""
    known = known_names()
    return [
        name
        for part in sentence.split(AND)
        for name in known
        if part == name or part.endswith(f"] {name}") or part.startswith(f"{name} ")
    ]


def leave_one_out(verdicts: list[Verdict], jobs: int | None) -> bool:
    """For each mistake that a table names: what would be read if it did not. Returns whether few are vague."""
    named = {v.entry.name: known_in(sentence_of(v)) for v in verdicts if v.failures}
    forget = {name: forgotten for name, forgotten in named.items() if forgotten}
    again = audit([v.entry for v in verdicts if v.entry.name in forget], jobs=jobs, forget=forget)
    kinds: dict[str, list[Verdict]] = {"named, as another mistake": [], "seen": [], "vague": [], "ACCEPTED": []}
    for verdict in again:
        sentence = sentence_of(verdict)
        kind = "ACCEPTED" if not verdict.failures else "vague" if VAGUE.search(sentence) else "seen"
        kinds["named, as another mistake" if known_in(sentence) else kind].append(verdict)
    for kind, of_it in kinds.items():
        print(f"\n{kind}: {len(of_it)} of {len(again)}")
        for verdict in of_it:
            print(f"  {verdict.entry.name}: {sentence_of(verdict)}")
    return len(kinds["vague"]) + len(kinds["ACCEPTED"]) <= 0.1 * len(again)


def show(verdict: Verdict) -> None:
    """Print an entry's difference from the reference, and every failure in full."""
    reference = REFERENCE.read_text(encoding="utf-8")
    old, new = (text.splitlines() for text in (reference, changed_source(verdict.entry, reference)))
    print("\n".join(difflib.unified_diff(old, new, "reference", verdict.entry.name, lineterm="")))
    for test, message in verdict.failures:
        print(f"\n--- {test}\n{message}")
    print()


def main(argv: list[str] | None = None) -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--only", metavar="WORDS", default="", help="entries whose 'taskN name' holds all these words")
    parser.add_argument("--show", metavar="NAME", help="this entry alone: its change and the full failures")
    parser.add_argument("--list", action="store_true", help="list the entries and run nothing")
    parser.add_argument("--full", action="store_true", help="run all tests on each: no mistake may cost another task")
    parser.add_argument("--jobs", type=number(int, 1, 1000), metavar="N", help="processes (default: one per core)")
    parser.add_argument("--leave-one-out", action="store_true", help="then each again, its own name unknown")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.worker:
        work()
        return 0
    entries: list[Entry] = [*MISTAKES, *VARIATIONS, *COMBINATIONS]
    if options.show is not None:
        entries = [entry for entry in entries if entry.name == options.show]
    words = options.only.lower().split()
    labels = ["".join(f"task{task} " for task in tasks(entry)) + entry.name for entry in entries]
    entries = [e for e, label in zip(entries, labels, strict=True) if all(word in label.lower() for word in words)]
    if not entries:
        parser.error("no entry has that name: --list shows them all")
    if options.list:
        for entry in entries:
            print(f"{type(entry).__name__:<12} {'+'.join(map(str, tasks(entry))):<8} {entry.name}")
        return 0
    missing = [name for name in HANDED_OUT if name != SFT and not (ROOT / name).exists()]
    if missing:
        parser.error(f"missing beside solutions/: {', '.join(missing)}")
    try:
        verdicts = audit(entries, options.full, options.show is not None, options.jobs)
    except ValueError as error:
        parser.error(str(error))
    if options.show is not None:
        show(verdicts[0])
    good = print_table(verdicts)
    if options.leave_one_out:
        good = leave_one_out(verdicts, options.jobs) and good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
