"""passk.py: the estimator against its definition, the samples against the exact curve, and the command."""

import math
import os
import shutil
import subprocess
import sys
from fractions import Fraction
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import call_main
from matplotlib.figure import Figure

import passk
import tinylm
from lab.files import PICTURES, check_marked
from lab.pictures import PASSK_MARK, plot_passk
from passk import pass_at_k

LAB = Path(__file__).resolve().parents[2]


# The estimator --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", range(1, 15))
def test_pass_at_k_is_its_formula(n):
    for k in range(1, n + 1):
        expected = [float(1 - Fraction(math.comb(n - c, k), math.comb(n, k))) for c in range(n + 1)]
        np.testing.assert_allclose(pass_at_k(n, np.arange(n + 1), k), expected, rtol=1e-13, atol=1e-15)
        assert pass_at_k(n, 0, k) == 0 and pass_at_k(n, n, k) == 1
        assert all(pass_at_k(n, c, k) == pytest.approx(expected[c]) for c in range(n + 1))  # c may be one number


def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample():
    n = 8
    for c in range(n + 1):
        samples = [True] * c + [False] * (n - c)
        for k in range(1, n + 1):
            subsets = [any(subset) for subset in combinations(samples, k)]
            assert pass_at_k(n, c, k) == pytest.approx(sum(subsets) / len(subsets), abs=1e-15)


@pytest.mark.parametrize("p", [0.05, 0.5, 0.9])
def test_pass_at_k_is_unbiased(p):
    """Over all outcomes of n samples, each right with chance p, its mean is 1 - (1 - p)^k; the plug-in's is not."""
    n, c = 12, np.arange(13)
    chance = np.array([math.comb(n, right) for right in c]) * p**c * (1 - p) ** (n - c)
    for k in range(1, n + 1):
        truth = 1 - (1 - p) ** k
        assert chance @ pass_at_k(n, c, k) == pytest.approx(truth, abs=1e-14)
    assert abs(chance @ (1 - (1 - c / n) ** 4) - (1 - (1 - p) ** 4)) > 1e-4


def test_pass_at_k_is_stable_where_the_binomials_overflow():
    n, c = 10_000, np.array([0, 1, 2, 17, 500, 9_000, 9_936, 9_937, 10_000])
    for k in (1, 2, 64, 5_000, 9_999, 10_000):
        expected = [float(1 - Fraction(math.comb(n - right, k), math.comb(n, k))) for right in c.tolist()]
        got = pass_at_k(n, c, k)
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-12)  # 10,000 roundings of 1e-16
        assert (got >= 0).all() and (got <= 1).all()


@pytest.mark.parametrize(
    ("n", "c", "k"),
    [(4, 0, 5), (4, 4, 5), (64, 3, 128), (4, 1, 0), (4, 1, -1), (0, 0, 0), (4, 5, 2), (4, -1, 2), (4, 0.5, 2)],
)
def test_pass_at_k_refuses_what_makes_no_sense(n, c, k):
    with pytest.raises(ValueError):
        pass_at_k(n, c, k)
    with pytest.raises(ValueError):
        pass_at_k(n, np.array([0, c]), k)


# The samples ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [16, 37])
def test_count_right_counts_what_the_verifier_rewards(sft, monkeypatch, n):
    """Every one of the n samples is scored, the remainder of the last call included, each against its own prompt."""
    _, held_out = tinylm.problems()
    prompts = held_out[:130]
    calls, sample = [], tinylm.generate

    def watched(model, rows, *args, **kwargs):
        calls.append((rows, sample(model, rows, *args, **kwargs)))
        return calls[-1][1]

    monkeypatch.setattr(tinylm, "generate", watched)
    counts = passk.count_right(sft, prompts, n, 1.0, torch.Generator().manual_seed(0))
    rewarded = dict.fromkeys(tinylm.decode(prompts), 0)
    drawn = 0
    for rows, responses in calls:
        drawn += len(rows)
        for prompt, text in zip(tinylm.decode(rows), tinylm.decode_and_strip_padding(responses), strict=True):
            rewarded[prompt] += tinylm.reward(prompt, text)
    assert drawn == n * len(prompts)
    assert counts.tolist() == list(rewarded.values())


def test_estimates_fall_on_the_exact_line(sft):
    _, held_out = tinylm.problems()
    n, temperature = 128, 0.8
    c = passk.count_right(sft, held_out, n, temperature, torch.Generator().manual_seed(1))
    p = tinylm.success_probability(sft, held_out, temperature).double().clamp(0, 1).numpy()
    right = np.arange(n + 1)
    # Each problem's c is binomial(n, p), so the variance of its estimate is a finite sum, and the standard error of
    # the mean over problems follows. The seven values of k share their samples; 4.5 standard errors let a right
    # sampler fail on less than one machine in 20,000.
    log_choose = np.array([math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1) for i in right])
    inner = np.clip(p, 1e-300, 1 - 1e-16)[:, None]
    chance = np.exp(log_choose + right * np.log(inner) + (n - right) * np.log1p(-inner))  # [problems, n + 1]
    for k in passk.KS:
        exact = 1 - (1 - p) ** k
        value = pass_at_k(n, right, k)
        np.testing.assert_allclose(chance @ value, exact, atol=1e-9)
        variance = (chance * (value - exact[:, None]) ** 2).sum(axis=1)
        standard_error = np.sqrt(variance.sum()) / len(p)
        assert abs(pass_at_k(n, c, k).mean() - exact.mean()) <= 4.5 * standard_error, k


def test_bootstrap_band():
    """Against the textbook: for a mean of many values the band is +- 1.96 standard errors."""
    values = np.random.default_rng(0).normal(0.3, [1.0, 0.1], size=(500, 2))
    low, high = passk.bootstrap_band(values, seed=1)
    mean, standard_error = values.mean(axis=0), values.std(axis=0) / math.sqrt(500)
    # From 2,000 draws a 2.5% percentile is known to about 0.06 standard errors; 0.3 is five times that.
    assert (np.abs(low - (mean - 1.96 * standard_error)) <= 0.3 * standard_error).all()
    assert (np.abs(high - (mean + 1.96 * standard_error)) <= 0.3 * standard_error).all()
    again = passk.bootstrap_band(values, seed=1)
    assert np.array_equal(low, again[0]) and np.array_equal(high, again[1])
    assert not np.array_equal(low, passk.bootstrap_band(values, seed=2)[0])


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        ([0.2, 0.0, -0.1, -0.2], [0.3, 0.1, 0.1, -0.1], "GRPO from k = 1, neither from k = 2, SFT from k = 4"),
        ([0.3, 0.2, 0.1], [0.4, 0.3, 0.2], "GRPO from k = 1"),
        ([-0.3, -0.1], [-0.1, 0.0], "SFT from k = 1, neither from k = 2"),
        ([-0.1, 0.0, -0.1], [0.1, 0.1, 0.0], "neither from k = 1"),
    ],
)
def test_leaders(low, high, expected):
    assert passk.leaders(np.array(low), np.array(high)) == expected


# The command ----------------------------------------------------------------------------------------------------


def start(folder: Path, *flags: str, **extra: str) -> subprocess.CompletedProcess:
    """The command as a program of its own."""
    command = [sys.executable, str(LAB / "passk.py"), *flags]
    return subprocess.run(
        command, cwd=folder, env=os.environ | extra, capture_output=True, encoding="utf-8", timeout=120, check=False
    )


def assert_one_line(status: int, stderr: str, *words: str) -> None:
    """Exit status 2 and a single line on stderr that holds the words."""
    assert status == 2, stderr
    assert stderr.count("\n") == 1 and stderr.endswith("\n"), stderr
    for word in words:
        assert word in stderr


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """call(*flags) runs `main` in the folder `tmp_path` of this process: (exit status, stdout, stderr)."""

    def main(*flags: str) -> tuple[int, str, str]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["passk.py", *flags])
        try:
            status = call_main(passk)
        except SystemExit as error:
            status = error.code
        return status, *capsys.readouterr()

    return main


@pytest.fixture(scope="module")
def trained(sft, tmp_path_factory) -> Path:
    """A checkpoint that stands in for a GRPO run: the SFT model with a sharper head, which changes every p."""
    path = tmp_path_factory.mktemp("trained") / "tinylm_grpo.pt"
    model = tinylm.TinyLM()
    model.load_state_dict(sft.state_dict())
    with torch.no_grad():
        model.head.weight *= 1.5
    tinylm.save_checkpoint(model, path)
    return path


def is_picture(path: Path) -> bool:
    start = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF", ".jpg": b"\xff\xd8"}[path.suffix]
    return path.read_bytes().startswith(start) and path.stat().st_size > 5_000


def test_the_command(sft, trained, tmp_path):
    shutil.copy(trained, tmp_path)
    result = start(tmp_path, "--n", "128")
    assert result.returncode == 0 and result.stderr == "", result.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"tinylm_grpo.pt", "passk.png"}
    assert is_picture(tmp_path / "passk.png")

    rows = [line.split() for line in result.stdout.splitlines() if line[:3].strip().isdigit()]
    assert [int(row[0]) for row in rows] == list(passk.KS) == [1, 2, 4, 8, 16, 32, 64]
    numbers = [[float(word.strip("()")) for word in row if word != "to"] for row in rows]
    _, held_out = tinylm.problems()
    for column, model in ((2, sft), (4, tinylm.load_checkpoint(trained))):
        p = tinylm.success_probability(model, held_out).double()
        for row in numbers:
            assert row[column] == pytest.approx((1 - (1 - p) ** row[0]).mean().item(), abs=6e-4)
            assert row[column - 1] == pytest.approx(row[column], abs=0.03)
    for _, sft_estimate, _, grpo_estimate, _, difference, _, low, high in numbers:
        assert difference == pytest.approx(grpo_estimate - sft_estimate, abs=1.1e-3)
        assert low <= difference <= high
    assert "ahead, where the band leaves out 0: GRPO from k = 1, neither from k = " in result.stdout


def test_a_seed_repeats_the_table_and_the_picture_is_replaced(trained, tmp_path, call, monkeypatch):
    train, held_out = tinylm.problems()
    monkeypatch.setattr(tinylm, "problems", lambda: (train, held_out[:10]))
    flags = ["--grpo", str(trained), "--n", "128", "--seed"]
    first, again, other = call(*flags, "1"), call(*flags, "1"), call(*flags, "2")
    assert first == again and first[0] == 0 and first[2] == ""
    assert other[0] == 0
    estimates = [[line.split()[1] for line in stdout.splitlines()[2:9]] for _, stdout, _ in (first, other)]
    assert estimates[0] != estimates[1]  # other samples, not only another band
    assert [path.name for path in tmp_path.iterdir()] == ["passk.png"]


@pytest.mark.parametrize("ending", PICTURES)
def test_a_picture_of_passk_may_be_replaced_and_no_other(ending, tmp_path):
    path = tmp_path / f"curves{ending}"
    check_marked(path, PASSK_MARK)
    curves = {"SFT": np.linspace(0.5, 0.99, 64), "GRPO": np.linspace(0.8, 0.98, 64)}
    difference = curves["GRPO"] - curves["SFT"]
    plot_passk(curves, curves, difference - 0.02, difference + 0.02, "a test", path)
    assert is_picture(path)
    check_marked(path, PASSK_MARK)
    path.write_bytes(path.read_bytes().replace(PASSK_MARK.encode(), b"x" * len(PASSK_MARK)))
    with pytest.raises(ValueError, match="is there already"):
        check_marked(path, PASSK_MARK)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


BAD_FLAGS = {
    "n below twice the largest k": (["--n", "127"], "128"),
    "n is no number": (["--n", "many"], "many"),
    "n is not whole": (["--n", "256.5"], "256.5"),
    "temperature 0": (["--temperature", "0"], "--temperature"),
    "temperature negative": (["--temperature", "-1"], "--temperature"),
    "temperature nan": (["--temperature", "nan"], "--temperature"),
    "seed negative": (["--seed", "-1"], "--seed"),
    "unknown flag": (["--samples", "256"], "--samples"),
    "no picture": (["--out", "passk.txt"], "passk.txt"),
    "no ending": (["--out", "passk"], ".png"),
    "no such folder": (["--out", "nowhere/passk.png"], "nowhere"),
    "another picture": (["--out", "mine.png"], "mine.png"),
    "a folder": (["--out", "folder.png"], "folder.png"),
    "no checkpoint": ([], "run `python run.py` first"),
    "no such checkpoint": (["--grpo", "clip.pt"], "clip.pt"),
}


@pytest.mark.parametrize("case", BAD_FLAGS)
def test_bad_flags_end_in_one_line(case, tmp_path, call):
    (tmp_path / "mine.png").write_bytes(b"my own drawing")
    (tmp_path / "folder.png").mkdir()
    flags, word = BAD_FLAGS[case]
    status, _, stderr = call(*flags)
    assert_one_line(status, stderr, "passk.py: ", word)
    assert {path.name for path in tmp_path.iterdir()} == {"mine.png", "folder.png"}
    assert (tmp_path / "mine.png").read_bytes() == b"my own drawing"


@pytest.mark.parametrize("case", ["damaged", "foreign", "device"])
def test_bad_checkpoints_and_devices_end_in_one_line(case, trained, tmp_path, call):
    path = tmp_path / "tinylm_grpo.pt"
    if case == "foreign":
        torch.save(torch.nn.Linear(2, 2).state_dict(), path)
    else:
        path.write_bytes(trained.read_bytes()[: 10_000 if case == "damaged" else None])
    status, _, stderr = call(*(["--device", "abacus"] if case == "device" else []))
    assert_one_line(status, stderr, "passk.py: ", "abacus" if case == "device" else "tinylm_grpo.pt")
    assert [file.name for file in tmp_path.iterdir()] == ["tinylm_grpo.pt"]


def test_help_and_refusals_do_not_wait_for_torch(tmp_path):
    """Importing torch takes seconds; here it would end the program."""
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')\n", encoding="utf-8")
    result = start(tmp_path, "--n", "127", PYTHONPATH=str(tmp_path))
    assert_one_line(result.returncode, result.stderr, "127")
    result = start(tmp_path, "--help", PYTHONPATH=str(tmp_path))
    assert result.returncode == 0
    for words in ("--grpo", "tinylm_grpo.pt", "--n", "256", "--temperature", "1.0", "--seed", "--device", "--out"):
        assert words in result.stdout


def test_a_picture_that_cannot_be_saved(trained, tmp_path, call, monkeypatch):
    def full(figure, path, **options):
        path.write_bytes(b"half a picture")
        raise OSError("no space left")

    monkeypatch.setattr(Figure, "savefig", full)
    monkeypatch.setattr(passk, "count_right", lambda model, prompts, n, *rest: np.zeros(len(prompts), dtype=int))
    status, stdout, stderr = call("--grpo", str(trained))
    assert_one_line(status, stderr, "no space left")
    assert "ahead" in stdout and list(tmp_path.iterdir()) == []  # the table is there all the same
