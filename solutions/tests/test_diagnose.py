"""lab/diagnose/: the naming never raises, whatever a student's function returns, whatever the shapes; the probes tell
the known mistakes from one another; a failure is short and has one first line; what is seen is true.
"""

import functools
import math

import pytest
import torch
from auditing.catalogue import BY_NAME
from auditing.entries import Mistake, changed_source
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import test_grpo
import tinylm
from lab.diagnose import advantages, k3, loss, samples, symptoms
from lab.door import answer
from lab.examine import Examiner, Memory, differences, rounded, run
from lab.inputs import Batch, fresh_batch, uniform
from lab.start import REFERENCE, load_module

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
    lengths = torch.randint(1, t + 1, (n,), generator=generator).tolist()
    clip, beta = draw(st.sampled_from([0.05, 0.2, 1000.0])), draw(st.sampled_from([0.0, 0.04, 0.5]))
    return fresh_batch(functools.partial(uniform, generator), lengths, t, clip, beta)


@CASES
@given(batches())
def test_every_choice_of_the_loss_has_a_value_on_every_shape(batch):
    for part in loss.PARTS:
        for name in part:
            names = tuple(name if part is other else "" for other in loss.PARTS)
            assert loss.loss_with(names, batch) is None or loss.loss_with(names, batch)[0].dim() == 0
    for key in ("clip_fraction", "kl", "ratio"):
        assert loss.metrics(key, batch.logp, batch)


@settings(CASES, max_examples=15)
@given(st.data())
def test_every_loss_is_diagnosed_and_nothing_raises(data):
    """Whatever comes back, also another thing for each probe."""
    call = lambda batch: (data.draw(tensors(())).double(), data.draw(tensors(tuple(batch.logp.shape))).double())  # noqa: E731
    assert isinstance(loss.diagnose(call), str)


@settings(CASES, max_examples=30)
@given(st.data())
def test_all_advantages_are_diagnosed_and_nothing_raises(data):
    assert isinstance(advantages.diagnose(lambda rewards, *_: data.draw(tensors(tuple(rewards.shape))).double()), str)


@settings(CASES, max_examples=30)
@given(st.data())
def test_every_k3_is_diagnosed_and_nothing_raises(data):
    def call(logp: Tensor, _: Tensor) -> tuple[Tensor, ...]:
        return tuple(data.draw(tensors(tuple(logp.shape))).double() for _ in range(2))

    assert isinstance(k3.diagnose(call), str)


@CASES
@given(st.integers(1, 3), st.integers(1, 3), st.data())
def test_all_samples_are_explained_and_no_table_raises(P, G, data):
    text = st.text(tinylm.VOCAB, min_size=4, max_size=4)
    responses = tinylm.encode(data.draw(st.lists(text, min_size=P * G, max_size=P * G)))
    rows = [f"{10 + i}+{20 + i}=" for i in range(P) for _ in range(G)]
    texts, mask = tinylm.decode_and_strip_padding(responses), tinylm.response_mask(responses)
    assert all(wrong(rows, texts, G).shape == (P * G,) for wrong in samples.REWARDS.values())
    assert all(wrong(responses, mask).shape == mask.shape for wrong in samples.MASKS.values())


@CASES
@given(st.sampled_from([(), (0,), (1,), (3,), (0, 2), (2, 0), (2, 3), (40, 2)]), st.data())
def test_any_tensor_is_shown_and_compared(shape, data):
    a, b = data.draw(tensors(shape)), data.draw(tensors(shape))
    assert isinstance(rounded(a), str)
    assert differences(a, b, {}).count("\n") <= 7
    assert "row" not in differences(a.nan_to_num(), a.nan_to_num(), {})


# The probes tell the known mistakes from one another ---------------------------------------------------------------


def names_of(*tables: dict) -> list[str]:
    return [name for table in tables for name in table if name]


@pytest.mark.parametrize("name", names_of(*loss.PARTS))
def test_a_mistake_of_the_loss_is_told_by_its_own_name(name):
    names = tuple(name if name in part else "" for part in loss.PARTS)
    told = loss.diagnose(lambda batch: loss.loss_with(names, batch))
    harmless = "the mask is applied to the log-ratio"  # alone, as the padding is masked again
    assert told == ("" if name.startswith(harmless) else name)


@pytest.mark.parametrize("name", names_of(*advantages.PARTS))
def test_a_mistake_of_the_advantages_is_told_by_its_own_name(name):
    names = tuple(name if name in part else "" for part in advantages.PARTS)
    assert advantages.diagnose(lambda *given: advantages.advantages_with(names, *given)[0]) == name


@pytest.mark.parametrize("name", k3.WRONG)
def test_a_wrong_k3_is_told_by_its_own_name(name):
    assert k3.diagnose(lambda *given: k3.k3_with(k3.WRONG[name], *given)) == name


# A student's function, in words ------------------------------------------------------------------------------------


TOLD = {  # a mistake of the audit's -> words of the first line, words of those below
    "the prompts flattened by repeat_interleave": (
        "tinylm.generate cannot work with its arguments",
        "with model a TinyLM, prompts a tensor [1536]",
    ),
    "the arguments of the verifier swapped": ("tinylm.reward cannot work with its arguments", "with prompt '"),
    "the arguments of generate swapped": (
        "model is to be a TinyLM, prompts is to be a Tensor",
        "raised AttributeError",
    ),
    "responses by G calls of generate": ("the responses are in the order a b a b", ""),
    "no keepdim in the mean": (
        "of grpo.py raised RuntimeError: advantages = groups - groups.mean(dim=1)",
        "with groups [2, 4]",
    ),
    "epsilon added to the quotient": ("eps is added to the quotient: divide by (std + eps)", ""),
    "the ratio clamped in place": (
        "changed in place: make a new one (clamp, not clamp_)",
        "clipped = ratio.clamp_(1 - clip",
    ),
    "the ratio against logp itself": ("old_logp is not used, so the ratio is always 1", ""),
    "divided by all tokens, and by N": (
        "each response is divided by the number of tokens of the whole batch",
        "",
    ),
    "KL of the policy to the old policy": ("against old_logp: it is against ref_logp", ""),
    "metrics before the loss": ("it returned (dict, Tensor)", ""),
    "logp once, before the loop": (
        "logp is computed once, before the loop: compute it anew in each inner step",
        "Trying to backward",
    ),
    "zero_grad between backward and step": (
        "zero_grad, backward, step is the order of the calls, not backward zero_grad step",
        "",
    ),
    "the prompts as they came for the log-probs": (
        "tinylm.token_logp cannot work with its arguments",
        "with model a TinyLM, prompts a tensor [6, 6], responses a tensor [24, 4]",
    ),
    "prompts looked for in config": (
        "raised AttributeError: samples = sample_group(",
        "object has no attribute 'prompts'; it has ",
    ),
    "metrics before the samples": ("it returned (dict, Samples)", ""),
}


def failures(mistake: Mistake, folder, sft) -> list[str]:
    """What the tests of its task say of the mistake: the messages of those that fail."""
    source, task = changed_source(mistake, REFERENCE.read_text(encoding="utf-8")), mistake.task
    (folder / "grpo.py").write_text(source, encoding="utf-8")
    module, memory, said = load_module(folder / "grpo.py", "grpo_that_is_wrong"), Memory(), []
    tests = [test for name, test in vars(test_grpo).items() if name.startswith(f"test_task{task}_")]
    for test in tests[: 5 if task == 5 else None]:  # without those that train for seconds
        if failure := run(test, Examiner(functools.partial(answer, module), sft, memory)):
            said.append(failure)
    return said


@pytest.mark.parametrize("name", TOLD)
def test_a_failure_is_told_in_words_and_once(name, tmp_path, sft):
    """Mistakes that a table of values cannot hold, or that once were told as others. Each failure is short, its first
    line the same in every test, and its numbers come once.
    """
    first, below = TOLD[name]
    said = failures(BY_NAME[name], tmp_path, sft)
    assert first in said[0].splitlines()[0]
    assert below in said[0].partition("\n")[2]
    assert all(len(message.splitlines()) <= 8 for message in said)
    lines = [line for message in said for line in message.splitlines() if line != "  as above"]
    assert len({message.splitlines()[0] for message in said}) == 1, said
    assert sorted(lines[1:]) == sorted([*lines[1 : len(said[0].splitlines())], *lines[:1] * (len(said) - 1)])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("return loss, metrics", "return loss * 1.005, metrics"), "1.005 times what it should be"),
        (("return loss, metrics", "return loss + 3, metrics"), "the loss is +3 off, yet its gradient is right"),
    ],
)
def test_a_loss_that_no_table_knows_is_told_by_what_is_seen(change, told, tmp_path, sft):
    unknown = Mistake(4, "not in the catalogue", [change], (told,))
    assert told in failures(unknown, tmp_path, sft)[0].splitlines()[0]


# Symptoms: true of any function, none of a right one ---------------------------------------------------------------


def fresh(seed: int) -> Batch:
    """A batch with responses of all lengths, ratios on both sides of the clip, and advantages of both signs."""
    return fresh_batch(functools.partial(uniform, torch.Generator().manual_seed(seed)), [2, 4, 1, 3, 5, 2], 5, beta=0.1)


@CASES
@given(st.integers(0, 10**6), st.integers(2, 5), st.integers(2, 6), st.booleans())
def test_a_right_function_has_no_symptoms(sft, seed, groups, G, normalize_std):
    reference = load_module(REFERENCE, "reference_of_the_symptoms")
    examiner = Examiner(functools.partial(answer, reference), sft, Memory())
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.rand(groups * G, generator=generator) + torch.arange(groups * G) % G
    assert symptoms.of_advantages(examiner.advantages_again, rewards, G, normalize_std) == ""
    logp, ref_logp = (-3 * torch.rand(groups, G, generator=generator) for _ in range(2))
    assert symptoms.of_k3(examiner.k3_again, logp, ref_logp) == ""
    batch = fresh(seed)
    assert symptoms.of_loss(examiner.loss_again, loss.right_of, batch) == ""


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
    seen = symptoms.of_loss(wrong_loss(LOSSES[told]), loss.right_of, batch)
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
    call = lambda r, G, normalize_std: ADVANTAGES[told](r, G)  # noqa: E731
    assert told in symptoms.of_advantages(call, rewards, 4, True)


K3 = {
    "one token's log-probs move": lambda logp, ref: ((ref - logp).exp() - (ref - logp) - 1).cumsum(1),
    "both log-probs fall": lambda logp, ref: (ref - logp).exp() - (ref - logp) - 1 + 0.1 * logp**2,
    "where the two policies agree": lambda logp, ref: (ref - logp).exp() - (ref - logp) - 0.9,
    "1.443 times (1 / ln 2: bits for nats)": lambda logp, ref: ((ref - logp).exp() - (ref - logp) - 1) / math.log(2),
    "wrong exactly where u < 1": lambda logp, ref: torch.where(
        ref > logp, k3_right(logp, ref), 2 * k3_right(logp, ref)
    ),
    "k3 is 0.5 wherever it should be more": lambda logp, ref: k3_right(logp, ref).clamp(max=0.5),
    "|log(u)| is large": lambda logp, ref: torch.where(
        (ref - logp).abs() > 1, 2 * k3_right(logp, ref), k3_right(logp, ref)
    ),
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
    call = lambda *args: (K3[told](*args).double(),)  # noqa: E731
    assert told in symptoms.of_k3(call, logp, ref)
