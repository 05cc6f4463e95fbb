"""What a patched model needs at run time. This file is copied into every `patched_model.py`: it imports torch alone."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
MOVABLE = (torch.float16, torch.bfloat16, torch.float32)
FUSING = {
    nn.TransformerEncoderLayer: ("activation_relu_or_gelu", 0),
    nn.TransformerEncoder: ("use_nested_tensor", False),
}


def convert(tree: Any, dtype: torch.dtype) -> Any:
    """Floating tensors of `tree` in `dtype`; float64, complex and integer tensors as they are."""
    if isinstance(tree, torch.Tensor):
        return tree.to(dtype) if tree.dtype in MOVABLE else tree
    if type(tree) in (tuple, list):  # what nearly every call consists of, without the price of a general traversal
        return type(tree)([convert(item, dtype) for item in tree])
    if type(tree) is dict:
        return {key: convert(item, dtype) for key, item in tree.items()}
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return tree
    return pytree.tree_map_only(torch.Tensor, lambda x: convert(x, dtype), tree)


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
    """Run a scope whose weights are stored in `precision`; its result is handed on in `output`.

    output: a precision, "input" for that of the first floating input, None to leave the result as it is.
    """
    given = floating_dtype((args, kwargs)) if output == "input" else None
    args, kwargs = convert((args, kwargs), DTYPES[precision])
    result = call(module, inner, args, kwargs)
    dtype = DTYPES.get(output or "", given)
    return result if dtype is None else convert(result, dtype)


def call(module: nn.Module, inner: Any, args: Any, kwargs: Any) -> Any:
    """The forward that the scope wraps: one set on the instance, or the class's."""
    return inner(*args, **kwargs) if inner is not None else type(module).forward(module, *args, **kwargs)


def device_type(module: nn.Module, inputs: Any) -> str:
    """Device of the first tensor among the inputs, or of the module's first parameter; autocast has none for meta."""
    args, _ = inputs
    first: Any = args[0] if args else None
    if not isinstance(first, torch.Tensor):
        leaves = (leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor))
        first = next(leaves, next(module.parameters(), None))
    return "cpu" if first is None or first.device.type == "meta" else str(first.device.type)


def floating_dtype(inputs: Any) -> torch.dtype | None:
    """Dtype of the first tensor among the inputs that `convert` would convert."""
    leaves = (leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor))
    return next((leaf.dtype for leaf in leaves if leaf.dtype in MOVABLE), None)


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


def call_modules(model: nn.Module) -> None:
    """Let PyTorch's transformer layers call the modules inside them where a scope is among these.

    In eval mode without gradients they read the weights of those modules instead, unless an attribute of theirs, asked
    for nothing else, says that they cannot. What it was lies beside it, for when the scopes are taken off.
    """
    for module in model.modules():
        for name, value in module.__dict__.pop("_fusing", {}).items():
            setattr(module, name, value)
        asked = {
            name: off for kind, (name, off) in FUSING.items() if isinstance(module, kind) and hasattr(module, name)
        }
        if asked and any(is_wrapped(inner) for inner in module.modules() if inner is not module):
            module.__dict__["_fusing"] = {name: getattr(module, name) for name in asked}
            for name, off in asked.items():
                setattr(module, name, off)


def precision_of(path: str, scopes: dict[str, Any]) -> str:
    """Precision of a module path: its own entry, or that of the nearest path above it."""
    while path and path not in scopes:
        path = path.rpartition(".")[0]
    return scopes[path]["precision"] if path in scopes else "fp32"


def apply_plan(model: nn.Module, plan: dict[str, Any]) -> nn.Module:
    """Make `model` follow `plan`, in place: wrap the forward of every scope and, for `cast`, store its weights.

    Class, signature, state_dict keys, hooks and train/eval mode stay. Applying another plan replaces this one.
    Raises: ValueError naming the first scope that the model does not have, or weights that are not FP32 any more; the
    model is then as it was before.
    """
    scopes, strategy = plan["scopes"], plan["strategy"]
    names = names_of_modules(model)
    refuse_other_model({path for paths in names.values() for path in paths}, scopes)
    stored = stored_precisions(model, scopes) if strategy == "cast" else {}
    refuse_lost_weights(model, stored)
    for module in names:
        if is_wrapped(module):
            unwrap(module)
    if strategy == "cast":
        store_weights(model, stored)
    for module, paths in names.items():
        choice = choice_for(paths, scopes, holds_fp32(module, stored))
        if choice is not None:
            scope = functools.partial(
                run_scope, module, module.__dict__.get("forward"), {"strategy": strategy, **choice}
            )
            module.forward = functools.update_wrapper(scope, module.forward)  # keeps the signature
    call_modules(model)
    return model


def refuse_other_model(paths: set[str], scopes: dict[str, Any]) -> None:
    """A plan is for the model that was audited, not for what wraps it."""
    missing = next((path for path in scopes if path not in paths), None)
    if missing is not None:
        wrapper = next((name for name in ("module", "_orig_mod") if f"{name}.{missing}" in paths), None)
        advice = f"apply the plan to its .{wrapper} and wrap it again" if wrapper else "audit it again"
        raise ValueError(f"the plan names the scope {missing!r}, which this model does not have: {advice}")


def names_of_modules(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Every module with its paths: several where it is used in several places."""
    names: dict[nn.Module, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(path)
    return names


def holds_fp32(module: nn.Module, stored: dict[int, str]) -> bool:
    """Whether a layer's weight is stored in FP32: its plan may be low, and the weight tied to one that is not."""
    own = [parameter for parameter in module._parameters.values() if parameter is not None]
    return not module._modules and any(stored.get(id(parameter)) == "fp32" for parameter in own)


def choice_for(paths: list[str], scopes: dict[str, Any], full: bool) -> dict[str, Any] | None:
    """How the module with these paths is wrapped: its precision and its output; None where it is as what calls it.

    Under several paths FP32 wins, as it does for weights, and the result is handed on as the inputs came.
    """
    precisions = {precision_of(path, scopes) for path in paths} | ({"fp32"} if full else set())
    chosen = [scopes[path] for path in paths if path in scopes]
    if not chosen and len(precisions) == 1:
        return None
    callers = {precision_of(path.rpartition(".")[0], scopes) for path in paths if path}
    keep = not callers or any(choice.get("output") == "keep" for choice in chosen)
    output = None if keep else "input" if len(callers) > 1 else callers.pop()
    return {"precision": "fp32" if "fp32" in precisions else precisions.pop(), "output": output}


def stored_precisions(model: nn.Module, scopes: dict[str, Any]) -> dict[int, str]:
    """{id of a parameter or buffer: precision of its module}; FP32 as soon as one of several owners is."""
    wanted: dict[int, str] = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        if wanted.get(id(tensor)) != "fp32":
            wanted[id(tensor)] = precision_of(name.rpartition(".")[0], scopes)
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
