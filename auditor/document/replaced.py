"""What an audit that is written over another one takes away with it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PROGRAMS = (".pt2", ".onnx")


def programs_in(directory: Path) -> tuple[str, ...]:
    """Files beside the plan.json in a directory that it names as its programs; none where it cannot be read."""
    try:
        plans = json.loads((directory / "plan.json").read_text(encoding="utf-8"))["plans"].values()
        named = [name for plan in plans for name in _files(plan.get("program") or {})]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return ()
    return tuple(name for name in named if Path(name).name == name and name.endswith(PROGRAMS))


def _files(program: Mapping[str, Any]) -> list[str]:
    onnx = program.get("onnx") or {}
    return [name for name in (program.get("file"), onnx.get("file")) if isinstance(name, str)]
