"""The files that the guide's blocks write, `qwen_task.py` and `train_qwen.py`.

What trains needs the guide's environment: `solutions/guide.py --run` starts this file there; elsewhere it is skipped.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "solutions"), str(ROOT)]

from guiding.document import GUIDE, written
from guiding.tiny_model import tiny_qwen

TRAINS = pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="no TRL here: solutions/guide.py --run")
QUICK = ["--model", "tiny", "--task", "digits_task", "--batch", "16", "--accumulate", "1", "--max-tokens", "24"]

# The task of the guide, but with a reward that random weights can earn; and, once, a crash in the third step.
DIGITS_TASK = """
import os, signal
from pathlib import Path
from qwen_task import LEVELS, SETTINGS, questions

def verifier(ends):
    def digit_share(completions, trainer_state, **kwargs):
        assert len(ends) == 2, "the tiny Qwen has two tokens that end an answer, as the real one"
        if trainer_state.global_step == 3 and Path("crash").exists():
            Path("crash").unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        texts = [completion[0]["content"] for completion in completions]
        return [sum(char.isdigit() for char in text) / max(1, len(text)) for text in texts]
    return digit_share
"""


@pytest.fixture
def folder(tmp_path) -> Path:
    for name, content in written().items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    (tmp_path / "digits_task.py").write_text(DIGITS_TASK, encoding="utf-8")
    return tmp_path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "tiny"
    tiny_qwen(path)
    return path


def start(folder: Path, *flags: str, launcher: tuple[str, ...] = (), **environment) -> subprocess.CompletedProcess:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"} | environment
    command = [sys.executable, *launcher, "train_qwen.py", *flags]
    pipes = {"capture_output": True, "encoding": "utf-8", "errors": "replace"}
    return subprocess.run(command, cwd=folder, env=environment, check=False, timeout=300, **pipes)


def rewards(out: Path, step: int) -> dict[int, float]:
    """{step: mean reward} of all that the checkpoint remembers."""
    state = json.loads((out / f"checkpoint-{step}" / "trainer_state.json").read_text(encoding="utf-8"))
    assert state["global_step"] == step
    rows = [row for row in state["log_history"] if "reward" in row]
    assert [row["step"] for row in rows] == list(range(1, step + 1)), "a step is missing, or was done twice"
    return {row["step"]: row["reward"] for row in rows}


# The task ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def task(folder):
    spec = importlib.util.spec_from_file_location("qwen_task_of_the_test", folder / "qwen_task.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_questions_are_different_and_have_their_answers(task):
    for level in task.LEVELS:
        rows = task.questions(level, 1200)
        asked = [row["prompt"][1]["content"] for row in rows]
        assert len(set(asked)) == len(rows) >= 128 + 64 + 8
        assert [row["prompt"][0]["role"] for row in rows] == ["system"] * len(rows)
        numbers = [re.fullmatch(r"What is (\d+) \* (\d+)\?", text).groups() for text in asked]
        assert all(int(a) * int(b) == int(row["answer"]) for (a, b), row in zip(numbers, rows, strict=True))
        assert rows[:100] == task.questions(level, 100), "fewer questions must be the first ones: the test stays apart"


def test_the_verifier_wants_the_right_number_and_an_end(task):
    correct = task.verifier({7, 9})
    cases = [("So 17 * 24 = 408", 7, 1.0), ("408", 9, 1.0), ("408", 3, 0.0), ("407", 7, 0.0), ("", 7, 0.0)]
    cases += [("<think> 408", 7, 0.0), ("<think> 400 </think> 408", 7, 1.0)]
    texts = [[{"role": "assistant", "content": text}] for text, _, _ in cases]
    ids = [[1, last] for _, last, _ in cases]
    expected = [reward for _, _, reward in cases]
    assert correct(completions=texts, completion_ids=ids, answer=["408"] * len(cases), prompts=None) == expected


# The command ---------------------------------------------------------------------------------------------------------


def test_help_is_quick_and_names_every_flag(folder):
    (folder / "torch.py").write_text("raise SystemExit('torch was imported')", encoding="utf-8")
    started = time.perf_counter()
    done = start(folder, "--help")
    assert done.returncode == 0 and not done.stderr and time.perf_counter() - started < 5
    text = GUIDE.read_text(encoding="utf-8").partition("# 8. Leaving the notebook")[2]
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    flags = set(re.findall(r"--[a-z][a-z-]+", " ".join(re.findall(r"`([^`]+)`", prose))))
    launchers = {"--nproc_per_node", "--config_file", "--num_processes", "--run"}
    assert {"--lora", "--resume", "--vllm"} <= {flag for flag in flags if flag in done.stdout}
    assert all(flag in done.stdout or any(name.startswith(flag) for name in launchers) for flag in flags)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--stpes", "3"], "--stpes"),
        (["--steps", "0"], "0 is not a number from 1 on"),
        (["--lr", "nan"], "nan is not a number"),
        (["--batch", "many"], "invalid int value"),
        (["--task", "no_task"], "No module named 'no_task'"),
        (["--task", "json"], "it has no LEVELS"),
        (["--task", ""], "--task"),
        (["--level", "9 x 9 digits"], "is none of '2 x 1 digits'"),
        (["--resume"], "there is no checkpoint"),
        (["--out", "full"], "is not empty"),
        (["--out", "qwen_task.py"], "is a file"),
        (["--vllm", "colocate"], "vllm is not installed"),
        (["--log", "trackio"], "trackio is not installed"),
    ],
)
def test_bad_input_is_one_line_and_status_2(folder, flags, told):
    (folder / "full").mkdir()
    (folder / "full" / "thesis.txt").write_text("years of work", encoding="utf-8")
    (folder / "torch.py").write_text("raise SystemExit('torch was imported')", encoding="utf-8")
    done = start(folder, *flags)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and told in done.stderr, done.stderr
    assert [path.name for path in (folder / "full").iterdir()] == ["thesis.txt"]
    second = start(folder, *flags, RANK="1")
    assert second.returncode == 2 and not second.stderr, "one line, not one for each process"


@TRAINS
@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--batch", "3", "--accumulate", "1"], "must be divisible by num_generations"),
        (["--model", "no such folder"], "no such folder"),
        (["--questions", "1", "--batch", "16"], "too few"),
    ],
)
def test_what_only_trl_can_refuse_is_one_line_too(folder, tiny, flags, told):
    (folder / "tiny").symlink_to(tiny)
    done = start(folder, "--model", "tiny", *flags, PYTHONWARNINGS="ignore")
    assert done.returncode == 2 and told in done.stderr.splitlines()[-1], done.stderr
    assert not (folder / "qwen_grpo").exists()


@TRAINS
def test_one_process_learns_is_killed_and_goes_on(folder, tiny):
    (folder / "tiny").symlink_to(tiny)
    (folder / "crash").touch()
    flags = [*QUICK, "--steps", "8", "--lr", "0.1", "--save-every", "2"]
    killed = start(folder, *flags)
    assert killed.returncode == -9 and not (folder / "crash").exists()
    out = folder / "qwen_grpo"
    before = rewards(out, 2)
    again = start(folder, *flags)
    assert again.returncode == 2 and "--resume goes on with it" in again.stderr

    done = start(folder, *flags, "--resume")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "qwen_grpo: 8 steps, 16 answers at once, 1 process(es)" in done.stdout
    after = rewards(out, 8)
    assert {step: after[step] for step in before} == before
    assert after[8] > 2 * before[1], "a reward that can be earned must rise"
    assert (out / "model.safetensors").exists() and len(list(out.glob("checkpoint-*"))) == 2


@TRAINS
def test_two_processes_with_lora_a_reference_and_a_test(folder, tiny):
    from safetensors.torch import load_file  # noqa: PLC0415  with TRL

    (folder / "tiny").symlink_to(tiny)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc_per_node", "2")
    flags = [*QUICK, "--steps", "3", "--lr", "0.1", "--lora", "4", "--beta", "0.04", "--eval-every", "3"]
    done = start(folder, *flags, launcher=launcher)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "qwen_grpo: 3 steps, 32 answers at once, 2 process(es)" in done.stdout
    assert done.stdout.count("'eval_reward'") == 2  # at the start, and at the end
    rewards(folder / "qwen_grpo", 3)
    adapter = load_file(folder / "qwen_grpo" / "adapter_model.safetensors")
    assert {name.rsplit(".", 2)[-2] for name in adapter} == {"lora_A", "lora_B"}
    assert all(weight.abs().sum() > 0 for weight in adapter.values()), "lora_B starts at 0: nothing was trained"
    layers = {name.split(".")[-3] for name in adapter}
    assert layers == {f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")}
