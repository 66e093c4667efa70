"""calibrate.py, for real: two starting policies, trained in two processes that are started afresh (spawn)."""

import os
import subprocess
import sys

import numpy as np
import pytest
from helpers import call_command, finish, start
from manifest import LAB
from measuring import calibration
from scipy.stats import t


@pytest.mark.slow
def test_two_policies_in_two_spawned_processes(tmp_path):
    command = [sys.executable, LAB / "solutions" / "calibrate.py", "--policies", "2", "--jobs", "2"]
    environment = {name: value for name, value in os.environ.items() if name != "RL_SOLUTIONS"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    table = {cells[1].strip(): cells[2:-1] for line in done.stdout.splitlines() if len(cells := line.split("|")) == 7}
    for name in ("sampled accuracy before", "sampled accuracy after", calibration.GAIN):
        mean, sd, lowest, highest = map(float, table[name])
        assert lowest <= mean <= highest and sd >= 0  # rounded, two policies may be alike
    assert float(table["sampled accuracy after"][0]) > float(table["sampled accuracy before"][0]) + 0.06
    assert "task 5 asks for a gain of 0.06" in done.stdout
    assert not list(tmp_path.iterdir())


def test_the_range_of_93_runs_holds_95_percent(capsys):
    """Whatever the distribution: in 95% of calibrations 95% of new runs lie from the lowest to the highest of 93."""
    generator, good = np.random.default_rng(0), 0
    for _ in range(400):
        known = generator.standard_t(3, 93)
        good += t.cdf(known.max(), 3) - t.cdf(known.min(), 3) >= 0.95
    assert 0.92 <= good / 400 <= 0.98
    calibration.print_table([{calibration.GAIN: 0.2 + i / 1000} for i in range(93)])
    assert "from lowest to highest: 95.0% of all machines, with 95% confidence" in capsys.readouterr().out


def test_every_rounding_changes_the_starting_policy():
    code = "import tinylm; print(tinylm.train_sft(target=0.02).head.weight.double().sum().item())"
    several = calibration.roundings()
    sums = {finish(start(LAB, "-c", code, **rounding)).stdout for rounding in several}
    assert len(sums) > len(several) / 2  # not each instruction set differs in each operation


@pytest.mark.parametrize("flags", ["--policies 1", "--grpo-seeds 1", "--policies 2 --grpo-seeds 2", "--jobs 0", "--x"])
def test_bad_flags_are_one_line(flags, capsys):
    assert call_command("calibrate.py", *flags.split()) == 2
    assert capsys.readouterr().err.count("\n") == 1
