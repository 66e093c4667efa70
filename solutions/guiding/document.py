"""The guide, `colab_grpo_trl.md`: its blocks as a notebook, one by one, and as the files that they write."""

import re

from manifest import LAB

GUIDE = LAB / "colab_grpo_trl.md"


def requirements() -> list[str]:
    """What the guide's one install line names: ["torch==2.13.0", ...]. Raises ValueError unless there is one line."""
    lines = re.findall(r"^%pip install -q (.+)$", GUIDE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    if len(lines) != 1:
        raise ValueError(f"{GUIDE.name} has {len(lines)} install lines, it must have one")
    return lines[0].split()


def notebook():
    """The guide as a notebook. Raises ValueError if a Python block of the file did not become a code cell."""
    import jupytext  # noqa: PLC0415  of the instructor's requirements: the rest of this file does without

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
