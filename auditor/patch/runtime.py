"""What a patched model needs at run time. This file is copied into every `patched_model.py`: it imports torch alone."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def convert(tree: Any, dtype: torch.dtype) -> Any:
    """Floating tensors of `tree` in `dtype`; float64, complex and integer tensors as they are."""
    movable = tuple(DTYPES.values())
    return pytree.tree_map_only(torch.Tensor, lambda x: x.to(dtype) if x.dtype in movable else x, tree)


def autocast_scope(module: nn.Module, inner: Any, precision: str, output: str | None, args: Any, kwargs: Any) -> Any:
    """Run a scope under autocast in `precision`, or, for fp32, outside autocast on inputs raised to FP32.

    output: "fp32" raises the result, for a low scope inside an FP32 one; autocast itself lowers what must be low.
    """
    device = device_type(module, (args, kwargs))
    if precision == "fp32":
        args, kwargs = convert((args, kwargs), torch.float32)
        with torch.autocast(device, enabled=False):
            return call(module, inner, args, kwargs)
    with torch.autocast(device, dtype=DTYPES[precision]):
        result = call(module, inner, args, kwargs)
    return convert(result, torch.float32) if output == "fp32" else result


def cast_scope(module: nn.Module, inner: Any, precision: str, output: str | None, args: Any, kwargs: Any) -> Any:
    """Run a scope whose weights are stored in `precision`; its result is handed on in `output`, as it is for None."""
    args, kwargs = convert((args, kwargs), DTYPES[precision])
    result = call(module, inner, args, kwargs)
    return result if output is None else convert(result, DTYPES[output])


def call(module: nn.Module, inner: Any, args: Any, kwargs: Any) -> Any:
    """The forward that the scope wraps: one set on the instance, or the class's."""
    return inner(*args, **kwargs) if inner is not None else type(module).forward(module, *args, **kwargs)


def device_type(module: nn.Module, inputs: Any) -> str:
    """Device of the first tensor among the inputs, or of the module's first parameter."""
    for leaf in pytree.tree_leaves(inputs):
        if isinstance(leaf, torch.Tensor):
            return leaf.device.type
    for parameter in module.parameters():
        return parameter.device.type
    return "cpu"


def run_scope(module: nn.Module, inner: Any, how: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """A wrapped `forward`. It is bound by functools.partial, which pickles, deep-copies, exports and compiles."""
    if how["strategy"] == "autocast":
        return autocast_scope(module, inner, how["precision"], how["output"], args, kwargs)
    return cast_scope(module, inner, how["precision"], how["output"], args, kwargs)


def is_wrapped(module: nn.Module) -> bool:
    """Whether a scope of an earlier plan wraps the module's forward."""
    forward = module.__dict__.get("forward")
    return isinstance(forward, functools.partial) and getattr(forward.func, "__name__", "") == run_scope.__name__


def unwrap(module: nn.Module) -> None:
    """Take a scope off again."""
    inner = module.__dict__.pop("forward").args[1]
    if inner is not None:
        module.forward = inner


def precision_of(path: str, scopes: dict[str, Any]) -> str:
    """Precision of a module path: its own entry, or that of the nearest path above it."""
    while path and path not in scopes:
        path = path.rpartition(".")[0]
    return scopes[path]["precision"] if path in scopes else "fp32"


def apply_plan(model: nn.Module, plan: dict[str, Any]) -> nn.Module:
    """Make `model` follow `plan`, in place: wrap the forward of every scope and, for `cast`, store its weights.

    Class, signature, state_dict keys, hooks and train/eval mode stay. Applying another plan replaces this one.
    Raises: ValueError naming the first scope that the model does not have, or weights that are not FP32 any more.
    """
    scopes, strategy = plan["scopes"], plan["strategy"]
    modules = dict(model.named_modules(remove_duplicate=False))
    for path in scopes:
        if path not in modules:
            raise ValueError(f"the plan names the scope {path!r}, which this model does not have: audit it again")
    for module in model.modules():
        if is_wrapped(module):
            unwrap(module)
    stored = stored_precisions(model, scopes) if strategy == "cast" else {}
    refuse_lost_weights(model, stored)
    if strategy == "cast":
        store_weights(model, stored)
    for path, choice in scopes.items():
        above = precision_of(path.rpartition(".")[0], scopes) if path else None
        keep = above is None or choice.get("output") == "keep"
        how = {"strategy": strategy, "precision": choice["precision"], "output": None if keep else above}
        module = modules[path]
        scope = functools.partial(run_scope, module, module.__dict__.get("forward"), how)
        module.forward = functools.update_wrapper(scope, module.forward)  # keeps the signature
    return model


def stored_precisions(model: nn.Module, scopes: dict[str, Any]) -> dict[int, str]:
    """{id of a parameter or buffer: precision of its module}; FP32 as soon as one of several owners is."""
    wanted: dict[int, str] = {}
    for path, module in model.named_modules():  # a module under two names has the scope of the first
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if wanted.get(id(tensor)) != "fp32":
                wanted[id(tensor)] = precision_of(path, scopes)
    return wanted


def refuse_lost_weights(model: nn.Module, stored: dict[int, str]) -> None:
    """What rounding took from a weight cannot be brought back by a plan that wants it in FP32."""
    for name, parameter in model.named_parameters():
        if parameter.dtype in (torch.float16, torch.bfloat16) and stored.get(id(parameter), "fp32") == "fp32":
            raise ValueError(
                f"{name!r} is stored in {parameter.dtype}: load the FP32 checkpoint before applying this plan"
            )


def store_weights(model: nn.Module, stored: dict[int, str]) -> None:
    """Convert parameters and buffers in place, so that ties and optimizers hold."""
    for parameter in model.parameters():
        parameter.data = convert(parameter.data, DTYPES[stored[id(parameter)]])
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = convert(buffer, DTYPES[stored[id(buffer)]])
