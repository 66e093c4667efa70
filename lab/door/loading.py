"""A student's grpo.py, loaded, or why it cannot be."""

import traceback
from pathlib import Path
from types import ModuleType

from lab.start import load_module


def load_student(path: Path) -> tuple[ModuleType | None, str]:
    """(the module, "") or (None, why it cannot be imported, with the line: "ValueError: ... at line 3: ...")."""
    try:
        return load_module(path, "grpo"), ""
    except (Exception, SystemExit) as error:
        if isinstance(error, SyntaxError):
            where = f"line {error.lineno}: {(error.text or '').strip()}"
        else:
            frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == path]
            where = f"line {frames[-1].lineno}: {frames[-1].line}" if frames else "its first lines"
        return None, f"{type(error).__name__}: {error}\n  at {where}"
