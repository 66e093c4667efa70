"""What users run into: every outside thing that a command reads or writes. The environment, how Python is started,
signals, closed pipes, files that others hold, notebooks, names with dollar signs, other styles, extreme settings.
"""

import copy
import itertools
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import LAB, TINY, assert_one_line, finish, names, running, start
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from manifest import STUDENT, copy_lab
from matplotlib import rc_context, style

import run
import tinylm
from lab.files import lock_on, save_each
from lab.history import EVALUATED, METRICS, Run, read_csv
from lab.pictures import plot, plot_passk
from lab.start import whole_number

POSIX = pytest.mark.skipif(sys.platform == "win32", reason="signals and pipes of POSIX")
pytestmark = pytest.mark.usefixtures("sft")
FILES = {"grpo_tinylm.png", "grpo_tinylm.csv", "tinylm_grpo.pt"}

# Results are not lost ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("held", sorted(FILES))
def test_a_file_that_another_program_holds_goes_under_a_free_name(call, tmp_path, monkeypatch, held):
    """As a spreadsheet does on Windows, where what is open cannot be replaced."""
    replace = Path.replace

    def refuse(path: Path, target: Path):
        if Path(target).name == held:
            raise PermissionError(13, "Permission denied")
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", refuse)
    monkeypatch.setattr(run, "plot", plot)
    result = call(*TINY)
    other = Path(held).with_stem(f"{Path(held).stem}-2").name
    assert result.returncode == 0
    assert result.stderr == f"run.py: {held} cannot be written (Permission denied): it is in {other}\n"
    assert names(tmp_path) == FILES - {held} | {other}
    assert set(result.stdout.splitlines()[-1].removeprefix("saved ").split(", ")) == names(tmp_path)
    assert len(read_csv(next(tmp_path.glob("*.csv"))).history) == 4


def test_what_cannot_be_saved_at_all_costs_nothing_else(tmp_path):
    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "b-2.csv").touch()
    writers = {tmp_path / "a.pt": full, tmp_path / "b.csv": lambda path: path.touch(), tmp_path / "c.png": full}
    saved, remarks, problems = save_each(writers)
    assert saved == [tmp_path / "b.csv"] and remarks == []
    assert [problem.split("/")[-1] for problem in problems] == [
        f"{name} (No space left on device)" for name in ("a.pt", "c.png")
    ]


def test_ctrl_c_while_the_picture_is_drawn_says_what_is_saved(call, tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "plot", interrupted)
    result = call(*TINY)
    assert_one_line(result, "could not save grpo_tinylm.png (stopped)")
    assert result.stdout.endswith("saved tinylm_grpo.pt, grpo_tinylm.csv\n")
    assert names(tmp_path) == FILES - {"grpo_tinylm.png"}


@POSIX
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_job_that_is_ended_and_a_terminal_that_is_closed_save_what_there_is(tmp_path, number):
    with running(tmp_path, LAB / "run.py", *TINY, "--solutions", "--iters", "1000000") as process:
        assert "iteration 1 of" in process.stdout.readline() + process.stdout.readline()
        process.send_signal(number)
        result = finish(process)
    assert result.returncode == 128 + number and names(tmp_path) == FILES, result
    done = len(read_csv(tmp_path / "grpo_tinylm.csv").history) - 1
    assert result.stderr == f"run.py: stopped by {number.name} after iteration {done} of 1000000\n"


@POSIX
def test_nohup_is_respected(tmp_path):
    """Where SIGHUP was ignored from the start, it stays so."""
    code = (
        "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); os.execv(sys.executable, sys.argv[1:])"
    )
    process = start(tmp_path, "-c", code, sys.executable, LAB / "run.py", *TINY, "--solutions", "--iters", "30")
    assert "iteration 1 of" in process.stdout.readline() + process.stdout.readline()
    process.send_signal(signal.SIGHUP)
    result = finish(process)
    assert (result.returncode, result.stderr) == (0, "")
    assert len(read_csv(tmp_path / "grpo_tinylm.csv").history) == 31


@POSIX
def test_a_pipe_that_is_closed_does_not_end_the_run(tmp_path):
    process = start(tmp_path, LAB / "run.py", *TINY, "--solutions", "--iters", "20")
    process.stdout.readline()
    process.stdout.close()  # as `| head -1` does
    process.stdout = None
    result = finish(process)
    assert (result.returncode, result.stderr) == (0, "")
    assert names(tmp_path) == FILES and len(read_csv(tmp_path / "grpo_tinylm.csv").history) == 21


def test_a_run_that_was_stopped_does_not_replace_a_whole_one(call, reference, tmp_path, monkeypatch):
    assert call(*TINY).returncode == 0
    whole = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    step, count = reference.grpo_step, itertools.count(1)

    def stopped(*arguments):
        if next(count) == 3:
            raise KeyboardInterrupt
        return step(*arguments)

    monkeypatch.setattr(reference, "grpo_step", stopped)
    result = call(*TINY)
    assert result.returncode == 130 and "saved grpo_tinylm-2.pt, grpo_tinylm-2.csv, grpo_tinylm-2.png" in result.stdout
    assert {name: (tmp_path / name).read_bytes() for name in whole} == whole
    assert len(read_csv(tmp_path / "grpo_tinylm-2.csv").history) == 3


def test_samples_that_break_the_tasks_are_one_line(call, reference, monkeypatch):
    sample_group = reference.sample_group

    def empty(*arguments, **named):
        samples = sample_group(*arguments, **named)
        samples.mask = torch.zeros_like(samples.mask)
        return samples

    monkeypatch.setattr(reference, "sample_group", empty)
    assert_one_line(call(*TINY), "sample_group (task 1): a row of the mask is empty")


def test_flags_that_name_several_runs_are_all_taken():
    assert run.run_parser().parse_args(["--versus", "a.csv", "--versus", "b.csv", "c.csv"]).versus == [
        *map(Path, ("a.csv", "b.csv", "c.csv"))
    ]


@POSIX
def test_a_lock_of_another_user_is_one_line(call, tmp_path, monkeypatch):
    def refuse(path, *rest):
        if str(path).endswith(".lock"):
            raise PermissionError(13, "Permission denied")
        return open_file(path, *rest)

    open_file = os.open
    monkeypatch.setattr(os, "open", refuse)
    assert_one_line(call(*TINY), "another run is writing these files")


# The environment, and how Python is started -----------------------------------------------------------------------


@pytest.mark.parametrize("value", ["abc", "", "0", "-1", "2.5", "99999", "1 ", "\u0661"])
def test_threads_that_make_no_sense_are_one_line(tmp_path, value):
    assert_one_line(finish(start(tmp_path, LAB / "run.py", *TINY, TINYLM_THREADS=value)), "TINYLM_THREADS", "from 1 to")


@pytest.mark.parametrize("setting", ["LAB_SEED=abc", "LAB_SEED=", "LAB_SEED=1e6", "RL_SOLUTIONS=yes"])
def test_a_variable_that_is_wrong_stops_the_tests_with_one_line(setting):
    name, _, value = setting.partition("=")
    command = start(LAB, "-m", "pytest", "-q", "-p", "no:cacheprovider", **{name: value})
    assert_one_line(finish(command), f"{name}={value!r} in the environment")


def test_rl_solutions_that_is_wrong_stops_a_run_with_one_line(call, monkeypatch):
    monkeypatch.setenv("RL_SOLUTIONS", "true")
    assert_one_line(call(*TINY), "RL_SOLUTIONS='true'")


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.one_of(st.integers(-5, 2 * 10**9).map(str), st.text("0123456789eE+-. _\u0661²", max_size=12)))
def test_a_whole_number_in_the_environment(text):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NUMBER", text)
        if text.isascii() and text.isdecimal() and len(text) <= 10 and int(text) <= 10**9:
            assert whole_number("NUMBER", 3) == int(text)
        else:
            with pytest.raises(SystemExit) as stop:
                whole_number("NUMBER", 3)
            assert stop.value.code == 2
        patch.delenv("NUMBER")
        assert whole_number("NUMBER", 3) == 3


@pytest.mark.parametrize(("flags", "extra"), [(["-P"], {}), (["-I"], {}), ([], {"PYTHONSAFEPATH": "1"}), (["-O"], {})])
def test_python_in_any_mode(tmp_path, flags, extra):
    if sys.version_info < (3, 11) and "-P" in flags:
        pytest.skip("-P came with Python 3.11")
    done = finish(start(tmp_path, *flags, "-W", "error", LAB / "run.py", *TINY, "--solutions", **extra))
    assert (done.returncode, done.stderr) == (0, "") and names(tmp_path) == FILES
    done = finish(start(tmp_path, *flags, LAB / "passk.py", "--n", "128", **extra))
    assert (done.returncode, done.stderr) == (0, "")
    for command in ("grade", "release", "audit", "calibrate", "bench", "experiments", "guide", "stress"):
        assert finish(start(tmp_path, *flags, LAB / "solutions" / f"{command}.py", "--help", **extra)).returncode == 0


@POSIX
def test_ctrl_c_while_torch_is_imported_is_one_line(tmp_path):
    slow = tmp_path / "slow"
    slow.mkdir()
    (slow / "torch.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n", encoding="utf-8")
    for program in ("run.py", "passk.py"):
        process = start(tmp_path, LAB / program, PYTHONPATH=str(slow))
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        result = finish(process)
        assert result.returncode in (130, -signal.SIGINT)
        assert result.stderr == f"{program}: stopped by Ctrl-C, nothing was saved\n"


# Notebooks ---------------------------------------------------------------------------------------------------------

TWICE = """
import runpy, sys
from pathlib import Path

lab = Path(sys.argv[1])
def command(*flags):
    sys.argv[:] = [str(lab / "run.py"), *flags]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as stop:
        print("exit status", stop.code)

tiny = "--iters 2 --prompts 2 --G 2".split()
command(*tiny, "--solutions", "--out", "a.png")
command(*tiny, "--out", "b.png")
(lab / "grpo.py").write_text((lab / "solutions" / "grpo.py").read_text(encoding="utf-8"), encoding="utf-8")
command(*tiny, "--out", "c.png")
"""


def test_a_notebook_runs_the_file_that_is_on_the_disk_and_was_asked_for(tmp_path):
    lab = copy_lab([*STUDENT, "solutions/grpo.py", tinylm.SFT_PATH.name], tmp_path / "lab")
    done = finish(start(tmp_path, "-c", TWICE, lab))
    told = [line for line in done.stdout.splitlines() if line.startswith(("running", "exit"))]
    assert told == [
        *("running solutions/grpo.py", "exit status 0"),
        *("running grpo.py", "exit status 2"),
        *("running grpo.py", "exit status 0"),
    ]
    assert done.stderr == "Task 1 (sample_group) is not written yet: open grpo.py\n"


def test_main_reads_no_arguments_but_those_it_is_given(monkeypatch, call, tmp_path):
    parser = run.run_parser()
    args = parser.parse_args([*TINY, "--out", str(tmp_path / "given.png")])
    monkeypatch.setattr(sys, "argv", ["ipykernel_launcher.py", "-f", "kernel.json"])
    assert run.main(parser, args) == 0 and (tmp_path / "given.csv").exists()


# Pictures ----------------------------------------------------------------------------------------------------------


def short_history() -> list[dict[str, float]]:
    rows = [{"iteration": i} | dict.fromkeys(METRICS if i else [], 0.5) for i in range(4)]
    return [row | dict.fromkeys(EVALUATED, 0.5) for row in rows]


@pytest.mark.parametrize("name", ["a$_$b", "ck$a_b_c$", "$", "$$", "\\frac{", "_^", "x" * 200, "été $1"])
def test_no_name_is_a_formula(tmp_path, name):
    run_of_it = Run(name, ["--lr 0.1"], short_history())
    plot([run_of_it, run_of_it._replace(name="other")], tmp_path / "runs.svg")
    curve = {"SFT": np.linspace(0.5, 0.9, 64), "GRPO": np.linspace(0.6, 0.9, 64)}
    band = curve["GRPO"] - curve["SFT"]
    plot_passk(curve, curve, band - 0.1, band + 0.1, f"500 problems, {name}", tmp_path / "passk.png")
    assert names(tmp_path) == {"runs.svg", "passk.png"}


@pytest.mark.parametrize("chosen", ["dark_background", "ggplot", "grayscale", "fast"])
def test_a_picture_is_the_same_under_any_style(tmp_path, chosen):
    runs = [Run("run", ["--lr 0.1"], short_history())]
    plot(runs, tmp_path / "plain.png")
    with style.context(chosen), rc_context({"figure.dpi": 300, "savefig.transparent": True, "font.size": 20}):
        plot(runs, tmp_path / "styled.png")
    assert (tmp_path / "plain.png").read_bytes() == (tmp_path / "styled.png").read_bytes()


# Any setting that a flag admits -------------------------------------------------------------------------------------

CORNERS = {
    "temperature": [1.0, 0.01, 0.1, 100.0],
    "beta": [0.04, 0.0, 1e6],
    "lr": [3e-4, 1e-300, 1.0, 1e6],
    "clip": [0.2, 1e-300, 1e6],
    "inner_steps": [2, 1, 20],
    "G": [8, 2],
    "std": [True, False],
}
DEFAULTS = {name: values[0] for name, values in CORNERS.items()}


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.fixed_dictionaries({name: st.sampled_from(values) for name, values in CORNERS.items()}))
def test_any_corner_trains_or_is_refused_with_a_reason_that_helps(reference, sft, corner):
    def trained(**changes) -> str:
        """What was wrong, or "" if all was finite."""
        config = reference.GRPOConfig(**(corner | changes | {"iters": 2, "P": 8}))
        try:
            history = reference.train_grpo(copy.deepcopy(sft).requires_grad_(), config)
        except FloatingPointError as error:
            return str(error)
        assert all(math.isfinite(value) for row in history for value in row.values())
        return ""

    problem = trained()
    if problem:
        assert len(problem.splitlines()) == 1
        named = re.findall(r"--([a-z-]+)", problem)
        assert "lr" in named and ("temperature" in named) == (corner["temperature"] < 1)
        assert not trained(**{name: DEFAULTS[name] for name in (flag.replace("-", "_") for flag in named)}), problem


def test_a_temperature_that_is_too_low_for_the_rate_is_named(call):
    assert_one_line(
        call("--temperature", "0.01", "--beta", "0", "--iters", "3"), "the kl is inf", "raise --temperature"
    )


# Nothing is left behind, and what else was tried and held -----------------------------------------------------------


def test_a_lock_leaves_no_file(call, tmp_path, monkeypatch):
    locks = tmp_path / "locks"
    locks.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(locks))
    assert call(*TINY).returncode == 0
    assert names(locks) == set()
    with lock_on(Path("a.png")), pytest.raises(TimeoutError), lock_on(Path("a.svg")):
        pass
    assert names(locks) == set()


def test_a_lock_whose_file_was_deleted_and_made_anew_is_not_held(tmp_path, monkeypatch):
    """The run before may delete the file between our opening it and our locking it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    opened, open_file = itertools.count(), os.open

    def slow_open(path, *rest):
        descriptor = open_file(path, *rest)
        if str(path).endswith(".lock") and next(opened) == 0:
            Path(path).unlink()
        return descriptor

    monkeypatch.setattr(os, "open", slow_open)
    with lock_on(Path("a.png")):
        assert next(opened) > 2, "it looked only once"
        with pytest.raises(TimeoutError), lock_on(Path("a.png")):
            pass


def test_a_submission_may_change_torchs_default_type(tmp_path):
    lab = copy_lab([*STUDENT, tinylm.SFT_PATH.name], tmp_path / "lab")
    right = (LAB / "solutions" / "grpo.py").read_text(encoding="utf-8")
    changed = right.replace("import tinylm\n", "import tinylm\n\ntorch.set_default_dtype(torch.float64)\n", 1)
    (lab / "grpo.py").write_text(changed, encoding="utf-8")
    done = finish(start(tmp_path, lab / "run.py", *TINY))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can become somebody else")
def test_another_user_without_a_home(tmp_path):
    if shutil.which("setpriv") is None:
        pytest.skip("needs setpriv")
    nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    if subprocess.run([*nobody, sys.executable, "-c", "import torch"], capture_output=True, check=False).returncode:
        pytest.skip("no other user can read this Python")
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    environment = {"PATH": os.environ["PATH"]}
    command = [*nobody, sys.executable, LAB / "run.py", *TINY, "--solutions"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and names(folder) == FILES, done
    shutil.rmtree(folder)
