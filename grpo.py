"""GRPO: Group Relative Policy Optimization (DeepSeekMath, arXiv 2402.03300), in five small tasks.

This is the file you edit: fill in the five functions marked TODO, in order, and run `python -m pytest -q -k task1`
(then task2, ...) after each. What is below task 5 is complete. Read `tinylm.py` first: you will call `generate`,
`response_mask`, `decode`, `decode_and_strip_padding`, `reward` and `token_logp` from it.

Shapes, everywhere alike: P prompts, G responses per prompt (the group size), N = P * G rows, PROMPT-MAJOR: rows
i*G to i*G + G-1 belong to prompt i. Tp prompt tokens, Tr response tokens. `mask` [N, Tr] is 1 on a response's own
tokens, its end-of-sequence included, and 0 on the padding after it. `logp`, `old_logp`, `ref_logp` [N, Tr] are the
log-probabilities of the sampled tokens under the policy being trained, the policy that sampled them, and the
reference (the SFT model).
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import tinylm
from tinylm import TinyLM


@dataclass
class Samples:
    """One batch of responses: N = P * G rows, prompt-major."""

    prompts: Tensor  # [N, Tp] int64: each of the P prompts, G times in a row
    responses: Tensor  # [N, Tr] int64, padded after the end-of-sequence
    mask: Tensor  # [N, Tr] 1 on own tokens up to and including the end-of-sequence, else 0
    rewards: Tensor  # [N] float32
    texts: list[str]  # N decoded responses, such as "85$"


@dataclass
class GRPOConfig:
    """The hyperparameters, each a flag of `run.py`: P is `--prompts`, `std = False` is `--no-std`."""

    iters: int = 300  # training iterations
    P: int = 16  # prompts per iteration
    G: int = 8  # responses per prompt, the group size
    inner_steps: int = 2  # gradient steps on each batch of samples
    lr: float = 3e-4  # Adam's learning rate
    clip: float = 0.2  # the ratio is clipped to [1 - clip, 1 + clip]
    beta: float = 0.04  # weight of the KL penalty
    std: bool = True  # divide the advantages by the group's standard deviation
    temperature: float = 1.0  # the policy is softmax(logits / temperature), sampled and trained alike
    seed: int = 0  # of the prompts drawn and the responses sampled
    eval_every: int = 10  # iterations between two evaluations on the held-out problems


# Task 1 ---------------------------------------------------------------------------------------------------------


def sample_group(
    model: TinyLM,
    prompts: Tensor,
    G: int,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
) -> Samples:
    """Sample G responses to each prompt, as one batch, and let the verifier score them.

    Args:
        model: the policy to sample from.
        prompts: [P, Tp] int64 token ids, each prompt once (in the Samples there are N rows of them).
        G: responses per prompt.
        temperature: tokens are drawn from softmax(logits / temperature).
        generator: the source of randomness; pass it on to `tinylm.generate`.

    Returns:
        Samples with N = P * G rows, prompt-major, rewards as float32 on the prompts' device.

    Example: prompts "37+48=" and "10+15=" with G = 2 give the rows
        37+48=, 37+48=, 10+15=, 10+15=   and, if the policy answers 85$, 84$, 25$, 25$, the rewards 1, 0, 1, 1.

    Hints:
        1. `repeat_interleave` gives a, a, b, b; `repeat` gives a, b, a, b and breaks the groups.
        2. Call `tinylm.generate` once, on all N rows; `tinylm.response_mask` gives the mask.
        3. `tinylm.reward(prompt, response)` takes two strings: `tinylm.decode` gives the prompts' texts,
           `tinylm.decode_and_strip_padding` the responses'.
    """
    # TODO(task 1)
    raise NotImplementedError("Task 1 (sample_group) is not written yet: open grpo.py")


# Task 2 ---------------------------------------------------------------------------------------------------------


def group_advantages(rewards: Tensor, G: int, normalize_std: bool = True, eps: float = 1e-4) -> Tensor:
    """How much better each response did than its own group: the baseline that replaces PPO's value network.

        A_i = (r_i - mean(r)) / (std(r) + eps)     mean and std over the G rewards of i's group
        A_i =  r_i - mean(r)                       if normalize_std is False

    The std is the POPULATION standard deviation, sqrt(mean((r - mean)^2)): it divides by G, not by G - 1.
    (DeepSeekMath, section 4.1.2, outcome supervision; mean only: Dr. GRPO, arXiv 2503.20783.)

    Args:
        rewards: [N] float, prompt-major, finite: one NaN would make its whole group NaN.
        G: group size; N must be a multiple of it.
        normalize_std: divide by the group's std, or not.
        eps: keeps the division finite when all rewards of a group are equal.

    Returns:
        Advantages [N], prompt-major. A group whose rewards are all equal gets 0: it says nothing about which
        response was better.

    Example, G = 4: rewards (1, 0, 0, 1) give (+1, -1, -1, +1); (1, 0, 0, 0) give (1.73, -0.58, -0.58, -0.58);
        mean only, (1, 0, 0, 0) give (0.75, -0.25, -0.25, -0.25).

    Hints:
        1. `rewards.view(-1, G)` has one group per row; `keepdim=True` keeps the mean a column.
        2. torch's `std` divides by G - 1 unless told otherwise: `correction=0`.
    """
    # TODO(task 2)
    raise NotImplementedError("Task 2 (group_advantages) is not written yet: open grpo.py")


# Task 3 ---------------------------------------------------------------------------------------------------------


def k3_kl(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """Per-token estimate of KL(pi_theta || pi_ref) from one sampled token, Schulman's k3.

        k3 = u - log(u) - 1     with u = pi_ref(token) / pi_theta(token)

    For tokens drawn from pi_theta its expectation is exactly the KL divergence, and unlike -log(u) it is never
    negative: 0 where the two policies agree, and larger the further apart they are. (DeepSeekMath, equation 4.)

    Args:
        logp: [N, Tr] log pi_theta of the sampled tokens, with gradient.
        ref_logp: [N, Tr] log pi_ref of the same tokens, without.

    Returns:
        k3 [N, Tr] in nats, differentiable in `logp`. No mask is applied here.

    Example: logp = log 0.5 and ref_logp = log 0.25 give u = 0.5 and k3 = 0.5 + 0.693 - 1 = 0.193 nats.

    Hints:
        1. log(u) is a difference of the two arguments; mind which one is on top.
        2. The gradient with respect to `logp` is 1 - u: detach neither u nor log(u).
    """
    # TODO(task 3)
    raise NotImplementedError("Task 3 (k3_kl) is not written yet: open grpo.py")


# Task 4 ---------------------------------------------------------------------------------------------------------


def grpo_loss(
    logp: Tensor,
    old_logp: Tensor,
    ref_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip: float = 0.2,
    beta: float = 0.04,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The GRPO loss of one batch of responses (DeepSeekMath, equation 3, negated), and what to watch beside it.

        ratio     = pi_theta / pi_old = exp(logp - old_logp)                                    per token
        surrogate = min(ratio * A, clamp(ratio, 1 - clip, 1 + clip) * A)                        per token
        objective = surrogate - beta * k3                                                       per token
        J_i       = sum of the objective over response i's own tokens / their number            per response
        loss      = - mean of J_i over the N responses

    The order of the two averages matters: first over a response's own tokens, then over responses. One average
    over all tokens of the batch would give long responses more weight (chapter 16 compares the two).

    Args:
        logp: [N, Tr] under the policy being trained, with gradient.
        old_logp: [N, Tr] under the policy that sampled, a constant.
        ref_logp: [N, Tr] under the reference, a constant.
        advantages: [N], one per response; every token of the response gets it.
        mask: [N, Tr], 1 on own tokens, 0 on padding, whose log-probs mean nothing; in each row at least one 1.
        clip: half-width of the interval in which the ratio may move freely.
        beta: weight of the KL penalty.

    Returns:
        loss: a scalar with gradient, averaged as above.
        metrics: three detached scalars to look at. Unlike the loss, each is ONE average over all own tokens:
            "clip_fraction": the share of tokens whose clipped term is strictly smaller than the other, so that the
                surrogate gives them no gradient;
            "kl": the mean of k3, without beta;
            "ratio": the mean ratio.

    Example, clip = 0.2, beta = 0: ratio 1.5 gives 1.2 * A for A = +1 (clipped), but 1.5 * A for A = -1 (not
        clipped: the token became likelier although the answer was wrong, so the gradient must stay).

    Hints:
        1. `advantages.unsqueeze(1)` is [N, 1] and broadcasts over the tokens.
        2. `k3_kl` is task 3; `torch.minimum` and `clamp` do the rest.
        3. Multiply by the mask before the sum, and divide by `mask.sum(dim=1)`, not by Tr.
        4. Optimizers minimise; the objective is to be maximised.
    """
    # TODO(task 4)
    raise NotImplementedError("Task 4 (grpo_loss) is not written yet: open grpo.py")


# Task 5 ---------------------------------------------------------------------------------------------------------


def grpo_step(
    model: TinyLM,
    ref_model: TinyLM,
    optimizer: torch.optim.Optimizer,
    prompts: Tensor,
    config: GRPOConfig,
    generator: torch.Generator | None = None,
) -> tuple[Samples, dict[str, Tensor]]:
    """One iteration of GRPO: sample, score, and take `config.inner_steps` gradient steps on the same samples.

        1. sample config.G responses to each prompt from the policy as it is now      (task 1)
        2. advantages from the rewards, within each group                             (task 2)
        3. old_logp under the policy, ref_logp under the reference: once, without gradient, BEFORE any step
        4. config.inner_steps times: logp with gradient, the loss (task 4), zero_grad, backward, optimizer step

    On the first inner step logp equals old_logp, so every ratio is 1 and nothing is clipped; the gradient of ratio * A
    is then A times that of logp, as in REINFORCE. The ratio moves only because old_logp stays frozen while the policy
    steps away from it.

    Args:
        model: the policy; trained in place.
        ref_model: the reference; never changes.
        optimizer: over the policy's parameters.
        prompts: [P, Tp] int64.
        config: G, inner_steps, clip, beta, std and temperature are used here.
        generator: the source of randomness for the samples.

    Returns:
        (samples, metrics): the samples of this iteration; the metrics of `grpo_loss` at the LAST inner step, and
        "loss", that step's loss, detached.

    Example: inner_steps = 1 always returns a clip_fraction of 0 and a ratio of 1.

    Hints:
        1. `tinylm.token_logp(model, samples.prompts, samples.responses, config.temperature)`: all three log-probs,
           at one temperature.
        2. `with torch.no_grad():` around the two that are constants.
        3. Gradients add up in torch until `optimizer.zero_grad()` clears them.
    """
    # TODO(task 5)
    raise NotImplementedError("Task 5 (grpo_step) is not written yet: open grpo.py")


# Given, complete ------------------------------------------------------------------------------------------------


def token_entropy(logits: Tensor, mask: Tensor) -> Tensor:
    """Mean entropy of the policy's next-token distributions, softmax(logits [N, Tr, V]), where mask [N, Tr] is 1: nats.

    H = - sum over the vocabulary of pi * log pi. It falls as the policy becomes sure of its answers, and with it
    the variety that groups need: a group of eight equal responses teaches nothing.
    """
    expected_logit = (logits.softmax(dim=-1) * logits).sum(dim=-1)
    entropy = logits.logsumexp(dim=-1) - expected_logit
    return (entropy * mask).sum() / mask.sum()


@torch.no_grad()
def evaluate(model: TinyLM, prompts: Tensor, config: GRPOConfig) -> dict[str, float]:
    """Sampled and greedy accuracy on `prompts`, the entropy over a fresh response to every second one, and the share of
    groups without signal to expect: a group of G is all right with probability p^G, all wrong with (1 - p)^G.
    """
    right = tinylm.answers(prompts)
    p, greedy = tinylm.success(tinylm.response_logits(model, prompts, right, config.temperature), right)
    some = prompts[::2]  # enough for the entropy: over 250 responses its sampling error is 0.001 nats
    # A generator of its own: how often we look must not change what is trained.
    generator = torch.Generator(prompts.device).manual_seed(config.seed)
    responses = tinylm.generate(model, some, config.temperature, generator)
    logits = tinylm.response_logits(model, some, responses, config.temperature)
    return {
        "sampled_accuracy": p.mean().item(),
        "greedy_accuracy": greedy.mean().item(),
        "entropy": token_entropy(logits, tinylm.response_mask(responses)).item(),
        "expected_zero_signal": (p**config.G + (1 - p) ** config.G).mean().item(),
    }


def check_samples(samples: Samples, P: int, G: int) -> None:
    """Raise ValueError, naming the function to look at, where the samples break what the other tasks rely on."""
    n, rewards = P * G, samples.rewards
    shapes = [tuple(part.shape[:1]) for part in (samples.prompts, samples.responses, samples.mask, rewards)]
    if set(shapes) != {(n,)} or rewards.dim() != 1:
        raise ValueError(
            f"sample_group (task 1): {P} prompts with G = {G} must give {n} rows of prompts, responses and mask, {n} "
            f"rewards; their first dimensions are {', '.join(map(str, shapes))}"
        )
    if not rewards.isfinite().all():
        raise ValueError("sample_group (task 1): a reward is not finite, and would make its whole group NaN")
    if (samples.mask.sum(dim=1) == 0).any():
        raise ValueError(
            "sample_group (task 1): a row of the mask is empty, so that grpo_loss (task 4) would divide by 0: even an "
            "answer that is only an end-of-sequence has one token"
        )


def check_finite(row: dict[str, float], config: GRPOConfig) -> None:
    """Raise FloatingPointError, saying what to change, where a metric or the accuracy is infinite or NaN."""
    for name in ("kl", "ratio", "loss", "sampled_accuracy"):  # the accuracy shows weights that the last step spoilt
        if math.isfinite(row.get(name, 0.0)):
            continue
        advice = f"lower --lr ({config.lr:g}) or --inner-steps ({config.inner_steps})"
        if config.temperature < 1:
            advice += f", or raise --temperature: at {config.temperature:g} log-probs move {1 / config.temperature:.3g}"
            advice += " times as fast as at 1"
        what = f"the {name.replace('_', ' ')} is {row[name]} at iteration {row['iteration']}"
        raise FloatingPointError(f"{what}: the policy moved too far at once; {advice}")


def train_grpo(
    model: TinyLM, config: GRPOConfig, callback: Callable[[dict[str, float]], None] | None = None
) -> list[dict[str, float]]:
    """Train `model` in place with GRPO; a frozen copy of what it was at the start is the reference.

    Returns the history, a row per iteration, each also handed to `callback` as soon as it is there. Row 0 is the
    evaluation before training; rows from 1 on have "reward" (mean), "all_right" and "all_wrong" (shares of
    groups without signal), "clip_fraction", "kl" (nats per token), "ratio" and "loss"; every `config.eval_every`
    iterations, and at the end, also the keys of `evaluate`.

    Raises FloatingPointError, naming the iteration, when a metric or the accuracy is not finite; ValueError, naming
    the function, when samples are not what `Samples` says.
    """
    device = next(model.parameters()).device
    train_prompts, held_out = (prompts.to(device) for prompts in tinylm.problems())
    ref_model = copy.deepcopy(model).requires_grad_(False)
    fused = device.type in ("cpu", "cuda")  # quicker; on Apple's mps not every version of torch has it
    optimizer = torch.optim.Adam(model.parameters(), lr=config.lr, fused=fused)
    draw = torch.Generator().manual_seed(config.seed)  # which prompts
    generator = torch.Generator(device).manual_seed(config.seed)  # which responses
    history = []
    for iteration in range(config.iters + 1):
        row = {"iteration": iteration}
        if iteration > 0:
            prompts = train_prompts[torch.randint(len(train_prompts), (config.P,), generator=draw)]
            samples, metrics = grpo_step(model, ref_model, optimizer, prompts, config, generator)
            check_samples(samples, config.P, config.G)
            group_means = samples.rewards.view(-1, config.G).mean(dim=1)
            row["reward"] = group_means.mean().item()
            row["all_right"] = (group_means == 1).float().mean().item()
            row["all_wrong"] = (group_means == 0).float().mean().item()
            row |= {name: float(value) for name, value in metrics.items()}
        if iteration % config.eval_every == 0 or iteration == config.iters:
            row |= evaluate(model, held_out, config)
        check_finite(row, config)
        history.append(row)
        if callback:
            callback(row)
    return history
