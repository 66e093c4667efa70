"""An entry of the catalogue: a small change to the reference, and how it is applied."""

import ast
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from manifest import LAB

REFERENCE = LAB / "solutions" / "grpo.py"
FUNCTIONS = {1: "sample_group", 2: "group_advantages", 3: "k3_kl", 4: "grpo_loss", 5: "grpo_step"}
IMPORT = "from tinylm import TinyLM\n"  # in the head of the reference
IN_PLACE = "changed|changes|modif|in place|in-place"  # what is said of an argument that was

Pairs = list[tuple[str, str]]


@dataclass(frozen=True)
class Mistake:
    """A wrong solution of one task."""

    task: int
    name: str
    change: Pairs | str  # (find, replace) pairs on the reference's source, or another body for the task's function
    says: tuple[str, ...]  # each must occur in one failure's headline; "a|b" is met by either, in any case


@dataclass(frozen=True)
class Variation:
    """A right solution of one task, in another style."""

    task: int
    name: str
    change: Pairs | str


@dataclass(frozen=True)
class Combination:
    """Several mistakes at once, in one task or in several."""

    parts: tuple[Mistake, ...]

    @property
    def name(self) -> str:
        return " + ".join(part.name for part in self.parts)


Entry = Mistake | Variation | Combination


def entries_of(task: int) -> tuple[Callable[..., Mistake], Callable[..., Variation]]:
    """`Mistake` and `Variation` with the task filled in."""
    return partial(Mistake, task), partial(Variation, task)


def not_written(task: int) -> Mistake:
    """The handout's own body of this task."""
    function = FUNCTIONS[task]
    stub = f"raise NotImplementedError('Task {task} ({function}) is not written yet: open grpo.py')"
    return Mistake(task, f"{function} not written", stub, ("not written|not implemented|NotImplementedError",))


def parts(entry: Entry) -> tuple[Mistake | Variation, ...]:
    return entry.parts if isinstance(entry, Combination) else (entry,)


def tasks(entry: Entry) -> list[int]:
    return sorted({part.task for part in parts(entry)})


def replace_body(source: str, function: str, body: str) -> str:
    """`source` with another body for `function`, which keeps its signature and docstring."""
    node = next(node for node in ast.parse(source).body if getattr(node, "name", None) == function)
    lines = source.splitlines(keepends=True)
    new = textwrap.indent(textwrap.dedent(body).strip() + "\n", "    ")
    return "".join([*lines[: node.body[1].lineno - 1], new, *lines[node.end_lineno :]])


def changed_source(entry: Entry, reference: str) -> str:
    """The reference with the entry's changes. Raises ValueError if a change does not apply, or changes nothing."""
    source = reference
    for part in parts(entry):
        if isinstance(part.change, str):
            source = replace_body(source, FUNCTIONS[part.task], part.change)
            continue
        for find, replace in part.change:
            if source.count(find) != 1:
                raise ValueError(f"{entry.name!r}: occurs {source.count(find)} times, not once: {find!r}")
            source = source.replace(find, replace)
    if source == reference:
        raise ValueError(f"{entry.name!r}: changes nothing")
    try:
        compile(source, "grpo.py", "exec")
    except SyntaxError as error:
        raise ValueError(f"{entry.name!r}: does not compile: {error}") from error
    return source
