"""calibrate.py, for real: two starting policies, trained in two processes that are started afresh (spawn)."""

import os
import subprocess
import sys
from pathlib import Path

import calibrate
import numpy as np
import pytest
from helpers import finish, start

LAB = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_two_policies_in_two_spawned_processes(tmp_path):
    command = [sys.executable, LAB / "solutions" / "calibrate.py", "--policies", "2", "--jobs", "2"]
    environment = {name: value for name, value in os.environ.items() if name != "RL_SOLUTIONS"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    table = {cells[1].strip(): cells[2:-1] for line in done.stdout.splitlines() if len(cells := line.split("|")) == 7}
    for name in ("sampled accuracy before", "sampled accuracy after", calibrate.GAIN):
        mean, sd, lowest, highest = map(float, table[name])
        assert lowest <= mean <= highest and sd >= 0  # rounded, two policies may be alike
    assert float(table["sampled accuracy after"][0]) > float(table["sampled accuracy before"][0]) + 0.06
    assert "task 5 asks for a gain of 0.06" in done.stdout
    assert not list(tmp_path.iterdir())


def test_ranges_hold_all_figures_of_95_percent_of_new_runs():
    """On figures whose distribution is known: in 95% of calibrations, 95% of new runs have all three inside."""
    generator = np.random.default_rng(0)

    def runs(n: int) -> np.ndarray:
        normal = generator.standard_normal((n, 2))
        return np.column_stack([normal, generator.standard_t(4, n) + normal[:, 0]])  # heavy tails, and dependent

    new, good = runs(20_000), 0
    for _ in range(100):
        known = runs(93)
        t = calibrate.tolerance([dict(enumerate(map(float, row))) for row in known])
        inside = (abs(new - known.mean(axis=0)) <= t * known.std(axis=0, ddof=1)).all(axis=1)
        good += inside.mean() >= 0.95
    assert good >= 85  # of 100: 95 are to be expected, and a t that is one order statistic too low gives 79
    assert calibrate.tolerance([{"a": float(i)} for i in range(58)]) is None


def test_every_rounding_changes_the_starting_policy():
    code = "import tinylm; print(tinylm.train_sft(target=0.02).head.weight.double().sum().item())"
    several = calibrate.roundings()
    sums = {finish(start(LAB, "-c", code, **rounding)).stdout for rounding in several}
    assert len(sums) > len(several) / 2  # not each instruction set differs in each operation


@pytest.mark.parametrize("flags", ["--policies 1", "--grpo-seeds 1", "--policies 2 --grpo-seeds 2", "--jobs 0", "--x"])
def test_bad_flags_are_one_line(flags, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["calibrate.py", *flags.split()])
    with pytest.raises(SystemExit) as stop:
        calibrate.main()
    assert stop.value.code == 2 and capsys.readouterr().err.count("\n") == 1
