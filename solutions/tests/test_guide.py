"""The guide `colab_grpo_trl.md`, as far as it can be checked without TRL. `solutions/guide.py --run` runs it."""

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from guiding import document, running
from guiding.document import GUIDE, requirements
from guiding.tiny_model import SUBSTITUTIONS

ROOT = Path(__file__).resolve().parents[2]
RUNNER = ROOT / "solutions" / "guide.py"


def load(path: Path, name: str):
    """The module at `path`."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def text() -> str:
    return GUIDE.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def blocks(text) -> list[str]:
    """The source of every Python block; a magic command on a line of its own becomes a comment."""
    sources = re.findall(r"^```python[^\n]*\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    return [re.sub(r"^%.*$", "# magic", source, flags=re.MULTILINE) for source in sources]


def assigned(blocks: list[str], name: str):
    """The literal that a block assigns to `name`, at top level and once in the whole guide."""
    nodes = [node for block in blocks for node in ast.parse(block).body if isinstance(node, ast.Assign)]
    found = [ast.literal_eval(node.value) for node in nodes if ast.unparse(node.targets[0]) == name]
    assert len(found) == 1, f"{name} is assigned {len(found)} times"
    return found[0]


def test_every_fence_is_closed_and_of_a_known_kind(text, blocks):
    fences = re.findall(r"^```(.*)$", text, flags=re.MULTILINE)
    assert len(fences) % 2 == 0 and not any(fences[1::2]), "a fence is not closed"
    kinds = {fence.split(" ")[0] for fence in fences[::2]}
    assert kinds <= {"python", "text"}, f"jupytext would run, or drop, blocks of the kinds {kinds}"
    assert len(blocks) > 20


def test_every_python_block_compiles_and_fits_the_page(blocks):
    for number, block in enumerate(blocks):
        compile(block, f"block {number}", "exec")
        assert max(map(len, block.splitlines())) <= 120, block


def test_every_file_is_opened_with_an_encoding_and_no_shell_is_used(blocks):
    calls = [node for block in blocks for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Call)]
    for call in calls:
        name = ast.unparse(call.func)
        keywords = {keyword.arg for keyword in call.keywords}
        assert "shell" not in keywords
        if name == "open" or name.endswith((".open", "_text", "subprocess.run")):
            assert "encoding" in keywords, ast.unparse(call)


def test_the_install_line_pins_what_the_version_block_compares(blocks):
    pinned = dict(requirement.split("==") for requirement in requirements() if "==" in requirement)
    assert pinned == assigned(blocks, "TESTED")
    assert {"torch", "trl", "transformers"} <= set(pinned)
    unpinned = {requirement for requirement in requirements() if "==" not in requirement}
    assert {"jupytext", "nbclient", "ipykernel"} <= unpinned, "what the runner itself needs"
    assert running.needed() == [*requirements(), "pytest"]


def test_the_pinned_torch_is_within_the_labs_bounds():
    ours = (ROOT / "requirements.txt").read_text(encoding="utf-8")
    low, high = re.search(r"^torch>=([\d.]+),<([\d.]+)$", ours, flags=re.MULTILINE).groups()
    pinned = next(r.partition("==")[2] for r in requirements() if r.startswith("torch=="))

    def key(number: str) -> list[int]:
        return [int(part) for part in number.split(".")]

    assert key(low) <= key(pinned) < key(high)


def table_after(text: str, heading: str) -> list[list[str]]:
    """The cells of the rows of the table whose first header cell is `heading`."""
    table = re.search(rf"^\| {re.escape(heading)} \|.*\n\|[-| ]+\|\n((?:\|.*\n)+)", text, flags=re.MULTILINE)
    assert table, f"no table starts with {heading!r}"
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in table.group(1).splitlines()]


def test_every_lab_name_in_the_table_of_pieces_exists(text):
    sys.path.insert(0, str(ROOT))
    try:
        import tinylm  # noqa: PLC0415

        grpo = load(ROOT / "solutions" / "grpo.py", "grpo_of_the_guide_test")
    finally:
        sys.path.remove(str(ROOT))
    rows = table_after(text, "the lab")
    names = [name for row in rows for name in re.findall(r"`([\w.]+)`", row[0])]
    for name in names:
        if name.startswith("tinylm."):
            assert hasattr(tinylm, name.removeprefix("tinylm.")), name
        else:
            assert hasattr(grpo, name) or name in grpo.GRPOConfig.__dataclass_fields__, name
    for name in ["sample_group", "group_advantages", "k3_kl", "grpo_loss", "grpo_step", "tinylm.token_logp"]:
        assert name in names, f"{name} is missing from the table"
    options = set(grpo.GRPOConfig.__dataclass_fields__) - {"std", "temperature", "seed", "eval_every"}
    assert options <= set(names), "an option of GRPOConfig is missing from the table"


def test_the_defaults_given_for_the_lab_are_the_labs(text):
    grpo = load(ROOT / "solutions" / "grpo.py", "grpo_of_the_guide_test")
    config, labs = grpo.GRPOConfig(), {row[0].strip("`"): row[2] for row in table_after(text, "`GRPOConfig`")}
    for trl_name, name in {
        "beta": "beta",
        "epsilon": "clip",
        "num_iterations": "inner_steps",
        "num_generations": "G",
        "temperature": "temperature",
        "learning_rate": "lr",
    }.items():
        assert ast.literal_eval(labs[trl_name].strip("`")) == getattr(config, name), trl_name


def test_part_7_stands_alone(text, tmp_path):
    """Its blocks, and part 8's, use no name that they do not define: a Colab student may start there."""
    part = text.partition("# 7. A real 0.5B model on a GPU")[2]
    sources = re.findall(r"^```python\n(?!%%)(.*?)^```$", part, flags=re.MULTILINE | re.DOTALL)
    alone = tmp_path / "alone.py"
    alone.write_text("\n".join(sources), encoding="utf-8")
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821,F401,F811", str(alone)]
    done = subprocess.run(command, check=False, capture_output=True, encoding="utf-8", timeout=60)
    assert done.returncode == 0, done.stdout


def test_the_tasks_that_each_part_needs(text):
    """The table at the top says which of the five functions a part uses: those that its blocks call."""
    used = {"sample_group": {1}, "group_advantages": {2}, "grpo_loss": {3, 4}, "train_grpo": {1, 2, 3, 4, 5}}
    said = {"": set(), "all five tasks": {1, 2, 3, 4, 5}, "tasks 2 to 4": {2, 3, 4}, "task 1": {1}}
    rows = table_after(text.replace("| |", "| - |"), "part")
    assert len(rows) == 8
    for title, _, tasks, *_ in rows:
        part = re.split(r"^# \d\. ", text.partition(f"\n# {title}")[2], flags=re.MULTILINE)[0]
        blocks = "\n".join(re.findall(r"^```python[^\n]*\n(.*?)^```$", part, flags=re.MULTILINE | re.DOTALL))
        names = set(re.findall(r"\bgrpo\.(\w+)", blocks)) - {"GRPOConfig", "py"}
        assert set().union(*(used[name] for name in names)) == said[tasks.strip("-")], title


# What the table of memory is computed from: the sizes in the models' config.json on the Hub.
QWEN = {
    "0.5B": {"vocab": 151936, "hidden": 896, "layers": 24, "mlp": 4864, "heads": 14, "kv_heads": 2, "tied": True},
    "1.5B": {"vocab": 151936, "hidden": 1536, "layers": 28, "mlp": 8960, "heads": 12, "kv_heads": 2, "tied": True},
    "7B": {"vocab": 152064, "hidden": 3584, "layers": 28, "mlp": 18944, "heads": 28, "kv_heads": 4, "tied": False},
}


def counts(vocab, hidden, layers, mlp, heads, kv_heads, tied, rank=16) -> tuple[int, int]:
    """(parameters of a Qwen2, parameters of LoRA on all its linear layers but the head)."""
    kv = hidden // heads * kv_heads
    linear = [(hidden, hidden), (hidden, kv), (hidden, kv), (hidden, hidden)]  # q, k, v, o
    linear += [(hidden, mlp), (hidden, mlp), (mlp, hidden)]  # gate, up, down
    biases, norms = hidden + 2 * kv, 2 * hidden
    layer = sum(a * b for a, b in linear) + biases + norms
    embeddings = vocab * hidden * (1 if tied else 2)
    return embeddings + layers * layer + hidden, layers * rank * sum(a + b for a, b in linear)


def test_the_table_of_memory(text):
    rows = {row[0]: row[1:] for row in table_after(text, "model")}
    assert len(rows) == 2 * len(QWEN)
    for name, sizes in QWEN.items():
        n, m = counts(**sizes)
        logits = 8 * 256 * sizes["vocab"] * 4
        full = [4 * n, 4 * n, 8 * n, 16 * n, 4 * n, logits]
        lora = [2 * n + 4 * m, 4 * m, 8 * m, 2 * n + 16 * m, 0, logits]
        for kind, adapter, sums in (("full", "0", full), ("LoRA", f"{m / 1e6:.1f}", lora)):
            expected = [f"{n / 1e9:.2f}", adapter, *(f"{size / 2**30:.1f}" if size else "0" for size in sums)]
            assert rows[f"{name}, {kind}"] == expected


def test_what_the_text_of_part_7_says_of_memory(text):
    n, _ = counts(**QWEN["0.5B"])
    assert f"{n / 1e9:.2f} billion parameters take {16 * n / 2**30:.1f} GiB" in text
    assert f"a reference would take another {4 * n / 2**30:.1f} GiB" in text


def test_the_runner_finds_what_it_replaces(text):
    for old in SUBSTITUTIONS:
        assert text.count(old) == 1, old


@pytest.mark.parametrize(
    ("flags", "steps", "complaint"),
    [
        ([], "6", "nothing to do"),
        (["--rum"], "6", "--rum"),
        (["--run"], "many", "LAB_STEPS"),
        (["--run"], "0", "LAB_STEPS"),
    ],
)
def test_bad_input_is_one_line_and_status_2(flags, steps, complaint, monkeypatch):
    monkeypatch.setenv("LAB_STEPS", steps)
    done = subprocess.run(
        [sys.executable, str(RUNNER), *flags], check=False, capture_output=True, encoding="utf-8", timeout=60
    )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1 and complaint in done.stderr


def test_an_environment_that_is_not_the_guides_is_refused(monkeypatch):
    monkeypatch.setattr(running, "requirements", lambda: ["torch==0.1", "no-such-package", "pytest"])
    problems = running.unmet()
    assert len(problems) == 2
    assert problems[0].startswith("torch==0.1 (here: ") and problems[1] == "no-such-package (here: missing)"


def test_a_block_that_would_not_become_a_cell_is_found(tmp_path, monkeypatch):
    pytest.importorskip("jupytext")
    wrong = tmp_path / "wrong.md"
    wrong.write_text("```python\nx = 1\n```\n\n```python .noeval\ny = 2\n```\n", encoding="utf-8")
    monkeypatch.setattr(document, "GUIDE", wrong)
    with pytest.raises(ValueError, match="2 Python blocks, jupytext made 1"):
        document.notebook()


def test_jupytext_sees_the_blocks_that_these_tests_see(blocks):
    pytest.importorskip("jupytext")
    cells = [cell.source for cell in document.notebook().cells if cell.cell_type == "code"]
    assert len(cells) == len(blocks)
