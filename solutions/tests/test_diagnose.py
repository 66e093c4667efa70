"""lab/diagnose/: the naming never raises, whatever a student's function returns and whatever the shapes."""

import copy
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import test_grpo
import tinylm
from lab.diagnose import advantages, k3, loss, samples, step, symptoms
from lab.diagnose.loss import Batch
from lab.examine import Examiner, first_difference, rounded
from lab.start import REFERENCE, load_module
from test_grpo import loss_as_defined

CASES = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
ODD = st.sampled_from([0.0, 1.0, -1.0, 1e30, -1e30, 1e-30, math.inf, -math.inf, math.nan])


def tensors(shape: tuple[int, ...]) -> st.SearchStrategy[Tensor]:
    """Any values at all, of any floating type."""
    n = math.prod(shape)
    values = st.lists(st.one_of(ODD, st.floats(-3, 3)), min_size=n, max_size=n)
    dtypes = st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64])
    return st.tuples(values, dtypes).map(lambda drawn: torch.tensor(drawn[0]).reshape(shape).to(drawn[1]))


@st.composite
def batches(draw) -> Batch:
    """A batch as the tests make them, of any size: one row, one token, N = Tr; clips and betas of all sizes."""
    n, t = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    uniform = lambda low, high, *shape: low + (high - low) * torch.rand(shape, generator=generator)  # noqa: E731
    lengths = torch.randint(1, t + 1, (n, 1), generator=generator)
    mask, logp = (torch.arange(t) < lengths).float(), uniform(-3, -0.5, n, t)
    clip, beta = draw(st.sampled_from([0.05, 0.2, 1000.0])), draw(st.sampled_from([0.0, 0.04, 0.5]))
    return Batch(logp, logp - uniform(-1, 1, n, t), logp + uniform(-1, 1, n, t), uniform(-2, 2, n), mask, clip, beta)


@CASES
@given(batches(), st.data())
def test_every_loss_is_explained_and_no_table_raises(batch, data):
    shape = tuple(batch.logp.shape)
    gradient = data.draw(tensors(shape)).double()
    value = data.draw(tensors(())).double()
    right = loss_as_defined(batch)
    cases = [(value, gradient), (1.005 * right[0], 1.005 * right[1]), (right[0] + 3, right[1]), (right[0], gradient)]
    for got, slope in cases:
        assert loss.explain(got, slope, right, batch)
    for key in ("clip_fraction", "kl", "ratio"):
        assert loss.metrics(key, gradient, batch)


@CASES
@given(st.integers(2, 4), st.integers(2, 6), st.booleans(), st.data())
def test_every_advantage_is_explained_and_no_table_raises(groups, G, normalize_std, data):
    rewards = data.draw(tensors((groups * G,))).float().nan_to_num(0, 1, -1).clamp(-1e6, 1e6)
    assert advantages.mistakes(rewards, G, normalize_std)


@CASES
@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_every_k3_is_explained_and_no_table_raises(n, t, data):
    log_u = data.draw(tensors((n, t))).double()
    assert k3.gradients(log_u).keys() <= k3.values(log_u).keys()


@CASES
@given(st.integers(1, 3), st.integers(1, 3), st.data())
def test_all_samples_are_explained_and_no_table_raises(P, G, data):
    text = st.text(tinylm.VOCAB, min_size=4, max_size=4)
    texts = data.draw(st.lists(text, min_size=P * G, max_size=P * G))
    prompts = [f"{10 + i}+{20 + i}=" for i in range(P)]
    responses = tinylm.encode(texts)
    assert samples.rewards(prompts, G, tinylm.decode_and_strip_padding(responses))
    assert samples.masks(responses, tinylm.response_mask(responses))


@CASES
@given(st.sampled_from([(), (0,), (1,), (3,), (0, 2), (2, 0), (2, 3), (40, 2)]), st.data())
def test_any_tensor_is_shown_and_compared(shape, data):
    a, b = data.draw(tensors(shape)), data.draw(tensors(shape))
    assert isinstance(rounded(a), str) and isinstance(first_difference(a, b), str)
    assert first_difference(a.nan_to_num(), a.nan_to_num()) == ""


@pytest.mark.parametrize("pairs", [False, True])
def test_any_weights_after_a_step_are_explained(sft, reference, pairs):
    policy, config = copy.deepcopy(sft), reference.GRPOConfig(G=2, inner_steps=1, lr=0.1)
    prompts = tinylm.encode(["12+34=", "56+78="])
    drawn = reference.sample_group(policy, prompts, 2, generator=torch.Generator().manual_seed(0))
    drawn.rewards = torch.tensor([1.0, 0.0, 0.0, 1.0])
    before = step.flat(policy)
    expected, _ = step.replay(step.RIGHT, policy, sft, drawn, config)
    calls = step.Calls([4], 1)
    for got in (before, before + 1, before * math.nan, before + 3 * (expected - before)):
        assert step.explain(got, expected, policy, sft, drawn, config, calls, pairs)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("return loss, metrics", "return loss * 1.005, metrics"), "1.005 times what it should be"),
        (("return loss, metrics", "return loss + 3, metrics"), "the loss is +3 off, yet its gradient is right"),
        (("log_u.exp() - log_u - 1", "log_u.detach().exp() - log_u - 1"), "u itself carries no gradient"),
        (("log_u.exp() - log_u - 1", "log_u.exp() - log_u.detach() - 1"), "log(u) carries no gradient"),
    ],
)
def test_a_failure_is_told_in_words(change, told, tmp_path, reference):
    """The smallest cases that once ended in an error of the naming itself, or in no name."""
    source = REFERENCE.read_text(encoding="utf-8")
    assert source.count(change[0]) == 1
    (tmp_path / "grpo.py").write_text(source.replace(*change), encoding="utf-8")
    examiner = Examiner(load_module(tmp_path / "grpo.py", "grpo_that_is_wrong"), with_traceback=False)
    test = test_grpo.test_task4_clip_worked_example if "loss" in change[0] else test_grpo.test_task3_worked_example
    with pytest.raises(pytest.fail.Exception, match=r"^Task [34] ") as failure:
        test(examiner)
    assert told in str(failure.value).splitlines()[0]


# Symptoms: true of any function, none of a right one ---------------------------------------------------------------


def fresh(seed: int, n: int = 6, t: int = 5, clip: float = 0.2, beta: float = 0.1) -> Batch:
    """A batch with responses of all lengths, ratios on both sides of the clip, and advantages of both signs."""
    generator = torch.Generator().manual_seed(seed)
    uniform = lambda low, high, *shape: low + (high - low) * torch.rand(shape, generator=generator)  # noqa: E731
    mask = (torch.arange(t) < torch.tensor([2, 4, 1, 3, t, 2, 4, 1])[:n, None]).float()
    logp, A = uniform(-3, -0.5, n, t), uniform(0.3, 2, n) * torch.tensor([1.0, -1.0] * n)[:n]
    return Batch(logp, logp - uniform(-0.9, 0.9, n, t), logp + uniform(-1.2, 1.2, n, t), A, mask, clip, beta)


@CASES
@given(st.integers(0, 10**6), st.integers(2, 5), st.integers(2, 6), st.booleans())
def test_a_right_function_has_no_symptoms(seed, groups, G, normalize_std):
    reference = load_module(REFERENCE, "reference_of_the_symptoms")
    examiner = Examiner(reference, with_traceback=False)
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.rand(groups * G, generator=generator) + torch.arange(groups * G) % G
    assert symptoms.of_advantages(examiner.value_again, rewards, G, normalize_std) == ""
    logp, ref_logp = (-3 * torch.rand(groups, G, generator=generator) for _ in range(2))
    assert symptoms.of_k3(examiner.value_again, logp, ref_logp) == ""
    batch = fresh(seed)
    assert symptoms.of_loss(examiner.loss_again, batch, loss_as_defined(batch)) == ""


def wrong_loss(change):
    """grpo_loss, of whose right parts `change` makes the loss: (batch, ratio, A, surrogate, k3) -> loss."""

    def call(batch: Batch) -> tuple[Tensor, Tensor]:
        logp = batch.logp.double().requires_grad_()
        ratio, A = (logp - batch.old_logp).exp(), batch.advantages[:, None].double()
        surrogate = torch.minimum(ratio * A, ratio.clamp(1 - batch.clip, 1 + batch.clip) * A)
        k3_of_it = (batch.ref_logp - logp).exp() - (batch.ref_logp - logp) - 1
        value = change(batch, ratio, A, surrogate, k3_of_it)
        return value.detach(), torch.autograd.grad(value, logp)[0]

    return call


def averaged(batch: Batch, objective: Tensor) -> Tensor:
    return -((objective * batch.mask).sum(1) / batch.mask.sum(1)).mean()


LOSSES = {
    "ln 2": lambda b, r, A, s, k: averaged(b, s - b.beta * k) * math.log(2),
    "6 times (N, the number of responses)": lambda b, r, A, s, k: averaged(b, s - b.beta * k) * len(A),
    "in proportion to the root of its length": lambda b, r, A, s, k: (
        -(((s - b.beta * k) * b.mask).sum(1) / b.mask.sum(1).sqrt()).mean()
    ),
    "the logp of the padding moves the loss": lambda b, r, A, s, k: averaged(b, s - b.beta * k) - 0.01 * r.mean(),
    "twice the beta does not give twice": lambda b, r, A, s, k: averaged(b, s - b.beta**1.5 * k),
    "beta makes no difference": lambda b, r, A, s, k: averaged(b, s - 0.07 * k),
    "at tokens with A < 0 and ratio > 1 + clip": lambda b, r, A, s, k: averaged(
        b, torch.where((A < 0) & (r > 1 + b.clip), s.detach(), s) - b.beta * k
    ),
    "exactly at tokens with the first token": lambda b, r, A, s, k: averaged(
        b, (s - b.beta * k) * torch.tensor([0.5, 1, 1, 1, 1])
    ),
    "all responses twice": lambda b, r, A, s, k: averaged(b, s - b.beta * k) + 0.01 * (r * b.mask).sum(),
    "twice the advantages": lambda b, r, A, s, k: averaged(b, torch.tanh(s) - b.beta * k),
}


@pytest.mark.parametrize("told", LOSSES)
@pytest.mark.parametrize("seed", range(3))
def test_a_wrong_loss_is_told_by_what_is_seen(told, seed):
    batch = fresh(seed)
    right = loss_as_defined(batch)
    seen = symptoms.of_loss(wrong_loss(LOSSES[told]), batch, right)
    expected = "0.6931 times" if told == "ln 2" else told
    assert expected in seen, seen


ADVANTAGES = {
    "the rewards of one group move": lambda r, G: (
        (r.view(-1, G) - r.view(-1, G).mean(1, keepdim=True)).flatten() / r.std()
    ),
    "the order of the rewards": lambda r, G: (r.view(-1, G) - r.view(-1, G)[:, :1]).flatten(),
    "adding 1 to all rewards": lambda r, G: (r.view(-1, G) / r.view(-1, G).mean(1, keepdim=True) - 1).flatten(),
    "twice the rewards give other": lambda r, G: (r.view(-1, G) - r.view(-1, G).mean(1, keepdim=True)).flatten() * 1.1,
    "1.5 times as large": lambda r, G: 1.5 * normal(r, G),
}


def normal(rewards: Tensor, G: int) -> Tensor:
    groups = rewards.view(-1, G)
    return ((groups - groups.mean(1, keepdim=True)) / groups.std(1, correction=0, keepdim=True)).flatten()


@pytest.mark.parametrize("told", ADVANTAGES)
def test_wrong_advantages_are_told_by_what_is_seen(told):
    rewards = torch.tensor([1.0, 0.2, 0.5, 0.0, 2.0, 1.5, 1.1, 1.0, 3.0, 0.0, 1.0, 2.5])
    call = lambda task, r, G, normalize_std: ADVANTAGES[told](r, G)  # noqa: E731
    assert told in symptoms.of_advantages(call, rewards, 4, True)


K3 = {
    "one token's log-probs move": lambda logp, ref: ((ref - logp).exp() - (ref - logp) - 1).cumsum(1),
    "both log-probs fall": lambda logp, ref: (ref - logp).exp() - (ref - logp) - 1 + 0.1 * logp**2,
    "where the two policies agree": lambda logp, ref: (ref - logp).exp() - (ref - logp) - 0.9,
    "1.443 times (1 / ln 2: bits for nats)": lambda logp, ref: ((ref - logp).exp() - (ref - logp) - 1) / math.log(2),
    "wrong exactly where u < 1": lambda logp, ref: torch.where(
        ref > logp, k3_right(logp, ref), 2 * k3_right(logp, ref)
    ),
    "|log(u)| is large": lambda logp, ref: k3_right(logp, ref).clamp(max=0.5),
    "k3 is too small where u > 1 and too large where u < 1": lambda logp, ref: (ref - logp) ** 2 / 2,
}


def k3_right(logp: Tensor, ref: Tensor) -> Tensor:
    return (ref - logp).exp() - (ref - logp) - 1


@pytest.mark.parametrize("told", K3)
def test_a_wrong_k3_is_told_by_what_is_seen(told):
    logp, ref = (
        torch.tensor([[-1.0, -2.0, -1.5], [-0.5, -3.0, -1.0]]),
        torch.tensor([[-2.2, -1.0, -1.4], [-0.4, -1.3, -2.8]]),
    )
    call = lambda task, *args: K3[told](*args).double()  # noqa: E731
    assert told in symptoms.of_k3(call, logp, ref)
