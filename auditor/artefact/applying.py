"""Applies a plan to a live module. `patched_model.py` contains a copy of this code from `FUSING` on."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from ..isolation.members import (
    LOW,
    is_wrapped,
    modules_of,
    named_modules,
    named_parameters,
    parameters_of,
    raise_in_place,
    rename_scopes,
    stored_low,
    unwrap_model,
)
from .runtime import DTYPES, Runtime, convert, inside
from .strategies import strategy_of


def runtime_of(strategy: str) -> type[Runtime]:
    """Return the Runtime class that patches live modules for a strategy."""
    return strategy_of(strategy).runtime


FUSING = {
    nn.TransformerEncoderLayer: ("activation_relu_or_gelu", 0),
    nn.TransformerEncoder: ("use_nested_tensor", False),
}


def run_scope(module: nn.Module, inner: Any, how: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """The `forward` of a wrapped module, bound by functools.partial: a partial can be pickled, copied, exported and
    compiled."""
    if how["raises"]:
        args, kwargs = convert((args, kwargs), torch.float32)
    if how["keep"] or how["region"] is not None:
        inner = functools.partial(inside, module, inner, how)
    return how["runtime"].run(module, inner, how["precision"], how["output"], args, kwargs)


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
    If the audited model was stored in FP16 or BF16, `raised` in the plan says which of the tensors become FP32. Under
    autocast, FP32 weights then take twice the memory. Raises: ValueError if the plan is an exported program or does not
    fit the model: a scope is missing, `forward` is a property, weights are no longer FP32, or torch lacks a kept
    function. A rejected plan leaves the model unchanged.
    """
    inner, runtime, raised = unwrap_model(model), runtime_of(plan["strategy"]), plan.get("raised", "none")
    names: dict[nn.Module, list[str]] = {}  # a shared module has several names
    for path, module in named_modules(inner):
        names.setdefault(module, []).append(path)
    paths_of_all = {path for paths in names.values() for path in paths}
    scopes = rename_scopes(plan["scopes"], paths_of_all)
    if (missing := next((path for path in scopes if path not in paths_of_all), None)) is not None:
        raise ValueError(f"the plan names the scope {missing!r}, which this model does not have: audit this model")
    stored = runtime.storage_precisions(inner, scopes)
    refuse_lost_weights(inner, stored, plan.get("stored_low") or {})
    wrapping: dict[nn.Module, dict[str, Any]] = {}
    for module, paths in names.items():
        if (choice := runtime.wrapper_of(module, paths, scopes, stored)) is not None:
            refuse_fixed_forward(paths[0], module)
            wrapping[module] = {**choice, **runtime.kept_functions(paths, choice["precision"], scopes)}
    low = {id(x): x for x in stored_low(inner, attributes=raised == "attributes")}
    if raised == "kept":
        stored = {key: precision for key, precision in stored.items() if key not in low}
    elif raised in ("weights", "attributes"):
        raise_in_place([x for key, x in low.items() if stored.get(key, "fp32") == "fp32"])
    for module in filter(is_wrapped, names):
        own = module.__dict__.pop("forward").args[1]
        if own is not None:
            module.__dict__["forward"] = own
    store_weights(inner, stored)
    for module, choice in wrapping.items():
        raises = names[module][0] == "" and not stored and raised not in ("none", "kept")
        how = {"runtime": runtime, "raises": raises, **choice}
        scope = functools.partial(run_scope, module, module.__dict__.get("forward"), how)
        # __dict__ bypasses the module's own __setattr__; the scope keeps the forward's signature.
        module.__dict__["forward"] = functools.update_wrapper(scope, module.forward)
    call_modules(inner)
    return model


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
                f"{name!r} is stored in {parameter.dtype}: load the FP32 checkpoint before applying this plan"
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
