"""One step of GRPO, looked at: how it pushes each token, what that did, and groups of answers as text."""

import copy
import os
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

import tinylm
from lab.pictures import BLUE, GREEN, VERMILLION


class Moment(NamedTuple):
    """The tokens of a group at one time of an iteration, each [G, Tr]."""

    gradient: Tensor  # of the objective with respect to each token's log-prob: the push that it gets now
    clipped: Tensor  # bool: own tokens of an answer with an advantage, but without a gradient from the surrogate
    ratio: Tensor
    k3: Tensor  # nats


class Step(NamedTuple):
    """One iteration of GRPO on one prompt, on the CPU; its rows sorted, right answers first, equal ones together."""

    prompt: str
    right: str
    tokens: list[str]  # G rows of Tr characters
    mask: Tensor  # [G, Tr]
    rewards: Tensor  # [G]
    advantages: Tensor  # [G]
    moments: list[Moment]  # before the first inner step, then after each
    answers: list[str]  # the distinct ones, the right one first even if nobody gave it
    chances: Tensor  # [moments, answers]: the exact probability of each
    entropies: list[float]  # of the whole distribution over answers, nats


# One step --------------------------------------------------------------------------------------------------------


def prompt_of(problem: str | bool, model: tinylm.TinyLM, temperature: float) -> Tensor:
    """The prompt [1, Tp] of a problem such as "37+48="; of True, the held-out one that the policy answers right with a
    probability next to one half.
    """
    if isinstance(problem, str):
        return tinylm.encode([problem]).to(next(model.parameters()).device)
    prompts = tinylm.problems()[1].to(next(model.parameters()).device)
    p = tinylm.success_probability(model, prompts, temperature)
    return prompts[(p - 0.5).abs().argmin()].unsqueeze(0)


def push(grpo: ModuleType, logp: Tensor, *rest) -> Tensor:
    """The gradient [N, Tr] of the objective, which is -loss, with respect to logp [N, Tr]; `rest` are the other
    arguments of grpo_loss.
    """
    leaf = logp.detach().clone().requires_grad_()
    loss, _ = grpo.grpo_loss(leaf, *rest)
    (gradient,) = torch.autograd.grad(loss, leaf, allow_unused=True)
    return torch.zeros_like(leaf) if gradient is None else -gradient


def look(grpo: ModuleType, logp: Tensor, old_logp: Tensor, ref_logp: Tensor, advantages: Tensor, mask: Tensor, config):
    """The Moment at which the policy gives the tokens of a group logp [G, Tr], by the functions of `grpo`."""
    constants = (old_logp, ref_logp, advantages, mask)
    surrogate = push(grpo, logp, *constants, config.clip, 0.0)
    return Moment(
        gradient=push(grpo, logp, *constants, config.clip, config.beta),
        clipped=(surrogate == 0) & (mask > 0) & (advantages.unsqueeze(1) != 0),
        ratio=(logp - old_logp).exp(),
        k3=grpo.k3_kl(logp, ref_logp).expand_as(logp),
    )


@torch.no_grad()
def chances_of(model: tinylm.TinyLM, prompt: Tensor, answers: list[str], temperature: float) -> Tensor:
    """The exact probability of each answer: the product of its tokens' probabilities."""
    responses = tinylm.encode([text.ljust(tinylm.RESPONSE_LEN, "_") for text in answers]).to(prompt.device)
    logp = tinylm.token_logp(model, prompt.expand(len(answers), -1), responses, temperature)
    return (logp * tinylm.response_mask(responses)).sum(dim=1).exp()


@torch.no_grad()
def entropy_of_answers(model: tinylm.TinyLM, prompt: Tensor, temperature: float) -> float:
    """The exact entropy, in nats, of the distribution over all answers to prompt [1, Tp]: over every beginning that has
    not ended, the probability to get there times the entropy of the next token.
    """
    going_on = torch.tensor([i for i in range(len(tinylm.VOCAB)) if i != tinylm.EOS], device=prompt.device)
    k = tinylm.RESPONSE_LEN - 1
    beginnings = torch.cartesian_prod(*[going_on] * k)  # [13^3, 3], in order
    tokens = torch.cat([prompt.expand(len(beginnings), -1), beginnings], dim=1)
    logp = tinylm.policy_logits(model, tokens, tinylm.RESPONSE_LEN, temperature).double().log_softmax(dim=-1)
    entropy = -(logp.exp() * logp).sum(dim=-1)  # [13^3, 4], of the token after the first 0, 1, 2 and 3
    reached = logp[:, :k].gather(-1, beginnings.unsqueeze(-1)).squeeze(-1).cumsum(dim=1).exp()
    reached = torch.cat([torch.ones_like(reached[:, :1]), reached], dim=1)
    strides = [len(going_on) ** (k - t) for t in range(k + 1)]  # rows with the same first t tokens follow one another
    return sum((reached[::n, t] * entropy[::n, t]).sum().item() for t, n in enumerate(strides))


def explain_step(grpo: ModuleType, model: tinylm.TinyLM, prompt: Tensor, config) -> Step:
    """One iteration on prompt [1, Tp] from the policy `model`, which stays as it is, with the five functions of `grpo`.

    Raises ValueError, naming the function, where there is nothing to look at, or the samples are not what they must be.
    """
    policies, ref_model, G = [copy.deepcopy(model)], model, config.G
    policy = copy.deepcopy(model)
    optimizer = torch.optim.Adam(policy.parameters(), lr=config.lr)
    optimizer.register_step_post_hook(lambda *_: policies.append(copy.deepcopy(policy)))
    generator = torch.Generator(prompt.device).manual_seed(config.seed)
    samples, _ = grpo.grpo_step(policy, ref_model, optimizer, prompt, replace(config, P=1), generator)
    grpo.check_samples(samples, 1, G)
    if len(policies) == 1:
        raise ValueError("grpo_step (task 5) never called optimizer.step(): there is nothing to look at")

    texts = tinylm.decode_and_strip_padding(samples.responses)
    right = tinylm.decode_and_strip_padding(tinylm.answers(prompt))[0]
    times = Counter(texts)
    rewards = samples.rewards.tolist()
    order = sorted(range(G), key=lambda i: (-rewards[i], -times[texts[i]], texts[i]))
    answers = list(dict.fromkeys([right, *(texts[i] for i in order)]))
    order = torch.tensor(order, device=prompt.device)
    advantages = grpo.group_advantages(samples.rewards, G, config.std)[order]
    responses, mask = samples.responses[order], samples.mask[order].float()
    with torch.no_grad():
        logps = [tinylm.token_logp(p, samples.prompts, responses, config.temperature) for p in policies]
    moments = [look(grpo, logp, logps[0], logps[0], advantages, mask, config) for logp in logps]
    return Step(
        prompt=tinylm.decode(prompt)[0],
        right=right,
        tokens=tinylm.decode(responses),
        mask=mask.cpu(),
        rewards=samples.rewards[order].cpu(),
        advantages=advantages.cpu(),
        moments=[Moment(*(part.cpu() for part in moment)) for moment in moments],
        answers=answers,
        chances=torch.stack([chances_of(p, prompt, answers, config.temperature) for p in policies]).cpu(),
        entropies=[entropy_of_answers(p, prompt, config.temperature) for p in policies],
    )


def times_of_day(step: Step) -> list[str]:
    """What the moments are called: "before", "after inner step 1", ..."""
    return ["before", *(f"after inner step {i}" for i in range(1, len(step.moments)))]


def step_as_text(step: Step) -> str:
    """The step for a terminal, and for those who cannot see the picture: equal lines together, with their number."""
    lines = [f"{step.prompt} the right answer is {step.right}"]

    def pushed(moment: Moment, i: int, t: int) -> str:
        return f"{moment.gradient[i, t]:+.4f}{' clipped' if moment.clipped[i, t] else ''}"

    def moved(moment: Moment, i: int, t: int) -> str:
        return f"{moment.ratio[i, t]:.2f} ({moment.k3[i, t]:.3f})"

    def group(title: str, told: Callable[[Moment, int, int], str], moment: Moment) -> None:
        """A line per answer: its number, tokens, reward and advantage, then what is told of each token."""
        padding = (step.mask == 0) & (moment.gradient == 0)  # a wrong function may push what follows the end
        rows = []
        for i, tokens in enumerate(step.tokens):
            cells = ["padding" if padding[i, t] else told(moment, i, t) for t in range(len(tokens))]
            row = " ".join(f"{token} {cell:14}" for token, cell in zip(tokens, cells, strict=True)).rstrip()
            rows.append(f"{tokens}  reward {step.rewards[i]:.0f}  advantage {step.advantages[i]:+.2f}   {row}")
        lines.extend(["", title, *(f"  {n} x {row}" for row, n in Counter(rows).items())])

    for k, (before, after) in enumerate(pairwise(step.moments), start=1):
        group(f"Inner step {k} pushes each token up (+) or down (-): the gradient of the objective", pushed, before)
        group(f"After inner step {k}: the ratio, and k3 in nats, of each token", moved, after)
    lines += ["", "The exact chance of each answer, " + ", ".join(times_of_day(step))]
    for answer, chances in zip(step.answers, step.chances.T.tolist(), strict=True):
        told = "  ".join(f"{chance:.3f}" for chance in chances)
        lines.append(f"  {answer:5} {'right' if answer == step.right else 'wrong'}  {told}")
    lines.append("  entropy of all answers, nats: " + "  ".join(f"{entropy:.3f}" for entropy in step.entropies))
    return "\n".join(lines)


# Groups of answers as text ---------------------------------------------------------------------------------------


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


def show_groups(grpo: ModuleType, model: tinylm.TinyLM, prompts: Tensor, config, start: tinylm.TinyLM) -> str:
    """A group of answers to each of the prompts, as text: equal answers in one line, with reward and advantage; and the
    exact chance of a right one, now and for the policy `start`. `grpo` is the module whose functions sample and score,
    `config` its GRPOConfig.
    """
    generator = torch.Generator(prompts.device).manual_seed(config.seed)  # its own: to look changes no training
    samples = grpo.sample_group(model, prompts, config.G, config.temperature, generator)
    advantages = grpo.group_advantages(samples.rewards, config.G, config.std)
    answered = list(zip(samples.texts, samples.rewards.tolist(), advantages.tolist(), strict=True))
    rights = tinylm.decode_and_strip_padding(tinylm.answers(prompts))
    chances = [tinylm.success_probability(policy, prompts, config.temperature).tolist() for policy in (start, model)]
    lines = []
    for i, (prompt, right) in enumerate(zip(tinylm.decode(prompts), rights, strict=True)):
        group = answered[i * config.G : (i + 1) * config.G]
        n = sum(reward == 1 for _, reward, _ in group)
        lines.append(f"  {prompt}  right is {right}  {n} of {config.G} answers are right")
        lines[-1] += f"; the exact chance of it: {chances[0][i]:.3f} at the start, {chances[1][i]:.3f} now"
        for (text, reward, advantage), times in sorted(Counter(group).items(), key=lambda counted: -counted[0][2]):
            line = f"    {times:2} x {text:6} reward {reward:.0f}  advantage {advantage:+.2f}"
            lines.append(paint(GREEN if reward else VERMILLION, line))
        if n in (0, config.G):
            equal = f"all answers are {'right' if n else 'wrong'}, none is better than its group: nothing to learn here"
            lines.append(paint(BLUE, f"    NO SIGNAL: {equal}"))
    return "\n".join(lines)
