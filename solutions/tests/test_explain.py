"""lab/explain.py: groups of answers to look at."""

import sys

import pytest
import torch
from helpers import TINY, differ

import tinylm
from lab import explain
from lab.pictures import GREEN


def test_show_prints_groups_with_rewards_and_advantages(runs, call, tmp_path, sft):
    first, _ = runs["first"]
    result = call(*TINY, "--show", "3")
    assert result.returncode == 0 and "\033" not in result.stdout
    assert not differ(first / "tinylm_grpo.pt", tmp_path / "tinylm_grpo.pt"), "looking changed the training"
    lines = result.stdout.splitlines()
    groups = [i for i, line in enumerate(lines) if "  right is " in line]
    assert len(groups) == 3 * 4, "three groups at each of four evaluations"
    for i in groups:
        prompt, _, _, right, count, *_, before, _, _, _, now, _ = lines[i].split()
        p = tinylm.success_probability(sft, tinylm.encode([prompt])).item()
        assert float(before) == pytest.approx(p, abs=6e-4)
        assert (before == now) == (i in groups[:3]), "training changed the chance, and looking did not"
        shown, answers = 0, lines[i + 1 :]
        while answers and " x " in answers[0]:
            times, _, text, _, reward, _, advantage = answers.pop(0).split()
            shown += int(times)
            assert float(reward) == tinylm.reward(prompt, text) == (text == right)
            expected = 0 if count != "1" else 1 if float(reward) else -1  # G = 2
            assert float(advantage) == pytest.approx(expected, abs=0.01)
        assert shown == 2
        assert ("NO SIGNAL" in "".join(answers[:1])) == (count != "1")


def test_show_is_in_colour_on_a_terminal_only(monkeypatch):
    assert explain.paint(GREEN, "85$") == "85$"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert explain.paint("#009E73", "85$") == "\033[38;2;0;158;115m85$\033[0m"
    monkeypatch.setenv("NO_COLOR", "")
    assert explain.paint(GREEN, "85$") == "85$"


def test_groups_without_signal_are_marked(reference, monkeypatch, sft):
    prompts = tinylm.encode(["37+48=", "10+15="])
    answers = {"37+48=": ["85$"] * 4, "10+15=": ["25$", "24$", "24$", "35$"]}

    def group(model, prompts, G, *_):
        texts = [text for prompt in tinylm.decode(prompts) for text in answers[prompt]]
        rewards = torch.tensor([1.0] * 4 + [1.0, 0.0, 0.0, 0.0])
        return reference.Samples(prompts, None, None, rewards, texts)

    monkeypatch.setattr(reference, "sample_group", group)
    lines = explain.show_groups(reference, sft, prompts, reference.GRPOConfig(G=4), sft).splitlines()
    assert lines[0].split()[:10] == ["37+48=", "right", "is", "85$", "4", "of", "4", "answers", "are", "right;"]
    assert lines[1].split() == ["4", "x", "85$", "reward", "1", "advantage", "+0.00"]
    assert "NO SIGNAL: all answers are right" in lines[2]
    assert [line.split()[0] for line in lines[4:]] == ["1", "2", "1"] and "+1.73" in lines[4] and "-0.58" in lines[5]
    assert len(lines) == 7
