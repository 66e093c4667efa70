"""The tests of the five tasks, which are also its grades: `python -m pytest -q -k task1` runs one task's.

What you return is compared with values worked by hand, in comments that you can check on paper, or computed from the
definition with plain loops on inputs drawn afresh in every run (LAB_SEED=1 repeats them). `examiner` calls your
functions with care (`lab/examine.py`). How a failure finds its words, which decide nothing, is in `lab/diagnose/`.
"""

import copy
import math
import statistics
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import tinylm
from lab.diagnose import close, loss, samples, step, symptoms
from lab.diagnose.k3 import k3_of
from lab.door.models import OddAnswers, flat
from lab.examine import differences, rounded
from lab.inputs import SEED, Batch, fresh_batch, shaken, short_and_long_prompts, some_prompts, talkative

# Task 1: sample_group --------------------------------------------------------------------------------------------


def check_rows(examiner, model):
    """Prompt-major rows, and each response scored against its own prompt."""
    G = 8
    got = examiner.sample(model, some_prompts(32), G)
    prompts = tinylm.decode(some_prompts(32))
    rows = [prompt for prompt in prompts for _ in range(G)]  # a a a ... b b b ...
    if (got_rows := tinylm.decode(got.prompts)) != rows:
        examiner.wrong(1, f"samples.prompts is wrong {samples.first_row(got_rows, rows)}")
    texts = tinylm.decode_and_strip_padding(got.responses)
    if list(got.texts) != texts:
        what = "samples.texts is not what tinylm.decode_and_strip_padding gives for the responses"
        examiner.wrong(1, f"{what}, first {samples.first_row(got.texts, texts)}")
    right = samples.scores(rows, texts)
    mistakes = {name: wrong(rows, texts, G) for name, wrong in samples.REWARDS.items()}
    symptom = partial(symptoms.of_rewards, got.rewards, right)
    given = {"prompt": rows, "response": texts}
    examiner.compare(1, "samples.rewards", got.rewards, right, given, mistakes=mistakes, symptom=symptom)


@pytest.mark.points(4)
def test_task1_rows_are_prompt_major_and_scored(examiner, sft):
    check_rows(examiner, sft)


@pytest.mark.points(3)
def test_task1_unended_and_odd_answers_are_wrong(examiner, sft):
    # Of 85$, 085$, _85$, 8_5$, 85_$, 85__ and the like only the first is right.
    for model in (talkative(sft), OddAnswers()):
        check_rows(examiner, model)


@pytest.mark.points(3)
def test_task1_mask_ends_with_the_end_of_sequence(examiner, sft):
    # 8 5 EOS PAD has the mask 1 1 1 0: the EOS is the policy's own token, what follows it is not.
    for model in (sft, talkative(sft)):
        got = examiner.sample(model, some_prompts(32), 8)
        expected = torch.zeros(got.responses.shape)
        for row, tokens in enumerate(got.responses.tolist()):
            length = tokens.index(tinylm.EOS) + 1 if tinylm.EOS in tokens else len(tokens)
            expected[row, :length] = 1
        mistakes = {name: wrong(got.responses, expected) for name, wrong in samples.MASKS.items()}
        symptom = partial(symptoms.of_mask, got.mask, expected)
        given = {"response": tinylm.decode(got.responses)}
        examiner.compare(1, "samples.mask", got.mask.double(), expected, given, mistakes=mistakes, symptom=symptom)


def check_temperature(examiner, task: int, model, prompts: Tensor, responses: Tensor, temperature: float):
    """How often a sample is the greedy response is known exactly: count it, and allow six standard deviations."""
    greedy = tinylm.generate(model, prompts, greedy=True)
    count = (responses == greedy).all(dim=1).sum().item()
    mean, sd = samples.greedy_count(model, prompts, greedy, temperature)
    if abs(count - mean) >= 6 * sd:
        found = f"{count} of {len(greedy)} responses are the greedy one, not {mean:.0f}"
        why = samples.temperature(model, prompts, greedy, count, temperature)
        examiner.wrong(task, why, f"\n  at temperature {temperature}: {found}")


@pytest.mark.points(3)
def test_task1_samples_the_policy_at_its_temperature(examiner, sft):
    prompts, G = some_prompts(64), 16
    for temperature in (0.5, 1.0, 2.0):
        got = examiner.sample(sft, prompts, G, temperature)
        if problem := samples.draws(sft, prompts, G, got):
            examiner.wrong(1, problem)
        check_temperature(examiner, 1, sft, got.prompts, got.responses, temperature)
        for j in (0, G - 1):  # the first and the last response of every group are drawn like the others
            check_temperature(examiner, 1, sft, got.prompts[j::G], got.responses[j::G], temperature)


@pytest.mark.points(2)
def test_task1_draws_from_the_generator(examiner, sft):
    prompts = some_prompts(16)
    first, again, other = (
        examiner.sample(sft, prompts, 8, 1.5, seed=seed).responses for seed in (SEED, SEED, SEED + 1)
    )  # `sample` seeds the global generator alike each time, and that one must not be used
    if torch.equal(first, other):
        examiner.wrong(1, "another generator gives the same responses: pass `generator` on to tinylm.generate")
    if not torch.equal(first, again):
        examiner.wrong(1, "the same generator gives other responses: all randomness must come from `generator`")
    once, twice = (got.responses for got in examiner.samples(sft, prompts, 8, 1.5, seed=SEED, times=2))
    if torch.equal(once, twice):
        examiner.wrong(1, "a second call with the same generator repeats the first: do not seed inside the function")


# Task 2: group_advantages ----------------------------------------------------------------------------------------


def advantages_as_defined(rewards: Tensor, G: int, normalize_std: bool) -> Tensor:
    """Group by group, with the standard library: mean and POPULATION standard deviation."""
    result = []
    for group in rewards.double().view(-1, G).tolist():
        scale = statistics.pstdev(group) if normalize_std else 1.0
        result += [(reward - statistics.mean(group)) / scale if scale else 0.0 for reward in group]
    return torch.tensor(result, dtype=torch.float64)


def check_advantages(examiner, rewards: Tensor, G: int, normalize_std: bool = True):
    got = examiner.advantages(rewards, G, normalize_std)
    expected = advantages_as_defined(rewards, G, normalize_std)
    given = {"rewards": rewards.view(-1, G)}
    what = "the advantage" if normalize_std else "with normalize_std = False, the advantage"
    # 0.002: eps may stand beside the std, as eps^2 under its root, or in a clamp; all of these are right.
    examiner.compare(2, what, got.view(-1, G), expected.view(-1, G), given, tolerance=2e-3)


@pytest.mark.points(4)
def test_task2_worked_example(examiner):
    # (1, 0, 0, 1): mean 1/2, every distance 1/2, population std 1/2          -> +1 -1 -1 +1
    # (1, 0, 0, 0): mean 1/4, variance (9 + 1 + 1 + 1) / 16 / 4 = 3/16, std 0.433
    #               0.75 / 0.433 = 1.732, -0.25 / 0.433 = -0.577               -> +1.732 -0.577 -0.577 -0.577
    check_advantages(examiner, torch.tensor([1.0, 0, 0, 1, 1, 0, 0, 0]), 4)


@pytest.mark.points(4)
def test_task2_fresh_groups(examiner, draw):
    for groups, G in ((6, 3), (4, 8), (5, 5)):
        rewards = torch.linspace(-1, 1, G) + draw(-0.3, 0.3, groups, G)  # no group is close to having no spread
        rewards = rewards[:, draw(0, 1, G).argsort()]
        # Unequal levels and spreads, so that the batch's mean and std are nobody's.
        check_advantages(examiner, (rewards * draw(0.5, 3, groups, 1) + draw(-1, 1, groups, 1)).flatten(), G)
    right = (draw(0, 1, 12, 6) < 0.5).float()
    right[:, 0], right[:, 1] = 1.0, 0.0
    check_advantages(examiner, right.flatten(), 6)  # rewards as the verifier gives them
    # A group of little spread, std 0.02: std + eps = 0.0201 and sqrt(var + eps^2) = 0.02 hardly change it, but
    # sqrt(var + eps) = sqrt(0.0004 + 0.0001) = 0.0224 does.
    small = torch.tensor([0.52, 0.48, 0.52, 0.48])
    expected = (small - 0.5).double() / 0.02
    examiner.compare(2, "the advantage", examiner.advantages(small, 4), expected, {"reward": small}, tolerance=0.01)


@pytest.mark.points(3)
def test_task2_mean_only(examiner, draw):
    # Dr. GRPO: (1, 0, 0, 0) has the mean 1/4  -> 0.75 -0.25 -0.25 -0.25
    check_advantages(examiner, torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 0]), 4, normalize_std=False)
    rewards = draw(0, 1, 5, 4) * draw(0.5, 3, 5, 1) + draw(-1, 1, 5, 1)
    check_advantages(examiner, rewards.flatten(), 4, normalize_std=False)


@pytest.mark.points(4)
def test_task2_group_without_signal_gets_zero(examiner):
    for normalize_std in (True, False):
        # Groups of 8: all wrong, all right, all 0.5, and one with signal.
        rewards = torch.tensor([0.0] * 8 + [1.0] * 8 + [0.5] * 8 + [1.0, 0, 0, 0, 0, 0, 0, 1])
        got = examiner.advantages(rewards, 8, normalize_std)
        if not (got[:24] == 0).all():
            what = "a group whose rewards are all equal must give exactly 0: no response was better than another"
            values = f"\n  got       {rounded(got[:24].view(3, 8))}\n  for       groups of eight 0, eight 1, eight 0.5"
            examiner.wrong(2, what, values)
        if got[24:].abs().min() == 0:
            examiner.wrong(2, "a group with signal gives advantages of 0, because another group has none")
        # Eight times 0.7: in float32 their mean may be off by 6e-8. Divided by (0 + 1e-8), that rounding would become
        # an advantage of 6; the default eps of 1e-4 keeps it below 0.001, which is as good as 0.
        got = examiner.advantages(torch.full((8,), 0.7), 8, normalize_std)
        if got.abs().max() > 0.01:
            what = "the rounding error of the mean became an advantage: the eps in the division is missing or too small"
            examiner.wrong(2, what, f"\n  got       {rounded(got)}\n  expected  0 for eight rewards of 0.7")


# Task 3: k3_kl ---------------------------------------------------------------------------------------------------


def check_k3(examiner, logp: Tensor, ref_logp: Tensor):
    """Values and gradient against u - log u - 1 and 1 - u, token by token in float64."""
    weights = torch.linspace(0.5, 1.5, logp.numel()).view_as(logp)  # unequal: a swapped or summed gradient shows
    got, gradient = examiner.k3(logp, ref_logp, weights)
    log_u = (ref_logp - logp).double()
    expected = torch.tensor([[math.exp(d) - d - 1 for d in row] for row in log_u.tolist()], dtype=torch.float64)
    given = {"logp": logp, "ref_logp": ref_logp}
    examiner.compare(3, "k3", got, expected, given)
    examiner.compare(3, "the gradient of k3", gradient / weights, 1 - log_u.exp(), given)


@pytest.mark.points(4)
def test_task3_worked_example(examiner):
    # logp = log 0.5 and ref_logp = log 0.25: u = 1/2, k3 = 0.5 + 0.6931 - 1 = 0.1931, gradient 1 - u = 0.5.
    # logp = log 0.5 and ref_logp = log 0.5:  u = 1,   k3 = 0, gradient 0.
    # ref_logp - logp = +1: u = 2.7183, k3 = 0.7183; ref_logp - logp = -1: u = 0.3679, k3 = 0.3679.
    logp = torch.tensor([[0.5, 0.5], [0.25, 0.5]]).log()
    ref_logp = torch.tensor([[0.25, 0.5], [0.25 * math.e, 0.5 / math.e]]).log()
    check_k3(examiner, logp, ref_logp)


@pytest.mark.points(6)
def test_task3_fresh_values_and_gradient(examiner, draw):
    # Log-ratios between -2.5 and 2.5: near 0, k3, its reverse and k2 all agree, and a test there is blind.
    ref_logp = draw(-6, -3, 5, 3)
    signs = torch.tensor([[1.0], [-1], [1], [-1], [1]])
    check_k3(examiner, ref_logp - draw(0.5, 2.5, 5, 3) * signs, ref_logp)
    check_k3(examiner, ref_logp - draw(4, 8, 5, 3) * signs, ref_logp)  # k3 from 3 to 3,000: nothing may cut it off


@pytest.mark.points(5)
def test_task3_is_an_unbiased_estimate_of_the_kl(examiner, draw):
    """The mean of k3 over tokens drawn from pi_theta against the exact sum over the vocabulary of p log(p / q)."""
    log_p, log_q = draw(-1.5, 1.5, 2, 14).log_softmax(dim=-1).double()
    tokens = torch.multinomial(log_p.exp(), 200_000, True, generator=torch.Generator().manual_seed(SEED)).view(-1, 4)
    logp, ref_logp = log_p[tokens], log_q[tokens]
    got, _ = examiner.k3(logp.float(), ref_logp.float(), torch.ones(logp.shape))
    exact = (log_p.exp() * (log_p - log_q)).sum()
    standard_error = k3_of(ref_logp - logp).std() / math.sqrt(got.numel())
    if (got.mean() - exact).abs() > 6 * standard_error + 1e-5:
        what = "the mean of k3 over 200,000 tokens of pi_theta, which must be the KL divergence, is wrong"
        examiner.wrong(3, what, differences(got.mean(), exact, {}))


# Task 4: grpo_loss -----------------------------------------------------------------------------------------------


def loss_as_defined(batch: Batch) -> tuple[Tensor, Tensor]:
    """(loss, gradient with respect to logp) in plain loops: response by response, token by token."""
    N, Tr = batch.logp.shape
    value, gradient = 0.0, torch.zeros(N, Tr, dtype=torch.float64)
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
            value -= (surrogate - batch.beta * (u - math.log(u) - 1)) / length / N
            gradient[i, t] = -(slope - batch.beta * (1 - u)) / length / N
    return torch.tensor(value, dtype=torch.float64), gradient


def check_loss(examiner, batch: Batch):
    """The loss and its gradient against the definition."""
    got, gradient, _ = examiner.loss(batch)
    expected = loss_as_defined(batch)
    if not (close(got, expected[0]) and close(gradient, expected[1])):
        what = "the loss is right, its gradient is not" if close(got, expected[0]) else "the loss is wrong"
        given = {"ratio": (batch.logp - batch.old_logp).exp(), "u": (batch.ref_logp - batch.logp).exp()}
        given |= {"A": batch.advantages}
        values = f"\n  the loss: got {got:.5f}, expected {expected[0]:.5f}; clip {batch.clip}, beta {batch.beta}"
        values += differences(gradient, expected[1], given, what="its gradient with respect to logp ")
        examiner.wrong(4, what, values)


@pytest.mark.points(5)
def test_task4_clip_worked_example(examiner):
    # Eight responses of one token, clip 0.2, beta 0. The ratios 0.5 0.9 1.1 1.5, first with A = +1, then with A = -1:
    #   A = +1: min(0.5, 0.8) = 0.5    0.9    1.1    min(1.5, 1.2) = 1.2
    #   A = -1: min(-0.5, -0.8) = -0.8  -0.9  -1.1    min(-1.5, -1.2) = -1.5
    # Sum 3.7 - 4.3 = -0.6, so the loss is 0.6 / 8 = 0.075. Clipped, hence without gradient: 1.5 with A = +1 and
    # 0.5 with A = -1. Elsewhere the gradient is -ratio * A / 8.
    ratios = torch.tensor([[0.5], [0.9], [1.1], [1.5]] * 2)
    A = torch.tensor([1.0] * 4 + [-1.0] * 4)
    logp = torch.full((8, 1), -1.0)
    check_loss(examiner, Batch(logp, logp - ratios.log(), logp.clone(), A, torch.ones(8, 1), beta=0.0))


@pytest.mark.points(4)
def test_task4_kl_term_worked_example(examiner):
    # One response of two tokens, A = 1, beta 0.1, both ratios 1.1, u = 1/2 and u = 2:
    #   k3 = 0.5 + 0.6931 - 1 = 0.1931 and 2 - 0.6931 - 1 = 0.3069; loss = -1.1 + 0.1 * (0.1931 + 0.3069) / 2 = -1.075
    #   gradient = (-1.1 + beta * (1 - u)) / 2 = -0.525 and -0.6
    logp = torch.tensor([[0.4, 0.3]]).log()
    ref_logp = torch.tensor([[0.2, 0.6]]).log()
    check_loss(examiner, Batch(logp, logp - math.log(1.1), ref_logp, torch.ones(1), torch.ones(1, 2), beta=0.1))


@pytest.mark.points(8)
def test_task4_loss_and_gradient_on_fresh_batches(examiner, draw):
    check_loss(examiner, fresh_batch(draw, [5, 5, 5, 5, 5, 5], Tr=5, beta=0.0))  # no padding, no penalty
    check_loss(examiner, fresh_batch(draw, [2, 4, 1, 3, 4, 2], Tr=5, clip=0.3, beta=0.1))
    square = fresh_batch(draw, [3, 1, 4, 2], Tr=4, clip=0.1, beta=0.5)  # N = Tr: a wrong broadcast fits
    square.advantages[1] = 0  # a response without signal pays the penalty all the same
    check_loss(examiner, square)
    free = fresh_batch(draw, [4, 2, 3], Tr=4, clip=1000.0, beta=0.0)  # a clip that never binds
    free.old_logp[:, 0] = free.logp[:, 0] - 1.5  # whatever was drawn, a ratio of 4.5 that a smaller one would stop
    check_loss(examiner, free)


@pytest.mark.points(4)
def test_task4_group_without_signal_gives_no_gradient(examiner, sft):
    """Through the real model: advantages of 0, at the reference (where k3 has no slope), must not move a weight."""
    model = copy.deepcopy(sft).requires_grad_()
    prompts = some_prompts(2).repeat_interleave(4, dim=0)
    responses = tinylm.answers(prompts)
    logp = tinylm.token_logp(model, prompts, responses)
    constant, mask = logp.detach(), tinylm.response_mask(responses)
    for A, moved in ((torch.zeros(8), False), (torch.linspace(-1, 2, 8), True)):
        _, gradient, _ = examiner.loss(Batch(constant, constant, constant, A, mask))
        # The chain rule: from the loss to logp by your function, from logp to the weights by the model.
        of_weights = torch.autograd.grad(logp, list(model.parameters()), gradient.float(), retain_graph=True)
        largest = torch.stack([weight.abs().max() for weight in of_weights]).max().item()
        if not moved and not largest <= 1e-7:  # also if it is NaN
            what = "a batch without signal (all advantages 0, policy = reference) must give zero gradient"
            examiner.wrong(4, what, f"\n  the largest gradient of a weight is {largest:.2g}")
        if moved and not largest >= 1e-6:
            examiner.wrong(4, "a batch with signal gives zero gradient: logp must reach the loss undetached")


@pytest.mark.points(4)
def test_task4_metrics(examiner, draw):
    batch = fresh_batch(draw, [2, 4, 1, 3, 4, 2], Tr=5, clip=0.35)
    sign = batch.advantages.sign()
    batch.old_logp[:, 0] = batch.logp[:, 0] - math.log(1.3) * sign  # ratios within 0.35, but beyond 0.2
    batch.old_logp[:, 1] = batch.logp[:, 1] + math.log(2) * sign  # outside, but on the side that is not clipped
    batch.old_logp[:, 2] = batch.logp[:, 2] - math.log(2) * sign  # clipped, whatever was drawn
    _, _, answer = examiner.loss(batch)
    ratio, own = (batch.logp - batch.old_logp).exp().double(), batch.mask.bool()
    A = batch.advantages[:, None]
    clipped = ratio.clamp(1 - batch.clip, 1 + batch.clip) * A < ratio * A
    log_u = (batch.ref_logp - batch.logp).double()
    for key, values in (("clip_fraction", clipped.double()), ("kl", log_u.exp() - log_u - 1), ("ratio", ratio)):
        got = examiner.metric(4, answer, key)
        mistakes = loss.metrics(key, values, batch)
        symptom = partial(symptoms.of_metric, examiner.metrics_again, key, batch)
        examiner.compare(4, f"metrics[{key!r}]", got, values[own].mean(), mistakes=mistakes, symptom=symptom)


# Task 5: grpo_step -----------------------------------------------------------------------------------------------


SETTINGS = {"G": 4, "inner_steps": 1, "clip": 0.05, "beta": 0.5, "std": True, "temperature": 1.0, "lr": 0.1}


def check_step(examiner, sft, far: bool = False, **changes):
    """Take one step of SGD with the student's function, and compare the weights with a replay of the same samples."""
    settings, prompts = SETTINGS | changes, short_and_long_prompts(6)
    for seed in range(SEED, SEED + 20):
        policy = shaken(sft, seed, 0.06 if far else 0.02)
        answer = examiner.steps(policy, sft, "SGD", prompts, settings, seed)
        taken = answer["steps"][0]
        expected, history = step.replay(policy, sft, taken["samples"], SimpleNamespace(**settings))
        # Once in some ten draws a token is so much likelier under the reference that k3's exp throws the policy far
        # off, where rounding decides what comes next. That says nothing about the student's function: draw again.
        moved = not torch.equal(expected, flat(policy))  # some group has a signal
        if moved and all((entry["kl"] > 0.3) == far and entry["loss"].isfinite() for entry in history):
            break
    for key in ("loss", "clip_fraction", "kl", "ratio"):
        examiner.metric(5, taken, key)
    start, weights = flat(policy), answer["policy"]
    length = (expected - start).norm()
    if not step.agree(weights, expected, length):
        moved = f"\n  they moved {(weights - start).norm() / length:.3f} times as far as they should"
        shown = ", ".join(f"{name} {settings[name]}" for name in changes)
        examiner.wrong(5, "the weights after the step are wrong", f"{moved}\n  with {shown}")
    return taken, history


@pytest.mark.points(6)
def test_task5_one_inner_step_moves_the_weights_right(examiner, sft):
    check_step(examiner, sft, inner_steps=1)
    check_step(examiner, sft, inner_steps=1, temperature=0.7, std=False)


@pytest.mark.points(7)
def test_task5_several_inner_steps_on_the_same_samples(examiner, sft):
    # Without the std: the exact place of eps in it would grow over the steps, and every right place must be accepted.
    check_step(examiner, sft, inner_steps=3, lr=0.03, std=False)
    check_step(examiner, sft, inner_steps=2, lr=0.1, temperature=1.4, clip=0.03, beta=0.3, std=False)
    # Far from the reference, with a KL of 0.3 and more: all inner steps are taken all the same.
    check_step(examiner, sft, far=True, inner_steps=3, lr=0.01, clip=0.5, beta=0.0, std=False)


@pytest.mark.points(4)
def test_task5_one_inner_step_never_clips(examiner, sft):
    """With one inner step logp equals old_logp, so every ratio is exactly 1, iteration after iteration."""
    policy, prompts = copy.deepcopy(sft).requires_grad_(), some_prompts(24).view(3, 8, -1)
    # Adam, at a rate at which a late old_logp would show at once.
    answer = examiner.steps(policy, sft, "Adam", prompts, SETTINGS | {"clip": 0.01, "lr": 0.01})
    for iteration, taken in enumerate(answer["steps"], start=1):
        ratio, clipped = (examiner.metric(5, taken, key) for key in ("ratio", "clip_fraction"))
        if abs(ratio - 1) > 1e-5 or clipped != 0:
            what = "with one inner step the ratio must be 1 and nothing clipped: take old_logp before the optimizer "
            what += "step, with the same model, tokens and temperature as logp, and measure no metrics after it"
            got = f"a mean ratio of {ratio:.5f} and a clip fraction of {clipped:.3f} in iteration {iteration}"
            examiner.wrong(5, what, f"\n  got {got}")


@pytest.mark.points(3)
def test_task5_leaves_the_reference_alone(examiner, sft):
    policy, reference = shaken(sft, SEED), copy.deepcopy(sft).requires_grad_()
    answer = examiner.steps(policy, reference, "SGD", some_prompts(4), SETTINGS)
    if not torch.equal(answer["reference"], flat(sft)):
        examiner.wrong(5, "the reference was trained: its weights must never change")
    if answer["reference has gradient"]:
        examiner.wrong(5, "ref_logp carries gradient into the reference: compute it under torch.no_grad()")
    if torch.equal(answer["policy"], flat(policy)):
        examiner.wrong(5, "the policy did not change: call loss.backward() and then optimizer.step()")


@pytest.mark.points(3)
def test_task5_samples_the_policy_with_the_generator(examiner, sft):
    def taken(policy, reference, prompts: Tensor, seed: int = SEED, **changes):
        return examiner.steps(policy, reference, "SGD", prompts, SETTINGS | changes, seed)["steps"][0]["samples"]

    got = taken(copy.deepcopy(sft).requires_grad_(), sft, some_prompts(64), lr=0.0, temperature=0.5)
    check_temperature(examiner, 5, sft, got.prompts, got.responses, 0.5)
    # A reference that never learnt anything: its samples would be random characters.
    first, again, other = (
        taken(shaken(sft, SEED), tinylm.TinyLM(), some_prompts(8), seed).responses for seed in (SEED, SEED, SEED + 1)
    )
    ended = (first == tinylm.EOS).any(dim=1).float().mean()
    if ended < 0.8:  # of the policy's samples nearly all end in four tokens, of random ones a quarter
        examiner.wrong(5, "the samples do not come from the policy: sample from `model`, not from `ref_model`")
    if torch.equal(first, other):
        examiner.wrong(5, "another generator gives the same samples: pass `generator` on to sample_group")
    if not torch.equal(first, again):
        examiner.wrong(5, "the same generator gives other samples: pass `generator` on to sample_group")


@pytest.mark.points(3)
def test_task5_metrics_of_the_last_inner_step(examiner, sft):
    taken, history = check_step(examiner, sft, inner_steps=3, lr=0.03, std=False)
    for key in ("loss", "clip_fraction", "kl", "ratio"):
        of_steps = torch.stack([entry[key] for entry in history])
        got, mistakes = examiner.metric(5, taken, key), step.metrics(key, of_steps)
        examiner.compare(5, f"metrics[{key!r}]", got, of_steps[-1], mistakes=mistakes, tolerance=1e-3)


@pytest.mark.points(4)
def test_task5_training_raises_the_accuracy(examiner, sft):
    """100 iterations with the default settings raise the exact sampled accuracy by at least 6 points."""
    policy, (train, held_out) = copy.deepcopy(sft).requires_grad_(), tinylm.problems()
    drawn = torch.randint(len(train), (100, 16), generator=torch.Generator().manual_seed(0))
    settings = {"G": 8, "inner_steps": 2, "lr": 3e-4, "clip": 0.2, "beta": 0.04, "std": True, "temperature": 1.0}
    weights = examiner.steps(policy, sft, "Adam", train[drawn], settings, seed=0)["policy"]
    torch.nn.utils.vector_to_parameters(weights.float(), policy.parameters())
    before, after = (tinylm.success_probability(model, held_out).mean().item() for model in (sft, policy))
    if not after - before >= 0.06:  # also when it is NaN
        got = f"after 100 iterations the sampled accuracy went from {before:.3f} to {after:.3f}"
        hint = "it should gain at least 0.06 (the reference gains about 0.2). Look at the other tests of task 5 first"
        examiner.wrong(5, f"{got}; {hint}")
