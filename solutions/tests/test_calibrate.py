"""calibrate.py, for real: two starting policies, trained in two processes that are started afresh (spawn)."""

import os
import subprocess
import sys
from pathlib import Path

import calibrate
import pytest

LAB = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_two_policies_in_two_spawned_processes(tmp_path):
    command = [sys.executable, LAB / "solutions" / "calibrate.py", "--policies", "2", "--jobs", "2"]
    environment = {name: value for name, value in os.environ.items() if name != "RL_SOLUTIONS"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    table = {cells[1].strip(): cells[2:-1] for line in done.stdout.splitlines() if len(cells := line.split("|")) == 9}
    for name in ("sampled accuracy before", "sampled accuracy after", calibrate.GAIN):
        mean, sd, lowest, highest, low, high = map(float, table[name])
        assert low <= lowest <= mean <= highest <= high and sd >= 0  # rounded, two policies may be alike
    assert float(table["sampled accuracy after"][0]) > float(table["sampled accuracy before"][0]) + 0.06
    assert "task 5 asks for a gain of 0.06" in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("flags", ["--policies 1", "--grpo-seeds 1", "--policies 2 --grpo-seeds 2", "--jobs 0", "--x"])
def test_bad_flags_are_one_line(flags, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["calibrate.py", *flags.split()])
    with pytest.raises(SystemExit) as stop:
        calibrate.main()
    assert stop.value.code == 2 and capsys.readouterr().err.count("\n") == 1
