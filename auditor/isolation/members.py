"""Modules, parameters and wrappers of a model as torch stores them, even if its class overrides attribute access.

`patched_model.py` contains a copy of this code from `WRAPPERS` on.
"""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

WRAPPERS = {"OptimizedModule": "_orig_mod", "DataParallel": "module", "DistributedDataParallel": "module"}
LOW = (torch.float16, torch.bfloat16)
OWN = frozenset(vars(nn.Module()))  # attributes that torch keeps in every module


def named_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """(path, module) of every module, under each of its paths; the traversal of a cyclic module ends."""
    result: list[tuple[str, nn.Module]] = []
    waiting: list[tuple[str, nn.Module, tuple[nn.Module, ...]]] = [("", model, ())]
    while waiting:
        path, module, above = waiting.pop()
        result.append((path, module))
        below = (*above, module)
        for name, child in reversed(list(module._modules.items())):
            if child is not None and not any(child is other for other in below):
                waiting.append((f"{path}.{name}" if path else name, child, below))
    return result


def modules_of(model: nn.Module) -> list[nn.Module]:
    """List every module once, in the order of the modules' first paths."""
    return list({id(module): module for _, module in named_modules(model)}.values())


def named_parameters(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """(name, parameter) of every parameter, under each of its names."""
    return named_in(model, "_parameters")


def named_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """(name, tensor) of every parameter and buffer, under each of its names."""
    return [*named_in(model, "_parameters"), *named_in(model, "_buffers")]


def named_in(model: nn.Module, store: str) -> list[tuple[str, torch.Tensor]]:
    """(name, tensor) of all modules' parameters or buffers, under each of their names. store: the dict, such as
    "_buffers"."""
    return [
        (f"{path}.{name}" if path else name, tensor)
        for path, module in named_modules(model)
        for name, tensor in getattr(module, store).items()
        if tensor is not None
    ]


def parameters_of(model: nn.Module) -> list[torch.Tensor]:
    """List every parameter once, even if several modules share it."""
    return list({id(parameter): parameter for _, parameter in named_parameters(model)}.values())


def size_of(model: nn.Module) -> int:
    """Number of parameters, shared ones counted once. Raises: ValueError for an uninitialized lazy layer."""
    for name, parameter in named_parameters(model):
        if nn.parameter.is_lazy(parameter):
            raise ValueError(f"{name} has no shape yet: call the model once, or load its weights, before you patch it")
    return sum(parameter.numel() for parameter in parameters_of(model))


def wrapper_of(model: nn.Module) -> str | None:
    """The attribute of a wrapper (torch.compile, DataParallel, DistributedDataParallel) that contains the model; None
    for other modules."""
    for kind in type(model).__mro__:
        if kind.__name__ in WRAPPERS and kind.__module__.split(".")[0] == "torch":
            return WRAPPERS[kind.__name__]
    return None


def unwrap_model(model: nn.Module) -> nn.Module:
    """The model inside all wrappers; without wrappers the model itself."""
    while (name := wrapper_of(model)) is not None:
        model = getattr(model, name)
    return model


def without_wrappers(path: str) -> str:
    """A module path without the components that wrappers add."""
    return ".".join(name for name in path.split(".") if name not in WRAPPERS.values())


def is_wrapped(module: nn.Module) -> bool:
    """Whether a precision plan replaced the module's forward by `run_scope`, see artefact/runtime.py."""
    forward = module.__dict__.get("forward")
    return isinstance(forward, functools.partial) and getattr(forward.func, "__name__", "") == "run_scope"


def structure_of(model: nn.Module) -> str:
    """A digest of the names, classes and parameter shapes of a model's modules: a plan fits models with equal digests.

    Wrappers and FSDP's generated classes do not count. Raises: the exception of an uninitialized lazy parameter.
    """
    inner = unwrap_model(model)
    lines = []
    for path, module in named_modules(inner):
        if wrapper_of(module) is None:
            own = (kind for kind in type(module).__mro__ if not kind.__module__.startswith("torch.distributed."))
            lines.append(f"{without_wrappers(path)} {next(own).__name__}")
    lines += [f"{without_wrappers(name)} {list(value.shape)}" for name, value in named_parameters(inner)]
    return hashlib.sha256("\n".join(sorted(lines)).encode(errors="backslashreplace")).hexdigest()[:16]


def rename_scopes(scopes: dict[str, Any], paths: set[str]) -> dict[str, Any]:
    """Rename the keys of a plan's scopes, which are module paths, to the paths of a model with other wrappers."""
    plain = {without_wrappers(path): path for path in sorted(paths)}
    return {path if path in paths else plain.get(without_wrappers(path), path): how for path, how in scopes.items()}


def stored_low(model: nn.Module, attributes: bool = False) -> list[torch.Tensor]:
    """List parameters and buffers in FP16 or BF16, each once. attributes: include modules' other tensor attributes."""
    held: list[Any] = [x for _, x in named_tensors(model)]
    if attributes:
        named = [item for module in modules_of(model) for item in vars(module).items()]
        held += pytree.tree_leaves([value for name, value in named if name not in OWN])
    return [x for x in {id(x): x for x in held}.values() if isinstance(x, torch.Tensor) and is_plainly_low(x)]


def is_plainly_low(x: torch.Tensor) -> bool:
    """Whether a tensor directly stores FP16 or BF16 entries: not a lazy, sparse or wrapper tensor."""
    known = not nn.parameter.is_lazy(x) and not hasattr(type(x), "__tensor_flatten__")
    return known and x.dtype in LOW and x.layout is torch.strided


def raise_in_place(tensors: list[torch.Tensor]) -> None:
    """Convert FP16 and BF16 tensors to FP32 in place; tensors that shared a storage share one afterwards."""
    together: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
    for x in filter(is_plainly_low, tensors):
        together.setdefault((x.untyped_storage()._cdata, x.dtype), []).append(x)
    for sharing in together.values():
        first = sharing[0]
        with torch.inference_mode(first.is_inference()):  # an inference tensor accepts only inference tensors
            if len(sharing) == 1:
                first.data = first.data.float()
                continue
            whole = torch.empty(0, dtype=first.dtype, device=first.device).set_(first.untyped_storage()).float()
            for x in sharing:
                x.data = whole.as_strided(x.shape, x.stride(), x.storage_offset())


def enter_by(model: nn.Module, method: str) -> None:
    """Make calls of the model run another of its methods: the plan of an audited method is made and verified so."""
    model.__dict__["forward"] = getattr(model, method)


def method_of(value: object) -> tuple[nn.Module, str] | None:
    """(model, method) of a bound method of a module; None for anything else."""
    model = getattr(value, "__self__", None)
    name = getattr(value, "__name__", "")
    if not isinstance(model, nn.Module) or not callable(getattr(type(model), name, None)):
        return None
    return model, name
