"""tinylm.py: the task, the log-probs against a plain forward pass, sampling, SFT, files."""

import copy
import math
import pickle
import random
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tinylm
from tinylm import EOS, HELD_OUT, PAD, PROMPT_LEN, RESPONSE_LEN, VOCAB, TinyLM


@pytest.fixture(scope="module")
def held_out() -> Tensor:
    return tinylm.problems()[1]


def accuracy(model: TinyLM, prompts: Tensor, temperature: float = 1.0) -> tuple[float, float]:
    right = tinylm.answers(prompts)
    p, greedy = tinylm.success(tinylm.response_logits(model, prompts, right, temperature), right)
    return p.mean().item(), greedy.mean().item()


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# The task ------------------------------------------------------------------------------------------------------


def test_decode_undoes_encode():
    texts = ["37+48=", "10+99=", "_$+=09", VOCAB[:6]]
    tokens = tinylm.encode(texts)
    assert tokens.dtype == torch.int64 and tokens.shape == (4, 6)
    assert tinylm.decode(tokens) == texts


def test_tokens_are_distinct():
    assert len(set(VOCAB)) == len(VOCAB) == 14
    assert PAD != EOS and (VOCAB[PAD], VOCAB[EOS]) == ("_", "$")


@pytest.mark.parametrize("texts", [["1+2", "10+20"], ["3 + 4="], ["1x2"]])
def test_encode_refuses_unequal_lengths_and_unknown_characters(texts):
    with pytest.raises(ValueError):
        tinylm.encode(texts)


@pytest.mark.parametrize(
    ("response", "text"),
    [
        ("85$_", "85$"),  # ended
        ("198$", "198$"),  # ended on the last token
        ("8555", "8555"),  # truncated: never ended
        ("$___", "$"),  # empty
        ("8_5$", "8_5$"),  # malformed: padding before the end was written by the policy
        ("85__", "85__"),  # padding without an end: not an answer
        ("85$7", "85$"),  # tokens after the end do not count
        ("8$5$", "8$"),  # the first end counts
        ("____", "____"),
    ],
)
def test_decode_and_strip_padding(response, text):
    assert tinylm.decode_and_strip_padding(tinylm.encode([response])) == [text]


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("85$", 1.0),
        ("85", 0.0),  # never ended
        ("84$", 0.0),
        ("085$", 0.0),  # not written plainly
        ("8_5$", 0.0),
        ("_85$", 0.0),
        ("+85$", 0.0),
        ("85$$", 0.0),
        ("85__", 0.0),
        ("$", 0.0),
        ("", 0.0),
    ],
)
def test_reward(response, expected):
    value = tinylm.reward("37+48=", response)
    assert isinstance(value, float) and value == expected


def test_split_is_complete_disjoint_and_repeatable():
    train, held_out = tinylm.problems()
    train_texts, held_out_texts = tinylm.decode(train), tinylm.decode(held_out)
    assert len(held_out_texts) == HELD_OUT == 500
    every = {f"{left}+{right}=" for left in range(10, 100) for right in range(10, 100)}
    assert len(train_texts) + len(held_out_texts) == len(every) == 8100
    assert set(train_texts) | set(held_out_texts) == every
    again = tinylm.problems()
    assert torch.equal(train, again[0]) and torch.equal(held_out, again[1])


def test_answers_are_right_for_all_problems():
    prompts = torch.cat(tinylm.problems())
    right = tinylm.answers(prompts)
    assert right.shape == (8100, RESPONSE_LEN)
    texts = tinylm.decode_and_strip_padding(right)
    assert all(tinylm.reward(prompt, text) == 1.0 for prompt, text in zip(tinylm.decode(prompts), texts, strict=True))
    after_the_end = right[tinylm.response_mask(right) == 0]
    assert len(after_the_end) > 0 and (after_the_end == PAD).all()


def test_response_mask_keeps_the_end_and_drops_what_follows():
    responses = tinylm.encode(["85$_", "198$", "8555", "$___", "8_5$", "8$5$", "$$$$"])
    expected = [[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]]
    mask = tinylm.response_mask(responses)
    assert mask.is_floating_point()
    assert mask.tolist() == expected


# selective_log_softmax ------------------------------------------------------------------------------------------


def gathered(logits: Tensor, index: Tensor) -> Tensor:
    """The definition: log-softmax over the whole vocabulary, then the chosen entry."""
    return F.log_softmax(logits, dim=-1).gather(-1, index.unsqueeze(-1)).squeeze(-1)


@pytest.mark.parametrize("shape", [(7, 14), (3, 5, 14), (2, 3, 4, 9)])
def test_selective_log_softmax_values_and_gradient(shape):
    generator = seeded(0)
    logits = (10 * torch.randn(shape, generator=generator, dtype=torch.float64)).requires_grad_()
    index = torch.randint(shape[-1], shape[:-1], generator=generator)
    weights = torch.randn(shape[:-1], generator=generator, dtype=torch.float64)
    got, expected = tinylm.selective_log_softmax(logits, index), gathered(logits, index)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    (got_gradient,) = torch.autograd.grad((got * weights).sum(), logits)
    (expected_gradient,) = torch.autograd.grad((expected * weights).sum(), logits)
    torch.testing.assert_close(got_gradient, expected_gradient, rtol=1e-12, atol=1e-12)


def test_selective_log_softmax_does_not_overflow():
    logits = torch.tensor([[1000.0, 0.0], [-1000.0, -1000.0]])
    got = tinylm.selective_log_softmax(logits, torch.tensor([1, 0]))
    torch.testing.assert_close(got, torch.tensor([-1000.0, -math.log(2)]), rtol=0, atol=1e-4)


def test_selective_log_softmax_keeps_no_copy_of_the_vocabulary():
    """In float32 the backward pass may keep the logits, which are there anyway, but no second [..., V] tensor."""
    logits = torch.randn(5, 4, 14, generator=seeded(2), requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        tinylm.selective_log_softmax(logits, torch.zeros(5, 4, dtype=torch.long))
    assert kept
    assert all(tensor.numel() < logits.numel() or tensor.data_ptr() == logits.data_ptr() for tensor in kept)


# Log-probs against a plain forward pass -------------------------------------------------------------------------


def plain_logits(model: TinyLM, prompts: Tensor, responses: Tensor) -> Tensor:
    """Every row read whole, on its own, in one pass: no cache, no shared prompt. Logits [N, Tr, V]."""
    tokens = torch.cat([prompts, responses[:, :-1]], dim=1)
    n, t = tokens.shape
    x = F.embedding(tokens, model.token_embedding.weight) + model.position_embedding.weight[:t]
    for block in model.blocks:
        q, k, v = (
            part.view(n, t, block.heads, -1).transpose(1, 2) for part in block.qkv(block.ln_1(x)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + block.proj(attended.transpose(1, 2).reshape(n, t, -1))
        x = x + block.fc_out(F.gelu(block.fc(block.ln_2(x))))
    return model.head(model.ln_f(x))[:, PROMPT_LEN - 1 :]


def plain_logp(model: TinyLM, prompts: Tensor, responses: Tensor, temperature: float = 1.0) -> Tensor:
    return gathered(plain_logits(model, prompts, responses) / temperature, responses)


def random_responses(n: int, seed: int) -> Tensor:
    """Rows of any tokens at all, so that lengths differ and unlikely tokens are scored too."""
    return torch.randint(len(VOCAB), (n, RESPONSE_LEN), generator=seeded(seed))


RUNS = {  # problem numbers, row by row
    "one row": [0],
    "G = 1": list(range(8)),
    "G = 2": [i // 2 for i in range(8)],
    "G = 8": [i // 8 for i in range(32)],
    "unequal runs": [0, 0, 0, 1, 2, 2, 2, 2, 2, 3, 3],
    "interleaved": [0, 1, 0, 1, 2, 0, 2, 1],
    "a prompt comes back": [0, 0, 1, 1, 0, 0, 2, 2],
}


@pytest.fixture(scope="module")
def untrained() -> TinyLM:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return TinyLM()


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
@pytest.mark.parametrize("run", RUNS)
def test_token_logp_equals_a_plain_forward(untrained, sft, held_out, run, temperature):
    prompts = held_out[RUNS[run]]
    responses = random_responses(len(prompts), 3)
    responses[1::2] = tinylm.answers(prompts)[1::2]
    mask = tinylm.response_mask(responses)
    for model in (untrained, sft):
        logits = plain_logits(model, prompts, responses) / temperature
        got = tinylm.token_logp(model, prompts, responses, temperature)
        assert got.shape == responses.shape and got.dtype == torch.float32
        error = ((got - gathered(logits, responses)) * mask).abs()
        # 1e-6, times the largest logit where that is above 1: float32 itself rounds a logit of 10 to 1e-6.
        assert (error <= 1e-6 * logits.abs().amax(dim=(1, 2)).clamp(min=1).unsqueeze(1)).all()
        torch.testing.assert_close(
            tinylm.response_logits(model, prompts, responses, temperature)[mask == 1], logits[mask == 1]
        )


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("run", RUNS)
def test_token_logp_gradient_equals_that_of_a_plain_forward(sft, held_out, run, temperature):
    prompts = held_out[RUNS[run]]
    responses = random_responses(len(prompts), 4)
    weights = torch.randn(responses.shape, generator=seeded(5)) * tinylm.response_mask(responses)

    def gradient(model: TinyLM, logp) -> Tensor:
        loss = (logp(model, prompts, responses, temperature) * weights).sum()
        return torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(model.parameters()))])

    got = gradient(sft, tinylm.token_logp)
    expected = gradient(copy.deepcopy(sft).double(), plain_logp)  # float64: the truth, as far as float32 is concerned
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_another_response_of_the_group_changes_nothing(sft, held_out):
    prompts = held_out[:2].repeat_interleave(4, dim=0)
    responses = random_responses(8, 6)
    other = responses.clone()
    other[2] = (other[2] + 1) % len(VOCAB)
    before, after = (tinylm.token_logp(sft, prompts, rows) for rows in (responses, other))
    rest = torch.arange(8) != 2
    torch.testing.assert_close(after[rest], before[rest], rtol=1e-6, atol=1e-6)
    assert (after[2] - before[2]).abs().max() > 0.1


def test_a_later_token_changes_no_earlier_log_prob(sft, held_out):
    prompts = held_out[:3].repeat_interleave(2, dim=0)
    responses = tinylm.answers(prompts)
    for t in range(1, RESPONSE_LEN):
        other = responses.clone()
        other[:, t:] = (other[:, t:] + 3) % len(VOCAB)
        before, after = (tinylm.token_logp(sft, prompts, rows) for rows in (responses, other))
        torch.testing.assert_close(after[:, :t], before[:, :t], rtol=1e-6, atol=1e-6)


# Sampling -------------------------------------------------------------------------------------------------------


def test_generate_repeats_itself_for_a_seed_and_leaves_the_global_generator_alone(sft, held_out):
    prompts = held_out[:32].repeat_interleave(4, dim=0)
    state = torch.random.get_rng_state()
    first, again, other = (tinylm.generate(sft, prompts, generator=seeded(seed)) for seed in (7, 7, 8))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_generate_pads_after_the_end(untrained, sft, held_out):
    prompts = held_out[:64].repeat_interleave(4, dim=0)
    for model in (untrained, sft):
        responses = tinylm.generate(model, prompts, 2.0, seeded(9))
        assert responses.shape == (256, RESPONSE_LEN) and responses.dtype == torch.int64
        own = tinylm.response_mask(responses) == 1
        assert not own.all() and (responses[~own] == PAD).all()
        # The rest is the policy's own: at this temperature an untrained one also writes padding, and may never end.
        if model is untrained:
            assert (responses[own] == PAD).any() and (responses != EOS).all(dim=1).any()


def test_greedy_takes_the_likeliest_token(sft, held_out):
    prompts = held_out[:100].repeat_interleave(2, dim=0)
    responses = tinylm.generate(sft, prompts, greedy=True)
    own = tinylm.response_mask(responses) == 1
    logits = plain_logits(sft, prompts, responses)
    chosen = logits.gather(-1, responses.unsqueeze(-1)).squeeze(-1)
    assert (chosen >= logits.amax(dim=-1) - 1e-4)[own].all()  # 1e-4: two logits may be equal but for rounding
    assert torch.equal(tinylm.generate(sft, prompts, 0.3, seeded(1), greedy=True), responses)  # nothing is drawn


@pytest.mark.parametrize(("run", "temperature"), [(1, 0.5), (8, 1.0), (8, 2.0)])
def test_whole_responses_come_as_often_as_token_logp_says(sft, held_out, run, temperature):
    """How often each response is drawn, against the product of its tokens' probabilities: the sampler, its cache and
    temperature, and the log-probs must agree on every token, in groups of `run` equal rows.
    """
    n = 2048
    p = tinylm.success_probability(sft, held_out, temperature)
    a, b = held_out[(p - 0.4).abs().argsort()[:2]].split(1)  # two problems with more than one frequent response
    prompts = torch.cat([a.repeat(run, 1), b.repeat(run, 1)]).repeat(n // run, 1)
    responses = tinylm.generate(sft, prompts, temperature, seeded(10)).view(-1, 2, run, RESPONSE_LEN)
    compared = 0
    for number, prompt in enumerate((a, b)):
        drawn, counts = responses[:, number].reshape(n, -1).unique(dim=0, return_counts=True)
        logp = plain_logp(sft, prompt.expand(len(drawn), -1), drawn, temperature)
        p = (logp * tinylm.response_mask(drawn)).sum(dim=1).exp().double()
        assert p.sum() <= 1 + 1e-5
        # Binomial counts: 5 standard deviations, where they are near enough to normal. Some 50 comparisons in all:
        # a right sampler fails on one machine in 30,000; one that ignores the temperature is off by 20 and more.
        frequent = n * p * (1 - p) >= 25
        z = (counts - n * p) / (n * p * (1 - p)).sqrt()
        assert (z[frequent].abs() <= 5).all()
        # And what was drawn is likely enough: the rare rest takes up no more than its share.
        assert abs(counts[~frequent].sum() - n * (1 - p[frequent].sum())) <= 5 * math.sqrt(n) / 2
        compared += frequent.sum()
    assert compared >= 4


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_exact_accuracy_agrees_with_sampling(sft, held_out, temperature):
    p = tinylm.success_probability(sft, held_out, temperature)
    right = tinylm.answers(held_out)
    by_hand = (plain_logp(sft, held_out, right, temperature) * tinylm.response_mask(right)).sum(dim=1).exp()
    torch.testing.assert_close(p, by_hand, rtol=1e-5, atol=1e-6)

    samples = 16
    prompts = held_out.repeat_interleave(samples, dim=0)
    texts = tinylm.decode_and_strip_padding(tinylm.generate(sft, prompts, temperature, seeded(11)))
    rewards = [tinylm.reward(prompt, text) for prompt, text in zip(tinylm.decode(prompts), texts, strict=True)]
    # Each problem's share of right answers has the variance p (1 - p) / samples.
    standard_error = math.sqrt((p * (1 - p)).sum() / samples) / len(p)
    assert abs(sum(rewards) / len(rewards) - p.mean()) <= 4 * standard_error
    sampled, greedy = accuracy(sft, held_out, temperature)
    assert sampled == pytest.approx(p.mean().item())
    texts = tinylm.decode_and_strip_padding(tinylm.generate(sft, held_out, greedy=True))
    rewards = [tinylm.reward(prompt, text) for prompt, text in zip(tinylm.decode(held_out), texts, strict=True)]
    assert greedy == pytest.approx(sum(rewards) / len(rewards))


# SFT ------------------------------------------------------------------------------------------------------------


def test_the_starting_policy_is_the_one_the_lab_is_calibrated_for(sft, held_out):
    sampled, greedy = accuracy(sft, held_out)  # their ranges are the README's, which test_readme.py holds
    assert 0 < sampled < greedy < 1
    parameters = sum(weights.numel() for weights in sft.parameters())
    assert 95_000 <= parameters <= 110_000


def test_train_sft_stops_on_accuracy_repeats_itself_and_keeps_to_itself(monkeypatch):
    measure, seen = tinylm.success_probability, []

    def watched(model, prompts, *args, **kwargs):
        p = measure(model, prompts, *args, **kwargs)
        seen.append((tinylm.decode(prompts), p.mean().item()))
        return p

    monkeypatch.setattr(tinylm, "success_probability", watched)
    target = 0.004  # reached within half a second
    state, own_state = torch.random.get_rng_state(), random.getstate()
    first = tinylm.train_sft(seed=3, target=target)
    assert torch.equal(torch.random.get_rng_state(), state) and random.getstate() == own_state
    checks = [accuracy for _, accuracy in seen]
    assert len(checks) >= 2 and checks[-1] >= target and max(checks[:-1]) < target
    held_out = set(tinylm.decode(tinylm.problems()[1]))
    assert all(held_out.isdisjoint(texts) for texts, _ in seen)  # the held-out problems stay out of it

    torch.manual_seed(12345)  # the global generator must not matter
    again, other = tinylm.train_sft(seed=3, target=target), tinylm.train_sft(seed=4, target=0.0)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.head.weight, other.head.weight)


def test_train_sft_gives_up():
    with pytest.raises(RuntimeError, match="11 steps"):
        tinylm.train_sft(target=0.99, max_steps=11)


# Files ----------------------------------------------------------------------------------------------------------


def same_weights(a: TinyLM, b: TinyLM) -> bool:
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_checkpoint_round_trip(untrained, tmp_path):
    path = tmp_path / "model.pt"
    tinylm.save_checkpoint(untrained, path)
    assert [file.name for file in tmp_path.iterdir()] == ["model.pt"]
    assert same_weights(tinylm.load_checkpoint(path), untrained)


def test_a_missing_checkpoint(tmp_path):
    with pytest.raises(FileNotFoundError):
        tinylm.load_checkpoint(tmp_path / "nothing.pt")


class Malicious:
    """Unpickling it would run code: here, create the file `trace`."""

    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return open, (str(self.trace), "w")


DAMAGE = ["truncated", "almost", "empty", "text", "pickle", "in torch", "linear", "narrow", "nan", "inf", "folder"]


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_and_foreign_checkpoints_are_named(untrained, tmp_path, kind):
    path, trace = tmp_path / "model.pt", tmp_path / "trace"
    tinylm.save_checkpoint(untrained, path)
    content = path.read_bytes()
    match kind:
        case "truncated":
            path.write_bytes(content[: len(content) // 2])
        case "almost":
            path.write_bytes(content[:-1])
        case "empty":
            path.write_bytes(b"")
        case "text":
            path.write_text("no checkpoint", encoding="utf-8")
        case "pickle":
            path.write_bytes(pickle.dumps(Malicious(trace), protocol=2))
        case "in torch":
            torch.save({"head.weight": Malicious(trace)}, path)
        case "linear":
            torch.save(torch.nn.Linear(3, 3).state_dict(), path)
        case "narrow":
            tinylm.save_checkpoint(TinyLM(width=32), path)
        case "nan" | "inf":
            spoilt = copy.deepcopy(untrained)
            with torch.no_grad():
                spoilt.head.weight[1, 2] = float(kind)
            tinylm.save_checkpoint(spoilt, path)
        case "folder":
            path.unlink()
            path.mkdir()
    with pytest.raises(ValueError, match=r"model\.pt") as caught:
        tinylm.load_checkpoint(path)
    assert "\n" not in str(caught.value)
    assert not trace.exists()


@pytest.fixture
def stub_sft(monkeypatch, untrained) -> list[int]:
    """train_sft is replaced by one that takes no time; the list grows with every call."""
    calls = []
    monkeypatch.setattr(tinylm, "train_sft", lambda *args, **kwargs: calls.append(1) or copy.deepcopy(untrained))
    return calls


def test_load_or_train_sft_trains_once(stub_sft, untrained, tmp_path, capsys):
    path = tmp_path / "sft.pt"
    assert same_weights(tinylm.load_or_train_sft(path), untrained)
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and "sft.pt" in message
    assert same_weights(tinylm.load_or_train_sft(path), untrained)
    assert len(stub_sft) == 1 and capsys.readouterr().err == ""


def test_load_or_train_sft_names_a_damaged_cache_and_replaces_it(stub_sft, untrained, tmp_path, capsys):
    path = tmp_path / "sft.pt"
    path.write_bytes(b"damaged")
    assert same_weights(tinylm.load_or_train_sft(path), untrained)
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and str(path) in message and "damaged" in message
    assert same_weights(tinylm.load_checkpoint(path), untrained)


def test_load_or_train_sft_works_where_nothing_can_be_saved(stub_sft, untrained, tmp_path, capsys, monkeypatch):
    write_bytes = Path.write_bytes

    def refuse(path, content):
        write_bytes(path, bytes(content)[:1000])
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_bytes", refuse)
    assert same_weights(tinylm.load_or_train_sft(tmp_path / "sft.pt"), untrained)
    assert "no space left" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
