"""What is wrapped around a model and computes nothing of its own. Copied into `patched_model.py` from WRAPPERS on."""

from __future__ import annotations

import functools
import hashlib
from typing import Any

from torch import nn

from ..state.members import named_modules, named_parameters

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


def is_wrapped(module: nn.Module) -> bool:
    """Whether a scope of a plan wraps the module's forward, see patch/runtime.py."""
    forward = module.__dict__.get("forward")
    return isinstance(forward, functools.partial) and getattr(forward.func, "__name__", "") == "run_scope"


def structure_of(model: nn.Module) -> str:
    """A digest of modules' classes and parameters' shapes, by name: a plan fits models of one structure.

    Wrappers do not count, nor the classes that FSDP makes of a module's own. Raises: what a lazy parameter raises.
    """
    inner = unwrapped(model)
    lines = [
        f"{without_wrappers(path)} {_class_of(module)}"
        for path, module in named_modules(inner)
        if wrapper_of(module) is None
    ]
    lines += [f"{without_wrappers(name)} {list(value.shape)}" for name, value in named_parameters(inner)]
    return hashlib.sha256("\n".join(sorted(lines)).encode(errors="backslashreplace")).hexdigest()[:16]


def _class_of(module: nn.Module) -> str:
    own = (kind for kind in type(module).__mro__ if not kind.__module__.startswith("torch.distributed."))
    return next(own).__name__


def renamed(scopes: dict[str, Any], paths: set[str]) -> dict[str, Any]:
    """The scopes of a plan under the paths of a model that is wrapped elsewhere, or nowhere, in other parts."""
    plain = {without_wrappers(path): path for path in sorted(paths)}
    return {path if path in paths else plain.get(without_wrappers(path), path): how for path, how in scopes.items()}
