"""Properties: the lab's functions against other definitions of the same thing, and its commands against any flags.

Each test draws some hundreds of cases with hypothesis, others in every run; a failure prints the smallest case found
and a line, `@reproduce_failure(...)`, that repeats it. In order: text and tokens, log-probs, the five tasks, pass@k,
run.py's numbers and CSVs, the command lines.
"""

import argparse
import atexit
import io
import math
import multiprocessing
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import grade
import numpy as np
import pytest
import release
import torch
from auditing import runner, worker
from guiding import running
from helpers import call_command, call_main
from hypothesis import HealthCheck, assume, configuration, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.special import log_softmax
from torch import Tensor

import passk
import run
import tinylm
from lab import explain
from lab.flags import number, run_parser, settings_of
from lab.history import EVALUATED, METRICS, Run, read_csv, write_csv

V = len(tinylm.VOCAB)
# What hypothesis caches, when the tests are collected already, goes there and not to `.hypothesis` in the repository.
CACHE = tempfile.mkdtemp(prefix="hypothesis-")
atexit.register(shutil.rmtree, CACHE, ignore_errors=True)
configuration.set_hypothesis_home_dir(CACHE)


def cases(n: int) -> settings:
    """n random cases for a test, other ones in each run, of which nothing is kept."""
    # A busy machine is no failure. What a fixture makes is made once for all cases of a test, as it should be.
    suppressed = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
    return settings(
        max_examples=n,
        deadline=None,
        derandomize=False,
        database=None,
        print_blob=True,
        suppress_health_check=suppressed,
    )


def tokens(rows: int, length: int) -> st.SearchStrategy[Tensor]:
    """[N, T] with N up to `rows` and T from 1 to `length`, of all tokens or of a few, so that rows begin alike."""
    shapes = st.tuples(st.integers(0, rows), st.integers(1, length))
    few_or_all = st.sampled_from([st.integers(0, 1), st.sampled_from([3, tinylm.PAD, tinylm.EOS]), st.integers(0, 13)])
    drawn = st.tuples(shapes, few_or_all).flatmap(lambda pair: arrays(np.int64, pair[0], elements=pair[1]))
    return drawn.map(torch.from_numpy)


# Text and tokens ------------------------------------------------------------------------------------------------


@cases(600)
@given(tokens(6, 10))
def test_text_ends_with_the_first_end_of_sequence(responses):
    expected = []
    for row in responses.tolist():
        text = ""
        for token in row:
            text += "0123456789+=_$"[token]
            if text[-1] == "$":
                break
        expected.append(text)
    assert tinylm.decode_and_strip_padding(responses) == expected


@cases(600)
@given(tokens(6, 10))
def test_mask_is_one_up_to_the_first_end_of_sequence(responses):
    expected = []
    for row in responses.tolist():
        ended = False
        expected.append([])
        for token in row:
            expected[-1].append(0.0 if ended else 1.0)
            ended = ended or token == tinylm.EOS
    mask = tinylm.response_mask(responses)
    assert mask.dtype == torch.float32 and mask.shape == responses.shape
    assert mask.tolist() == expected


@st.composite
def answered(draw) -> tuple[int, int, str]:
    """Two numbers and an answer: any text, the sum in one of many forms, or one that is right but for an edit."""
    left, right = draw(st.integers(0, 10**6)), draw(st.integers(0, 10**6))
    total = left + right
    arabic = "".join(chr(0x660 + int(digit)) for digit in str(total))
    forms = [
        f"{total}$",
        f"{total}",
        f"0{total}$",
        f"+{total}$",
        f"{total:_}$",
        f"{total}.0$",
        f"{arabic}$",
        f"-{total}$",
    ]
    text = draw(st.one_of(st.sampled_from(forms), st.text("0123456789+=_$ \n-.é٣", max_size=8)))
    if draw(st.booleans()):
        place = draw(st.integers(0, len(text)))
        new = draw(st.sampled_from(["", "0", "$", "_", " ", "+", "\n"]))
        text = text[:place] + new + text[place + draw(st.integers(0, 1)) :]
    return left, right, text


@cases(800)
@given(answered())
@example((37, 48, "85$"))
def test_reward_is_for_the_plain_sum_and_its_end(case):
    left, right, text = case
    digits = text[:-1]
    plain = len(digits) > 0 and all(char in "0123456789" for char in digits) and (digits[0] != "0" or digits == "0")
    expected = 1.0 if text.endswith("$") and plain and int(digits) == left + right else 0.0
    got = tinylm.reward(f"{left}+{right}=", text)
    assert type(got) is float and got == expected


@cases(300)
@given(tokens(12, 10), st.integers(1, 10))
def test_equal_rows_are_computed_once_and_every_row_is_right(sft, rows, keep):
    """`policy_logits` reads each distinct row once, and gives every row what the model gives it alone."""
    assume(len(rows) > 0 and keep <= rows.shape[1])
    read = []

    def model(tokens, logits_to_keep):
        read.append(tokens)
        return sft(tokens, logits_to_keep)

    with torch.no_grad():
        got = tinylm.policy_logits(model, rows, keep, 0.5)
        expected = torch.cat([sft(row.unsqueeze(0)) for row in rows])[:, -keep:] / 0.5
    assert sorted(map(tuple, read[0].tolist())) == sorted(set(map(tuple, rows.tolist())))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-4)


# Log-probs ------------------------------------------------------------------------------------------------------

# The largest logits drawn. The result is a difference of two numbers of the logits' size, each rounded: its error is an
# eps of that size, here 1e-3.
LARGEST = {torch.float32: 1e4, torch.float64: 1e13}


@st.composite
def chosen_logits(draw) -> tuple[Tensor, Tensor, Tensor]:
    """(logits [..., V], index [...], weights [...]) of up to three leading dimensions; some tokens are impossible."""
    dtype = draw(st.sampled_from(list(LARGEST)))
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    size = draw(st.integers(1, V))
    top = draw(st.sampled_from([1.0, 30.0, LARGEST[dtype]]))
    logits = draw(arrays(np.float64, (*shape, size), elements=st.floats(-top, top)))
    logits[draw(arrays(np.bool_, logits.shape, elements=st.sampled_from([False, False, False, True])))] = -np.inf
    # Where no token at all is possible there is no distribution.
    logits[..., 0] = np.where(np.isinf(logits).all(axis=-1), 0.0, logits[..., 0])
    index = draw(arrays(np.int64, shape, elements=st.integers(0, size - 1)))
    weights = draw(arrays(np.float64, shape, elements=st.sampled_from([1.0, -1.0, 0.5, 3.0])))
    return torch.from_numpy(logits).to(dtype), torch.from_numpy(index), torch.from_numpy(weights).to(dtype)


@cases(700)
@given(chosen_logits())
def test_selective_log_softmax_is_scipys_log_softmax_gathered(case):
    logits, index, weights = case
    logits.requires_grad_()
    got = tinylm.selective_log_softmax(logits, index)
    assert got.dtype == logits.dtype and got.shape == index.shape
    (gradient,) = torch.autograd.grad(got, logits, weights)

    values, places = logits.detach().double().numpy(), index.numpy()[..., None]
    every = log_softmax(values, axis=-1) if values.size else values
    expected = np.take_along_axis(every, places, axis=-1)[..., 0]
    expected_gradient = -np.exp(every)
    np.put_along_axis(expected_gradient, places, 1 + np.take_along_axis(expected_gradient, places, -1), axis=-1)
    expected_gradient *= weights.double().numpy()[..., None]

    eps = torch.finfo(logits.dtype).eps
    size = np.abs(np.where(np.isinf(values), 0, values)).max(axis=-1, initial=1)
    impossible = np.isinf(expected)
    assert np.array_equal(np.isneginf(got.detach().double().numpy()), impossible)
    error = np.abs(got.detach().double().numpy()[~impossible] - expected[~impossible])
    assert (error <= 4 * eps * size[~impossible]).all()
    error = np.abs(gradient.double().numpy() - expected_gradient)
    assert (error <= 8 * eps * (size * np.abs(weights.double().numpy()))[..., None]).all()
    # The same again from torch, where its own rounding is no worse than what was allowed above.
    theirs = torch.nn.functional.log_softmax(logits.detach().double(), dim=-1).gather(-1, index.unsqueeze(-1))
    assert np.allclose(theirs.squeeze(-1).numpy(), expected, rtol=1e-12, atol=1e-12)


# The tasks ------------------------------------------------------------------------------------------------------

DTYPES = st.sampled_from([torch.float32, torch.float64])
SMALLEST = 1e-35  # what float32 does below it has fewer and fewer digits: no relative error can be asked for


@st.composite
def rewards(draw) -> tuple[Tensor, int]:
    """(rewards [P * G], G). Rewards are finite and, up to 1e6, far from where a square overflows."""
    p, g = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    element = draw(
        st.sampled_from(
            [st.sampled_from([0.0, 1.0]), st.floats(0, 1, width=32), st.floats(-1e6, 1e6, width=32), st.just(0.7)]
        )
    )
    values = draw(arrays(np.float32, (p, g), elements=element))
    values[draw(st.integers(0, p - 1))] = draw(element)  # one group without signal, at least
    return torch.from_numpy(values).flatten().to(draw(DTYPES)), g


@cases(700)
@given(rewards(), st.booleans(), st.sampled_from([1e-4, 1e-8, 0.1, 1.0]))
def test_advantages_are_those_of_statistics_and_exactly_zero_without_signal(reference, case, normalize_std, eps):
    values, g = case
    before = values.clone()
    got = reference.group_advantages(values, g, normalize_std, eps)
    assert got.shape == values.shape and got.dtype == values.dtype and torch.equal(values, before)
    for group, advantages in zip(values.view(-1, g).tolist(), got.view(-1, g).tolist(), strict=True):
        if len(set(group)) == 1:
            assert advantages == [0.0] * g
            continue
        mean = statistics.fmean(group)
        divisor = statistics.pstdev(group) + eps if normalize_std else 1.0
        rounding = 8 * torch.finfo(values.dtype).eps * max(map(abs, group)) / divisor
        for value, advantage in zip(group, advantages, strict=True):
            expected = (value - mean) / divisor
            assert abs(advantage - expected) <= rounding * (1 + abs(expected)) + SMALLEST, (value, advantage, expected)


@st.composite
def log_probs(draw) -> tuple[Tensor, Tensor]:
    """Two of [N, Tr], from -80, below which no token is ever drawn; exp of a difference stays finite in float32."""
    shape = draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    low = draw(st.sampled_from([-80.0, -3.0]))
    pair = draw(arrays(np.float32, (2, *shape), elements=st.floats(low, 0, width=32)))
    logp, ref_logp = torch.from_numpy(pair).to(draw(DTYPES))
    return logp.clone().requires_grad_(), ref_logp


@cases(600)
@given(log_probs())
def test_k3_and_its_gradient(reference, case):
    logp, ref_logp = case
    got = reference.k3_kl(logp, ref_logp)
    assert got.shape == logp.shape and got.dtype == logp.dtype
    (gradient,) = torch.autograd.grad(got.sum(), logp)
    eps = torch.finfo(logp.dtype).eps
    flat = (part.flatten().tolist() for part in (logp, ref_logp, got, gradient))
    for ours, theirs, value, slope in zip(*flat, strict=True):
        log_u = theirs - ours
        rounding = 2 * eps * ((1 + abs(log_u)) * math.exp(log_u) + abs(log_u) + 1)
        assert abs(value - (math.expm1(log_u) - log_u)) <= rounding
        assert abs(slope - (-math.expm1(log_u))) <= rounding
        assert value >= -rounding  # it is never negative, but for rounding


class Batch(NamedTuple):
    """The arguments of `grpo_loss`."""

    logp: Tensor
    old_logp: Tensor
    ref_logp: Tensor
    advantages: Tensor
    mask: Tensor
    clip: float
    beta: float


@st.composite
def batches(draw) -> Batch:
    """Any mask with a one in each row. On padding the log-probs mean nothing, but they are finite, and so is the ratio
    made of them (a difference below 80): infinity times the mask's 0 would be no number.
    """
    shape = n, t = draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    mask = draw(arrays(np.float32, shape, elements=st.sampled_from([0.0, 1.0])))
    mask[np.arange(n), draw(arrays(np.int64, n, elements=st.integers(0, t - 1)))] = 1
    moved = draw(st.sampled_from([0.5, 4.0, 20.0]))
    old_logp, ref_logp = draw(arrays(np.float32, (2, *shape), elements=st.floats(-20, 0, width=32)))
    logp = np.minimum(0, old_logp + draw(arrays(np.float32, shape, elements=st.floats(-moved, moved, width=32))))
    nothing = draw(arrays(np.float32, (3, *shape), elements=st.sampled_from([0.0, -1.0, 39.0, -39.0])))
    logps = np.where(mask == 1, np.stack([logp, old_logp, ref_logp]), nothing)
    advantage = st.one_of(st.just(0.0), st.floats(-5, 5, width=32, allow_subnormal=False))
    advantages = draw(arrays(np.float32, n, elements=advantage))
    dtype = draw(DTYPES)
    logp, old_logp, ref_logp, advantages, mask = (torch.tensor(part).to(dtype) for part in (*logps, advantages, mask))
    clip = draw(st.one_of(st.sampled_from([0.2, 1.0, 1000.0]), st.floats(1e-3, 3)))
    beta = draw(st.one_of(st.sampled_from([0.0, 0.04]), st.floats(1e-6, 10)))
    return Batch(logp.requires_grad_(), old_logp, ref_logp, advantages, mask, clip, beta)


@cases(600)
@given(batches())
def test_loss_gradient_and_metrics_are_those_of_a_loop_over_tokens(reference, batch):
    eps = 200 * torch.finfo(batch.logp.dtype).eps  # 200: exp of a difference of up to 20 multiplies its rounding
    rows = zip(*(part.tolist() for part in batch[:5]), strict=True)
    loss = size = clipped_tokens = kl_sum = kl_size = ratio_sum = own_tokens = 0.0
    gradient, gradient_size = torch.zeros(2, *batch.logp.shape, dtype=torch.float64)
    for i, (logp, old_logp, ref_logp, advantage, mask) in enumerate(rows):
        own = [t for t, one in enumerate(mask) if one]
        weight = 1 / (len(own) * len(batch.mask))  # first the mean over the response, then over responses
        for t in own:
            ratio, log_u = math.exp(logp[t] - old_logp[t]), ref_logp[t] - logp[t]
            u = math.exp(log_u)
            kl = math.expm1(log_u) - log_u
            # Where the ratio is on an edge, rounding decides on which side it is.
            assume(all(abs(ratio - edge) > 2 * eps * ratio for edge in (1 - batch.clip, 1 + batch.clip)))
            too_good = advantage > 0 and ratio > 1 + batch.clip
            too_bad = advantage < 0 and ratio < 1 - batch.clip
            held = 1 + batch.clip if too_good else 1 - batch.clip if too_bad else ratio
            loss -= weight * (held * advantage - batch.beta * kl)
            size += weight * (held * abs(advantage) + batch.beta * (u + abs(log_u) + 1))
            gradient[i, t] = -weight * ((ratio * advantage if held == ratio else 0) - batch.beta * (1 - u))
            gradient_size[i, t] = weight * (ratio * abs(advantage) + batch.beta * (1 + u))
            clipped_tokens, own_tokens = clipped_tokens + (held != ratio), own_tokens + 1
            kl_sum, kl_size, ratio_sum = kl_sum + kl, kl_size + u + abs(log_u) + 1, ratio_sum + ratio

    got, metrics = reference.grpo_loss(*batch)
    assert got.shape == () and abs(got.item() - loss) <= eps * size + SMALLEST
    (got_gradient,) = torch.autograd.grad(got, batch.logp)
    assert ((got_gradient.double() - gradient).abs() <= eps * gradient_size + SMALLEST).all()
    assert set(metrics) == {"clip_fraction", "kl", "ratio"}
    assert all(value.shape == () and not value.requires_grad for value in metrics.values())
    assert metrics["clip_fraction"].item() == pytest.approx(clipped_tokens / own_tokens, abs=1e-6)
    assert abs(metrics["kl"].item() - kl_sum / own_tokens) <= eps * kl_size / own_tokens
    assert abs(metrics["ratio"].item() - ratio_sum / own_tokens) <= eps * ratio_sum / own_tokens


@cases(200)
@given(batches())
def test_the_cells_of_a_step_that_is_explained_are_the_gradient_that_autograd_gives(reference, batch):
    logp, old_logp, ref_logp, advantages, mask = (part.detach().double() for part in batch[:5])
    config = reference.GRPOConfig(clip=batch.clip, beta=batch.beta)
    moment = explain.look(reference, logp, old_logp, ref_logp, advantages, mask, config)

    leaf, A = logp.clone().requires_grad_(), advantages.unsqueeze(1)
    ratio, log_u = (leaf - old_logp).exp(), ref_logp - leaf
    low, high = 1 - batch.clip, 1 + batch.clip
    assume(all((abs(ratio - edge) > 1e-9)[mask == 1].all() for edge in (low, high)))
    held = torch.where(A > 0, ratio.clamp(max=high), ratio.clamp(min=low))
    objective = (held * A - batch.beta * (log_u.exp() - log_u - 1)) * mask
    (expected,) = torch.autograd.grad((objective.sum(dim=1) / mask.sum(dim=1)).mean(), leaf)
    torch.testing.assert_close(moment.gradient, expected, rtol=1e-6, atol=1e-9)
    stopped = ((A > 0) & (ratio > high)) | ((A < 0) & (ratio < low))
    assert torch.equal(moment.clipped, stopped & (mask == 1))


# pass@k ---------------------------------------------------------------------------------------------------------


@st.composite
def counted(draw) -> tuple[int, np.ndarray, int]:
    n = draw(st.one_of(st.integers(1, 30), st.integers(1, 10_000)))
    k = draw(st.one_of(st.integers(1, min(n, 64)), st.integers(1, n)))
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=2)))
    dtype = draw(st.sampled_from([np.int32, np.int64, np.uint16]))
    return n, draw(arrays(dtype, shape, elements=st.integers(0, n))), k


@cases(600)
@given(counted())
def test_pass_at_k_is_a_ratio_of_binomials(case):
    n, c, k = case
    got = passk.pass_at_k(n, c, k)
    every = math.comb(n, k)
    expected = np.array([1 - math.comb(n - right, k) / every for right in c.flatten().tolist()]).reshape(c.shape)
    assert got.shape == c.shape
    assert (abs(got - expected) <= 3e-16 * n).all() and (got >= 0).all() and (got <= 1).all()


@cases(400)
@given(
    st.integers(-1, 9),
    st.one_of(
        st.lists(st.integers(-2, 11), min_size=1, max_size=3), st.lists(st.floats(-1, 9), min_size=1, max_size=3)
    ),
    st.integers(-1, 10),
)
def test_pass_at_k_refuses_all_else(n, c, k):
    if 1 <= k <= n and all(isinstance(right, int) and 0 <= right <= n for right in c):
        assert passk.pass_at_k(n, np.array(c), k).shape == (len(c),)
    else:
        with pytest.raises(ValueError):
            passk.pass_at_k(n, np.array(c), k)


# run.py: numbers and CSVs ---------------------------------------------------------------------------------------

NO_NUMBERS = ["", " ", "x", "--", "1 2", "1.2.3", "0x1F", "1e", "é", "1,5", "½", "\udcff", "\n", "9" * 5000 + "x"]


@st.composite
def number_texts(draw, kind: type) -> tuple[str, float | None]:
    """A text and the number that it is, or None."""
    blank = draw(st.sampled_from(["", " ", "\n", "\u2028"]))
    whole = st.one_of(st.integers(-20, 20), st.integers(-(10**20), 10**20))
    drawn = draw(st.one_of(whole, st.floats(), st.sampled_from(NO_NUMBERS)))
    if isinstance(drawn, str):
        return drawn, None
    if kind is int and isinstance(drawn, float):
        return f"{blank}{drawn!r}{blank}", None
    return f"{blank}{drawn!r}{blank}", None if math.isnan(drawn) else drawn


@cases(900)
@given(st.data(), st.sampled_from([int, float]), st.integers(-20, 20), st.integers(0, 10**7), st.booleans())
def test_number_takes_what_lies_in_its_bounds(data, kind, low, width, above):
    text, value = data.draw(number_texts(kind))
    convert = number(kind, low, low + width, above)
    if value is not None and low <= value <= low + width and not (above and value == low):
        got = convert(text)
        assert type(got) is kind and got == value
    else:
        with pytest.raises(argparse.ArgumentTypeError) as refused:
            convert(text)
        assert repr(text) in str(refused.value) and len(str(refused.value).splitlines()) == 1


FINITE = st.floats(allow_nan=False, allow_infinity=False)


def as_run(flags: list[str], stop: int, values: list[float]) -> Run:
    """A whole run with these flags, ended after iteration `stop`; its numbers are `values`, again and again."""
    args = run_parser().parse_args(flags)
    endless = (value for _ in range(10**6) for value in values)
    history = []
    for i in range(min(stop, args.iters) + 1):
        evaluated = i % args.eval_every == 0 or i == args.iters
        names = (METRICS if i else []) + (EVALUATED if evaluated else [])
        history.append({"iteration": i} | {name: next(endless) for name in names})
    return Run("saved", settings_of(args), history)


def write(saved: Run, path: Path) -> None:
    iters = int(saved.settings[0].removeprefix("--iters "))
    write_csv(saved, len(saved.history) <= iters, path)


def assert_whole(got: Run) -> None:
    """Every number that a run with these settings writes is there, and finite; no others are."""
    iters, every = (
        int(next(word.split()[1] for word in got.settings if word.startswith(flag)))
        for flag in ("--iters ", "--eval-every ")
    )
    assert 2 <= len(got.history) <= iters + 1
    for i, row in enumerate(got.history):
        names = {"iteration", *(METRICS if i else []), *(EVALUATED if i % every == 0 or i == iters else [])}
        assert row.keys() == names and row["iteration"] == i
        assert all(map(math.isfinite, row.values())), row


@st.composite
def flags_of_a_run(draw) -> list[str]:
    flags = ["--iters", str(draw(st.integers(1, 6))), "--eval-every", str(draw(st.integers(1, 4)))]
    flags += draw(st.sampled_from([[], ["--no-std"], ["--device", "cuda:1"], ["--seed", str(2**63 - 1)]]))
    return [*flags, "--lr", repr(draw(st.floats(1e-300, 1e6)))]


@cases(300)
@given(flags_of_a_run(), st.integers(1, 6), st.lists(FINITE, min_size=1, max_size=5))
def test_csv_is_read_as_it_was_written(tmp_path, flags, stop, values):
    saved = as_run(flags, stop, values)
    write(saved, tmp_path / "saved.csv")
    got = read_csv(tmp_path / "saved.csv")
    assert got == saved
    assert_whole(got)


def written() -> list[bytes]:
    """The CSVs that are then damaged: a whole run, one that was stopped, and one evaluated at every iteration."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "saved.csv"
        texts = []
        for flags, stop in (
            (["--iters", "4", "--eval-every", "3"], 4),
            (["--iters", "9", "--eval-every", "3", "--no-std"], 4),
            (["--iters", "2", "--eval-every", "1", "--lr", "1e-3"], 2),
        ):
            write(as_run(flags, stop, [0.125, 0.5, 1e-05]), path)
            texts.append(path.read_bytes())
    return texts


WRITTEN = written()
BYTES = st.one_of(st.binary(max_size=2), st.sampled_from([b",", b"\n", b'"', b"#", b"-", b"\xff"]))
CELLS = ["", "nan", "inf", "-inf", "1e400", "0", "1", "2", "3", "x", '"', '"1"', " 1", "1_0", "٣", "1,1", "0" * 200_000]
WORDS = ["--help", "-h", "--iters", "--redraw", "--out", "--no-std", "--", "-1", "2", "9", "nan", "cpu", "é", "--lr="]


@st.composite
def damaged_csvs(draw) -> bytes:
    """A run's CSV after an edit, or up to three: of a byte, a word of its settings, a cell, or whole lines."""
    data = draw(st.sampled_from(WRITTEN))
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3]))):
        kind = draw(st.sampled_from(["byte", "word", "lines", "cell", "cell", "cell", "cell"]))
        lines = data.split(b"\n")
        if kind == "byte":
            place = draw(st.integers(0, len(data)))
            data = data[:place] + draw(BYTES) + data[place + draw(st.integers(0, 2)) :]
        elif kind == "lines":  # one goes, is doubled, is another one, or two are one
            place = draw(st.integers(0, len(lines) - 1))
            lines[place : place + draw(st.integers(0, 2))] = draw(st.lists(st.sampled_from(lines), max_size=1))
            data = b"\n".join(lines)
        else:
            mark, place, new = b" ", 0, WORDS
            if kind == "cell" and len(lines) > 2:
                mark, place, new = b",", draw(st.integers(2, len(lines) - 1)), CELLS
            cells = lines[place].split(mark)
            cell = draw(st.integers(0, len(cells) - 1))
            cells[cell : cell + draw(st.integers(0, 1))] = [draw(st.sampled_from(new)).encode()]
            lines[place] = mark.join(cells)
            data = b"\n".join(lines)
    return data


@cases(1300)
@given(damaged_csvs())
@example(WRITTEN[0].replace(b"--iters 4", b"--iters 4 --help"))
@example(WRITTEN[0].replace(b"0,,,", b"0,,1,"))  # row 0 with one number that only later rows have
@example(WRITTEN[0][: WRITTEN[0].rindex(b",") + 1])  # the last number
@example(WRITTEN[2].replace(b",0.5,", b",nan,", 1))
@example(WRITTEN[1].replace(b"--iters 9", b"--iters 3"))  # stopped after iteration 4
def test_damaged_csv_is_a_whole_run_or_a_value_error_of_one_line(tmp_path, data):
    path = tmp_path / "damaged.csv"
    path.write_bytes(data)
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        try:
            got = read_csv(path)
        except ValueError as error:
            got = None
            assert len(str(error).splitlines()) == 1 and str(path) in str(error)
    assert out.getvalue() == err.getvalue() == ""
    if got:
        assert got.name == "damaged"
        assert_whole(got)


# The command lines ----------------------------------------------------------------------------------------------


class Accepted(BaseException):
    """Raised where a command would begin its work: it has taken its flags. No `except` of a command's catches it."""


def accept(*_, **__):
    raise Accepted


class Tool(NamedTuple):
    """A command, the functions at which its work begins, command lines that it takes, and some that it must refuse."""

    module: ModuleType | None  # None: it has nothing to patch itself, and is called as a program
    work: list[tuple[object, str]]
    good: list[str]
    bad: list[str]


LONG = "x" * 300  # more than a name may have. "--out=--" is there because argparse, before 3.13, made a list of it.
TOOLS = {
    "run.py": Tool(
        run,
        [(tinylm, "load_or_train_sft"), (run, "plot"), (run, "look")],
        [
            "--out new.png",
            "--iters 3 --versus run.csv --lr 1e-3",
            "--redraw run.csv run.csv --out new.svg",
            "--explain 37+48= --out new.png",
            "--explain --text",
            "--explain-parts 2 3 --G 4 --out new.pdf",
            "--seeds 3",
        ],
        [
            "--out foreign.png",
            "--explain --out foreign.png",
            "--explain-parts --out foreign.png",
            "--explain 37+4",
            "--text",
            "--redraw damaged.csv --out new.png",
            f"--out {LONG}.png",
            "--out \udcff.png",
            "--out=--",
        ],
    ),
    "passk.py": Tool(
        passk,
        [(tinylm, "problems")],
        ["--grpo sft.pt", "--grpo sft.pt --n 128 --out new.pdf"],
        ["", "--grpo damaged.pt", f"--grpo {LONG}", "--grpo sft.pt --out foreign.png", "--grpo \udcff", "--grpo=--"],
    ),
    "grade.py": Tool(
        grade,
        [(grade, "make_exam")],
        ["submissions --out new.csv", "submissions/a.py --results new.json", "submissions --out grades.csv --resume"],
        ["submissions", "new --out new.csv", "submissions --out grades.csv", "submissions --out=--"]
        + [f"submissions --out {name}.csv --resume" for name in ("binary", "big", "run", LONG)],
    ),
    "release.py": Tool(
        release,
        [(release, "first_difference")],
        ["--gradescope", "--out new.zip --with-solutions"],
        ["--gradescope --with-solutions", "--out new.png", "--out foreign.zip", f"--out {LONG}/new.zip", "--out=--"],
    ),
    "audit.py": Tool(
        None,
        [(runner, "audit"), (worker, "work")],
        ["--only task4", "--list", "--full --jobs 2"],
        ["--wrong", "--only no-such-entry", "--show no-such-entry", "--jobs 0", "--jobs=--"],
    ),
    "calibrate.py": Tool(
        None,
        [(tinylm, "load_or_train_sft"), (multiprocessing, "get_context")],
        ["--jobs 2", "--grpo-seeds 5"],
        ["--policies 1", "--grpo-seeds 0", "--jobs 0", "--policies 2 --grpo-seeds 2", "--policies=--"],
    ),
    "bench.py": Tool(
        None,
        [(tinylm, "load_or_train_sft")],
        ["--quick --repeats 1", "--busy"],
        ["--repeats 0", "--repeats", "--repeats=--", "new"],
    ),
    "guide.py": Tool(
        None,
        [(running, "run_blocks"), (running, "unmet"), (subprocess, "run")],
        ["--requirements", "--install --run", "--run --out pictures"],
        ["", "--out pictures", "--run new", "--run --out=--"],
    ),
}
STEMS = ["new", "run", "grades", "damaged", "big", "binary", "foreign", "sft", "folder", "submissions", "tinylm_sft"]
STEMS += ["", "..", "é", "a\nb", "-", "\udcff", "x" * 250, LONG]  # 250: with what a temporary name adds too long
ENDINGS = ["", ".png", ".svg", ".csv", ".pt", ".zip", ".json"]
ODD = ["", "-", "--", "=", "..", "%s", "%(prog)s", "{}", "@x", "a b", "a\nb", "cpu", "cpu:1", "cuda", "meta", "mps"]
ODD += ["nan", "inf", "-inf", "1e400", "-0", "1.5", "1_0", "1e3", "0x10", "٣", "³", "9" * 30, "9" * 5000, "x" * 5000]
# No "/", so that a name drawn stays in the test's folder; and no NUL, which no system passes to a program. "\udcff" is
# how Python passes on a byte that is not UTF-8.
CHARACTERS = "ab17.,-=_ \t\n\r\x1b\x85\u2028é٣λ😀'\"%$*@#:\udcff"


def command_lines(tool: Tool, flags: list[tuple[str, str]]) -> st.SearchStrategy[list[str]]:
    """A good command line or none, then up to six flags, with and without a value, or values without a flag.

    Mostly it is one or two: of many, one is nearly always wrong, and the others are not looked at.
    """
    name = st.tuples(
        st.sampled_from(["", "", "", "folder/", "no/", f"{LONG}/"]),
        st.sampled_from(STEMS),
        st.sampled_from(ENDINGS),
    )
    number = st.one_of(st.integers(-3, 1000), st.integers(), st.floats()).map(repr)
    word = st.one_of(name.map("".join), st.sampled_from(ODD), number, st.text(CHARACTERS, max_size=6))
    wrong = [(flag, "N") for flag in ("--wrong", "-x", "--iter", "--no-std=1")]
    flag = st.sampled_from([*flags, *flags, *wrong])
    a_file = ("FILE", "FOLDER", "CSV")
    pair = flag.flatmap(lambda f: st.tuples(st.just(f[0]), name.map("".join) if f[1].startswith(a_file) else word))
    alone = st.one_of(flag.map(lambda f: (f[0],)), st.tuples(word), pair.map("=".join).map(lambda text: (text,)))
    pieces = st.sampled_from([1, 1, 1, 2, 2, 3, 6]).flatmap(lambda n: st.lists(st.one_of(pair, alone), max_size=n))
    return st.tuples(st.sampled_from([*tool.good, *tool.good, ""]), pieces).map(
        lambda drawn: drawn[0].split() + [text for piece in drawn[1] for text in piece]
    )


def contents(folder: Path) -> list[str]:
    parts = folder, folder / "folder", folder / "submissions"
    return [path.name for part in parts for path in sorted(part.iterdir())]


@pytest.fixture
def call(tmp_path, monkeypatch, reference) -> Callable[..., tuple[int, str, str]]:
    """Call a command, up to where its work begins, in a folder with files of all kinds: (status, stdout, stderr)."""
    folder = tmp_path / "here"
    for name in ("folder", "submissions", "folder.png"):
        (folder / name).mkdir(parents=True)
    (folder / "submissions" / "a.py").write_text("x = 1\n", encoding="utf-8")
    (folder / "run.csv").write_bytes(WRITTEN[0])
    (folder / "damaged.csv").write_bytes(WRITTEN[0][:-20])
    (folder / "grades.csv").write_text("name,task1,total\n", encoding="utf-8")
    (folder / "big.csv").write_text(f"name,task1,total\n{'x' * 200_000},1,2\n", encoding="utf-8")
    (folder / "binary.csv").write_bytes(bytes(range(256)))
    for name in ("foreign.png", "foreign.zip", "damaged.pt"):
        (folder / name).write_bytes(b"not what the name says")
    tinylm.save_checkpoint(tinylm.TinyLM(), folder / "sft.pt")
    before = contents(folder)

    (tmp_path / "locks").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "locks"))
    monkeypatch.setattr(run, "load_grpo", lambda path: reference)
    monkeypatch.setattr(grade, "signal", SimpleNamespace())  # so that it leaves this process's handlers as they are
    monkeypatch.delenv("RL_SOLUTIONS", raising=False)
    monkeypatch.delenv("LAB_STEPS", raising=False)
    monkeypatch.chdir(folder)

    def call(name: str, arguments: list[str]) -> tuple[int, str, str]:
        # As a terminal has them: what is not UTF-8 is escaped on stderr, and an error on stdout.
        streams = [io.TextIOWrapper(io.BytesIO(), "utf-8", errors, "") for errors in ("strict", "backslashreplace")]
        with monkeypatch.context() as patch, redirect_stdout(streams[0]), redirect_stderr(streams[1]):
            for owner, function in TOOLS[name].work:
                patch.setattr(owner, function, accept)
            patch.setattr(sys, "argv", [name, *arguments])
            patch.setattr(sys, "path", list(sys.path))
            try:
                module = TOOLS[name].module
                status = call_main(module) if module else call_command(name, *arguments)
            except Accepted:
                status = 0
            except SystemExit as stop:
                status = stop.code or 0
        out, err = (stream.detach() for stream in streams if not stream.flush())
        assert contents(folder) == before, "files were left, or are gone"
        return status, out.getvalue().decode(), err.getvalue().decode()

    return call


def flags_in_help(call, name: str) -> list[tuple[str, str]]:
    """What the tool says that its flags are, each with what its value is called, if it has one: ("--out", "FILE")."""
    status, text, _ = call(name, ["--help"])
    assert status == 0
    return sorted({("--worker", ""), *re.findall(r"(?<!\w)(--?[a-zA-Z][\w-]*)(?: ([A-Z]+))?", text)})


def assert_taken_or_refused_in_one_line(call, name: str, arguments: list[str], statuses: tuple[int, ...] = (0, 2)):
    status, _, stderr = call(name, arguments)
    assert status in statuses, arguments
    if status:
        assert stderr.startswith(f"{name}: ") and stderr.endswith("\n") and len(stderr.splitlines()) == 1, stderr
    else:
        assert stderr == ""


@pytest.mark.parametrize(("name", "line"), [(name, line) for name, tool in TOOLS.items() for line in tool.good])
def test_good_command_lines_are_taken(call, name, line):
    assert_taken_or_refused_in_one_line(call, name, line.split(), statuses=(0,))


@pytest.mark.parametrize(("name", "line"), [(name, line) for name, tool in TOOLS.items() for line in tool.bad])
def test_bad_command_lines_are_refused_in_one_line(call, name, line):
    assert_taken_or_refused_in_one_line(call, name, line.split(), statuses=(2,))


@pytest.mark.parametrize("name", TOOLS)
def test_any_command_line_is_taken_or_refused_in_one_line(call, name):
    flags = flags_in_help(call, name)

    @cases(300)
    @given(command_lines(TOOLS[name], flags))
    def taken_or_refused(arguments):
        assert_taken_or_refused_in_one_line(call, name, arguments)

    taken_or_refused()


@cases(100)
@given(st.one_of(st.sampled_from(ODD), st.integers(-3, 300).map(str), st.text(CHARACTERS, max_size=5)))
@example("9" * 5000)
def test_the_guides_steps_are_a_whole_number_or_refused_in_one_line(call, text):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LAB_STEPS", text)
        status, _, stderr = call("guide.py", ["--requirements"])
    assert (status, len(stderr.splitlines())) in {(0, 0), (2, 1)}
    assert status == 0 or "LAB_STEPS" in stderr
