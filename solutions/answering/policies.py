"""What is measured of a policy, before GRPO and after it: its mistakes, its distance, what one step pushes."""

from collections import Counter

import torch
from torch import Tensor

import grpo
import tinylm
from lab.explain import look


def kinds(prompts: Tensor) -> dict[str, list[int]]:
    """Which of the problems [P, Tp] are of which kind."""
    rows = {"no carry, two digits": [], "carry, two digits": [], "three digits": []}
    for i, text in enumerate(tinylm.decode(prompts)):
        left, right = map(int, text.rstrip("=").split("+"))
        carry = left % 10 + right % 10 > 9
        kind = "three digits" if left + right > 99 else "carry, two digits" if carry else "no carry, two digits"
        rows[kind].append(i)
    return rows


def mistake(right: int, text: str) -> str:
    """The name of what is wrong with an answer; "" if it is right."""
    if not text.endswith("$") or not text[:-1].isdecimal() or text[:-1] != str(int(text[:-1])):
        return "not a number, or not ended"
    difference = int(text[:-1]) - right
    names = {0: "", -10: "10 too small", 10: "10 too large", -100: "100 too small", 100: "100 too large"}
    if difference in names:
        return names[difference]
    return "off by 1" if abs(difference) == 1 else "off by 9 or 11" if abs(difference) in (9, 11) else "other"


def anatomy(model: tinylm.TinyLM, samples: int = 32) -> dict[str, dict[str, float]]:
    """What the policy answers on the held-out problems: exact accuracy by kind, and the share of each mistake."""
    _, prompts = tinylm.problems()
    p = tinylm.success_probability(model, prompts)
    rows = prompts.repeat_interleave(samples, dim=0)
    texts = tinylm.decode_and_strip_padding(tinylm.generate(model, rows, generator=torch.Generator().manual_seed(0)))
    rights = [int(text.rstrip("$_")) for text in tinylm.decode(tinylm.answers(rows))]
    counts = Counter(mistake(right, text) for right, text in zip(rights, texts, strict=True))
    return {
        "kinds": {kind: p[numbers].mean().item() for kind, numbers in kinds(prompts).items()},
        "mistakes": {name: times / len(texts) for name, times in counts.items() if name},
    }


def kl_to(sft: tinylm.TinyLM, model: tinylm.TinyLM, temperature: float, samples: int = 16) -> float:
    """The mean k3 over the tokens that `model` samples on the held-out problems: KL(model || sft), nats per token.

    The runs' own "kl" will not do: it is what the loss uses, which may be k1 or k2.
    """
    _, prompts = tinylm.problems()
    rows = prompts.repeat_interleave(samples, dim=0)
    responses = tinylm.generate(model, rows, temperature, torch.Generator().manual_seed(1))
    mask = tinylm.response_mask(responses)
    with torch.no_grad():
        logp, ref_logp = (tinylm.token_logp(policy, rows, responses, temperature) for policy in (model, sft))
    return ((grpo.k3_kl(logp, ref_logp) * mask).sum() / mask.sum()).item()


def one_step(sft: tinylm.TinyLM, groups: int = 8) -> dict[str, float]:
    """What the first step does, from `groups` groups to each held-out problem.

    Right first digits, "first_right": the share of the wrong answers that begin with the right digit. In the groups in
    which there is such an answer beside a right one, "alone": the mean push on the digit in one such answer,
    "together": that over the group, "down": the share of the groups in which that points down.

    Of the groups with signal, "extreme": the share in which 1 or G - 1 answers are right; "loud" and "quiet": the share
    of all |A| that is theirs, with the std and without.
    """
    _, prompts = tinylm.problems()
    config = grpo.GRPOConfig()
    prompts = prompts.repeat_interleave(groups, dim=0)
    samples = grpo.sample_group(sft, prompts, config.G, generator=torch.Generator().manual_seed(0))
    advantages = grpo.group_advantages(samples.rewards, config.G)
    with torch.no_grad():
        logp = tinylm.token_logp(sft, samples.prompts, samples.responses)
    first = look(grpo, logp, logp, logp, advantages, samples.mask, config).gradient[:, 0].view(-1, config.G)
    first = len(prompts) * first  # as if each group were a batch of its own
    right = (samples.responses[:, 0] == tinylm.answers(samples.prompts)[:, 0]).view(-1, config.G)
    wrong = (samples.rewards == 0).view(-1, config.G)
    some = (right & wrong).any(dim=1) & ~wrong.all(dim=1)
    added_up = (first * right).sum(dim=1)[some]
    times = wrong.sum(dim=1)
    extreme = (times == 1) | (times == config.G - 1)
    sizes = [grpo.group_advantages(samples.rewards, config.G, std).abs().view(-1, config.G) for std in (True, False)]
    loud, quiet = ((size[extreme].sum() / size.sum()).item() for size in sizes)
    return {
        "first_right": (right & wrong).sum().item() / wrong.sum().item(),
        "down": (added_up < -1e-6).float().mean().item(),
        "alone": first[right & wrong & some.unsqueeze(1)].mean().item(),
        "together": added_up.mean().item(),
        "extreme": extreme.sum().item() / ((times > 0) & (times < config.G)).sum().item(),
        "loud": loud,
        "quiet": quiet,
    }
