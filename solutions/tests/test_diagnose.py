"""lab/diagnose/: the naming never raises, whatever a student's function returns and whatever the shapes."""

import copy
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import tinylm
from lab.diagnose import advantages, k3, loss, samples, step
from lab.diagnose.loss import Batch
from lab.examine import Examiner, first_difference, rounded
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
        (("return loss, metrics", "return loss * 1.005, metrics"), "scaled by 1.005"),
        (("return loss, metrics", "return loss + 3, metrics"), "the loss is wrong"),
        (("log_u.exp() - log_u - 1", "log_u.detach().exp() - log_u - 1"), "u itself carries no gradient"),
        (("log_u.exp() - log_u - 1", "log_u.exp() - log_u.detach() - 1"), "log(u) carries no gradient"),
    ],
)
def test_a_failure_is_told_in_words(change, told, tmp_path, reference):
    """The smallest cases that once ended in an error of the naming itself, or in no name."""
    import test_grpo  # noqa: PLC0415
    from lab.start import REFERENCE, load_module  # noqa: PLC0415

    source = REFERENCE.read_text(encoding="utf-8")
    assert source.count(change[0]) == 1
    (tmp_path / "grpo.py").write_text(source.replace(*change), encoding="utf-8")
    examiner = Examiner(load_module(tmp_path / "grpo.py", "grpo_that_is_wrong"), with_traceback=False)
    test = test_grpo.test_task4_clip_worked_example if "loss" in change[0] else test_grpo.test_task3_worked_example
    with pytest.raises(pytest.fail.Exception, match=r"^Task [34] ") as failure:
        test(examiner)
    assert told in str(failure.value).splitlines()[0]
