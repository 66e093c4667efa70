"""experiments.py: what it measures, that it goes on where it stopped, that an answer that does not hold is reported."""

import json
import re

import pytest
import torch
from answering import claims, key, policies, questions, runs
from helpers import call_command

import tinylm


@pytest.mark.parametrize(
    ("right", "text", "name"),
    [
        (85, "85$", ""),
        (85, "75$", "10 too small"),
        (85, "95$", "10 too large"),
        (185, "85$", "100 too small"),
        (85, "185$", "100 too large"),
        (85, "84$", "off by 1"),
        (85, "94$", "off by 9 or 11"),
        (85, "74$", "off by 9 or 11"),
        (85, "33$", "other"),
        *((85, text, "not a number, or not ended") for text in ("85", "8_5$", "$", "085$", "+85$", "8555")),
    ],
)
def test_mistakes_have_names(right, text, name):
    assert policies.mistake(right, text) == name


def test_kinds_of_problems_are_complete_and_disjoint():
    prompts = tinylm.encode(["12+34=", "18+25=", "60+40=", "99+99=", "90+15=", "45+54="])
    kinds = policies.kinds(prompts)
    assert kinds == {"no carry, two digits": [0, 5], "carry, two digits": [1], "three digits": [2, 3, 4]}


def test_what_a_policy_answers_adds_up(sft):
    anatomy = policies.anatomy(sft, samples=4)
    _, prompts = tinylm.problems()
    p = tinylm.success_probability(sft, prompts)
    sizes = {kind: len(rows) for kind, rows in policies.kinds(prompts).items()}
    mean = sum(anatomy["kinds"][kind] * n for kind, n in sizes.items()) / len(prompts)
    assert mean == pytest.approx(p.mean().item(), abs=1e-5)
    # 2,000 samples: a standard error of about a point
    assert sum(anatomy["mistakes"].values()) == pytest.approx(1 - mean, abs=0.05)


def test_kl_of_a_policy_to_itself_is_zero_and_to_another_is_not(sft):
    other = tinylm.train_sft(seed=1, target=0.01)
    assert policies.kl_to(sft, sft, 1.0, samples=1) == pytest.approx(0, abs=1e-6)
    assert policies.kl_to(sft, other, 1.0, samples=1) > 0.1


def test_credit_of_right_first_digits(sft, monkeypatch):
    """Three groups told by hand: what is pushed down alone is pushed up, or not at all, over the group."""
    prompts = tinylm.encode(["37+48="])
    groups = {
        "beside others": (["85$"] * 2 + ["86$", "95$"], 1 / 2, -1 / 12, 1 / 12),
        "all begin alike": (["85$"] * 2 + ["86$", "84$"], 1.0, -1 / 12, 0.0),
        "a shorter one": (["85$"] * 2 + ["8$", "8$"], 1.0, -1 / 8, 2 / 12 - 2 / 8),
    }
    grpo = policies.grpo
    monkeypatch.setattr(tinylm, "problems", lambda: (prompts, prompts))
    config = grpo.GRPOConfig
    monkeypatch.setattr(grpo, "GRPOConfig", lambda: config(G=4))
    for texts, share, alone, together in groups.values():
        responses = tinylm.encode([text.ljust(4, "_") for text in texts])
        rewards = torch.tensor([tinylm.reward("37+48=", text) for text in texts])
        samples = grpo.Samples(prompts.expand(4, -1), responses, tinylm.response_mask(responses), rewards, texts)
        monkeypatch.setattr(grpo, "sample_group", lambda *_, given=samples, **__: given)
        found = policies.one_step(sft, groups=1)
        assert found["first_right"] == share
        assert found["alone"] == pytest.approx(alone, abs=1e-4)
        assert found["together"] == pytest.approx(together, abs=1e-4)
        assert found["down"] == float(together < 0)
        assert found["extreme"] == 0.0 == found["loud"]


@pytest.mark.parametrize("name", ["k1", "k2"])
def test_estimators_have_the_mean_of_the_divergence_nearby(name):
    """For two policies that lie close, the mean of k1 is the KL divergence, that of k2 nearly."""
    logits = torch.randn(14, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    pi, ref = logits.log_softmax(0), (logits + 0.01 * torch.arange(14)).log_softmax(0)
    exact = (pi.exp() * (pi - ref)).sum()
    mean = (pi.exp() * runs.ESTIMATORS[name](pi, ref)).sum()
    assert mean == pytest.approx(exact.item(), rel=1e-12 if name == "k1" else 0.05)


def test_commands_are_those_of_the_readme():
    assert questions.command("default") == "`run.py`"
    assert questions.command("noclip") == "`run.py --inner-steps 8 --clip 1000.0`"
    assert questions.command("nostd") == "`run.py --no-std`"
    assert questions.command("k1_leash") == "`run.py --beta 0.5`, k1 in `k3_kl`"


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Two tiny variants and one experiment, in a folder of the test's own."""
    variants = {"default": {"iters": 1, "P": 2, "G": 2}, "k1": {"iters": 1, "P": 2, "G": 2, "kl": "k1"}}
    monkeypatch.setattr(questions, "VARIANTS", variants)
    answer = "It is {default[sampled]:.2f}. It was. It will be {k1[sampled]:.2f}."
    one = questions.Experiment(
        "kl", "An estimator", ["k1"], "A tip.", "A number.", answer, "A hint.", ["k1['sampled'] > 0"]
    )
    monkeypatch.setattr(questions, "EXPERIMENTS", [one])
    monkeypatch.setattr(key, "OUT", tmp_path / "experiments.md")
    monkeypatch.setattr(key, "FOLDER", tmp_path / "experiments")
    monkeypatch.setattr(runs, "RUNS", tmp_path / "experiments" / "runs")
    runs.RUNS.mkdir(parents=True)
    return tmp_path


def run_all(sft) -> None:
    for seed in (0, 1):
        tinylm.save_checkpoint(sft, runs.RUNS / f"sft_{seed}.pt")
        for variant in questions.VARIANTS:
            runs.run_one((variant, seed))


def test_the_key_is_written_from_the_runs(small, sft, monkeypatch):
    monkeypatch.setattr(runs, "anatomy", lambda model: {"kinds": {"all": 0.5}, "mistakes": {"other": 0.25}})
    run_all(sft)
    assert key.write(2) == []
    text = (small / "experiments.md").read_text(encoding="utf-8")
    assert (small / "experiments" / "kl.png").read_bytes().startswith(b"\x89PNG")
    values = [run["figures"]["sampled accuracy after"] for run in runs.read_runs(2)["default"]]
    assert f"| {values[0]:.2f} ({values[0]:.2f} to {values[0]:.2f}) |" in text, "written from the first half alone"
    assert f"It is {values[0]:.2f}. It was." in text and "*Marking:* A hint." in text
    assert "| all | 0.500 | 0.500 |" in text and "| other | 0.250 | 0.250 |" in text
    one = questions.EXPERIMENTS[0]
    monkeypatch.setattr(questions, "EXPERIMENTS", [one._replace(claims=["k1['sampled'] > 0", "k1['sampled'] > 1"])])
    assert key.write(2) == ["kl: k1['sampled'] > 1: on the fresh half False, on 0 of ten halves"]


def test_a_claim_that_one_seed_makes_is_not_supported():
    """Nine seeds of ten say the opposite: the mean over the half with the tenth bears it out, the others do not."""
    figures = {"default": {"sampled": [0.5] * 10}, "fast": {"sampled": [100.0] + [0.4] * 9}}
    fresh, of_ten = claims.support("fast['sampled'] > default['sampled']", figures)
    assert not fresh and of_ten == 5
    assert claims.support("default['sampled'] == 0.5", figures) == (True, 10)
    assert all(len(half) == 5 for half in claims.halves(10)) and len(claims.halves(10)) == 10


def test_every_claim_of_the_key_is_borne_out_by_seeds_that_did_not_write_it():
    figures = json.loads((key.FOLDER / "figures.json").read_text(encoding="utf-8"))
    assert figures.keys() == questions.VARIANTS.keys() and len(figures["default"]["sampled"]) >= 10
    assert claims.unsupported(figures) == []
    for experiment in questions.EXPERIMENTS:  # every figure in an answer is one that a claim speaks of
        shown = set(re.findall(r"\{(\w+)\[(\w+)\]", experiment.tip + experiment.numbers + experiment.answer))
        claimed = set(re.findall(r"(\w+)\['(\w+)'\]", " ".join(experiment.claims)))
        assert shown <= claimed, (experiment.name, shown - claimed)


def test_a_run_that_is_there_is_not_run_again(small, sft, monkeypatch):
    monkeypatch.setattr(runs, "anatomy", lambda model: {"kinds": {}, "mistakes": {}})
    run_all(sft)
    assert runs.is_there("k1", 1)
    path = runs.path_of("k1", 1)
    whole = path.read_text(encoding="utf-8")
    for damaged in ("", whole[:-20], "[]", json.dumps(json.loads(whole) | {"code": "older"})):
        path.write_text(damaged, encoding="utf-8")
        assert not runs.is_there("k1", 1)
    path.unlink()
    assert not runs.is_there("k1", 1) and runs.is_there("k1", 0)


def test_the_estimator_is_put_into_the_loss_and_taken_out_again(small, sft, monkeypatch):
    tinylm.save_checkpoint(sft, runs.RUNS / "sft_0.pt")
    k3_kl, used = runs.grpo.k3_kl, []
    monkeypatch.setitem(runs.ESTIMATORS, "k1", lambda logp, ref: used.append(1) or (logp - ref))
    runs.run_one(("k1", 0))
    assert used and runs.grpo.k3_kl is k3_kl


@pytest.mark.parametrize("flags", [["--seeds", "1"], ["--seeds", "many"], ["--jobs", "0"], ["--unknown"], ["stray"]])
def test_bad_flags_are_one_line(flags, capsys):
    assert call_command("experiments.py", *flags) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_key_in_the_tree_is_of_the_experiments_in_the_code():
    text = key.OUT.read_text(encoding="utf-8")
    for experiment in questions.EXPERIMENTS:
        assert f"## {experiment.title}\n" in text
        assert key.paragraph(f"*Marking:* {experiment.hint}") in text
        assert (key.FOLDER / f"{experiment.name}.png").exists()
        assert len(re.split(r"\.\s", experiment.answer.strip())) >= 3
