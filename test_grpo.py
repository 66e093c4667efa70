"""The tests of the five tasks, which are also its grades: `python -m pytest -q -k task1` runs one task's.

Expected values are worked by hand in comments that you can check on paper, or computed from the definition with plain
loops on inputs drawn afresh in every run. A failure names the task, what came and what was expected; and where the
value that came is the one that a well-known mistake gives, it names the mistake. LAB_SEED=1 repeats inputs.
"""

import copy
import itertools
import math
import os
import random
import statistics
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import tinylm

SEED = int(os.environ.get("LAB_SEED", random.SystemRandom().randrange(10**6)))


@pytest.fixture
def draw():
    """Fresh inputs: draw(a, b, *shape) is uniform between a and b."""
    generator = torch.Generator().manual_seed(SEED)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(*shape, generator=generator)

    return uniform


@pytest.fixture(scope="session")
def sft():
    return tinylm.load_or_train_sft().requires_grad_(False)


# Task 1: sample_group --------------------------------------------------------------------------------------------


def talkative(sft: tinylm.TinyLM) -> tinylm.TinyLM:
    """The SFT model made to forget its end-of-sequence and to write padding, so that all kinds of answers occur."""
    model = copy.deepcopy(sft)
    model.head = torch.nn.Linear(sft.head.in_features, len(tinylm.VOCAB))
    model.head.weight = copy.deepcopy(sft.head.weight)
    bias = torch.zeros(len(tinylm.VOCAB))
    bias[tinylm.EOS], bias[tinylm.PAD] = -4.0, 3.0
    model.head.bias = torch.nn.Parameter(bias)
    return model


def sample(lab, model, prompts: Tensor, G: int, temperature: float = 1.0, seed: int = 0):
    """Call sample_group, and see that all five fields of the Samples have the right type and shape."""
    torch.manual_seed(SEED)  # of the global generator, which must not matter
    generator = torch.Generator().manual_seed(seed)
    samples = lab.call(1, model, prompts, G, temperature, generator)
    missing = [f for f in ("prompts", "responses", "mask", "rewards", "texts") if not hasattr(samples, f)]
    if missing:
        lab.fail(1, f"it must return a Samples; a {type(samples).__name__} has no {missing[0]!r}")
    N, Tp, Tr = len(prompts) * G, tinylm.PROMPT_LEN, tinylm.RESPONSE_LEN
    lab.tensor(1, "samples.prompts", samples.prompts, (N, Tp), floating=False)
    lab.tensor(1, "samples.responses", samples.responses, (N, Tr), floating=False)
    if isinstance(samples.mask, Tensor) and tuple(samples.mask.shape) == (N, Tp + Tr):
        lab.fail(1, f"samples.mask covers the prompt too, shape {(N, Tp + Tr)}; it must cover the response, {(N, Tr)}")
    lab.tensor(1, "samples.mask", samples.mask, (N, Tr), floating=False)
    lab.tensor(1, "samples.rewards", samples.rewards, (N,))
    if not isinstance(samples.texts, list | tuple) or len(samples.texts) != N:
        lab.fail(1, f"samples.texts must be a list of N = {N} strings, one per response")
    return samples


def some_prompts(count: int) -> Tensor:
    train, _ = tinylm.problems()
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(SEED))
    return train[order[:count]]


def check_rows(lab, model):
    """Prompt-major rows, and each response scored against its own prompt."""
    prompts, G = some_prompts(32), 8
    samples = sample(lab, model, prompts, G)
    rows = [prompt for prompt in tinylm.decode(prompts) for _ in range(G)]  # a a a ... b b b ...
    tiled = tinylm.decode(prompts) * G  # a b c ... a b c ...
    got = tinylm.decode(samples.prompts)
    if got != rows:
        if got == tiled:
            lab.fail(1, "the rows are interleaved (a, b, a, b): repeat each prompt G times in a row (a, a, b, b)")
        row = next(i for i, (a, b) in enumerate(zip(got, rows, strict=True)) if a != b)
        lab.fail(1, f"samples.prompts is wrong at row {row}: got {got[row]}, expected {rows[row]}")
    texts = tinylm.decode_and_strip_padding(samples.responses)
    if list(samples.texts) != texts:
        row = next(i for i, (a, b) in enumerate(zip(samples.texts, texts, strict=True)) if a != b)
        lab.fail(
            1,
            f"samples.texts is not what tinylm.decode_and_strip_padding gives for the responses, first at row {row}: "
            f"got {samples.texts[row]!r}, expected {texts[row]!r}",
        )

    def scores(prompt_texts, response_texts):
        pairs = zip(prompt_texts, response_texts, strict=True)
        return torch.tensor([tinylm.reward(p, r) for p, r in pairs], dtype=torch.float64)

    right = scores(rows, texts)
    digits = [text.rstrip("$") for text in texts]
    mistakes = {
        "the rewards score the answers against the wrong prompts: row i*G + j answers prompt i": scores(tiled, texts),
        "the rewards stand in the wrong order: they must stay row by row": right.view(32, G).T.flatten(),
        "the rewards score the answers against the wrong prompt, the next one's": scores(rows[G:] + rows[:G], texts),
        "the rewards score the answers against the wrong prompt, the row after": scores(rows[1:] + rows[:1], texts),
        "the rewards score the answers against the wrong prompt, the one before": scores(rows[-G:] + rows[:-G], texts),
        "every response of a group gets the first one's reward: score each row": right[::G].repeat_interleave(G),
        "an answer that never ended, or is not plain, was scored as right: use tinylm.reward as it is": torch.tensor(
            [
                float(d.isdigit() and int(d) == sum(map(int, p.rstrip("=").split("+"))))
                for p, d in zip(rows, digits, strict=True)
            ]
        ),
        "the rewards are the wrong way round: 1 is for the right answer": 1 - right,
        "the rewards are +1 and -1: 1 is for a right answer, 0 for a wrong one": 2 * right - 1,
    }
    lab.compare(1, "samples.rewards", samples.rewards, right, mistakes)


@pytest.mark.points(4)
def test_task1_rows_are_prompt_major_and_scored(lab, sft):
    check_rows(lab, sft)


@pytest.mark.points(3)
def test_task1_unended_and_odd_answers_are_wrong(lab, sft):
    check_rows(lab, talkative(sft))


@pytest.mark.points(3)
def test_task1_mask_ends_with_the_end_of_sequence(lab, sft):
    # 8 5 EOS PAD has the mask 1 1 1 0: the EOS is the policy's own token, what follows it is not.
    for model in (sft, talkative(sft)):
        samples = sample(lab, model, some_prompts(32), 8)
        expected = torch.zeros(samples.responses.shape)
        for row, tokens in enumerate(samples.responses.tolist()):
            length = tokens.index(tinylm.EOS) + 1 if tinylm.EOS in tokens else len(tokens)
            expected[row, :length] = 1
        is_eos = samples.responses == tinylm.EOS
        mistakes = {
            "the mask drops the end-of-sequence: stopping is the policy's own token and keeps its 1": expected
            * ~is_eos,
            "the mask keeps the padding after the end-of-sequence: it must be 0 there": torch.ones_like(expected),
            "the mask is shifted by one: it keeps one token too many": torch.cat(
                [torch.ones_like(expected[:, :1]), expected[:, :-1]], dim=1
            ),
            "the mask is shifted by one: its first token is missing": torch.cat(
                [torch.zeros_like(expected[:, :1]), expected[:, 1:]], dim=1
            ),
            "the mask is shifted by one to the right": torch.cat(
                [torch.zeros_like(expected[:, :1]), expected[:, :-1]], dim=1
            ),
            "the mask is the wrong way round: 1 is for own tokens, 0 for padding": 1 - expected,
            "the mask marks the end-of-sequence alone": is_eos.float(),
            "the mask is shifted by one, and its last column became the first (roll)": expected.roll(1, dims=1),
            "the mask is shifted by one, and its first column became the last (roll)": expected.roll(-1, dims=1),
            "the mask leaves out padding that the policy itself wrote before its end: all tokens up to the "
            "end-of-sequence are its own": (samples.responses != tinylm.PAD).double(),
            "the mask holds lengths or positions, not 0 and 1": expected.cumsum(dim=1) * expected,
        }
        mistakes["the mask is shifted left by one: it drops the last own token of every response"] = torch.cat(
            [expected[:, 1:], torch.zeros_like(expected[:, :1])], dim=1
        )
        given = f"the responses {samples.texts[:3]} ..."
        lab.compare(1, "samples.mask", samples.mask.double(), expected, mistakes, given)


def check_temperature(lab, task: int, model, samples, temperature: float):
    """How often a sample is the greedy response is known exactly: count it, and allow six standard deviations."""
    greedy = tinylm.generate(model, samples.prompts, greedy=True)

    def expectation(at: float) -> tuple[float, float]:
        logp = tinylm.token_logp(model, samples.prompts, greedy, at) * tinylm.response_mask(greedy)
        p = logp.detach().sum(dim=1).exp().double()
        return p.sum().item(), (p * (1 - p)).sum().sqrt().item()

    count = (samples.responses == greedy).all(dim=1).sum().item()
    mean, sd = expectation(temperature)
    if abs(count - mean) < 6 * sd:
        return
    got = f"\n  at temperature {temperature}: {count} of {len(greedy)} responses are the greedy one, not {mean:.0f}"
    others = {
        1.0: "the temperature is ignored in sampling: draw from softmax(logits / temperature)",
        1 / temperature: "the logits are multiplied by the temperature: divide them",
        temperature**2: "the temperature is applied twice",
    }
    for at, name in others.items():
        other_mean, other_sd = expectation(at)
        if at != temperature and abs(count - other_mean) < 4 * other_sd:
            lab.fail(task, name + got)
    lab.fail(task, f"the responses are not drawn from the policy softmax(logits / temperature){got}")


@pytest.mark.points(3)
def test_task1_samples_the_policy_at_its_temperature(lab, sft):
    prompts, G = some_prompts(64), 16
    greedy = tinylm.generate(sft, prompts, greedy=True).repeat_interleave(G, dim=0)
    for temperature in (0.5, 1.0, 2.0):
        samples = sample(lab, sft, prompts, G, temperature)
        groups = samples.responses.view(len(prompts), G, -1)
        if torch.equal(samples.responses, greedy):
            lab.fail(
                1, "every response is the greedy one: draw the tokens at random, from softmax(logits / temperature)"
            )
        if (groups == groups[:, :1]).all():
            lab.fail(1, "one response is copied G times: draw G responses of their own for each prompt")
        if (groups == groups[:1]).all():
            lab.fail(1, "different prompts got the very same responses")
        check_temperature(lab, 1, sft, samples, temperature)


@pytest.mark.points(2)
def test_task1_draws_from_the_generator(lab, sft):
    prompts = some_prompts(16)
    first, again, other = (
        sample(lab, sft, prompts, 8, 1.5, seed=seed).responses for seed in (SEED, SEED, SEED + 1)
    )  # `sample` seeds the global generator alike each time, and that one must not be used
    if torch.equal(first, other):
        lab.fail(1, "another generator gives the same responses: pass `generator` on to tinylm.generate")
    if not torch.equal(first, again):
        lab.fail(1, "the same generator gives other responses: all randomness must come from `generator`")
    generator = torch.Generator().manual_seed(SEED)
    once = lab.call(1, sft, prompts, 8, 1.5, generator).responses
    if torch.equal(once, lab.call(1, sft, prompts, 8, 1.5, generator).responses):
        lab.fail(1, "a second call with the same generator repeats the first: do not seed inside the function")


# Task 2: group_advantages ----------------------------------------------------------------------------------------


def advantages_as_defined(rewards: Tensor, G: int, normalize_std: bool) -> Tensor:
    """Group by group, with the standard library: mean and POPULATION standard deviation."""
    result = []
    for group in rewards.double().view(-1, G).tolist():
        scale = statistics.pstdev(group) if normalize_std else 1.0
        result += [(reward - statistics.mean(group)) / scale if scale else 0.0 for reward in group]
    return torch.tensor(result, dtype=torch.float64)


def wrong_advantages(rewards: Tensor, G: int, normalize_std: bool) -> dict[str, Tensor]:
    """What the known mistakes give, alone and two at a time."""
    eps = 1e-4
    right_groups = rewards.double().view(-1, G)
    groupings = {
        "": (right_groups, lambda a: a.reshape(-1)),
        "view(G, -1) makes G groups of P rows: the rows are prompt-major, P groups of G, so view(-1, G)": (
            rewards.double().view(G, -1),
            lambda a: a.reshape(-1),
        ),
        "mean and std run across the prompts (dim=0 of view(-1, G)): a group is one row of it, so dim=1": (
            rewards.double().view(-1, G).T,
            lambda a: a.T.reshape(-1),
        ),
        "the groups are interleaved, read as columns by view(G, -1): rows are prompt-major, so view(-1, G)": (
            rewards.double().view(G, -1).T,
            lambda a: a.T.reshape(-1),
        ),
        "the rewards are replaced by their ranks: use the rewards themselves": (
            right_groups.argsort(dim=1).argsort(dim=1).double(),
            lambda a: a.reshape(-1),
        ),
        "mean and std are taken over the whole batch: take them within each group": (
            rewards.double().view(1, -1),
            lambda a: a.reshape(-1),
        ),
    }
    centres = {
        "": lambda g: g - g.mean(1, keepdim=True),
        "the rewards are not centred: subtract the group's mean": lambda g: g,
        "the mean is the batch's: subtract each group's own mean": lambda g: g - g.mean(),
        "the sign is flipped: a reward above the mean is a positive advantage": lambda g: g.mean(1, keepdim=True) - g,
        "the baseline leaves the response itself out (as in RLOO): subtract the mean of all G": lambda g: (
            (g - g.mean(1, keepdim=True)) * G / (G - 1)
        ),
        "the median is subtracted: subtract the mean": lambda g: g - g.median(1, keepdim=True).values,
        "the group's lowest reward is subtracted: subtract the mean": lambda g: g - g.amin(1, keepdim=True),
        "the group's highest reward is subtracted: subtract the mean": lambda g: g - g.amax(1, keepdim=True),
    }
    std = lambda g: g.std(1, correction=0, keepdim=True)  # noqa: E731
    mean_only = lambda g: torch.ones_like(g[:, :1])  # noqa: E731
    if normalize_std:
        scales = {
            "": lambda g: std(g) + eps,
            "this is the sample standard deviation (divides by G - 1); the lab uses the population one "
            "(divides by G)": lambda g: g.std(1, keepdim=True) + eps,
            "this divides by the variance: divide by its square root, the standard deviation": lambda g: (
                std(g) ** 2 + eps
            ),
            "this divides by the sample variance: divide by the population standard deviation": lambda g: (
                g.var(1, keepdim=True) + eps
            ),
            "the std is the batch's: divide by each group's own": lambda g: g.std(correction=0) + eps,
            "the std is the batch's sample std: divide by each group's own population std": lambda g: g.std() + eps,
            "the advantages are not divided by the standard deviation": mean_only,
            "this divides by the mean absolute deviation: divide by the standard deviation": lambda g: (
                (g - g.mean(1, keepdim=True)).abs().mean(1, keepdim=True) + eps
            ),
            "this divides by the range (max - min): divide by the standard deviation": lambda g: (
                g.amax(1, keepdim=True) - g.amin(1, keepdim=True) + eps
            ),
            "this divides by the largest reward: divide by the standard deviation": lambda g: (
                g.amax(1, keepdim=True) + eps
            ),
            "this divides by the largest advantage: divide by the standard deviation": lambda g: (
                (g - g.mean(1, keepdim=True)).abs().amax(1, keepdim=True) + eps
            ),
            "this divides by the root of the sum of squares, not of their mean: the std has a mean under the "
            "root": lambda g: std(g) * G**0.5 + eps,
            "only the sign of the advantage is left: divide by the standard deviation": lambda g: (
                (g - g.mean(1, keepdim=True)).abs() + 1e-12
            ),
            "this multiplies by the standard deviation: divide by it": lambda g: 1 / (std(g) + eps),
        }
    else:
        scales = {
            "": mean_only,
            "normalize_std is False, yet the advantages are divided by the standard deviation": lambda g: std(g) + eps,
            "normalize_std is False, yet the advantages are divided by the sample standard deviation": lambda g: (
                g.std(1, keepdim=True) + eps
            ),
            "the advantages are divided by G: subtracting the mean is all": lambda g: torch.full_like(g[:, :1], G),
        }
    found = {}
    for names in few_deviations(groupings, centres, scales):
        groups, flatten = groupings[names[0]]
        found[named(names)] = flatten(centres[names[1]](groups) / scales[names[2]](groups))
    return found


def few_deviations(*choices: dict):
    """All ways to choose one key of each dict with one or two that are not the right one (""), fewest first."""
    for count in (1, 2):
        for places in itertools.combinations(range(len(choices)), count):
            for wrong in itertools.product(*(list(choices[place])[1:] for place in places)):
                chosen = dict(zip(places, wrong, strict=True))
                yield tuple(chosen.get(place, "") for place in range(len(choices)))


def named(names: tuple) -> str:
    return "; and ".join(filter(None, names))


def check_advantages(lab, rewards: Tensor, G: int, normalize_std: bool = True):
    got = lab.call(2, rewards, G, normalize_std)
    expected = advantages_as_defined(rewards, G, normalize_std)
    if isinstance(got, Tensor) and got.isnan().any():
        lab.fail(2, f"the advantages hold NaN for the rewards {lab.rounded(rewards.view(-1, G))}")
    got = lab.tensor(2, "the advantages", got, (len(rewards),))
    # 0.002: eps may stand beside the std, under it or in a clamp; all of these are right.
    given = f"rewards {lab.rounded(rewards.view(-1, G))}, G = {G}, normalize_std = {normalize_std}"
    mistakes = wrong_advantages(rewards, G, normalize_std)
    lab.compare(2, "the advantage", got, expected, mistakes, given, tolerance=2e-3)


def check_worked_advantages(lab):
    # (1, 0, 0, 1): mean 1/2, every distance 1/2, population std 1/2          -> +1 -1 -1 +1
    # (1, 0, 0, 0): mean 1/4, variance (9 + 1 + 1 + 1) / 16 / 4 = 3/16, std 0.433
    #               0.75 / 0.433 = 1.732, -0.25 / 0.433 = -0.577               -> +1.732 -0.577 -0.577 -0.577
    check_advantages(lab, torch.tensor([1.0, 0, 0, 1, 1, 0, 0, 0]), 4)


@pytest.mark.points(4)
def test_task2_worked_example(lab):
    check_worked_advantages(lab)


@pytest.mark.points(4)
def test_task2_fresh_groups(lab, draw):
    for groups, G in ((6, 3), (4, 8), (5, 5)):
        rewards = torch.linspace(-1, 1, G) + draw(-0.3, 0.3, groups, G)  # no group is close to having no spread
        rewards = rewards[:, draw(0, 1, G).argsort()]
        # Unequal levels and spreads, so that the batch's mean and std are nobody's.
        check_advantages(lab, (rewards * draw(0.5, 3, groups, 1) + draw(-1, 1, groups, 1)).flatten(), G)
    right = (draw(0, 1, 12, 6) < 0.5).float()
    right[:, 0], right[:, 1] = 1.0, 0.0
    check_advantages(lab, right.flatten(), 6)  # rewards as the verifier gives them
    # A group of little spread, std 0.02: std + eps = 0.0201 and sqrt(var + eps^2) = 0.02 hardly change it, but
    # sqrt(var + eps) = sqrt(0.0004 + 0.0001) = 0.0224 does.
    small = torch.tensor([0.52, 0.48, 0.52, 0.48])
    got = lab.tensor(2, "the advantages", lab.call(2, small, 4), (4,))
    mistakes = {"eps is added to the variance, under the root: add it to the std": (small - 0.5).double() / 0.0005**0.5}
    lab.compare(2, "the advantage", got, (small - 0.5).double() / 0.02, mistakes, lab.rounded(small), tolerance=0.01)


@pytest.mark.points(3)
def test_task2_mean_only(lab, draw):
    # Dr. GRPO: (1, 0, 0, 0) has the mean 1/4  -> 0.75 -0.25 -0.25 -0.25
    check_advantages(lab, torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 0]), 4, normalize_std=False)
    check_advantages(lab, (draw(0, 1, 5, 4) * draw(0.5, 3, 5, 1) + draw(-1, 1, 5, 1)).flatten(), 4, normalize_std=False)


@pytest.mark.points(4)
def test_task2_group_without_signal_gets_zero(lab):
    for normalize_std in (True, False):
        # Groups of 8: all wrong, all right, all 0.5, and one with signal.
        rewards = torch.tensor([0.0] * 8 + [1.0] * 8 + [0.5] * 8 + [1.0, 0, 0, 0, 0, 0, 0, 1])
        got = lab.call(2, rewards, 8, normalize_std)
        if isinstance(got, Tensor) and got.isnan().any():
            lab.fail(2, "a group whose rewards are all equal gives NaN (0 / 0): the eps under the division is missing")
        got = lab.tensor(2, "the advantages", got, (32,))
        if not (got[:24] == 0).all():
            lab.fail(
                2,
                "a group whose rewards are all equal must give exactly 0: no response was better than another"
                f"\n  got       {lab.rounded(got[:24].view(3, 8))}\n  for       groups of eight 0, eight 1, eight 0.5",
            )
        if got[24:].abs().min() == 0:
            lab.fail(2, "a group with signal gives advantages of 0, because another group has none")
        # Eight times 0.7: in float32 their mean is 0.70000005. Divided by (0 + 1e-8), that rounding would become an
        # advantage of -6; the default eps of 1e-4 keeps it below 0.001, which is as good as 0.
        got = lab.tensor(2, "the advantages", lab.call(2, torch.full((8,), 0.7), 8, normalize_std), (8,))
        if got.abs().max() > 0.01:
            lab.fail(
                2,
                "the rounding error of the mean became an advantage: the eps in the division is missing or too small"
                f"\n  got       {lab.rounded(got)}\n  expected  0 for eight rewards of 0.7",
            )


# Task 3: k3_kl ---------------------------------------------------------------------------------------------------


def k3_of(log_u: Tensor) -> Tensor:
    return log_u.exp() - log_u - 1


# Each gives what k3_kl would return, from log_u = ref_logp - logp.
WRONG_K3 = {
    "the ratio u is upside down: u = pi_ref / pi_theta": lambda log_u: k3_of(-log_u),
    "this is k1, -log(u): unbiased, but negative as often as not; k3 = u - log(u) - 1": lambda log_u: -log_u,
    "this is log(u), k1 with its sign flipped; k3 = u - log(u) - 1": lambda log_u: log_u,
    "this is k2, log(u)^2 / 2: biased; k3 = u - log(u) - 1": lambda log_u: log_u**2 / 2,
    "this is log(u)^2, twice k2: k3 = u - log(u) - 1": lambda log_u: log_u**2,
    "1 is added, not subtracted: k3 must be 0 where the policies agree": lambda log_u: log_u.exp() - log_u + 1,
    "the - 1 is missing: k3 must be 0 where the policies agree": lambda log_u: log_u.exp() - log_u,
    "this is u * log(u) - u + 1, the estimate for tokens of the reference": lambda log_u: (
        log_u.exp() * log_u - log_u.exp() + 1
    ),
    "the - log(u) is missing": lambda log_u: log_u.exp() - 1,
    "log(u) has the wrong sign: it is subtracted": lambda log_u: log_u.exp() + log_u - 1,
    "the sign of k3 is flipped": lambda log_u: -k3_of(log_u),
    "this is half of k3": lambda log_u: k3_of(log_u) / 2,
    "this is the absolute log-ratio: k3 = u - log(u) - 1": lambda log_u: log_u.abs(),
    "u itself carries no gradient: do not detach it": lambda log_u: log_u.detach().exp() - log_u - 1,
    "log(u) carries no gradient: do not detach it": lambda log_u: log_u.exp() - log_u.detach() - 1,
    "k3 is clamped: let large values through": lambda log_u: k3_of(log_u).clamp(max=1.0),
    **{
        f"the log-ratio is clamped to [-{bound}, {bound}]: let large values through": lambda log_u, bound=bound: k3_of(
            log_u.clamp(-bound, bound)
        )
        for bound in (0.1, 0.2, 0.5, 1, 2)
    },
    "the log-ratio is taken without its sign (abs)": lambda log_u: k3_of(log_u.abs()),
    "this is k3 divided by u": lambda log_u: k3_of(log_u) / log_u.exp(),
    "this is k3 weighted by u": lambda log_u: k3_of(log_u) * log_u.exp(),
}


def check_k3(lab, logp: Tensor, ref_logp: Tensor):
    """Values and gradient against u - log u - 1 and 1 - u, token by token in float64."""
    logp = logp.clone().requires_grad_()
    k3 = lab.call(3, logp, ref_logp)
    got = lab.tensor(3, "k3", k3, tuple(logp.shape))
    log_u = (ref_logp - logp.detach()).double()
    expected = torch.tensor([[math.exp(d) - d - 1 for d in row] for row in log_u.tolist()], dtype=torch.float64)
    given = f"ref_logp - logp = {lab.rounded(log_u)}"
    lab.compare(3, "k3", got, expected, {name: wrong(log_u) for name, wrong in WRONG_K3.items()}, given)
    if not k3.requires_grad:
        lab.fail(3, "k3 carries no gradient: something was detached, and the penalty could never pull the policy back")
    weights = torch.linspace(0.5, 1.5, log_u.numel()).view_as(log_u)  # unequal: a swapped or summed gradient shows
    (gradient,) = torch.autograd.grad((k3 * weights).sum(), logp, allow_unused=True)
    if gradient is None:
        lab.fail(3, "k3 carries no gradient towards logp: do not detach it")
    mistakes = {}
    for name, wrong in WRONG_K3.items():
        leaf = (ref_logp - logp.detach()).double().requires_grad_()
        mistakes[name] = -torch.autograd.grad((wrong(leaf) * weights).sum(), leaf)[0]
    lab.compare(3, "the gradient of k3", gradient / weights, (1 - log_u.exp()), mistakes, given)


def check_worked_k3(lab):
    # logp = log 0.5 and ref_logp = log 0.25: u = 1/2, k3 = 0.5 + 0.6931 - 1 = 0.1931, gradient 1 - u = 0.5.
    # logp = log 0.5 and ref_logp = log 0.5:  u = 1,   k3 = 0, gradient 0.
    # ref_logp - logp = +1: u = 2.7183, k3 = 0.7183; ref_logp - logp = -1: u = 0.3679, k3 = 0.3679.
    logp = torch.tensor([[0.5, 0.5], [0.25, 0.5]]).log()
    ref_logp = torch.tensor([[0.25, 0.5], [0.25 * math.e, 0.5 / math.e]]).log()
    check_k3(lab, logp, ref_logp)


@pytest.mark.points(4)
def test_task3_worked_example(lab):
    check_worked_k3(lab)


@pytest.mark.points(6)
def test_task3_fresh_values_and_gradient(lab, draw):
    # Log-ratios between -2.5 and 2.5: near 0, k3, its reverse and k2 all agree, and a test there is blind.
    ref_logp = draw(-6, -3, 5, 3)
    check_k3(lab, ref_logp - draw(0.5, 2.5, 5, 3) * torch.tensor([[1.0], [-1], [1], [-1], [1]]), ref_logp)


@pytest.mark.points(5)
def test_task3_is_an_unbiased_estimate_of_the_kl(lab, draw):
    """The mean of k3 over tokens drawn from pi_theta against the exact sum over the vocabulary of p log(p / q)."""
    log_p, log_q = draw(-1.5, 1.5, 2, 14).log_softmax(dim=-1).double()
    tokens = torch.multinomial(log_p.exp(), 200_000, True, generator=torch.Generator().manual_seed(SEED)).view(-1, 4)
    logp, ref_logp = log_p[tokens], log_q[tokens]
    got = lab.tensor(3, "k3", lab.call(3, logp.float(), ref_logp.float()), tuple(tokens.shape))
    exact = (log_p.exp() * (log_p - log_q)).sum()
    standard_error = got.std() / math.sqrt(got.numel())
    if (got.mean() - exact).abs() > 6 * standard_error + 1e-5:
        mistakes = {name: wrong(ref_logp - logp).mean() for name, wrong in WRONG_K3.items()}
        what = "the mean of k3 over 200,000 tokens of pi_theta, which must be the KL divergence,"
        lab.compare(3, what, got.mean(), exact, mistakes, tolerance=1e-6)


# Task 4: grpo_loss -----------------------------------------------------------------------------------------------


def batch_of(logp, old_logp, ref_logp, advantages, mask, clip=0.2, beta=0.04) -> SimpleNamespace:
    return SimpleNamespace(
        logp=logp, old_logp=old_logp, ref_logp=ref_logp, advantages=advantages, mask=mask, clip=clip, beta=beta
    )


def fresh_batch(draw, lengths: list[int], Tr: int, clip: float = 0.2, beta: float = 0.04) -> SimpleNamespace:
    """Unequal lengths, advantages of both signs and unequal size, ratios on both sides of both ends of the clip."""
    N = len(lengths)
    mask = (torch.arange(Tr) < torch.tensor(lengths)[:, None]).float()
    logp = draw(-3, -0.5, N, Tr)
    advantages = draw(0.3, 2, N) * torch.tensor([1.0, -1.0] * N)[:N]
    old_logp = logp - draw(-0.9, 0.9, N, Tr)
    ref_logp = logp + draw(-1.2, 1.2, N, Tr)
    # The padding's log-probs mean nothing: make them large, but finite (infinity * 0 is NaN).
    for values, poison in ((logp, -2.0), (old_logp, -7.0), (ref_logp, 3.0)):
        values[mask == 0] = poison
    return batch_of(logp, old_logp, ref_logp, advantages, mask, clip, beta)


def loss_as_defined(batch: SimpleNamespace) -> tuple[Tensor, Tensor]:
    """(loss, gradient with respect to logp) in plain loops: response by response, token by token."""
    N, Tr = batch.logp.shape
    loss, gradient = 0.0, torch.zeros(N, Tr, dtype=torch.float64)
    for i in range(N):
        A, length = batch.advantages[i].item(), int(batch.mask[i].sum())
        for t in range(Tr):
            if not batch.mask[i, t]:
                continue
            ratio = math.exp(batch.logp[i, t].item() - batch.old_logp[i, t].item())
            u = math.exp(batch.ref_logp[i, t].item() - batch.logp[i, t].item())
            clipped = min(max(ratio, 1 - batch.clip), 1 + batch.clip)
            surrogate = min(ratio * A, clipped * A)
            # d ratio / d logp = ratio; a clipped token has no slope; d k3 / d logp = 1 - u.
            slope = ratio * A if ratio * A <= clipped * A else 0.0
            loss -= (surrogate - batch.beta * (u - math.log(u) - 1)) / length / N
            gradient[i, t] = -(slope - batch.beta * (1 - u)) / length / N
    return torch.tensor(loss, dtype=torch.float64), gradient


def sequence_ratio(b) -> Tensor:
    return ((b.logp - b.old_logp) * b.mask).sum(1, keepdim=True).exp().expand_as(b.logp)


# One choice for each part of the loss; "" is the right one. Any one or two wrong choices together can be named.
RATIOS = {
    "": lambda b: (b.logp - b.old_logp).exp(),
    "old and new are swapped in the ratio: it is exp(logp - old_logp)": lambda b: (b.old_logp - b.logp).exp(),
    "the ratio is one number for the whole response (sequence level): take it token by token": sequence_ratio,
    "the ratio is one number for the whole response, the geometric mean over its tokens (as in GSPO): take it "
    "token by token": lambda b: (
        (((b.logp - b.old_logp) * b.mask).sum(1, keepdim=True) / b.mask.sum(1, keepdim=True)).exp().expand_as(b.logp)
    ),
    "the exp of the log-ratio is missing": lambda b: b.logp - b.old_logp,
    "the ratio is logp / old_logp: dividing probabilities means subtracting their logs": lambda b: b.logp / b.old_logp,
    "the ratio is taken against the reference: it is against old_logp": lambda b: (b.logp - b.ref_logp).exp(),
    "the ratio is the new probability alone: divide by the old one, exp(logp - old_logp)": lambda b: b.logp.exp(),
    "the mask is applied to the log-ratio, before the exp: padding then counts as ratio 1": lambda b: (
        (b.logp - b.old_logp) * b.mask
    ).exp(),
    "the ratio carries no gradient: do not detach logp": lambda b: (b.logp - b.old_logp).exp().detach(),
    "old_logp is not used, so the ratio is always 1: the frozen old_logp belongs in it": lambda b: (
        b.logp - b.logp.detach()
    ).exp(),
    "the ratio is missing: this is the plain policy gradient, logp * A": lambda b: b.logp,
}
SURROGATES = {
    "": lambda r, A, b: torch.minimum(r * A, r.clamp(1 - b.clip, 1 + b.clip) * A),
    "max is taken for min: the surrogate is the smaller of the two terms": lambda r, A, b: torch.maximum(
        r * A, r.clamp(1 - b.clip, 1 + b.clip) * A
    ),
    "only the clipped term is there: take the minimum with the unclipped one": lambda r, A, b: (
        r.clamp(1 - b.clip, 1 + b.clip) * A
    ),
    "nothing is clipped: take the minimum with the clipped term": lambda r, A, b: r * A,
    "the clip is in log space (exp(-clip) to exp(clip)): clip the ratio itself": lambda r, A, b: torch.minimum(
        r * A, r.clamp(math.exp(-b.clip), math.exp(b.clip)) * A
    ),
    "the clip works for positive advantages only: it must bind for negative ones too": lambda r, A, b: torch.where(
        A > 0, torch.minimum(r, 0 * r + 1 + b.clip) * A, r * A
    ),
    "the clip works for negative advantages only: it must bind for positive ones too": lambda r, A, b: torch.where(
        A < 0, r.clamp(min=1 - b.clip) * A, r * A
    ),
    "the clip is wrong for negative advantages: take the minimum after multiplying by A": lambda r, A, b: (
        torch.minimum(r, r.clamp(1 - b.clip, 1 + b.clip)) * A
    ),
    "the larger ratio is taken before multiplying by A: take the minimum after it": lambda r, A, b: (
        torch.maximum(r, r.clamp(1 - b.clip, 1 + b.clip)) * A
    ),
    "clip is ignored, a fixed 0.2 stands in its place": lambda r, A, b: torch.minimum(r * A, r.clamp(0.8, 1.2) * A),
    "the lower end of the clip is 0, not 1 - clip": lambda r, A, b: torch.minimum(r * A, r.clamp(0, 1 + b.clip) * A),
    "the upper end of the clip is 1, not 1 + clip": lambda r, A, b: torch.minimum(r * A, r.clamp(1 - b.clip, 1) * A),
    "the clip reaches from -clip to clip: it is 1 - clip to 1 + clip": lambda r, A, b: torch.minimum(
        r * A, r.clamp(-b.clip, b.clip) * A
    ),
    "the clip reaches from 1 / (1 + clip) to 1 + clip: its lower end is 1 - clip": lambda r, A, b: torch.minimum(
        r * A, r.clamp(1 / (1 + b.clip), 1 + b.clip) * A
    ),
    "the bounds of the clip are swapped: from 1 - clip to 1 + clip": lambda r, A, b: torch.minimum(
        r * A, r.clamp(1 + b.clip, 1 - b.clip) * A
    ),
    "the upper end of the clip is raised (clip-higher, as in DAPO): it is 1 + clip": lambda r, A, b: torch.minimum(
        r * A, r.clamp(1 - b.clip, 1 + 1.4 * b.clip) * A
    ),
    "the two terms are averaged: take the smaller": lambda r, A, b: (r + r.clamp(1 - b.clip, 1 + b.clip)) * A / 2,
    "the two terms are added: take the smaller": lambda r, A, b: (r + r.clamp(1 - b.clip, 1 + b.clip)) * A,
    "negative advantages have a second clip (dual clip): the lab has none": lambda r, A, b: torch.where(
        A < 0,
        torch.maximum(torch.minimum(r * A, r.clamp(1 - b.clip, 1 + b.clip) * A), 2 * A),
        torch.minimum(r * A, r.clamp(1 - b.clip, 1 + b.clip) * A),
    ),
}
ADVANTAGES = {
    "": lambda b: b.advantages[:, None],
    "the advantages are broadcast over the tokens, not over the rows: make them [N, 1]": lambda b: (
        b.advantages[None, :] if b.logp.shape[1] in (1, len(b.logp)) else None
    ),
    "the advantages are not used": lambda b: torch.ones_like(b.advantages)[:, None],
    "the absolute advantage is used: its sign says whether to go up or down": lambda b: b.advantages.abs()[:, None],
    "only the sign of the advantage is used": lambda b: b.advantages.sign()[:, None],
    "the advantages are tiled token by token: every token of response i gets advantages[i]": lambda b: (
        b.advantages.repeat(b.logp.shape[1]).view(b.logp.shape)
    ),
    "the advantages are normalised again, over the batch: use them as they come": lambda b: (
        (b.advantages - b.advantages.mean()) / (b.advantages.std(correction=0) + 1e-8)
    )[:, None],
    "the advantages are normalised again, over the batch and with the sample std: use them as they come": lambda b: (
        ((b.advantages - b.advantages.mean()) / (b.advantages.std() + 1e-8))[:, None] if len(b.advantages) > 1 else None
    ),
    "one mean advantage is used for all responses": lambda b: b.advantages.mean().expand(len(b.logp), 1),
}
PENALTIES = {
    "": lambda b: b.beta * k3_of(b.ref_logp - b.logp),
    "the KL penalty has the wrong sign: the objective is surrogate - beta * k3": lambda b: (
        -b.beta * k3_of(b.ref_logp - b.logp)
    ),
    "the KL penalty is missing: subtract beta * k3": lambda b: 0 * b.logp,
    "beta is missing: the penalty is beta * k3": lambda b: k3_of(b.ref_logp - b.logp),
    "beta is ignored, a fixed 0.04 stands in its place": lambda b: 0.04 * k3_of(b.ref_logp - b.logp),
    "beta is applied twice": lambda b: b.beta**2 * k3_of(b.ref_logp - b.logp),
    "the KL penalty is reversed: u = pi_ref / pi_theta": lambda b: b.beta * k3_of(b.logp - b.ref_logp),
    "the KL penalty is k1: use k3": lambda b: b.beta * (b.logp - b.ref_logp),
    "the KL penalty is k2: use k3": lambda b: b.beta * (b.logp - b.ref_logp) ** 2 / 2,
    "the KL penalty is taken against old_logp: it is against ref_logp": lambda b: b.beta * k3_of(b.old_logp - b.logp),
    "the KL penalty compares old_logp with ref_logp: it must move with logp": lambda b: (
        b.beta * k3_of(b.ref_logp - b.old_logp)
    ),
    "the KL penalty carries no gradient: do not detach it": lambda b: b.beta * k3_of(b.ref_logp - b.logp).detach(),
    "the KL penalty is multiplied by the ratio (as newer TRL does): the lab's is plain k3": lambda b: (
        b.beta * k3_of(b.ref_logp - b.logp) * (b.logp - b.old_logp).exp()
    ),
}
AVERAGES = {
    "": lambda x, b: ((x * b.mask).sum(1) / b.mask.sum(1)).mean(),
    "this is the average over all tokens of the batch; average each response over its own tokens first": lambda x, b: (
        (x * b.mask).sum() / b.mask.sum()
    ),
    "each response is divided by Tr, the padded length: divide by its own number of tokens": lambda x, b: (
        (x * b.mask).sum(1) / x.shape[1]
    ).mean(),
    "the mask is ignored: padding counts as tokens": lambda x, b: x.mean(),
    "the padding is summed too, before dividing by the length: multiply by the mask": lambda x, b: (
        x.sum(1) / b.mask.sum(1)
    ).mean(),
    "a response's tokens are summed: divide by their number": lambda x, b: (x * b.mask).sum(1).mean(),
    "the responses are summed: average over them": lambda x, b: ((x * b.mask).sum(1) / b.mask.sum(1)).sum(),
    "everything is summed: average over a response's tokens, then over responses": lambda x, b: (x * b.mask).sum(),
    "all is divided by the length of the longest response: divide each by its own": lambda x, b: (
        (x * b.mask).sum(1) / b.mask.sum(1).max()
    ).mean(),
    "all is divided by the mean length: divide each response by its own": lambda x, b: (
        (x * b.mask).sum(1) / b.mask.sum(1).mean()
    ).mean(),
    "the average runs over responses first, token by token: it runs over a response's own tokens first": lambda x, b: (
        (x * b.mask).sum(0) / b.mask.sum(0).clamp(min=1)
    ).mean(),
    "the surrogate counts the padding: mask it like the KL penalty": lambda x, b: (
        (b.surrogate - b.penalty * b.mask).sum(1) / b.mask.sum(1)
    ).mean(),
    "the KL penalty is summed over a response's tokens: average it like the surrogate": lambda x, b: (
        ((b.surrogate * b.mask).sum(1) / b.mask.sum(1)).mean() - (b.penalty * b.mask).sum(1).mean()
    ),
    "the KL penalty counts the padding: mask it like the surrogate": lambda x, b: (
        (b.surrogate * b.mask - b.penalty).sum(1) / b.mask.sum(1)
    ).mean(),
    "the KL penalty is averaged over all N * Tr places: average it like the surrogate": lambda x, b: (
        ((b.surrogate * b.mask).sum(1) / b.mask.sum(1)).mean() - b.penalty.mean()
    ),
    "the KL penalty is averaged over all tokens of the batch: average it like the surrogate": lambda x, b: (
        ((b.surrogate * b.mask).sum(1) / b.mask.sum(1)).mean() - (b.penalty * b.mask).sum() / b.mask.sum()
    ),
    "the length is one too large": lambda x, b: ((x * b.mask).sum(1) / (b.mask.sum(1) + 1)).mean(),
    "the end-of-sequence is left out: the mask's last 1 counts too": lambda x, b: (
        ((x * b.mask)[:, :-1] * b.mask[:, 1:]).sum(1) / b.mask[:, 1:].sum(1).clamp(min=1)
    ).mean(),
    "the first token of each response is left out": lambda x, b: (
        (x * b.mask)[:, 1:].sum(1) / b.mask[:, 1:].sum(1).clamp(min=1)
    ).mean(),
    "the average is taken twice: the mean over responses is divided by N again": lambda x, b: (
        ((x * b.mask).sum(1) / b.mask.sum(1)).mean() / len(x)
    ),
}
SIGNS = {
    "": -1.0,
    "the loss is not negated: optimizers minimise, and the objective is to be maximised": 1.0,
}
LOSS_PARTS = (RATIOS, SURROGATES, ADVANTAGES, PENALTIES, AVERAGES, SIGNS)


def loss_with(names: tuple, batch: SimpleNamespace) -> tuple[Tensor, Tensor] | None:
    """(loss, gradient) with the named choice for each part; None where that choice makes no sense."""
    leaf = batch.logp.detach().double().requires_grad_()
    b = SimpleNamespace(**{name: v.double() if isinstance(v, Tensor) else v for name, v in vars(batch).items()})
    b.logp = leaf
    ratio, surrogate, advantages, penalty, average, sign = (
        part[name] for part, name in zip(LOSS_PARTS, names, strict=True)
    )
    if (A := advantages(b)) is None:
        return None
    b.surrogate, b.penalty = surrogate(ratio(b), A, b), penalty(b)
    loss = sign * average(b.surrogate - b.penalty, b)
    gradient = torch.autograd.grad(loss, leaf, allow_unused=True)[0] if loss.requires_grad else None
    return loss.detach(), torch.zeros_like(leaf) if gradient is None else gradient


def name_of_loss(lab, loss: Tensor, gradient: Tensor, expected: tuple[Tensor, Tensor], batch) -> str | None:
    """The name of the mistakes, at most two, that give this loss and this gradient."""
    for names in few_deviations(*LOSS_PARTS):
        wrong = loss_with(names, batch)
        if wrong is None or (lab.close(wrong[0], expected[0], 1e-4) and lab.close(wrong[1], expected[1], 1e-4)):
            continue
        if lab.close(loss, wrong[0], 1e-4) and lab.close(gradient, wrong[1], 1e-4):
            return named(names)
    return None


def check_loss(lab, batch: SimpleNamespace):
    """The student's loss and its gradient against the definition."""
    logp = batch.logp.clone().requires_grad_()
    returned = lab.call(4, logp, batch.old_logp, batch.ref_logp, batch.advantages, batch.mask, batch.clip, batch.beta)
    loss, _ = loss_and_metrics(lab, returned)
    expected = loss_as_defined(batch)
    got = lab.tensor(4, "the loss", loss, ())
    if not loss.requires_grad:
        lab.fail(4, "the loss carries no gradient: something was detached, or turned into a number")
    (gradient,) = torch.autograd.grad(loss, logp, allow_unused=True)
    gradient = torch.zeros_like(logp) if gradient is None else gradient.double()
    if lab.close(got, expected[0], 1e-4) and lab.close(gradient, expected[1], 1e-4):
        return
    if got == 0 and not gradient.any():
        lab.fail(4, "the loss and its gradient are 0: is the mask the wrong way round, or all set to zero?")
    name = name_of_loss(lab, got, gradient, expected, batch)
    values = f"\n  loss: got {got:.5f}, expected {expected[0]:.5f}"
    values += f"\n  gradient with respect to logp: got {lab.rounded(gradient)}\n  expected {lab.rounded(expected[1])}"
    values += f"\n  clip {batch.clip}, beta {batch.beta}, advantages {lab.rounded(batch.advantages)}"
    if name:
        lab.fail(4, name + values)
    if not gradient.any():
        lab.fail(4, f"the gradient of the loss is zero: logp must reach the loss undetached{values}")
    if not lab.close(got, expected[0], 1e-4):
        scale = (got / expected[0]).item()
        if lab.close(gradient, scale * expected[1], 1e-4):
            lab.fail(4, f"the loss and its gradient are scaled by {scale:.4g}: take that factor out{values}")
        lab.fail(4, f"the loss is wrong{lab.first_difference(gradient, expected[1], 1e-4)} of its gradient{values}")
    lab.fail(4, f"the loss is right, its gradient is not{lab.first_difference(gradient, expected[1], 1e-4)}{values}")


def loss_and_metrics(lab, returned) -> tuple[Tensor, dict]:
    if not isinstance(returned, tuple | list) or len(returned) != 2 or not isinstance(returned[1], dict):
        lab.fail(4, f"it must return (loss, metrics), a scalar and a dict; it returned a {type(returned).__name__}")
    return returned


def check_worked_loss(lab):
    # Eight responses of one token, clip 0.2, beta 0. The ratios 0.5 0.9 1.1 1.5, first with A = +1, then with A = -1:
    #   A = +1: min(0.5, 0.8) = 0.5    0.9    1.1    min(1.5, 1.2) = 1.2
    #   A = -1: min(-0.5, -0.8) = -0.8  -0.9  -1.1    min(-1.5, -1.2) = -1.5
    # Sum 3.7 - 4.3 = -0.6, so the loss is 0.6 / 8 = 0.075. Clipped, hence without gradient: 1.5 with A = +1 and
    # 0.5 with A = -1. Elsewhere the gradient is -ratio * A / 8.
    ratios = torch.tensor([[0.5], [0.9], [1.1], [1.5]] * 2)
    advantages = torch.tensor([1.0] * 4 + [-1.0] * 4)
    logp = torch.full((8, 1), -1.0)
    check_loss(lab, batch_of(logp, logp - ratios.log(), logp.clone(), advantages, torch.ones(8, 1), beta=0.0))


@pytest.mark.points(5)
def test_task4_clip_worked_example(lab):
    lab.stand_in(4, EARLIER[4])
    check_worked_loss(lab)


@pytest.mark.points(4)
def test_task4_kl_term_worked_example(lab):
    # One response of two tokens, A = 0, beta 0.5, u = 1/2 and u = 2:
    #   k3 = 0.5 + 0.6931 - 1 = 0.1931 and 2 - 0.6931 - 1 = 0.3069; loss = 0.5 * (0.1931 + 0.3069) / 2 = 0.125
    #   gradient = beta * (1 - u) / 2 = 0.125 and -0.25
    lab.stand_in(4, EARLIER[4])
    logp = torch.tensor([[0.4, 0.3]]).log()
    ref_logp = torch.tensor([[0.2, 0.6]]).log()
    check_loss(lab, batch_of(logp, logp.clone(), ref_logp, torch.zeros(1), torch.ones(1, 2), beta=0.5))


@pytest.mark.points(8)
def test_task4_loss_and_gradient_on_fresh_batches(lab, draw):
    lab.stand_in(4, EARLIER[4])
    check_loss(lab, fresh_batch(draw, [5, 5, 5, 5, 5, 5], Tr=5, beta=0.0))  # no padding, no penalty
    check_loss(lab, fresh_batch(draw, [2, 4, 1, 3, 4, 2], Tr=5, clip=0.3, beta=0.1))
    check_loss(lab, fresh_batch(draw, [3, 1, 4, 2], Tr=4, clip=0.1, beta=0.5))  # N = Tr: a wrong broadcast fits
    check_loss(lab, fresh_batch(draw, [4, 2, 3], Tr=4, clip=1000.0, beta=0.0))  # a clip that never binds


@pytest.mark.points(4)
def test_task4_group_without_signal_gives_no_gradient(lab, sft):
    """Through the real model: advantages of 0, at the reference (where k3 has no slope), must not move a weight."""
    lab.stand_in(4, EARLIER[4])
    model = copy.deepcopy(sft).requires_grad_()
    prompts = some_prompts(2).repeat_interleave(4, dim=0)
    responses = tinylm.answers(prompts)
    logp = tinylm.token_logp(model, prompts, responses)
    constant = logp.detach()
    mask = tinylm.response_mask(responses)
    for advantages, moved in ((torch.zeros(8), False), (torch.linspace(-1, 2, 8), True)):
        loss, _ = loss_and_metrics(lab, lab.call(4, logp, constant, constant, advantages, mask))
        if not isinstance(loss, Tensor) or not loss.requires_grad:
            lab.fail(4, "the loss carries no gradient: something was detached, or turned into a number")
        gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, retain_graph=True)
        largest = max(0.0 if g is None else g.abs().max().item() for g in gradients)
        if not moved and largest > 1e-7:
            lab.fail(
                4,
                "a batch without signal (all advantages 0, policy = reference) must give zero gradient"
                f"\n  the largest gradient of a weight is {largest:.2g}",
            )
        if moved and largest < 1e-6:
            lab.fail(4, "a batch with signal gives zero gradient: logp must reach the loss undetached")


@pytest.mark.points(4)
def test_task4_metrics(lab, draw):
    lab.stand_in(4, EARLIER[4])
    batch = fresh_batch(draw, [2, 4, 1, 3, 4, 2], Tr=5)
    logp = batch.logp.clone().requires_grad_()
    args = (logp, batch.old_logp, batch.ref_logp, batch.advantages, batch.mask, batch.clip, batch.beta)
    _, metrics = loss_and_metrics(lab, lab.call(4, *args))
    ratio = (batch.logp - batch.old_logp).exp().double()
    A, own = batch.advantages[:, None], batch.mask.bool()
    clipped = ratio.clamp(0.8, 1.2) * A < ratio * A
    outside = (ratio < 0.8) | (ratio > 1.2)
    k3 = k3_of((batch.ref_logp - batch.logp).double())
    per_response = lambda x: ((x.double() * own).sum(1) / own.sum(1)).mean()  # noqa: E731
    for key, values in (("clip_fraction", clipped.double()), ("kl", k3), ("ratio", ratio)):
        mistakes = {
            f"metrics[{key!r}] counts the padding: take the mean over own tokens": values.mean(),
            f"metrics[{key!r}] is a mean of each response's mean: take one mean over all own tokens": per_response(
                values
            ),
            f"metrics[{key!r}] is a sum: take the mean over own tokens": values[own].sum(),
            f"metrics[{key!r}] is multiplied by beta: it is the plain mean of k3": 0.04 * values[own].mean(),
        }
        if key == "clip_fraction":
            mistakes |= {
                "metrics['clip_fraction'] counts every ratio outside the interval: count those tokens whose clipped "
                "term is the smaller one, which lose their gradient": outside[own].double().mean(),
                "metrics['clip_fraction'] counts ties (<=): count those tokens whose clipped term is the smaller one": (
                    ratio.clamp(0.8, 1.2) * A <= ratio * A
                )[own]
                .double()
                .mean(),
                "metrics['clip_fraction'] is the share that is not clipped": 1 - clipped[own].double().mean(),
            }
        got = metric(lab, 4, metrics, key)
        lab.compare(4, f"metrics[{key!r}]", got, values[own].mean(), mistakes)


def metric(lab, task: int, metrics: dict, key: str) -> Tensor:
    """metrics[key] as a detached float64 scalar; a plain number will do as well."""
    if key not in metrics:
        lab.fail(task, f"metrics has no {key!r}; it has {sorted(map(str, metrics))}")
    value = metrics[key]
    if isinstance(value, Tensor) and value.requires_grad:
        lab.fail(task, f"metrics[{key!r}] keeps the graph alive: detach it")
    value = value if isinstance(value, Tensor) else torch.tensor(float(value))
    return lab.tensor(task, f"metrics[{key!r}]", value.double(), ())


# Task 5: grpo_step -----------------------------------------------------------------------------------------------

# The whole step is replayed from the samples that the student's function returned, once as it should be and, where
# that gives other weights, with each known mistake. One choice for each part, as in task 4.
OLD_LOGP = {
    "": "frozen",
    "old_logp is recomputed inside the inner loop, so the ratio is always 1: freeze it before the loop": "recomputed",
    "old_logp is taken after the first optimizer step: take it before any step": "late",
    "old_logp carries gradient, which cancels that of logp: compute it under torch.no_grad()": "with gradient",
    "ref_logp stands in for old_logp: old_logp comes from the policy that sampled": "reference",
}
REF_LOGP = {
    "": "reference",
    "the reference is the policy itself: ref_logp comes from ref_model": "policy",
    "ref_logp is recomputed from the policy at every inner step: it comes from ref_model, once": "moving policy",
    "old_logp and ref_logp are swapped": "swapped",
}
STEPS = {
    "": lambda n: n,
    "only one gradient step is taken: take config.inner_steps": lambda n: 1,
    "one gradient step too many is taken": lambda n: n + 1,
    "one gradient step is missing": lambda n: n - 1,
    "no step is taken: the weights do not change; call optimizer.step() after backward": lambda n: 0,
}
GRADIENTS = {
    "": "cleared",
    "the gradients add up over the inner steps: call optimizer.zero_grad() at each": "kept",
    "optimizer.step() stands before loss.backward(): it takes the gradient of the step before": "late",
    "the step goes up the loss (gradient ascent): the loss is negated already": "up",
    "the loss is scaled by 1 / inner_steps: each inner step takes the whole gradient": "shared",
    "the gradients of all inner steps are gathered for one optimizer step: step at each": "gathered",
}
TEMPERATURES = {  # the temperatures of logp, old_logp, ref_logp
    "": lambda T: (T, T, T),
    "config.temperature is missing in all log-probs": lambda T: (1, 1, 1),
    "config.temperature is missing in logp": lambda T: (1, T, T),
    "config.temperature is missing in old_logp": lambda T: (T, 1, T),
    "config.temperature is missing in ref_logp": lambda T: (T, T, 1),
    "config.temperature is missing in old_logp and ref_logp": lambda T: (T, 1, 1),
    "the logits are multiplied by the temperature: divide them": lambda T: (1 / T, 1 / T, 1 / T),
}
SETTINGS = {
    "": {},
    "config.std is ignored: the advantages are always divided by the std": {"std": True},
    "config.std is ignored: the advantages are never divided by the std": {"std": False},
    "config.std is used the wrong way round": {"std": "inverted"},
    "config.clip is ignored, and the default of 0.2 used": {"clip": 0.2},
    "config.clip is not used: nothing is clipped": {"clip": 1000.0},
    "config.beta is ignored, and the default of 0.04 used": {"beta": 0.04},
    "config.beta is not used: there is no KL penalty": {"beta": 0.0},
    "clip and beta are swapped": {"clip": "beta", "beta": "clip"},
}
SIGNALS = {
    "": lambda rewards, A, G: A,
    "the advantages are taken over P rows, not over G: pass config.G": lambda rewards, A, G: grouped(
        rewards, len(rewards) // G
    ),
    "the rewards are used as they are: task 2 makes advantages of them": lambda rewards, A, G: rewards,
    "the sign of the advantages is flipped: this makes right answers less likely": lambda rewards, A, G: -A,
    "the advantages are computed over the whole batch: pass config.G": lambda rewards, A, G: (
        (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-4)
    ),
}
MASKS = {"": lambda m: m, "the mask is not passed to the loss: padding counts": torch.ones_like}
LOSSES = {
    "": lambda ratio, A, b: SURROGATES[""](ratio, A, b) - PENALTIES[""](b),
    "this is REINFORCE, logp * A: the surrogate is the clipped ratio times A, from grpo_loss": lambda ratio, A, b: (
        b.logp * A - PENALTIES[""](b)
    ),
    "this is REINFORCE without a KL penalty: take the loss from grpo_loss": lambda ratio, A, b: b.logp * A,
}
STEP_PARTS = (OLD_LOGP, REF_LOGP, STEPS, GRADIENTS, TEMPERATURES, SETTINGS, SIGNALS, MASKS, LOSSES)


def replay(names: tuple, policy, reference, samples, config, lr: float) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """The weights after grpo_step with SGD on `samples`, with the named choices, and the metrics of each inner step."""
    old, ref, steps, gradients, temperatures, settings, signal, masking, objective = (
        part[name] for part, name in zip(STEP_PARTS, names, strict=True)
    )
    values = {"clip": config.clip, "beta": config.beta, "std": config.std}
    values |= {k: {"inverted": not config.std}.get(v, getattr(config, str(v), v)) for k, v in settings.items()}
    T_logp, T_old, T_ref = temperatures(config.temperature)
    model = copy.deepcopy(policy).requires_grad_()
    weights = list(model.parameters())
    at = (samples.prompts, samples.responses)
    A = grouped(samples.rewards, config.G, values["std"])
    batch = batch_of(None, None, None, signal(samples.rewards, A, config.G), masking(samples.mask.float()))
    batch.clip, batch.beta = values["clip"], values["beta"]
    with torch.no_grad():
        batch.old_logp = tinylm.token_logp(reference if old == "reference" else policy, *at, T_old)
        batch.ref_logp = tinylm.token_logp(policy if ref == "policy" else reference, *at, T_ref)
    if ref == "swapped":
        batch.old_logp, batch.ref_logp = batch.ref_logp, batch.old_logp
    history, total = [], [torch.zeros_like(weight) for weight in weights]
    last = steps(config.inner_steps) - 1
    for step in range(last + 1):
        batch.logp = tinylm.token_logp(model, *at, T_logp)
        if old == "with gradient":
            batch.old_logp = batch.logp
        elif old == "recomputed" or (old == "late" and step == 1):
            batch.old_logp = batch.logp.detach()
        if ref == "moving policy":
            batch.ref_logp = batch.logp.detach()
        ratio, A = RATIOS[""](batch), batch.advantages[:, None]
        loss = -AVERAGES[""](objective(ratio, A, batch), batch)
        gradient = torch.autograd.grad(loss, weights)
        own, clipped = batch.mask.bool(), ratio.clamp(1 - batch.clip, 1 + batch.clip) * A < ratio * A
        k3 = k3_of(batch.ref_logp - batch.logp)
        metrics = {"loss": loss, "ratio": ratio[own].mean(), "kl": k3[own].mean()}
        metrics["clip_fraction"] = clipped[own].double().mean()
        history.append({key: value.detach().double() for key, value in metrics.items()})
        if gradients in ("kept", "gathered"):
            total = [t + g for t, g in zip(total, gradient, strict=True)]
        applied = total if gradients in ("kept", "gathered", "late") else gradient
        factor = {"up": -1.0, "shared": 1.0 / config.inner_steps}.get(gradients, 1.0)
        if gradients != "gathered" or step == last:
            with torch.no_grad():
                for weight, slope in zip(weights, applied, strict=True):
                    weight.sub_(lr * factor * slope)
        if gradients == "late":
            total = gradient
    return flat(model), history


def grouped(rewards: Tensor, G: int, std: bool = True) -> Tensor:
    """The advantages as the reference computes them, eps included: over several steps even 1e-4 would show."""
    groups = rewards.float().view(-1, G)
    centred = groups - groups.mean(1, keepdim=True)
    return (centred / (groups.std(1, correction=0, keepdim=True) + 1e-4) if std else centred).flatten()


def flat(model) -> Tensor:
    """All weights of a model in one row."""
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


def shaken(sft: tinylm.TinyLM, seed: int, size: float = 0.02) -> tinylm.TinyLM:
    """A policy some way from the reference: the SFT model with noise on its weights."""
    model = copy.deepcopy(sft).requires_grad_()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(size * torch.randn(weight.shape, generator=generator))
    return model


def short_and_long_prompts(count: int) -> Tensor:
    """Sums below 100 and above in turn, so that responses of three and of four tokens stand side by side."""
    prompts = some_prompts(40 * count)
    is_short = tinylm.answers(prompts)[:, 2] == tinylm.EOS
    return torch.stack([prompts[is_short][:count], prompts[~is_short][:count]], dim=1).flatten(0, 1)[:count]


def configuration(lab, **changes):
    values = {"G": 4, "inner_steps": 1, "clip": 0.05, "beta": 0.5, "std": True, "temperature": 1.0, "lr": 0.1}
    return lab.grpo.GRPOConfig(**(values | changes))


@contextmanager
def counted(lab, owner, name: str):
    """The arguments of each call of owner.name within the block. Looked at only to name what went wrong."""
    calls, original = [], getattr(owner, name)
    lab.monkeypatch.setattr(owner, name, lambda *args, **kwargs: calls.append(args) or original(*args, **kwargs))
    yield calls
    lab.monkeypatch.setattr(owner, name, original)


def step(lab, policy, reference, optimizer, prompts, config, seed: int = SEED):
    """Call grpo_step, and see that it returns samples of the right size and a dict."""
    generator = torch.Generator().manual_seed(seed)
    returned = lab.call(5, policy, reference, optimizer, prompts, config, generator)
    if not isinstance(returned, tuple | list) or len(returned) != 2 or not isinstance(returned[1], dict):
        lab.fail(5, f"it must return (samples, metrics), a Samples and a dict; it returned a {type(returned).__name__}")
    samples, metrics = returned
    if not hasattr(samples, "responses") or not hasattr(samples, "rewards"):
        lab.fail(5, f"the first value it returns must be the Samples, not a {type(samples).__name__}")
    expected = tinylm.decode(prompts.repeat_interleave(config.G, dim=0))
    if len(samples.rewards) != len(expected):
        lab.fail(5, f"it sampled {len(samples.rewards)} responses, expected P * config.G = {len(expected)}")
    if tinylm.decode(samples.prompts) != expected:
        lab.fail(5, "the samples do not answer the prompts that were given, each config.G times in a row")
    return samples, metrics


def check_step(lab, sft, pairs: bool, **changes):
    """Take one step of SGD with the student's function, and compare the weights with a replay of the same samples."""
    config = configuration(lab, **changes)
    right = ("",) * len(STEP_PARTS)
    for seed in range(SEED, SEED + 20):
        policy, reference = shaken(sft, seed), copy.deepcopy(sft)
        before = copy.deepcopy(policy).requires_grad_(False)
        optimizer = torch.optim.SGD(policy.parameters(), lr=config.lr)
        with counted(lab, tinylm, "generate") as sampled, counted(lab, optimizer, "step") as stepped:
            samples, metrics = step(lab, policy, reference, optimizer, short_and_long_prompts(6), config, seed)
        expected, history = replay(right, before, reference, samples, config, config.lr)
        # Once in some hundred draws a token is so much likelier under the reference that k3's exp throws the policy far
        # off, where rounding decides what comes next. That says nothing about the student's function: draw again.
        if all(entry["kl"] < 0.3 and entry["loss"].isfinite() for entry in history):
            break
    got, length = flat(policy), (expected - flat(before)).norm()

    def agree(a: Tensor, b: Tensor) -> bool:
        return bool((a - b).norm() < 2e-3 * length)  # in parts of the step's own length

    for key in ("loss", "clip_fraction", "kl", "ratio"):
        metric(lab, 5, metrics, key)
    if agree(got, expected):
        return metrics, history
    moved = (got - flat(before)).norm() / length
    values = f"\n  the weights moved {moved:.3f} times as far as they should"
    values += f"\n  with inner_steps {config.inner_steps}, clip {config.clip}, beta {config.beta}, std {config.std}, "
    values += f"temperature {config.temperature}"
    if [len(prompts) for _, prompts, *_ in sampled].count(len(samples.rewards)) > 1:
        lab.fail(5, f"responses are sampled more than once: sample once, before the loop, and train on these{values}")
    if not stepped and (got - flat(before)).norm() > 0:
        lab.fail(5, f"the weights were changed without the optimizer given: call optimizer.step(){values}")
    if (got - flat(before)).norm() == 0:
        lab.fail(5, f"the weights did not change: call backward() and optimizer.step(), of the optimizer given{values}")
    for names in few_deviations(*STEP_PARTS):
        if not pairs and sum(map(bool, names)) > 1:
            break
        wrong, _ = replay(names, before, reference, samples, config, config.lr)
        if not agree(wrong, expected) and agree(got, wrong):
            lab.fail(5, named(names) + values)
    scale = ((got - flat(before)) @ (expected - flat(before)) / length**2).item()
    if scale and agree(got - flat(before), scale * (expected - flat(before))):
        lab.fail(
            5, f"the step has the right direction and {scale:.4g} times the right length: something scales it{values}"
        )
    lab.fail(5, f"the weights after the step are wrong{values}")


@pytest.mark.points(6)
def test_task5_one_inner_step_moves_the_weights_right(lab, sft):
    lab.stand_in(5, EARLIER[5])
    check_step(lab, sft, pairs=True)
    check_step(lab, sft, pairs=False, temperature=0.7, std=False)


@pytest.mark.points(7)
def test_task5_several_inner_steps_on_the_same_samples(lab, sft):
    lab.stand_in(5, EARLIER[5])
    # Without the std: the exact place of eps in it would grow over the steps, and every right place must be accepted.
    check_step(lab, sft, pairs=True, inner_steps=3, lr=0.03, std=False)
    check_step(lab, sft, pairs=False, inner_steps=2, lr=0.1, temperature=1.4, clip=0.03, beta=0.3, std=False)


@pytest.mark.points(4)
def test_task5_one_inner_step_never_clips(lab, sft):
    """With one inner step logp equals old_logp, so every ratio is exactly 1, iteration after iteration."""
    lab.stand_in(5, EARLIER[5])
    policy = copy.deepcopy(sft).requires_grad_()
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)  # a rate at which a late old_logp would show at once
    for iteration in range(3):
        config = configuration(lab, clip=0.01)
        _, metrics = step(lab, policy, copy.deepcopy(sft), optimizer, some_prompts(8), config, seed=iteration)
        ratio, clipped = metric(lab, 5, metrics, "ratio"), metric(lab, 5, metrics, "clip_fraction")
        if abs(ratio - 1) > 1e-5 or clipped > 0:
            lab.fail(
                5,
                "with one inner step the ratio must be 1 and nothing clipped: take old_logp before the optimizer step, "
                "with the same model, tokens and temperature as logp, and do not measure the metrics again after it"
                f"\n  got a mean ratio of {ratio:.5f} and a clip "
                f"fraction of {clipped:.3f} in iteration {iteration + 1}",
            )


@pytest.mark.points(3)
def test_task5_leaves_the_reference_alone(lab, sft):
    lab.stand_in(5, EARLIER[5])
    policy, reference = shaken(sft, SEED), copy.deepcopy(sft).requires_grad_()
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    before = flat(policy)
    step(lab, policy, reference, optimizer, some_prompts(4), configuration(lab, inner_steps=1))
    if not torch.equal(flat(reference), flat(sft)):
        lab.fail(5, "the reference was trained: its weights must never change")
    if any(weight.grad is not None for weight in reference.parameters()):
        lab.fail(5, "ref_logp carries gradient into the reference: compute it under torch.no_grad()")
    if torch.equal(flat(policy), before):
        lab.fail(5, "the policy did not change: call loss.backward() and then optimizer.step()")


@pytest.mark.points(3)
def test_task5_samples_the_policy_with_the_generator(lab, sft):
    lab.stand_in(5, EARLIER[5])

    def responses(seed: int) -> Tensor:
        policy = shaken(sft, SEED)
        optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
        torch.manual_seed(SEED)  # of the global generator, which must not matter
        # A reference that never learnt anything: its samples would be random characters.
        return step(lab, policy, tinylm.TinyLM(), optimizer, some_prompts(8), configuration(lab), seed)[0].responses

    policy = copy.deepcopy(sft).requires_grad_()
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
    samples, _ = step(lab, policy, sft, optimizer, some_prompts(64), configuration(lab, temperature=0.5))
    check_temperature(lab, 5, sft, samples, 0.5)
    first, again, other = responses(SEED), responses(SEED), responses(SEED + 1)
    ended = (first == tinylm.EOS).any(dim=1).float().mean()
    if ended < 0.8:  # of the policy's samples nearly all end in four tokens, of random ones a quarter
        lab.fail(5, "the samples do not come from the policy: sample from `model`, not from `ref_model`")
    if torch.equal(first, other):
        lab.fail(5, "another generator gives the same samples: pass `generator` on to sample_group")
    if not torch.equal(first, again):
        lab.fail(5, "the same generator gives other samples: pass `generator` on to sample_group")


@pytest.mark.points(3)
def test_task5_metrics_of_the_last_inner_step(lab, sft):
    lab.stand_in(5, EARLIER[5])
    metrics, history = check_step(lab, sft, pairs=False, inner_steps=3, lr=0.03, std=False)
    for key in ("loss", "clip_fraction", "kl", "ratio"):
        of_steps = torch.stack([entry[key] for entry in history])
        mistakes = {
            f"metrics[{key!r}] is the first inner step's: return the last one's": of_steps[0],
            f"metrics[{key!r}] is the mean over the inner steps: return the last one's": of_steps.mean(),
            f"metrics[{key!r}] is the sum over the inner steps: return the last one's": of_steps.sum(),
        }
        lab.compare(5, f"metrics[{key!r}]", metric(lab, 5, metrics, key), of_steps[-1], mistakes, tolerance=1e-3)


@pytest.mark.points(4)
def test_task5_training_raises_the_accuracy(lab, sft):
    """100 iterations with the default settings raise the exact sampled accuracy by at least 6 points."""
    lab.stand_in(5, EARLIER[5])
    config = lab.grpo.GRPOConfig()
    policy = copy.deepcopy(sft).requires_grad_()
    optimizer = torch.optim.Adam(policy.parameters(), lr=config.lr, fused=True)
    train, held_out = tinylm.problems()
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        prompts = train[torch.randint(len(train), (config.prompts,), generator=generator)]
        lab.call(5, policy, sft, optimizer, prompts, config, generator)
    before, after = (tinylm.success_probability(model, held_out).mean().item() for model in (sft, policy))
    if not after - before >= 0.06:  # also when it is NaN
        lab.fail(
            5,
            f"after 100 iterations the sampled accuracy went from {before:.3f} to {after:.3f}; it should gain at least "
            "0.06 (the reference solution gains about 0.2). Look at the other tests of task 5 first",
        )


# What a task builds on, and a quick check of each, for when there is no reference to stand in.
EARLIER = {
    4: {3: check_worked_k3},
    5: {
        1: lambda lab: check_rows(lab, tinylm.load_or_train_sft()),
        2: check_worked_advantages,
        3: check_worked_k3,
        4: check_worked_loss,
    },
}
