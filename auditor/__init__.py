"""Measures which layers of a PyTorch model can run in FP16 or BF16 and which must stay in FP32, and verifies plans."""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # as `typing` has it, whose import takes long enough for a Ctrl-C
if TYPE_CHECKING:
    from typing import Any

__version__ = "1.0.0"

_API = {
    "audit": "api",
    "Audit": "results",
    "apply": "document.live",
    "emulate": "emulation.emulate",
    "load": "results",
    "load_plan": "document.read",
    "rehearse": "features.rehearsal.facade",
    "snippet": "snippets",
}
__all__ = ["Audit", "__version__", "apply", "audit", "emulate", "load", "load_plan", "rehearse", "snippet"]


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


def __getattr__(name: str) -> Any:
    """Import public names on first use, so that `python -m auditor --help` does not import torch."""
    if name not in _API:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import random

    state = random.getstate()  # which some libraries change when they are imported
    try:
        return getattr(importlib.import_module(f"{__name__}.{_API[name]}"), name)
    finally:
        random.setstate(state)
