"""Run the guide, `colab_grpo_trl.md`: every Python block of it, as a notebook; then what is said there of TRL.

    python solutions/guide.py --requirements       print what the guide's own install line names, one package a line
    python solutions/guide.py --install --run      install that into this environment, then run every block
    LAB_STEPS=200 python solutions/guide.py --run --out pictures     at full length, and keep what it drew

`--run` reads the guide with jupytext and executes it with nbclient, in a folder of its own, with the reference
solution. Nothing is downloaded: the 0.5B model's name is replaced by a tiny model of the same architecture, made on
the spot, with a reward that it can earn. It fails when a block raises, was not run, or is in the file but not in the
notebook; when that reward does not rise; and when a test of `CHECKS` fails, which need this environment.

For other code that needs a piece of the guide: `block("convert")["to_gpt2"]`, `written()["train_qwen.py"]`.
"""
# ruff: noqa: PLC0415  what `--install` installs can only be imported afterwards

import argparse
import contextlib
import importlib.metadata
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]
from lab.flags import Parser, number

ROOT = Path(__file__).resolve().parent.parent
GUIDE = ROOT / "colab_grpo_trl.md"
GPU_MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
SHORT = "4"  # LAB_STEPS unless it is set: long enough for every branch, short enough for CI
CHECKS = ("test_trl.py", "test_train_qwen.py")  # in tests/; elsewhere, where there is no TRL, they are skipped


def requirements() -> list[str]:
    """What the guide's one install line names: ["torch==2.13.0", ...]. Raises ValueError unless there is one line."""
    lines = re.findall(r"^%pip install -q (.+)$", GUIDE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    if len(lines) != 1:
        raise ValueError(f"{GUIDE.name} has {len(lines)} install lines, it must have one")
    return lines[0].split()


def needed() -> list[str]:
    """What `--install` installs: that, and what runs `CHECKS`."""
    return [*requirements(), "pytest"]


def unmet() -> list[str]:
    """Of what is needed, what this environment does not have, each with what is there instead."""
    problems = []
    for requirement in needed():
        name, _, pinned = requirement.partition("==")
        try:
            here = importlib.metadata.version(name).split("+")[0]  # 2.13.0+cpu is torch 2.13.0
        except importlib.metadata.PackageNotFoundError:
            here = "missing"
        if here == "missing" or (pinned and here != pinned):
            problems.append(f"{requirement} (here: {here})")
    return problems


def notebook():
    """The guide as a notebook. Raises ValueError if a Python block of the file did not become a code cell."""
    import jupytext

    cells = jupytext.read(GUIDE)
    found = sum(cell.cell_type == "code" for cell in cells.cells)
    written = sum(line.startswith("```python") for line in GUIDE.read_text(encoding="utf-8").splitlines())
    if found != written:
        raise ValueError(f"{GUIDE.name} has {written} Python blocks, jupytext made {found} code cells of them")
    return cells


def block(tag: str) -> dict:
    """Execute the guide's block that carries `tag`, and return its names. Raises ValueError if there is no such block.

    `block("convert")` has to_gpt2, to_tinylm and character_tokenizer.
    """
    for cell in notebook().cells:
        if tag in cell.metadata.get("tags", []):
            namespace = {}
            exec(compile(cell.source, f"{GUIDE.name}:{tag}", "exec"), namespace)
            return namespace
    raise ValueError(f"{GUIDE.name} has no block tagged {tag!r}")


CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_qwen(folder: Path) -> None:
    """Save a Qwen2 of two layers with random weights, its tokenizer and its chat template to `folder`."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    pad, start, end = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        ["What is 17 * 24?", "Work out the product step by step."],
        trainers.BpeTrainer(vocab_size=300, special_tokens=[pad, start, end], initial_alphabet=alphabet),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=pad, eos_token=end, chat_template=CHAT_TEMPLATE, padding_side="left"
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
        )
    )
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


# How part 7 is changed for the tiny model: {what stands in the guide, once: what is run}. Random weights never multiply
# right, so a second reward can be earned, by digits; at a rate at which six steps show it, and more would show no more.
EARNABLE = """\
def digit_share(completions, **kwargs):
    texts = [completion[0]["content"] for completion in completions]
    return [sum(char.isdigit() for char in text) / max(1, len(text)) for text in texts]


untrained = {name: weight.clone() for name, weight in qwen.state_dict().items()}
"""
EARNED = """
earned = [row["rewards/digit_share/mean"] for row in trainer.state.log_history if "reward" in row]
assert len(earned) == QWEN_STEPS and earned[-1] > 4 * earned[0], f"the reward does not rise: {earned}"
moved = [name for name, weight in qwen.state_dict().items() if not torch.equal(weight, untrained[name])]
assert len(moved) == len(untrained), f"weights that stayed as they were: {set(untrained) - set(moved)}"
print("a reward that the tiny model can earn:", *(f"{share:.2f}" for share in earned))
"""
SUBSTITUTIONS = {
    f'MODEL = "{GPU_MODEL}"': "MODEL = {folder!r}",
    'QWEN_STEPS = int(os.environ.get("LAB_STEPS", "200"))': "QWEN_STEPS = 6",
    "    learning_rate=1e-6,": "    learning_rate=0.1,",
    "    reward_funcs=[correct],": "    reward_funcs=[correct, digit_share],",
    "trainer.train()\ntrainer.save_model": f"trainer.train(){EARNED}trainer.save_model",
    "args = GRPOConfig(\n    **qwen_task": f"{EARNABLE}args = GRPOConfig(\n    **qwen_task",
}


def put_tiny_model(cells, folder: Path) -> None:
    """Make a tiny model in `folder`, and change part 7 so that it is trained. Raises ValueError where that fails."""
    with contextlib.redirect_stderr(io.StringIO()):  # progress bars
        tiny_qwen(folder)
    for old, new in SUBSTITUTIONS.items():
        places = [cell for cell in cells.cells if cell.cell_type == "code" and old in cell.source]
        if len(places) != 1 or places[0].source.count(old) != 1:
            raise ValueError(f"{GUIDE.name} must have {old!r} once, in a block")
        places[0].source = places[0].source.replace(old, new.replace("{folder!r}", repr(str(folder))))


def written() -> dict[str, str]:
    """The files that the guide's blocks write, {name: content}: "train_qwen.py" and others."""
    text = GUIDE.read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n%%writefile (\S+)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    return dict(blocks)


def parts(cells) -> list[str]:
    """The numbered heading under which each cell stands."""
    titles = ["Set-up"]
    for cell in cells.cells:
        found = re.findall(r"^# (\d\. .+)$", cell.source, re.MULTILINE) if cell.cell_type == "markdown" else []
        titles.append(found[-1] if found else titles[-1])
    return titles[1:]


def run(out: Path | None) -> int:
    """Execute every block. Returns 0, or 1 if one raised or was not run. Keeps notebook and pictures in `out`."""
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    cells = notebook()
    environment = {"RL_SOLUTIONS": "1", "HF_HUB_OFFLINE": "1", "LAB_STEPS": SHORT, "MPLBACKEND": "agg"} | os.environ
    environment["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"  # a debugger's warning about frozen modules
    titles = parts(cells)
    seconds = dict.fromkeys(titles, 0.0)
    started, reached = {}, []

    def start(cell, cell_index):
        reached.append(cell_index)
        started[cell_index] = time.perf_counter()

    def end(cell, cell_index, execute_reply=None):
        seconds[titles[cell_index]] += time.perf_counter() - started.pop(cell_index)

    with tempfile.TemporaryDirectory(prefix="guide-") as name:
        work = Path(name)
        (work / "solutions").mkdir()
        for file in ("tinylm.py", "grpo.py", "solutions/grpo.py", "tinylm_sft.pt"):
            if (ROOT / file).exists():
                shutil.copy(ROOT / file, work / file)
        put_tiny_model(cells, work / "tiny_qwen")
        client = NotebookClient(
            cells,
            timeout=3600,  # of a block; at LAB_STEPS=200 the slowest takes a few minutes
            kernel_name="python3",
            extra_arguments=["--log-level=ERROR"],
            resources={"metadata": {"path": str(work)}},
            on_cell_start=start,
            on_cell_executed=end,
        )
        status, stopped_at = 0, len(cells.cells)
        try:
            client.execute(env=environment)
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            status, stopped_at = 1, reached[-1] if reached else 0
            if stopped_at in started:  # a time-out: it never ended
                end(None, stopped_at)
            print(f"{GUIDE.name}, part {titles[stopped_at]!r}: {error}", file=sys.stderr)
        if out:
            out.mkdir(parents=True, exist_ok=True)
            nbformat.write(cells, out / f"{GUIDE.stem}.ipynb")
            for picture in work.glob("*.png"):
                shutil.copy(picture, out / picture.name)
    code = [i for i, cell in enumerate(cells.cells) if cell.cell_type == "code"]
    ran = sum(i < stopped_at and cells.cells[i].execution_count is not None for i in code)
    for title, spent in seconds.items():
        failed = "  FAILED" if status and title == titles[stopped_at] else ""
        print(f"{spent:7.1f} s  {title}{failed}")
    print(f"{ran} of {len(code)} blocks of {GUIDE.name} ran, LAB_STEPS={environment['LAB_STEPS']}")
    return status or int(ran != len(code))


def check() -> int:
    """Run the tests that need this environment. Returns pytest's exit status."""
    tests = [str(ROOT / "solutions" / "tests" / name) for name in CHECKS]
    # Without the two conftest.py, which need what only the lab's own tests need.
    pytest = [sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", "--durations=3"]
    return subprocess.run([*pytest, *tests], check=False, cwd=ROOT).returncode


def main() -> int:
    """Parse the flags; returns the exit status."""
    parser = Parser(description="Run every Python block of colab_grpo_trl.md.", allow_abbrev=False)
    parser.add_argument("--requirements", action="store_true", help="print what the guide's install line names")
    parser.add_argument("--install", action="store_true", help="install that into this environment first")
    parser.add_argument("--run", action="store_true", help=f"run every block; LAB_STEPS in the environment, or {SHORT}")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="keep the executed notebook and the pictures there")
    args = parser.parse_args()
    if not (args.requirements or args.install or args.run):
        parser.error("nothing to do: --requirements, --install or --run")
    steps = os.environ.get("LAB_STEPS", SHORT)
    try:
        number(int, 1, 1_000_000)(steps)
    except argparse.ArgumentTypeError as error:
        parser.error(f"LAB_STEPS: {error}")
    if args.requirements:
        print(*requirements(), sep="\n")
    if args.install:
        done = subprocess.run([sys.executable, "-m", "pip", "install", "-q", *needed()], check=False)
        if done.returncode:
            return done.returncode
    if args.run:
        if problems := unmet():
            parser.error(f"this environment is not the guide's, --install makes it so: {', '.join(problems)}")
        started = time.perf_counter()
        checked = check()
        print(f"{time.perf_counter() - started:7.1f} s  {', '.join(CHECKS)}")
        return run(args.out) or checked
    return 0


if __name__ == "__main__":
    sys.exit(main())
