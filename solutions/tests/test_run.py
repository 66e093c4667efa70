"""run.py as a user meets it: its exit status, its output and its files, with the reference solution.

Where imports, signals or the environment matter it is a program of its own; elsewhere `run.main` runs in here, which
saves the seconds of importing torch.
"""

import csv
import io
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from matplotlib import rc_context
from matplotlib.image import imread

import run
import tinylm

LAB = Path(run.__file__).resolve().parent
TINY = ["--iters", "3", "--prompts", "2", "--G", "2", "--eval-every", "1"]
pytestmark = pytest.mark.usefixtures("sft")  # so that no run below has to say that it trains the policy
DEFAULT_FILES = {"grpo_tinylm.png", "grpo_tinylm.csv", "tinylm_grpo.pt"}


def start(folder: Path, *arguments: str | Path, **extra: str) -> subprocess.Popen:
    """Python with `arguments`, in `folder`; `extra` goes into its environment."""
    environment = {name: value for name, value in os.environ.items() if name != "RL_SOLUTIONS"} | extra
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "encoding": "utf-8"}
    return subprocess.Popen([sys.executable, *map(str, arguments)], cwd=folder, env=environment, **pipes)


def finish(process: subprocess.Popen) -> subprocess.CompletedProcess:
    stdout, stderr = process.communicate(timeout=600)
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def read_csv(path: Path) -> tuple[str, list[dict[str, str]]]:
    """(the settings line, the rows)."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return lines[0], list(csv.DictReader(line for line in lines if not line.startswith("#")))


def differ(a: Path, b: Path) -> bool:
    """Whether two checkpoints differ in any bit of any weight."""
    pairs = zip(tinylm.load_checkpoint(a).parameters(), tinylm.load_checkpoint(b).parameters(), strict=True)
    return not all(torch.equal(left, right) for left, right in pairs)


def assert_one_line(result: subprocess.CompletedProcess, *words: str) -> None:
    """Exit status 2 and a single line on stderr that holds the words."""
    assert result.returncode == 2, result
    assert result.stderr.count("\n") == 1 and result.stderr.endswith("\n"), result.stderr
    for word in words:
        assert word in result.stderr


@pytest.fixture(scope="module")
def no_torch(tmp_path_factory) -> str:
    """A folder for PYTHONPATH in which importing torch ends the program: nothing before that may take seconds."""
    folder = tmp_path_factory.mktemp("no_torch")
    (folder / "torch.py").write_text("raise SystemExit('torch was imported')\n", encoding="utf-8")
    return str(folder)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two programs side by side, {name: (folder, what came out)}: "again" repeats "first" under other file names."""
    started = {}
    for name, flags, extra in (
        ("first", [*TINY, "--solutions"], {}),
        ("again", [*TINY, "--out", "plot.svg"], {"RL_SOLUTIONS": "1"}),
    ):
        folder = tmp_path_factory.mktemp(name)
        started[name] = folder, start(folder, LAB / "run.py", *flags, **extra)
    return {name: (folder, finish(process)) for name, (folder, process) in started.items()}


@pytest.fixture
def call(reference, tmp_path, monkeypatch, capsys):
    """run.main in this process, in the empty folder `tmp_path`, on the reference, which a test may spoil.

    It draws no picture, which would take longer than all the rest.
    """
    monkeypatch.setattr(run, "plot", lambda runs, path, mark="": path.write_bytes(b"picture"))
    monkeypatch.setitem(sys.modules, "grpo", reference)
    monkeypatch.delenv("RL_SOLUTIONS", raising=False)
    monkeypatch.chdir(tmp_path)

    def main(*flags: str) -> subprocess.CompletedProcess:
        monkeypatch.setattr(sys, "argv", ["run.py", *flags])
        try:
            status = run.main()
        except SystemExit as stop:
            status = stop.code
        return subprocess.CompletedProcess(flags, status, *capsys.readouterr())

    return main


@pytest.fixture
def own_lab(tmp_path) -> Path:
    """A copy of the lab as it is handed out, without solutions: a test may write into its grpo.py."""
    lab = tmp_path / "lab"
    lab.mkdir()
    for path in (LAB / "run.py", LAB / "tinylm.py", LAB / "grpo.py"):
        shutil.copy(path, lab)
    if tinylm.SFT_PATH.exists():
        shutil.copy(tinylm.SFT_PATH, lab)
    return lab


# Flags ----------------------------------------------------------------------------------------------------------


def test_flags_are_the_fields_of_the_config(reference):
    flags = vars(run.build_parser().parse_args([]))
    config = {field.name: field.default for field in fields(reference.GRPOConfig)}
    others = ("device", "out", "solutions", "show", "versus", "redraw")
    assert {name: flags[name] for name in flags if name not in others} == config
    given = "--iters 1 --prompts 2 --G 3 --inner-steps 4 --lr 5 --clip 1000 --beta 7 --no-std --temperature 8 --seed 9"
    changed = vars(run.build_parser().parse_args([*given.split(), "--eval-every", "11"]))
    assert all(changed[name] != default for name, default in config.items()), "a flag does not reach its field"


def test_help_gives_every_default_and_imports_no_torch(tmp_path, no_torch, reference):
    result = finish(start(tmp_path, LAB / "run.py", "--help", PYTHONPATH=no_torch))
    assert (result.returncode, result.stderr) == (0, "")
    text = " ".join(result.stdout.partition("--help ")[2].split())
    for field in fields(reference.GRPOConfig):
        name = "--no-std" if field.name == "std" else f"--{field.name.replace('_', '-')} N"
        default = "divide" if field.name == "std" else field.default
        assert f"(default: {default})" in text.partition(f" {name} ")[2].partition(" --")[0], name
    assert "RL_SOLUTIONS=1" in text and "current folder" in text


# A run and its files --------------------------------------------------------------------------------------------


def test_run_writes_picture_csv_and_checkpoint(runs):
    folder, result = runs["first"]
    assert (result.returncode, result.stderr) == (0, "")
    assert names(folder) == DEFAULT_FILES, "beside the three files nothing may be left"

    settings, rows = read_csv(folder / "grpo_tinylm.csv")
    assert settings == (
        "# run.py --iters 3 --prompts 2 --G 2 --inner-steps 2 --lr 0.0003 --clip 0.2 --beta 0.04 "
        "--temperature 1.0 --seed 0 --eval-every 1 --device cpu"
    )
    assert list(rows[0]) == [
        *("iteration", "reward", "all_right", "all_wrong", "clip_fraction", "kl", "ratio", "loss"),
        *("sampled_accuracy", "greedy_accuracy", "entropy", "expected_zero_signal"),
    ]
    assert [row["iteration"] for row in rows] == ["0", "1", "2", "3"]
    assert all(rows[0][name] == "" for name in run.METRICS)
    values = [float(value) for row in rows for value in row.values() if value]
    assert len(values) == 4 + 3 * 7 + 4 * 4  # iterations; seven metrics of three steps; four of four evaluations

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
    lines = result.stdout.splitlines()
    assert [line.split(":")[0] for line in lines[:3]] == [f"iteration {i} of 3" for i in (1, 2, 3)]
    assert all("reward" in line and "KL" in line for line in lines[:3])
    _, rows = read_csv(folder / "grpo_tinylm.csv")
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
    run.print_table(history)
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
    _, rows = read_csv(tmp_path / "grpo_tinylm.csv")
    assert [row["entropy"] != "" for row in rows] == [True, False, False, True]


def test_settings_reach_the_training(runs, call, tmp_path):
    first, _ = runs["first"]
    assert call(*TINY, "--no-std", "--clip", "1000", "--beta", "0").returncode == 0
    settings, rows = read_csv(tmp_path / "grpo_tinylm.csv")
    assert " --clip 1000.0 --beta 0.0 " in settings and settings.endswith(" --no-std")
    assert all(float(row["clip_fraction"]) == 0 for row in rows[1:])
    assert differ(first / "tinylm_grpo.pt", tmp_path / "tinylm_grpo.pt")
    assert call(*TINY, "--seed", "1", "--out", "seed.png").returncode == 0
    assert differ(first / "tinylm_grpo.pt", tmp_path / "seed.pt")


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
    code = "import signal, run, sys; signal.signal(signal.SIGINT, signal.default_int_handler); sys.exit(run.main())"
    flags = [*TINY, "--solutions", "--iters", "1000000", "--out", "long.png"]
    process = start(tmp_path, "-c", code, *flags, PYTHONPATH=str(LAB))
    assert "iteration 2 of 1000000" in process.stdout.readline() + process.stdout.readline()
    process.send_signal(signal.SIGINT)
    result = finish(process)
    assert result.returncode == 130, result
    assert "saved long.png, long.csv, long.pt" in result.stdout
    assert names(tmp_path) == {"long.png", "long.csv", "long.pt"}
    _, rows = read_csv(tmp_path / "long.csv")
    assert len(rows) >= 3
    assert result.stderr.endswith(f": stopped by Ctrl-C after iteration {len(rows) - 1} of 1000000\n")
    assert result.stderr.count("\n") == 1
    assert differ(tmp_path / "long.pt", tinylm.SFT_PATH)
    assert (tmp_path / "long.csv").read_text(encoding="utf-8").splitlines()[1].startswith("# stopped after iteration ")
    assert len(run.read_csv(tmp_path / "long.csv").history) == len(rows)


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
    assert [row["iteration"] for row in read_csv(tmp_path / "grpo_tinylm.csv")[1]] == ["0", "1", "2"]


def test_full_disk_is_one_line(call, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tinylm, "save_checkpoint", full)
    assert_one_line(call(*TINY), "could not save", "No space left")


def test_lab_as_handed_out_says_where_to_begin(tmp_path, own_lab):
    folder = tmp_path / "here"
    folder.mkdir()
    result = finish(start(folder, own_lab / "run.py"))
    assert (result.returncode, result.stdout, names(folder)) == (2, "", set())
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


# Bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags",
    [
        *("--iters 0", "--iters 1.5", "--iters many", "--prompts 0", "--inner-steps 0", "--eval-every 0"),
        *("--G 0", "--no-std --G 1", "--lr 0", "--lr -0.1", "--lr nan", "--lr inf", "--beta -0.04", "--beta inf"),
        *("--clip 0", "--clip -1", "--clip nan", "--temperature 0", "--temperature -1", "--temperature nan"),
        *("--seed -1", "--seed 9223372036854775808", "--unknown 1", "--iter 3", "stray"),
        *("--out clip", "--out clip.txt", "--out clip.csv", "--out run.py", "--out .png"),
        *("--out missing/clip.png", "--out file/clip.png", f"--out {'x' * 300}.png"),
        *("--out tinylm_sft.png", "--out TinyLM_SFT.svg", "--out passk.png"),
    ],
)
def test_bad_flag_is_one_line_before_torch_is_imported(tmp_path, no_torch, flags):
    (tmp_path / "file").touch()
    result = finish(start(tmp_path, LAB / "run.py", "--solutions", *flags.split(), PYTHONPATH=no_torch))
    assert_one_line(result, "run.py: ", " ".join(flags.split()[-2:-1]))
    assert (names(tmp_path), result.stdout) == ({"file"}, "")


@pytest.mark.parametrize("flags", ["--clip 1000", "--beta 0", "--G 2", "--temperature 0.5", "--lr 1e-9"])
def test_unusual_flag_is_accepted(flags):
    name, value = flags.split()
    assert vars(run.build_parser().parse_args([name, value]))[name[2:]] == float(value)


@pytest.mark.parametrize("device", ["nowhere", "cuda:99", "meta", ""])
def test_device_that_is_not_there_is_one_line(call, tmp_path, device):
    assert_one_line(call(*TINY, "--device", device), f"--device {device}")
    assert names(tmp_path) == set()


def test_solutions_that_are_not_there_are_one_line(tmp_path, own_lab, no_torch):
    for flags, extra in ((["--solutions"], {}), ([], {"RL_SOLUTIONS": "1"})):
        result = finish(start(tmp_path, own_lab / "run.py", *flags, PYTHONPATH=no_torch, **extra))
        assert_one_line(result, "solutions/grpo.py")


def test_folder_without_write_permission(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "touch", refuse)
    with pytest.raises(ValueError, match=r"cannot write to the folder .*Permission denied"):
        run.check_files(tmp_path / "clip.png", [])


# What may be replaced -------------------------------------------------------------------------------------------


def test_run_replaces_its_own_files_and_no_others(runs, tmp_path, no_torch):
    """Whether a run gets past the check is seen without training: it then imports torch, which ends it here."""
    source, _ = runs["first"]
    shutil.copytree(source, tmp_path, dirs_exist_ok=True)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}

    def attempt(*flags: str) -> subprocess.CompletedProcess:
        return finish(start(tmp_path, LAB / "run.py", *flags, PYTHONPATH=no_torch))

    for same in (TINY, [*TINY, "--solutions"], [*TINY, "--lr", "3e-4"], [*TINY, "--out", "grpo_tinylm.png"]):
        assert attempt(*same).stderr == "torch was imported\n"
    for other in ([*TINY, "--seed", "1"], [*TINY, "--no-std"], [], [*TINY, "--out", "tinylm_grpo.png"]):
        assert_one_line(attempt(*other), "is there already", "--out")
    assert attempt(*TINY, "--seed", "1", "--out", "seed1.png").stderr == "torch was imported\n"
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("name", ["clip.png", "clip.csv", "clip.pt"])
@pytest.mark.parametrize("content", [b"", b"# run.py\n", b"\xff\xfe\x00 not text", b"a,b\n1,2\n"])
def test_foreign_file_is_never_replaced(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=name):
        run.check_files(tmp_path / "clip.png", run.settings_of(run.build_parser().parse_args([])))
    assert (tmp_path / name).read_bytes() == content and names(tmp_path) == {name}


def test_folder_of_a_files_name_is_never_replaced(tmp_path):
    (tmp_path / "clip.csv").write_text("# run.py --G 4\n", encoding="utf-8")
    run.check_files(tmp_path / "clip.png", ["--G 4"])
    (tmp_path / "clip.pt").mkdir()
    with pytest.raises(ValueError, match=r"clip\.pt"):
        run.check_files(tmp_path / "clip.png", ["--G 4"])


# Earlier runs beside this one -----------------------------------------------------------------------------------


def test_a_csv_is_read_as_it_was_written(runs):
    folder, _ = runs["first"]
    read = run.read_csv(folder / "grpo_tinylm.csv")
    assert read.name == "grpo_tinylm"
    assert read.settings == run.settings_of(run.build_parser().parse_args(TINY))
    _, rows = read_csv(folder / "grpo_tinylm.csv")
    assert read.history == [{name: float(value) for name, value in row.items() if value} for row in rows]


@pytest.fixture
def two_csvs(runs, tmp_path) -> tuple[Path, Path]:
    """Two CSVs of runs that differ in two settings, in the folder that `call` runs in."""
    folder, _ = runs["first"]
    text = (folder / "grpo_tinylm.csv").read_text(encoding="utf-8")
    (tmp_path / "a.csv").write_text(text, encoding="utf-8")
    changed = text.replace("--inner-steps 2 ", "--inner-steps 8 ").replace("--clip 0.2 ", "--clip 1000.0 ")
    (tmp_path / "b.csv").write_text(changed, encoding="utf-8")
    return tmp_path / "a.csv", tmp_path / "b.csv"


def test_labels_are_the_settings_that_differ(two_csvs):
    a, b = map(run.read_csv, two_csvs)
    assert run.labels([a, b]) == ["--inner-steps 2 --clip 0.2", "--inner-steps 8 --clip 1000.0"]
    assert run.labels([a, a._replace(name="again")]) == ["a", "again"]
    mean_only = a._replace(settings=[*a.settings, "--no-std"])
    assert run.labels([a, mean_only]) == ["a", "--no-std"]
    twice = run.labels([a, b, b._replace(name="c")])
    assert twice == ["--inner-steps 2 --clip 0.2", *(f"--inner-steps 8 --clip 1000.0 {name}" for name in "bc")]


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


def test_a_picture_of_several_runs_names_them_and_may_be_drawn_again(two_csvs, tmp_path):
    a, b = map(run.read_csv, two_csvs)
    with rc_context({"svg.fonttype": "none"}):  # texts as texts
        run.plot([a, b], tmp_path / "both.svg", run.MARK)
    picture = (tmp_path / "both.svg").read_text(encoding="utf-8")
    for text in ("--inner-steps 8 --clip 1000.0", "--inner-steps 2 --clip 0.2", "greedy", "measured"):
        assert f">{text}</text>" in picture, text
    run.check_marked(tmp_path / "both.svg", run.MARK)
    run.plot([a, b], tmp_path / "both.svg")  # as the picture of a run
    with pytest.raises(ValueError, match="is there already"):
        run.check_marked(tmp_path / "both.svg", run.MARK)


def test_redraw_needs_no_torch_until_it_draws(two_csvs, tmp_path, no_torch):
    for flags in (
        ["--redraw", "missing.csv"],
        ["--redraw", "a.csv", "--G", "4"],
        ["--redraw", "a.csv", "--versus", "b.csv"],
    ):
        result = finish(start(tmp_path, LAB / "run.py", *flags, "--out", "x.png", PYTHONPATH=no_torch))
        assert_one_line(result, "run.py: ", "--redraw" if "--G" in flags or "--versus" in flags else "missing.csv")
    many = finish(start(tmp_path, LAB / "run.py", "--versus", *["a.csv"] * 7, PYTHONPATH=no_torch))
    assert_one_line(many, "7 runs at most")


DAMAGE = {
    "empty": lambda text: "",
    "another program's": lambda text: "a,b\n1,2\n",
    "no settings": lambda text: text.split("\n", 1)[1],
    "other columns": lambda text: text.replace("clip_fraction", "clipped"),
    "a column more": lambda text: text.replace("\n", ",1\n").replace(",1\n", "\n", 1),
    "settings of another version": lambda text: text.replace("--beta 0.04", "--beta 0.04 --new 1"),
    "a setting out of range": lambda text: text.replace("--G 2 ", "--G 0 "),
    "cut within a row": lambda text: text[: len(text) - 30],
    "cut within the last number": lambda text: text[:-4],
    "cut before the last line break": lambda text: text[:-1],
    "cut between two rows": lambda text: text[: text.rindex("\n3,") + 1],
    "header alone": lambda text: text[: text.index("\n0,") + 1],
    "a row missing": lambda text: text.replace("\n2,", "\n3,"),
    "a word for a number": lambda text: text.replace("\n1,", "\n1,much"),
    "a number missing": lambda text: text.replace("\n1,", "\n1,,", 1).replace(",,0", ",", 1),
    "not finite": lambda text: text.replace(text.split("\n")[3].split(",")[1], "inf", 1),
    "stopped elsewhere": lambda text: text.replace("\n", "\n# stopped after iteration 2\n", 1),
    "stopped nowhere": lambda text: text.replace("\n", "\n# stopped\n", 1),
    "a broken quote": lambda text: text.replace("\n1,", '\n1,"', 1),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_csv_that_is_not_a_whole_one_of_ours_is_one_line(two_csvs, call, tmp_path, kind):
    a, _ = two_csvs
    text = a.read_text(encoding="utf-8")
    assert DAMAGE[kind](text) != text
    (tmp_path / "bad.csv").write_text(DAMAGE[kind](text), encoding="utf-8", newline="")
    before = names(tmp_path)
    assert_one_line(call("--redraw", "a.csv", "bad.csv", "--out", "x.png"), "bad.csv: ")
    assert_one_line(call(*TINY, "--versus", "bad.csv"), "bad.csv: ")
    assert names(tmp_path) == before


def test_a_csv_that_is_no_text_or_a_folder_is_one_line(call, tmp_path):
    (tmp_path / "bad.csv").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "folder.csv").mkdir()
    for name in ("bad.csv", "folder.csv", "missing.csv"):
        assert_one_line(call("--redraw", name), f"{name}: ")


def test_two_runs_with_one_out_at_once(call, tmp_path, monkeypatch):
    with run.lock_on(Path("same.png")):
        assert_one_line(call(*TINY, "--out", "same.svg"), "--out same.svg", "another run is writing")
        assert names(tmp_path) == set()
        assert call(*TINY, "--out", "other.png").returncode == 0
    assert call(*TINY, "--out", "same.png").returncode == 0


# Groups to look at ----------------------------------------------------------------------------------------------


def test_show_prints_groups_with_rewards_and_advantages(runs, call, tmp_path):
    first, _ = runs["first"]
    result = call(*TINY, "--show", "3")
    assert result.returncode == 0 and "\033" not in result.stdout
    assert not differ(first / "tinylm_grpo.pt", tmp_path / "tinylm_grpo.pt"), "looking changed the training"
    lines = result.stdout.splitlines()
    groups = [i for i, line in enumerate(lines) if "  right is " in line]
    assert len(groups) == 3 * 4, "three groups at each of four evaluations"
    for i in groups:
        prompt, _, _, right, count, *_ = lines[i].split()
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
    assert run.paint(run.GREEN, "85$") == "85$"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert run.paint("#009E73", "85$") == "\033[38;2;0;158;115m85$\033[0m"
    monkeypatch.setenv("NO_COLOR", "")
    assert run.paint(run.GREEN, "85$") == "85$"


def test_groups_without_signal_are_marked(reference, monkeypatch, sft):
    monkeypatch.setitem(sys.modules, "grpo", reference)
    prompts = tinylm.encode(["37+48=", "10+15="])
    answers = {"37+48=": ["85$"] * 4, "10+15=": ["25$", "24$", "24$", "35$"]}

    def group(model, prompts, G, *_):
        texts = [text for prompt in tinylm.decode(prompts) for text in answers[prompt]]
        rewards = torch.tensor([1.0] * 4 + [1.0, 0.0, 0.0, 0.0])
        return reference.Samples(prompts, None, None, rewards, texts)

    monkeypatch.setattr(reference, "sample_group", group)
    lines = run.show_groups(None, prompts, reference.GRPOConfig(G=4)).splitlines()
    assert lines[0].split() == ["37+48=", "right", "is", "85$", "4", "of", "4", "answers", "are", "right"]
    assert lines[1].split() == ["4", "x", "85$", "reward", "1", "advantage", "+0.00"]
    assert "NO SIGNAL: all answers are right" in lines[2]
    assert [line.split()[0] for line in lines[4:]] == ["1", "2", "1"] and "+1.73" in lines[4] and "-0.58" in lines[5]
    assert len(lines) == 7


# The plot -------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("error")  # such as a layout that does not fit, or an axis without height
@pytest.mark.parametrize(
    ("case", "n", "ending"),
    [("one iteration", 1, ".jpg"), ("spikes", 60, ".svg"), ("all zero", 60, ".pdf"), ("many", 2000, ".png")],
)
def test_plot_draws_extreme_histories(tmp_path, case, n, ending):
    history = [{"iteration": i} | dict.fromkeys(run.METRICS, 0.0) for i in range(n + 1)]
    history[0] = {"iteration": 0}
    if case == "spikes":
        for row in history[1:]:
            row["kl"] = 50.0 if row["iteration"] % 30 == 1 else 0.1
    for i in (0, n):
        history[i] = history[i] | dict.fromkeys(run.EVALUATED, 0.0)
    path = tmp_path / f"plot{ending}"
    run.plot([run.Run("plot", ["--lr 1.2345678901234567e-05"] * 20, history)], path)
    assert path.stat().st_size > 10_000
    if case == "spikes":
        assert "up to 50" in path.read_text(encoding="utf-8"), "the spikes are cut off without a word"


def test_smooth_is_a_centred_mean_of_21():
    assert run.smooth([float(i) for i in range(41)])[20] == 20.0
    assert run.smooth([0.0] * 10 + [21.0] + [0.0] * 10)[10] == 1.0
    assert run.smooth([4.0]) == [4.0]
    assert run.smooth([1.0, 2.0]) == [1.5, 1.5]
