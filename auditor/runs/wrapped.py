"""What is wrapped around a model and computes nothing of its own. Copied into `patched_model.py` from WRAPPERS on."""

from __future__ import annotations

from typing import Any

from torch import nn

WRAPPERS = {"OptimizedModule": "_orig_mod", "DataParallel": "module", "DistributedDataParallel": "module"}


def wrapper_of(model: nn.Module) -> str | None:
    """The attribute with what torch.compile, DataParallel or DistributedDataParallel wrapped; None for other models."""
    for kind in type(model).__mro__:
        if kind.__name__ in WRAPPERS and kind.__module__.split(".")[0] == "torch":
            return WRAPPERS[kind.__name__]
    return None


def unwrapped(model: nn.Module) -> nn.Module:
    """What is inside all wrappers; the model itself where there is none."""
    while (name := wrapper_of(model)) is not None:
        model = getattr(model, name)
    return model


def without_wrappers(path: str) -> str:
    """A module path without the names that wrappers put into it."""
    return ".".join(name for name in path.split(".") if name not in WRAPPERS.values())


def renamed(scopes: dict[str, Any], paths: set[str]) -> dict[str, Any]:
    """The scopes of a plan under the paths of a model that is wrapped elsewhere, or nowhere, in other parts."""
    plain = {without_wrappers(path): path for path in sorted(paths)}
    return {path if path in paths else plain.get(without_wrappers(path), path): how for path, how in scopes.items()}
