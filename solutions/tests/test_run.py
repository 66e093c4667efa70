"""run.py as a user meets it: its exit status, its output and its files, with the reference solution.

Where imports, signals or the environment matter it is a program of its own; elsewhere `run.main` runs in here, which
saves the seconds of importing torch.
"""

import io
import signal
import sys
from pathlib import Path

import pytest
import torch
from helpers import LAB, TINY, assert_one_line, differ, finish, names, rows_of, running, start
from matplotlib.image import imread

import run
import tinylm
from lab.files import lock_on
from lab.history import METRICS, Run, print_table, read_csv
from lab.tasks import watched_gradient

pytestmark = pytest.mark.usefixtures("sft")  # so that no run below has to say that it trains the policy
DEFAULT_FILES = {"grpo_tinylm.png", "grpo_tinylm.csv", "tinylm_grpo.pt"}


# A run and its files --------------------------------------------------------------------------------------------


def test_run_writes_picture_csv_and_checkpoint(runs):
    folder, result = runs["first"]
    assert (result.returncode, result.stderr) == (0, "")
    assert names(folder) == DEFAULT_FILES, "beside the three files nothing may be left"

    settings, rows = rows_of(folder / "grpo_tinylm.csv")
    assert settings == (
        "# run.py --iters 3 --prompts 2 --G 2 --inner-steps 2 --lr 0.0003 --clip 0.2 --beta 0.04 "
        "--temperature 1.0 --seed 0 --seeds 1 --verifier strict --eval-every 1 --device cpu --solutions"
    )
    assert list(rows[0]) == [
        *("iteration", "reward", "all_right", "all_wrong", "clip_fraction", "kl", "ratio", "loss", "gradient"),
        *("sampled_accuracy", "greedy_accuracy", "entropy", "expected_zero_signal", "seed"),
    ]
    assert [row["iteration"] for row in rows] == ["0", "1", "2", "3"]
    assert all(rows[0][name] == "" for name in METRICS)
    values = [float(value) for row in rows for value in row.values() if value]
    assert len(values) == 4 + 3 * 8 + 4 * 4 + 4  # iterations; eight metrics of three steps; evaluations; seeds

    picture = imread(folder / "grpo_tinylm.png")
    assert picture.shape[0] > 800 and picture.shape[1] > 1200
    assert picture[..., :3].std() > 0.05, "the picture is blank"

    trained = tinylm.load_checkpoint(folder / "tinylm_grpo.pt")
    assert differ(folder / "tinylm_grpo.pt", tinylm.SFT_PATH)
    _, held_out = tinylm.problems()
    p = tinylm.success_probability(trained, held_out).double()
    assert p.mean().item() == pytest.approx(float(rows[-1]["sampled_accuracy"]), abs=1e-5)
    two_alike = (p**2 + (1 - p) ** 2).mean().item()  # G = 2
    assert two_alike == pytest.approx(float(rows[-1]["expected_zero_signal"]), abs=1e-5)


def test_without_a_terminal_plain_lines_then_a_table(runs):
    folder, result = runs["first"]
    which, *lines = result.stdout.splitlines()
    assert which == "running solutions/grpo.py"
    assert [line.split(":")[0] for line in lines[:3]] == [f"iteration {i} of 3" for i in (1, 2, 3)]
    assert all("reward" in line and "KL" in line for line in lines[:3])
    _, rows = rows_of(folder / "grpo_tinylm.csv")
    table = {line[:40].strip(): line.split()[-2:] for line in lines[3:]}
    for label, column in (
        ("accuracy, sampled", "sampled_accuracy"),
        ("accuracy, greedy", "greedy_accuracy"),
        ("entropy, nats per token", "entropy"),
    ):
        assert table[label] == [f"{float(rows[i][column]):.3f}" for i in (0, -1)]
    kl = sum(float(row["kl"]) for row in rows[1:]) / 3
    assert table["KL to the reference, nats per token"] == [f"{kl:.3f}"] * 2
    zero_signal = sum(float(row["all_right"]) + float(row["all_wrong"]) for row in rows[1:]) / 3
    assert table["share of groups without signal"] == [f"{zero_signal:.3f}"] * 2
    assert all(name in lines[-1] for name in DEFAULT_FILES)


def test_table_averages_the_first_and_the_last_30_iterations(capsys):
    evaluation = {"sampled_accuracy": 0.5, "greedy_accuracy": 0.75, "entropy": 0.25}
    history = [{"iteration": i, "kl": i / 100, "all_right": 0.1, "all_wrong": i / 1000} for i in range(101)]
    history[0], history[100] = {"iteration": 0} | evaluation, history[100] | evaluation
    print_table(Run("run", [], history))
    lines = {line[:40].strip(): line.split()[-2:] for line in capsys.readouterr().out.splitlines()}
    assert lines["KL to the reference, nats per token"] == ["0.155", "0.855"]  # the means of 1 to 30 and of 71 to 100
    assert lines["share of groups without signal"] == [f"{0.1 + 0.0155:.3f}", f"{0.1 + 0.0855:.3f}"]


def test_same_flags_and_seed_give_the_same_run_to_the_bit(runs):
    (first, _), (again, result) = runs["first"], runs["again"]
    assert result.returncode == 0, result.stderr
    assert names(again) == {"plot.svg", "plot.csv", "plot.pt"}
    assert "<svg" in (again / "plot.svg").read_text(encoding="utf-8")
    assert (first / "grpo_tinylm.csv").read_bytes() == (again / "plot.csv").read_bytes()
    assert not differ(first / "tinylm_grpo.pt", again / "plot.pt")


def test_how_often_one_looks_does_not_change_what_is_trained(runs, call, tmp_path):
    first, _ = runs["first"]
    assert call(*TINY, "--eval-every", "3").returncode == 0
    assert not differ(first / "tinylm_grpo.pt", tmp_path / "tinylm_grpo.pt")
    _, rows = rows_of(tmp_path / "grpo_tinylm.csv")
    assert [row["entropy"] != "" for row in rows] == [True, False, False, True]


def test_settings_reach_the_training(runs, call, tmp_path):
    first, _ = runs["first"]
    assert call(*TINY, "--no-std", "--clip", "1000", "--beta", "0").returncode == 0
    settings, rows = rows_of(tmp_path / "grpo_tinylm.csv")
    assert " --clip 1000.0 --beta 0.0 " in settings and settings.endswith(" --no-std")
    assert all(float(row["clip_fraction"]) == 0 for row in rows[1:])
    assert differ(first / "tinylm_grpo.pt", tmp_path / "tinylm_grpo.pt")
    assert call(*TINY, "--seed", "1", "--out", "seed.png").returncode == 0
    assert differ(first / "tinylm_grpo.pt", tmp_path / "seed.pt")


def test_several_seeds_are_runs_of_their_own_and_the_first_keeps_its_checkpoint(runs, call, tmp_path):
    first, _ = runs["first"]
    result = call(*TINY, "--seeds", "2")
    assert result.returncode == 0
    assert "iteration 2 of 3, seed 1: reward" in result.stdout
    assert call(*TINY, "--seed", "1", "--out", "second.png").returncode == 0
    _, rows = rows_of(tmp_path / "grpo_tinylm.csv")
    assert rows == rows_of(first / "grpo_tinylm.csv")[1] + rows_of(tmp_path / "second.csv")[1]
    assert not differ(first / "tinylm_grpo.pt", tmp_path / "tinylm_grpo.pt")
    after = [float(row["sampled_accuracy"]) for row in rows if row["iteration"] == "3"]
    spread = f"{sum(after) / 2:.3f} ({min(after):.3f} to {max(after):.3f})"
    assert spread in next(line for line in result.stdout.splitlines() if "accuracy, sampled" in line)


def test_ctrl_c_in_a_later_seed_keeps_them_all(call, reference, monkeypatch, tmp_path):
    step, count, drawn = reference.grpo_step, [], []

    def interrupted(*arguments):
        count.append(1)
        if len(count) == 5:  # the second iteration of the second seed
            raise KeyboardInterrupt
        return step(*arguments)

    monkeypatch.setattr(reference, "grpo_step", interrupted)
    monkeypatch.setattr(run, "plot", lambda runs, path, mark="": drawn.append(runs[0]) or path.write_bytes(b"picture"))
    result = call(*TINY, "--seeds", "3")
    assert result.returncode == 130
    assert result.stderr == "run.py: stopped by Ctrl-C after iteration 1 of 3, seed 1\n"
    assert names(tmp_path) == DEFAULT_FILES
    read = read_csv(tmp_path / "grpo_tinylm.csv")
    assert [len(history) for history in read.histories] == [4, 2]
    assert drawn[0].whole == [drawn[0].history], "a mean over whole seeds only"


def test_a_later_seed_that_fails_leaves_the_first_ones_checkpoint(call, reference, monkeypatch, tmp_path):
    step, count = reference.grpo_step, []

    def spoilt(*arguments):
        samples, metrics = step(*arguments)
        count.append(1)
        return samples, metrics | {"loss": torch.tensor(float("nan") if len(count) == 4 else 0.0)}

    monkeypatch.setattr(reference, "grpo_step", spoilt)
    result = call(*TINY, "--seeds", "2")
    assert_one_line(result, "run.py: ", "iteration 1", "--lr")
    assert names(tmp_path) == DEFAULT_FILES
    assert len(read_csv(tmp_path / "grpo_tinylm.csv").histories) == 1


def test_the_gradient_is_the_one_that_the_optimizer_follows():
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.Adam([weight, torch.nn.Parameter(torch.zeros(1))])
    with watched_gradient() as norm:
        optimizer.step()
        assert norm == [0.0]
        (weight * torch.tensor([3.0, 4.0])).sum().backward()
        optimizer.step()
        assert norm == [5.0]
    weight.grad *= 2
    optimizer.step()
    assert norm == [5.0], "it goes on watching"


def test_on_a_terminal_a_progress_bar_with_reward_and_kl(call, monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "120")
    result = call(*TINY)
    assert result.returncode == 0
    bar = terminal.getvalue()
    assert "/3" in bar and "reward " in bar and "KL " in bar
    assert "iteration 1 of 3" not in result.stdout


# Runs that end early --------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot send Ctrl-C to one program")
def test_ctrl_c_saves_what_there_is(tmp_path):
    # A shell that starts pytest in the background makes its programs ignore Ctrl-C: undo that first.
    code = "import runpy, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); del sys.argv[0]; "
    code += "sys.path.insert(0, sys.argv[0]); runpy.run_path(sys.argv[0] + '/run.py', run_name='__main__')"
    flags = [*TINY, "--solutions", "--iters", "1000000", "--out", "long.png"]
    with running(tmp_path, "-c", code, LAB, *flags) as process:
        assert "iteration 2 of 1000000" in "".join(process.stdout.readline() for _ in range(3))
        process.send_signal(signal.SIGINT)
        result = finish(process)
    assert result.returncode == 130, result
    assert "saved long.pt, long.csv, long.png" in result.stdout
    assert names(tmp_path) == {"long.png", "long.csv", "long.pt"}
    _, rows = rows_of(tmp_path / "long.csv")
    assert len(rows) >= 3
    assert result.stderr.endswith(f": stopped by Ctrl-C after iteration {len(rows) - 1} of 1000000\n")
    assert result.stderr.count("\n") == 1
    assert differ(tmp_path / "long.pt", tinylm.SFT_PATH)
    assert (tmp_path / "long.csv").read_text(encoding="utf-8").splitlines()[1].startswith("# stopped after iteration ")
    assert len(read_csv(tmp_path / "long.csv").history) == len(rows)


def test_ctrl_c_before_the_first_iteration_leaves_no_files(call, reference, monkeypatch, tmp_path):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(reference, "grpo_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        call(*TINY)
    assert names(tmp_path) == set()


@pytest.mark.parametrize("bad", [1, 3])
def test_loss_that_is_not_finite_stops_the_run_without_a_checkpoint(call, reference, monkeypatch, tmp_path, bad):
    step, count = reference.grpo_step, []

    def spoilt(*arguments):
        samples, metrics = step(*arguments)
        count.append(1)
        return samples, metrics | {"loss": torch.tensor(float("nan") if len(count) == bad else 0.0)}

    monkeypatch.setattr(reference, "grpo_step", spoilt)
    result = call(*TINY, "--iters", "9")
    assert_one_line(result, "run.py: ", f"iteration {bad}", "--lr")
    if bad == 1:  # there is nothing to keep
        assert names(tmp_path) == set()
        return
    assert "no checkpoint" in result.stdout
    assert names(tmp_path) == {"grpo_tinylm.png", "grpo_tinylm.csv"}
    assert [row["iteration"] for row in rows_of(tmp_path / "grpo_tinylm.csv")[1]] == ["0", "1", "2"]


def test_full_disk_is_one_line(call, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tinylm, "save_checkpoint", full)
    assert_one_line(call(*TINY), "could not save", "No space left")


def test_lab_as_handed_out_says_where_to_begin(tmp_path, own_lab):
    folder = tmp_path / "here"
    folder.mkdir()
    result = finish(start(folder, own_lab / "run.py"))
    assert (result.returncode, result.stdout, names(folder)) == (2, "running grpo.py\n", set())
    assert result.stderr == "Task 1 (sample_group) is not written yet: open grpo.py\n"


def test_first_unwritten_task_is_the_one_named(call, reference, monkeypatch):
    def leave_unwritten(message: str, name: str):
        def stub(*_, **__):
            raise NotImplementedError(message)

        monkeypatch.setattr(reference, name, stub)

    tasks = ("sample_group", "group_advantages", "k3_kl", "grpo_loss", "grpo_step")
    for number, name in reversed(list(enumerate(tasks, start=1))):
        message = f"Task {number} ({name}) is not written yet: open grpo.py"
        leave_unwritten(message, name)
        assert call(*TINY).stderr == f"{message}\n"


@pytest.mark.parametrize("error", [ZeroDivisionError("division by zero"), NotImplementedError("no such kernel")])
def test_exception_in_grpo_py_keeps_its_traceback(call, reference, monkeypatch, tmp_path, error):
    def broken(*_):
        raise error

    monkeypatch.setattr(reference, "grpo_step", broken)
    with pytest.raises(type(error), match=str(error)):
        call(*TINY)
    assert names(tmp_path) == set()


def test_syntax_error_in_grpo_py_keeps_its_traceback(tmp_path, own_lab):
    with (own_lab / "grpo.py").open("a", encoding="utf-8") as file:
        file.write("def broken(:\n")
    result = finish(start(tmp_path, own_lab / "run.py"))
    assert result.returncode == 1
    assert "SyntaxError" in result.stderr and "def broken(:" in result.stderr and "grpo.py" in result.stderr


def test_two_runs_with_one_out_at_once(call, tmp_path, monkeypatch):
    with lock_on(Path("same.png")):
        assert_one_line(call(*TINY, "--out", "same.svg"), "--out same.svg", "another run is writing")
        assert names(tmp_path) == set()
        assert call(*TINY, "--out", "other.png").returncode == 0
    assert call(*TINY, "--out", "same.png").returncode == 0


# Earlier runs beside this one -----------------------------------------------------------------------------------


def test_earlier_runs_are_drawn_beside_this_one_and_alone(two_csvs, call, monkeypatch):
    drawn = []
    monkeypatch.setattr(run, "plot", lambda runs, path, mark="": drawn.append(runs) or path.write_bytes(b"picture"))
    a, b = two_csvs
    before = a.read_bytes(), b.read_bytes()
    assert call(*TINY, "--seed", "1", "--out", "new.png", "--versus", "a.csv", "b.csv").returncode == 0
    assert [one.name for one in drawn[-1]] == ["new", "a", "b"] and "--seed 1" in drawn[-1][0].settings
    assert call("--redraw", "b.csv", "new.csv", "--out", "again.png").returncode == 0
    assert [one.name for one in drawn[-1]] == ["b", "new"]
    assert names(a.parent) == {"a.csv", "b.csv", "new.png", "new.csv", "new.pt", "again.png"}
    assert (a.read_bytes(), b.read_bytes()) == before


def test_what_cannot_be_drawn_is_one_line(two_csvs, call):
    for flags in (
        ["--redraw", "missing.csv"],
        ["--redraw", "a.csv", "--G", "4"],
        ["--redraw", "a.csv", "--versus", "b.csv"],
    ):
        result = call(*flags, "--out", "x.png")
        assert_one_line(result, "run.py: ", "--redraw" if "--G" in flags or "--versus" in flags else "missing.csv")
    assert_one_line(call("--versus", *["a.csv"] * 5), "5 runs at most")
