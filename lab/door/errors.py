"""An error that a student's function raised, told by what stands in the line that raised it."""

import dataclasses
import inspect
import re
import traceback
from pathlib import Path
from types import FrameType

from torch import Tensor, nn

import tinylm
from lab.door.calls import Calls, twice_through_a_graph
from tinylm import TinyLM

IN_PLACE = "a tensor that the backward pass needs was changed in place: make a new one (clamp, not clamp_)"

MEANINGS = {  # words of an error of torch's -> what they mean, wherever they come from
    "does not require grad": "the loss does not depend on logp: something was detached, or computed under no_grad",
    "Inference tensors cannot be saved": "leave torch.inference_mode with a clone(), or use torch.no_grad()",
}


def brief(value) -> str:
    """A value in a few characters: of a tensor its shape."""
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)}"
    if isinstance(value, str | int | float | bool | None):
        return repr(value)[:30]
    return f"a {type(value).__name__}"


def operands(frame: FrameType, line: str) -> str:
    """The tensors that a line of code names, with their shapes."""
    found = {}
    for name in re.findall(r"(?<![\w.])[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*", line):
        first, *attributes = name.split(".")
        value, known = frame.f_locals.get(first), first
        for attribute in attributes:
            if not dataclasses.is_dataclass(value):
                break
            value, known = getattr(value, attribute, None), f"{known}.{attribute}"
        if isinstance(value, Tensor):
            found[known] = f"{known} {list(value.shape)}"
    return ", ".join(found.values())


def refused(frame: FrameType) -> tuple[str, str]:
    """That a function of tinylm could not work with its arguments, and which types it wants; the arguments."""
    name = frame.f_code.co_name
    function = inspect.unwrap(getattr(tinylm, name, describe))
    values = {key: frame.f_locals.get(key) for key in inspect.signature(function).parameters}
    wanted = {key: kind for key, kind in function.__annotations__.items() if kind in (TinyLM, Tensor, str)}
    wanted.pop("return", None)
    wrong = [f"{key} is to be a {kind.__name__}" for key, kind in wanted.items() if not fits(values.get(key), kind)]
    got = ", ".join(f"{key} {brief(value)}" for key, value in values.items() if key in wanted)
    return f"tinylm.{name} cannot work with its arguments{': ' if wrong else ''}{', '.join(wrong)}", got


def fits(value, wanted: type) -> bool:
    return isinstance(value, nn.Module if wanted is TinyLM else wanted)


def fields_of(error: BaseException) -> str:
    """What an object has, of which another attribute was wanted."""
    owner = getattr(error, "obj", None)
    if not isinstance(error, AttributeError) or not dataclasses.is_dataclass(owner):
        return ""
    return f"; it has {', '.join(field.name for field in dataclasses.fields(owner))}"


def in_place(function) -> str:
    """The places where a function changes a tensor in place, if its source can be read."""
    try:
        lines, start = inspect.getsourcelines(function)
    except (OSError, TypeError):
        return ""
    code = [(number, line.split("#")[0]) for number, line in enumerate(lines, start)]
    found = [f"line {number}: {line.strip()}" for number, line in code if re.search(r"\w_\(|[-+*/]= |\]\s*=[^=]", line)]
    return "".join(f"\n  {place}" for place in found[:3])


def describe(error: BaseException, function, calls: Calls | None = None) -> str:
    """A few lines. First what the error means, where that is known, or the line of grpo.py that raised it: nothing that
    depends on the inputs, so that it is the same in every test. Then the error, and the tensors in that line.

    Args:
        error: what `function`, a student's, raised.
        calls: what it had called before.
    """
    text = str(error).splitlines()[0] if str(error) else ""
    kind, text = type(error).__name__, f"{text}{fields_of(error)}"
    if "modified by an inplace operation" in text:
        return f"{IN_PLACE}\n  it raised {kind}: {text[:80]} ...{in_place(function)}"
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    lines = traceback.extract_tb(error.__traceback__)
    own = [i for i, line in enumerate(lines) if Path(line.filename).name == "grpo.py"]
    if not own:
        return f"it raised {kind}: {text}"
    outer, inner = own[0], own[-1]  # the task's function, and where in grpo.py it happened
    given = [frame for frame in frames[inner + 1 :] if frame.f_code.co_filename == tinylm.__file__]
    meaning, arguments = refused(given[0]) if given else ("", "")
    meaning = next((known for words, known in MEANINGS.items() if words in text), meaning)
    if calls and calls.order and "graph a second time" in text:
        meaning = twice_through_a_graph(calls)
    raised = f"line {lines[outer].lineno} of grpo.py raised {kind}: {lines[outer].line}"
    told = [meaning, raised, text] if meaning else [raised, text]
    if lines[inner].lineno != lines[outer].lineno:
        told.append(f"within it, line {lines[inner].lineno}: {lines[inner].line}")
    if tensors := arguments or operands(frames[inner], lines[inner].line or ""):
        told.append(f"with {tensors}")
    return "\n  ".join(told)
