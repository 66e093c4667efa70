"""bench.py: what it counts is what the work multiplies, its table holds together, and it leaves nothing behind."""

import importlib.util
import math
from collections import Counter
from functools import partial

import pytest
import torch
from grading.confinement import find_confinement
from helpers import call_command
from measuring import bench, grading_cost
from measuring.beside_trl import save_gpt2
from measuring.processes import busy_core

import tinylm


def test_products_of_forward_and_backward_are_counted():
    x, weight, bias = torch.randn(5, 7), torch.randn(3, 7, requires_grad=True), torch.randn(3, requires_grad=True)
    forward = 2 * 5 * 7 * 3
    assert bench.flop(bench.count_products(lambda: x @ weight.T)) == forward
    assert bench.flop(bench.count_products(lambda: torch.nn.functional.linear(x, weight, bias))) == forward
    assert bench.flop(bench.count_products(lambda: (x @ weight.T).sum().backward())) == 2 * forward  # x needs none
    batches = torch.randn(4, 5, 7), torch.randn(4, 7, 3)
    assert bench.flop(bench.count_products(lambda: torch.bmm(*batches))) == 4 * forward
    assert bench.flop(bench.count_products(lambda: torch.baddbmm(torch.randn(5, 3), *batches))) == 4 * forward
    assert bench.flop(bench.count_products(lambda: x + x)) == 0


def test_the_floor_grows_with_the_count():
    big = ((600, 600), (600, 1), (600, 600), (1, 600))  # sizes and strides: the second matrix is transposed
    once, often = (bench.floor_of(Counter({big: times})) for times in (1, 1000))
    assert 0 < 10 * once < often


def test_an_iteration_multiplies_what_its_parts_do_and_every_token_once(sft):
    rows = bench.core_rows(sft)
    count = {name.strip(): bench.flop(bench.count_products(work)) for name, work in rows.items()}
    # Two operations for each weight and token; but in the last layer most weights read the responses alone.
    weights = sum(weight.numel() for weight in sft.blocks.parameters())
    read = 6 + 7 + 8 + 9 + 2 * 9 + 2 * 3 * 9  # tokens a row: sampling, two log-probs, two inner steps forward and back
    alone = 128 * read * 2 * weights
    assert 0.7 < count["iteration without sharing"] / alone < 1
    one = bench.Iteration(sft)
    samples = one.samples
    rows = len(torch.cat([samples.prompts, samples.responses[:, :-1]], dim=1).unique(dim=0))
    assert rows < 128
    for work, times in ((one.log_probs, 2), (one.inner_steps, 6)):
        assert 0.7 < bench.flop(bench.count_products(work)) / (times * rows * 9 * 2 * weights) < 1
    # The parts have each their own samples, and those differ.
    parts = count["sampling"] + count["old and reference log-probs"] + count["inner steps"]
    assert 0.6 < parts / count["GRPO iteration"] < 1.6


def test_the_tables(capsys, sft):
    assert call_command("bench.py", "--quick", "--repeats", "1", "--busy") == 0
    output = capsys.readouterr().out
    table = [line for line in output.splitlines() if len(line) == 36 + 48 and line[-1].isdigit()]
    assert len(table) == 5 + 4 + 5, output
    for line in table:
        took, operations, rate, floor, ratio = map(float, line[36:].split())
        assert 0 < floor <= took and rate > 0 and operations > 0, line
        assert abs(ratio - took / floor) <= 0.1 * ratio, line  # they are rounded
    growth = [line.split() for line in output.splitlines() if line.startswith("cost ~")]
    # One round on a busy machine fits any exponent: here it need only be a number, the fit itself is tested below.
    assert len(growth) == 2 and all(math.isfinite(float(words[-1])) for words in growth), output
    slower = next(line for line in output.splitlines() if line.startswith("slower than idle: "))
    assert all(float(value) > 0 for value in slower.split(": ")[1].split(", "))


def test_the_fitted_exponent(monkeypatch, capsys):
    """Cost 1, 4 and 16 for 2, 4 and 8 rows: an exponent of 2."""

    class Fake:
        def __init__(self, sft, prompts, G):
            self.whole = (prompts * G) ** 2

    monkeypatch.setattr(bench, "Iteration", Fake)
    monkeypatch.setattr(bench, "seconds", lambda cost, repeats: [float(cost)] * repeats)
    assert bench.print_growth(None, "P", [{"prompts": p, "G": 2} for p in (1, 2, 4)], 2) == pytest.approx(2)
    assert capsys.readouterr().out.count("\n") == 6


def test_the_busy_process_is_ended():
    with pytest.raises(ValueError, match="stop"), busy_core() as process:
        assert process.poll() is None
        raise ValueError("stop")
    assert process.returncode is not None


@pytest.mark.skipif(importlib.util.find_spec("trl") is not None, reason="trl is installed")
def test_without_trl_one_line_says_so(capsys):
    assert call_command("bench.py", "--trl") == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1 and "trl" in output.err


def test_the_gpt2_for_trl_computes_the_same_logits(sft, tmp_path):
    pytest.importorskip("transformers")
    gpt2, tokenizer = save_gpt2(sft, tmp_path)
    _, held_out = tinylm.problems()
    right = tinylm.answers(held_out)
    with torch.no_grad():
        theirs = gpt2(torch.cat([held_out, right], dim=1)).logits[:, tinylm.PROMPT_LEN - 1 : -1]
        torch.testing.assert_close(theirs, tinylm.response_logits(sft, held_out, right), rtol=1e-5, atol=1e-5)
    assert tokenizer(tinylm.decode(held_out))["input_ids"] == held_out.tolist()


def test_grading_is_timed_beside_the_tests(capsys, monkeypatch):
    monkeypatch.setattr(grading_cost.subprocess, "run", lambda *_, **__: None)  # of pytest the time alone would count
    monkeypatch.setattr(grading_cost, "find_confinement", partial(find_confinement, unconfined=True))
    grading_cost.print_grading(1)
    graded, tested = (float(line.split()[-2]) for line in capsys.readouterr().out.strip().splitlines())
    assert graded > 0.5 and tested < 0.5
