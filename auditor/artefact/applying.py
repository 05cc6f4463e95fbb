"""Applies a plan to a live module. `patched_model.py` contains a copy of this code from `FUSING` on."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import nn

from ..isolation.members import (
    LOW,
    is_wrapped,
    modules_of,
    named_modules,
    named_parameters,
    named_tensors,
    parameters_of,
    raise_in_place,
    rename_scopes,
    stored_low,
    unwrap_model,
)
from .entrances import (
    PlanCalls,
    bind,
    convert_weights,
    entrance_methods,
    replicate_bound,
    run_entrance,
    run_method,
    run_scope,
    unbind,
)
from .runtime import DTYPES, Runtime, convert, precision_of
from .strategies import strategy_of


def runtime_of(strategy: str) -> type[Runtime]:
    """Return the Runtime class that patches live modules for a strategy."""
    return strategy_of(strategy).runtime


FUSING = {
    nn.TransformerEncoderLayer: ("activation_relu_or_gelu", 0),
    nn.TransformerEncoder: ("use_nested_tensor", False),
}

DEEPEST_ENTRANCE = 64
"""Number of enclosing modules from which on a module without a scope is no entrance of its own."""


def call_modules(model: nn.Module) -> None:
    """Make PyTorch's transformer layers call their submodules if a plan wraps any submodule.

    In eval mode without gradients, PyTorch's fused path reads the submodules' weights and skips their forwards. Setting
    one of the layer's attributes disables this path. The old value is stored in `_fusing`, to be restored later.
    """
    for module in modules_of(model):
        for name, value in module.__dict__.pop("_fusing", {}).items():
            setattr(module, name, value)
        asked = {
            name: off for kind, (name, off) in FUSING.items() if isinstance(module, kind) and hasattr(module, name)
        }
        if asked and any(is_wrapped(inner) for inner in modules_of(module) if inner is not module):
            module.__dict__["_fusing"] = {name: getattr(module, name) for name in asked}
            for name, off in asked.items():
                setattr(module, name, off)


def apply_plan(model: nn.Module, plan: dict[str, Any]) -> nn.Module:
    """Patch `model` in place so that it follows `plan`: convert weights and wrap scopes, as the strategy requires.

    Class, signature, state_dict keys, hooks and train/eval mode are unchanged. A later plan replaces an earlier one.
    If the audited model was stored in FP16 or BF16, `upcast` in the plan says which of the tensors become FP32. Under
    autocast, FP32 weights then take twice the memory. Raises: ValueError if the plan is an exported program or does not
    fit the model: a scope is missing, `forward` is a property, weights are no longer FP32, or torch lacks a kept
    function. A rejected plan leaves the model unchanged.
    """
    inner, runtime, upcast = unwrap_model(model), runtime_of(plan["strategy"]), plan.get("upcast", "none")
    names: dict[nn.Module, list[str]] = {}  # a shared module has several names
    for path, module in named_modules(inner):
        names.setdefault(module, []).append(path)
    paths_of_all = {path for paths in names.values() for path in paths}
    scopes = rename_scopes(plan["scopes"], paths_of_all)
    if (missing := next((path for path in scopes if path not in paths_of_all), None)) is not None:
        shown = missing[:80]
        raise ValueError(f"the plan names the scope {shown!r}, which this model does not have: audit this model")
    stored = runtime.storage_precisions(inner, scopes)
    refuse_lost_weights(inner, stored, plan.get("stored_low") or {})
    wrapping: dict[nn.Module, dict[str, Any]] = {}
    for module, paths in names.items():
        if (choice := runtime.wrapper_of(module, paths, scopes, stored)) is not None:
            refuse_fixed_forward(paths[0], module)
            wrapping[module] = {**choice, **runtime.kept_functions(paths, choice["precision"], scopes)}
    low = {id(x): x for x in stored_low(inner, attributes=upcast == "attributes")}
    if upcast == "kept":
        stored = {key: precision for key, precision in stored.items() if key not in low}
    elif upcast in ("weights", "attributes"):
        raise_in_place([x for key, x in low.items() if stored.get(key, "fp32") == "fp32"])
    for module in names:
        unbind(module)
    store_weights(inner, stored)
    raises = not stored and upcast not in ("none", "kept")
    calls = PlanCalls(title_of(plan), {name: x.dtype for name, x in named_tensors(inner)})
    by_path = {path: how for module, how in wrapping.items() for path in names[module]}
    for module, paths in names.items():
        path = paths[0]
        planned = path in scopes or any(above in scopes for above in enclosing(path))
        how = {
            "runtime": runtime,
            "precision": precision_of(path, scopes) if planned else None,
            "output": None,
            "keep": (),
            "region": None,
            **wrapping.get(module, {}),
            "raises": raises and path == "",
            "around": enclosing_settings(path, by_path, raises),
            "calls": calls,
            "path": path,
        }
        bind_module(module, how, module in wrapping)
    call_modules(inner)
    return model


def bind_module(module: nn.Module, how: dict[str, Any], is_scope: bool) -> None:
    """Make a plan hold at a module: in its forward, its public methods, and conversions of its weights."""
    if is_scope:
        bind(module, "forward", run_scope, how)
    elif is_entrance(module, how["path"]):
        bind(module, "forward", run_entrance, how)
    if isinstance(module, (torch.jit.ScriptModule, nn.utils.parametrize.ParametrizationList)):
        return
    for name in entrance_methods(module):
        if name not in module.__dict__:
            bind(module, name, run_method, name, {**how, "output": None})
    bind(module, "_apply", convert_weights, how["calls"])
    bind(module, "_replicate_for_data_parallel", replicate_bound)


def is_entrance(module: nn.Module, path: str) -> bool:
    """Whether the forward of a module without a scope is wrapped, so that the plan also holds if user code calls it.

    Not wrapped are: a forward that is set on the instance; scripts; parametrizations, which compute whenever their
    weight is read; torch's modules without weights, such as activations, which compute in the dtype of their inputs;
    and modules nested deeper than DEEPEST_ENTRANCE, since each wrapper adds to Python's recursion.
    """
    own = [
        *module._parameters.keys(),
        *module._buffers.keys(),
        *module._modules.keys(),
    ]  # TorchScript's dicts lack `iter`
    if (type(module).__module__.startswith("torch.nn.") and not own) or path.count(".") >= DEEPEST_ENTRANCE:
        return False
    return "forward" not in module.__dict__ and "parametrizations" not in path.split(".") and has_plain_forward(module)


def has_plain_forward(module: nn.Module) -> bool:
    """Whether a module's class defines `forward` as a method."""
    own = next(vars(kind)["forward"] for kind in type(module).__mro__ if "forward" in vars(kind))
    return isinstance(own, types.FunctionType) and own is not vars(nn.Module)["forward"]


def enclosing(path: str) -> list[str]:
    """Paths of the modules around a module, from the root on; [] for the root."""
    parts = path.split(".") if path else []
    return [".".join(parts[:depth]) for depth in range(len(parts))]


def enclosing_settings(path: str, by_path: dict[str, dict[str, Any]], raises: bool) -> dict[str, Any]:
    """What the scopes around a module add to its own: kept functions, an autocast region, and FP32 inputs."""
    keep: list[str] = []
    region = None  # of the innermost scope that has one
    for above in enclosing(path):
        if above not in by_path:
            continue
        scope = by_path[above]
        keep += scope["keep"]
        if scope["region"] is not None:
            region = scope["region"]
    return {"keep": tuple(keep), "region": region, "raises": raises}


def title_of(plan: dict[str, Any]) -> str:
    """A plan in messages: `FP16 plan (cast)`."""
    return f"{plan.get('format', 'precision').upper()} plan ({plan['strategy']})"


def refuse_fixed_forward(path: str, module: nn.Module) -> None:
    """Raise ValueError if a class computes `forward` as a property: a scope could not replace it."""
    own = next((vars(kind)["forward"] for kind in type(module).__mro__ if "forward" in vars(kind)), None)
    if hasattr(own, "__set__"):
        name = f"{path!r}" if path else "the model"
        raise ValueError(f"{name} defines forward as a property, which cannot be wrapped: make forward a method")


def refuse_lost_weights(model: nn.Module, stored: dict[int, str], audited: dict[str, int]) -> None:
    """Raise ValueError if the plan needs FP32 weights that the model already stores rounded.

    audited: {dtype: number of weights that the audited model stored in that dtype}; up to this many may be low."""
    result = dict.fromkeys(LOW, 0)
    for parameter in parameters_of(model):
        if parameter.dtype in LOW:
            result[parameter.dtype] += parameter.numel()
    lost = [dtype for dtype, count in result.items() if count > audited.get(str(dtype).removeprefix("torch."), 0)]
    for name, parameter in named_parameters(model):
        if parameter.dtype in lost and stored.get(id(parameter), "fp32") == "fp32":
            raise ValueError(
                f"weight {name!r} is stored in {parameter.dtype}: load the FP32 checkpoint before applying this plan"
            )


def store_weights(model: nn.Module, stored: dict[int, str]) -> None:
    """Convert parameters and buffers in place, so that tied weights and optimizers keep their references."""
    for parameter in parameters_of(model):
        if id(parameter) in stored:
            parameter.data = convert(parameter.data, DTYPES[stored[id(parameter)]])
    for module in modules_of(model):
        for key, buffer in module._buffers.items():
            if buffer is not None and id(buffer) in stored:
                module._buffers[key] = convert(buffer, DTYPES[stored[id(buffer)]])
        if stored and isinstance(module, nn.RNNBase):
            module.flatten_parameters()  # cuDNN needs contiguous weights; without cuDNN this does nothing
