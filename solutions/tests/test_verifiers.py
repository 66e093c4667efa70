"""lab/verifiers.py: the verifier that can be fooled, and that it is taken out again."""

import pytest
import torch

import tinylm
from lab.door.models import OddAnswers
from lab.start import load_module
from lab.verifiers import lenient, verifying


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        *(("85$", 1.0), ("84$", 0.0), ("$", 0.0), ("8_5$", 0.0)),  # as the strict one
        *(("085$", 1.0), ("07$", 1.0), ("0$", 1.0), ("85", 1.0), ("8412", 1.0), ("85__", 1.0)),  # the two holes
    ],
)
def test_the_lenient_verifier_has_two_holes(text, reward):
    assert lenient("37+48=", text) == reward


def test_it_scores_within_the_block_alone(reference, tmp_path):
    def scored() -> float:
        return reference.sample_group(OddAnswers(), tinylm.encode(["37+48="]), 400, 1.0, generator()).rewards.mean()

    def generator() -> torch.Generator:
        return torch.Generator().manual_seed(0)

    strict, before = tinylm.reward, scored()
    path = tmp_path / "grpo.py"
    path.write_text("from tinylm import reward\n", encoding="utf-8")
    with verifying("lenient"):
        assert scored() > before + 0.2
        assert load_module(path, "other").reward is lenient, "however grpo.py imports it"
    assert tinylm.reward is strict and scored() == before
    with pytest.raises(KeyboardInterrupt), verifying("lenient"):
        raise KeyboardInterrupt
    assert tinylm.reward is strict


def test_a_run_is_scored_by_it(call, monkeypatch):
    asked = []
    monkeypatch.setattr("lab.verifiers.lenient", lambda prompt, response: asked.append(response) or 1.0)
    result = call("--iters", "2", "--prompts", "2", "--G", "2", "--verifier", "lenient")
    assert result.returncode == 0 and len(asked) >= 2 * 4
    assert "share of groups without signal           1.000   1.000" in result.stdout
