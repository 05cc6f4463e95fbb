"""Modules, parameters and wrappers of a model as torch stores them, even if its class overrides attribute access.

`patched_model.py` contains a copy of this code from `WRAPPERS` on.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

WRAPPERS = {
    "OptimizedModule": "_orig_mod",
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "ActivationWrapper": "_checkpoint_wrapped_module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
}
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
    """The attribute of a wrapper of torch (torch.compile, DataParallel, checkpoint_wrapper) that contains the model;
    None for other modules."""
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


def misfit(model: nn.Module, parameters: int, structure: str, paths: Collection[str]) -> str:
    """Why a plan does not fit a model, and what to do, in one sentence; "" if it fits.

    parameters, structure: `size_of` and `structure_of` the model of the plan; structure "" accepts any names. paths:
    modules of the plan's model, as far as they are known. Raises: ValueError for an uninitialized lazy layer.
    """
    count = size_of(model)
    if structure_of(model) == structure if structure else count == parameters:
        return ""
    inner = unwrap_model(model)
    message = f"the plan was made for {parameters} parameters, this model has {count}"
    if count == parameters:
        message = (
            f"the plan was made for another model than this {type(inner).__name__}: other names, classes or shapes"
        )
    inside = module_that_fits(inner, parameters, structure)
    if inside:
        return f"{message}; it fits {inside!r} in this model: apply it to this module"
    return f"{message}. {advice_on_names(inner, paths) or advice_on_additions(inner)}"


def module_that_fits(model: nn.Module, parameters: int, structure: str) -> str:
    """The path of a module that a plan fits; "" if there is none."""
    for path, module in named_modules(model):
        if structure and path and size_of(module) == parameters and structure_of(module) == structure:
            return path
    return ""


def advice_on_names(model: nn.Module, paths: Collection[str]) -> str:
    """What to do if a plan was made for a model with an adapter, or for a module around this model; "" otherwise."""
    own = {path for path, _ in named_modules(model)}
    others = [path for path in paths if path not in own]
    adapter = next((path for path in others if is_adapter(path)), None)
    if adapter is not None:
        return (
            f"The plan's model has an adapter of PEFT ({adapter!r}): load the adapter before you apply the plan, or "
            "audit this model"
        )
    prefix = next((path.partition(".")[0] for path in others), "")
    if prefix and prefix not in own and all(inside_of(prefix, path) in own for path in paths):
        return (
            f"The plan's names begin with '{prefix[:80]}.': it was made for a module that contains such a model. Apply "
            "it to that module, or audit this model"
        )
    return ""


def is_adapter(path: str) -> bool:
    """Whether a module path is one that PEFT gives to layers with an adapter."""
    return path.startswith("base_model.model.") or "base_layer" in path.split(".")


def inside_of(prefix: str, path: str) -> str:
    """A module path relative to the module `prefix`; the path of the module itself, or of one around it, is ""."""
    return "" if path in ("", prefix) else path.removeprefix(f"{prefix}.")


def advice_on_additions(model: nn.Module) -> str:
    """What to do with a model that has an adapter or parametrizations, which the plan's model lacked."""
    adapters = (path for path, module in named_modules(model) if type(module).__module__.startswith("peft."))
    adapted = next(adapters, None)
    if adapted is not None:
        where = f"{adapted!r}" if adapted else "its root"
        return (
            f"This model has an adapter of PEFT at {where}: apply the plan before the adapter is added or after "
            "merge_and_unload(), or audit the model with its adapter"
        )
    for path, _ in named_modules(model):
        owner, _, name = path.rpartition(".parametrizations.")
        if owner:
            return (
                f"{owner!r} has a parametrization of its {name.partition('.')[0]}: apply the plan before it is "
                "registered or after remove_parametrizations, or audit this model"
            )
    return "Audit this model"


def rename_scopes(scopes: dict[str, Any], paths: set[str]) -> dict[str, Any]:
    """Rename the keys of a plan's scopes, which are module paths, to the paths of a model with other wrappers."""
    plain = {without_wrappers(path): path for path in sorted(paths)}
    return {path if path in paths else plain.get(without_wrappers(path), path): how for path, how in scopes.items()}


def stored_low(model: nn.Module, attributes: bool = False) -> list[torch.Tensor]:
    """List parameters and buffers in FP16 or BF16, each once. attributes: include modules' other tensor attributes."""
    tensors: list[Any] = [x for _, x in named_tensors(model)]
    if attributes:
        named = [item for module in modules_of(model) for item in vars(module).items()]
        tensors += pytree.tree_leaves([value for name, value in named if name not in OWN])
    return [x for x in {id(x): x for x in tensors}.values() if isinstance(x, torch.Tensor) and is_plainly_low(x)]


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
