"""run.py --explain and --explain-parts: that what they draw is what the functions do, right ones and wrong ones."""

import copy
import itertools
from dataclasses import replace

import pytest
import torch
from auditing.catalogue import VARIATIONS
from auditing.entries import REFERENCE, changed_source
from helpers import LAB, assert_one_line, finish, names, start
from matplotlib.patches import Rectangle

import tinylm
from lab import explain, explained, parts
from lab.flags import run_parser
from lab.start import load_module

pytestmark = pytest.mark.usefixtures("sft")
PROMPT = tinylm.encode(["37+48="])


@pytest.fixture(scope="module")
def step(sft, reference):
    return explain.explain_step(reference, sft, PROMPT, reference.GRPOConfig())


# The numbers (that a cell is the gradient on random groups: test_properties.py) -----------------------------------


def test_the_cells_are_the_gradient_of_the_weights_too(sft, reference, step):
    """What grpo_step hands to the optimizer at first is each cell's gradient, carried on to the weights."""
    seen, policy = [], copy.deepcopy(sft)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
    optimizer.register_step_pre_hook(lambda *_: seen.append([weight.grad.clone() for weight in policy.parameters()]))
    config = reference.GRPOConfig()
    samples, _ = reference.grpo_step(policy, sft, optimizer, PROMPT, config, torch.Generator().manual_seed(config.seed))
    responses = tinylm.encode(step.tokens)
    assert sorted(tinylm.decode(samples.responses)) == sorted(step.tokens)
    logp = tinylm.token_logp(policy, PROMPT.expand(config.G, -1), responses)
    carried = torch.autograd.grad(-(logp * step.moments[0].gradient).sum(), list(policy.parameters()))
    for got, expected in zip(carried, seen[0], strict=True):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-3)


def test_the_bars_are_exact_products_of_probabilities(sft, step):
    assert step.answers[0] == step.right == "85$" and len(set(step.answers)) == len(step.answers)
    assert step.chances.shape == (3, len(step.answers))
    for answer, chance in zip(step.answers, step.chances[0].tolist(), strict=True):
        product, text = 1.0, step.prompt
        for char in answer:
            product *= sft(tinylm.encode([text]))[0, -1].softmax(0)[tinylm.VOCAB.index(char)].item()
            text += char
        assert chance == pytest.approx(product, rel=1e-4)
    assert step.chances[0, 0] == pytest.approx(tinylm.success_probability(sft, PROMPT).item(), rel=1e-5)


def test_the_entropy_is_that_of_all_answers(sft):
    """Against the definition, over every answer there is: 1 + 13 + 13^2 + 13^3 that end, 13^4 that do not."""
    others = [char for char in tinylm.VOCAB if char != "$"]
    ended = ["".join(word) + "$" for n in range(4) for word in itertools.product(others, repeat=n)]
    answers = ended + ["".join(word) for word in itertools.product(others, repeat=4)]
    p = explain.chances_of(sft, PROMPT, answers, 1.5).double()
    assert p.sum().item() == pytest.approx(1, abs=1e-4)
    assert explain.entropy_of_answers(sft, PROMPT, 1.5) == pytest.approx(-(p * p.log()).sum().item(), rel=1e-4)


def test_a_step_is_told_in_order_and_leaves_the_policy_as_it_was(sft, reference, step):
    before = [weight.clone() for weight in sft.parameters()]
    again = explain.explain_step(reference, sft, PROMPT, reference.GRPOConfig())
    assert all(torch.equal(a, b) for a, b in zip(before, sft.parameters(), strict=True))
    assert torch.equal(again.chances, step.chances) and again.entropies == step.entropies
    assert step.rewards.tolist() == sorted(step.rewards.tolist(), reverse=True)
    assert [key for key, _ in itertools.groupby(step.tokens)] == list(dict.fromkeys(step.tokens)), "equal ones together"
    torch.testing.assert_close(step.moments[0].ratio, torch.ones(8, 4))
    assert not step.moments[0].clipped.any() and step.moments[1].clipped.any()
    assert step.chances[1, 0] > step.chances[0, 0], "the right answer became likelier"


def test_the_problem_by_default_is_right_about_half_of_the_time(sft):
    prompt = explain.prompt_of(True, sft, 1.0)
    assert tinylm.success_probability(sft, prompt).item() == pytest.approx(0.5, abs=0.05)
    assert prompt[0].tolist() in tinylm.problems()[1].tolist()


def test_as_text_it_tells_the_same(step):
    text = explain.step_as_text(step)
    assert text.isascii() and text.splitlines()[0] == "37+48= the right answer is 85$"
    for answer, chances in zip(step.answers, step.chances.T.tolist(), strict=True):
        line = next(line.split() for line in text.splitlines() if line.split()[:1] == [answer])
        assert line[1] == ("right" if answer == "85$" else "wrong")
        assert [float(word) for word in line[2:]] == pytest.approx(chances, abs=6e-4)
    second = text.partition("Inner step 2")[2].partition("After inner step 2")[0]
    clipped = sum(int(line.split()[0]) * line.count("clipped") for line in second.splitlines()[1:] if line)
    assert clipped == step.moments[1].clipped.sum()
    first = text.partition("Inner step 1")[2].partition("After inner step 1")[0]
    counted = [line.split() for line in first.splitlines()[1:] if line]
    assert sum(int(words[0]) for words in counted) == 8
    assert f"{step.moments[0].gradient[0, 0]:+.4f}" in first and "padding" in first


# Wrong functions -------------------------------------------------------------------------------------------------


def no_clip(reference):
    loss = reference.grpo_loss
    return "grpo_loss", lambda *args: loss(*args[:5], 1e6, *args[6:])


def no_mask(reference):
    loss = reference.grpo_loss
    return "grpo_loss", lambda logp, old, ref, A, mask, *rest: loss(logp, old, ref, A, torch.ones_like(mask), *rest)


def wrong_sign(reference):
    advantages = reference.group_advantages
    return "group_advantages", lambda *args: -advantages(*args)


def one_step(reference):
    grpo_step = reference.grpo_step
    return "grpo_step", lambda *args: grpo_step(*args[:4], replace(args[4], inner_steps=1), args[5])


@pytest.mark.parametrize("mistake", [no_clip, no_mask, wrong_sign, one_step])
def test_a_wrong_function_draws_its_own_wrong_picture(mistake, sft, reference, monkeypatch, step, tmp_path):
    monkeypatch.setattr(reference, *mistake(reference))
    config = reference.GRPOConfig()
    wrong = explain.explain_step(reference, sft, PROMPT, config)
    if mistake is no_clip:
        assert not any(moment.clipped.any() for moment in wrong.moments)
    if mistake is no_mask:
        assert wrong.moments[0].gradient[0, 3] != 0 == step.moments[0].gradient[0, 3]
        assert "padding" not in explain.step_as_text(wrong).partition("After inner step 1")[0]
    if mistake is one_step:
        assert len(wrong.moments) == 2 < len(step.moments)
    if mistake is wrong_sign:
        torch.testing.assert_close(wrong.moments[0].gradient, -step.moments[0].gradient)
        assert wrong.chances[1, 0] < wrong.chances[0, 0]
        for name, one in (("right.png", step), ("wrong.png", wrong)):
            explained.draw_step(one, config, tmp_path / name)
        assert (tmp_path / "right.png").read_bytes() != (tmp_path / "wrong.png").read_bytes()


SAME_DRAWS = [entry for entry in VARIATIONS if "sampl" not in entry.name]  # the others draw other answers


@pytest.mark.parametrize("entry", SAME_DRAWS[::9], ids=lambda entry: entry.name)
def test_a_right_function_in_another_style_draws_the_same_picture(entry, sft, step, tmp_path):
    path = tmp_path / "grpo.py"
    path.write_text(changed_source(entry, REFERENCE.read_text(encoding="utf-8")), encoding="utf-8")
    other = load_module(path, "other_grpo")
    found = explain.explain_step(other, sft, PROMPT, other.GRPOConfig())
    assert found.tokens == step.tokens and found.answers == step.answers
    for ours, theirs in zip(found.moments, step.moments, strict=True):
        torch.testing.assert_close(ours.gradient * step.mask, theirs.gradient * step.mask, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(found.chances, step.chances, atol=2e-3, rtol=1e-2)


def test_a_step_that_steps_nowhere_says_so(call, reference, monkeypatch):
    samples = reference.sample_group
    monkeypatch.setattr(
        reference,
        "grpo_step",
        lambda model, ref, opt, prompts, config, generator: (samples(model, prompts, config.G, 1.0, generator), {}),
    )
    assert_one_line(call("--explain", "37+48="), "grpo_step (task 5) never called optimizer.step()")


# The parts -------------------------------------------------------------------------------------------------------


def test_advantages_of_every_group(reference):
    with_std, without = (parts.advantages(reference, 8, std) for std in (True, False))
    for k in range(1, 8):
        std = (k / 8 * (1 - k / 8)) ** 0.5
        assert without.right[k].item() == pytest.approx(1 - k / 8, abs=1e-6)
        assert without.wrong[k].item() == pytest.approx(-k / 8, abs=1e-6)
        assert with_std.right[k].item() == pytest.approx((1 - k / 8) / (std + 1e-4), rel=1e-5)
    assert with_std.right[0].isnan() and with_std.wrong[8].isnan() and with_std.right[8] == with_std.wrong[0] == 0


def test_estimators_meet_the_exact_divergence(reference):
    found = parts.estimators(reference)
    for name in ("k1", "k3"):
        error = found.means[name].std() / len(found.means[name]) ** 0.5
        assert found.means[name].mean().item() == pytest.approx(found.kl, abs=5 * error.item())
    assert found.means["k3"].std() < 0.5 * found.means["k1"].std()
    torch.testing.assert_close(found.values["k3"], found.log_u.exp() - found.log_u - 1)


@pytest.mark.parametrize("clip", [0.05, 0.2, 1000.0])
def test_the_objective_and_its_slope(reference, clip):
    for A in (1.0, -1.0):
        found = parts.objective(reference, A, clip)
        held = found.ratio > 1 + clip if A > 0 else found.ratio < 1 - clip
        near = ((found.ratio - 1).abs() - clip).abs() < 1e-5  # at the very edge rounding decides
        assert torch.equal((found.slope == 0)[~near], held[~near])
        torch.testing.assert_close(found.slope[~held & ~near], torch.full_like(found.slope[~held & ~near], A))
        expected = torch.minimum(found.ratio * A, found.ratio.clamp(1 - clip, 1 + clip) * A)
        torch.testing.assert_close(found.value, expected)


def test_a_stub_is_named_and_its_panel_left_out(call, reference, monkeypatch, tmp_path):
    def stub(*_):
        raise NotImplementedError("Task 3 (k3_kl) is not written yet: open grpo.py")

    drawn = []
    monkeypatch.setattr(explained, "draw_parts", lambda there, stubs, path: drawn.append((set(there), stubs)))
    assert call("--explain-parts").returncode == 0 and drawn[-1] == ({2, 3, 4}, [])
    assert call("--explain-parts", "4", "2").returncode == 0 and drawn[-1] == ({2, 4}, [])
    monkeypatch.setattr(reference, "k3_kl", stub)
    result = call("--explain-parts")
    message = "Task 3 (k3_kl) is not written yet: open grpo.py"
    assert (result.returncode, result.stderr) == (0, f"{message}\n")
    assert drawn[-1] == ({2}, [message]), "task 4 calls k3_kl, too"
    assert_one_line(call("--explain-parts", "3"), message)
    assert_one_line(call("--explain"), message)
    assert len(drawn) == 3


@pytest.mark.filterwarnings("error")
def test_parts_of_extreme_arguments_are_drawn(reference, tmp_path):
    for name, G, clip in (("small.png", 2, 1e-3), ("large.png", 32, 1e6)):
        explained.draw_parts(*parts.each_part(reference, [2, 4], G, clip), tmp_path / name)
        assert (tmp_path / name).stat().st_size > 10_000


# The command -----------------------------------------------------------------------------------------------------


def test_two_runs_give_equal_bytes(call, tmp_path):
    for flags, ending in ((["--explain", "37+48"], ".png"), (["--explain-parts", "2", "4"], ".svg")):
        pair = [tmp_path / f"{name}{flags[0]}{ending}" for name in ("a", "b")]
        for path in pair:
            assert call(*flags, "--out", path.name).returncode == 0
        assert pair[0].read_bytes() == pair[1].read_bytes()
    assert len(names(tmp_path)) == 4
    assert_one_line(call("--explain", "--out", "a--explain-parts.svg"), "is there already")
    assert_one_line(call("--explain-parts", "--out", "a--explain.png"), "is there already")


def test_the_colours_of_the_cells_are_those_of_the_gradient(step, monkeypatch, tmp_path, reference):
    kept = []
    monkeypatch.setattr(explained, "save_figure", lambda figure, *_: kept.append(figure))
    explained.draw_step(step, reference.GRPOConfig(), tmp_path / "x.png")
    assert len(kept[0].axes) == 6  # gradient and ratio of two inner steps, the chances, the entropies
    panel, gradient = kept[0].axes[0], step.moments[0].gradient
    cells = [patch for patch in panel.patches if isinstance(patch, Rectangle) and patch.get_fill()]
    largest = max(moment.gradient.abs().max().item() for moment in step.moments[:-1])
    for cell, (i, t) in zip(cells, itertools.product(range(8), range(4)), strict=True):
        value = gradient[i, t].item()
        colour = explained.tint(value, largest) if step.mask[i, t] else (221 / 255,) * 3
        assert cell.get_facecolor()[:3] == pytest.approx(colour)
        red, green, _ = cell.get_facecolor()[:3]
        assert not step.mask[i, t] or (green > red) == (value > 0)


def test_text_goes_to_the_screen_and_no_file_is_written(call, tmp_path):
    result = call("--explain", "37+48=", "--text", "--G", "4", "--inner-steps", "1")
    assert result.returncode == 0 and "37+48= the right answer is 85$" in result.stdout and names(tmp_path) == set()
    assert "Inner step 2" not in result.stdout


@pytest.mark.parametrize(
    "flags",
    [
        *("--explain 37+4", "--explain 37+481", "--explain 07+48=", "--explain abc", "--explain 37-48=", "--explain 3"),
        *("--explain --iters 3", "--explain --show 2", "--explain --seeds 2", "--explain --prompts 4", "--text"),
        *(
            "--explain --redraw a.csv",
            "--explain --versus a.csv",
            "--explain --explain-parts",
            "--explain-parts --text",
        ),
        *("--explain-parts 1", "--explain-parts x", "--explain-parts --lr 1", "--explain --G 33"),
        *("--explain --inner-steps 9", "--redraw a.csv --seeds 3", "--verifier kind", "--seeds 0"),
    ],
)
def test_what_will_not_do_is_one_line(flags, capsys):
    with pytest.raises(SystemExit) as stop:
        run_parser().parse_args(flags.split())
    assert stop.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_bad_sum_is_told_before_torch_is_imported(tmp_path, no_torch):
    result = finish(start(tmp_path, LAB / "run.py", "--explain", "37+4", PYTHONPATH=no_torch))
    assert_one_line(result, "37+4", "two-digit")
    assert names(tmp_path) == set()
