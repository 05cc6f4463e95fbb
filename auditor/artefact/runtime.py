"""What a strategy does to a live module. Everything from DTYPES on is copied into every `patched_model.py`."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ..numerics.functions import functions_by_name

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
MOVABLE = (torch.float16, torch.bfloat16, torch.float32)
LAZY = (types.GeneratorType, map, filter, zip)


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


def call(module: nn.Module, inner: Any, args: Any, kwargs: Any) -> Any:
    """The forward that the scope wraps: one set on the instance, or the class's."""
    if inner is not None:
        return inner(*args, **kwargs)
    if isinstance(module, torch.jit.ScriptModule):  # whose class has none
        return module.__getattr__("forward")(*args, **kwargs)
    return type(module).forward(module, *args, **kwargs)


def in_region(region: Callable[[], AbstractContextManager[Any]], run: Callable[[], Any]) -> Any:
    """What `run()` gives inside a region; what it would compute only while it is read, it computes there as well."""
    with region():
        result = run()
        return iter(list(result)) if isinstance(result, LAZY) else result


def device_type(module: nn.Module, inputs: Any) -> str:
    """Device that the module computes on: its inputs', of which lengths may stay on the CPU, else its weights'."""
    args, _ = inputs
    if args and isinstance(args[0], torch.Tensor) and args[0].device.type not in ("cpu", "meta"):
        return str(args[0].device.type)
    leaves = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    used = [leaf.device.type for leaf in (*leaves, next(module.parameters(), None)) if leaf is not None]
    return next((str(kind) for kind in used if kind not in ("cpu", "meta")), "cpu")


def floating_dtype(inputs: Any) -> torch.dtype | None:
    """Dtype of the first tensor among the inputs that `convert` would convert."""
    leaves = (leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor))
    return next((leaf.dtype for leaf in leaves if leaf.dtype in MOVABLE), None)


class KeptFunctions:
    """Functions that a scope keeps in FP32. They pickle by their names."""

    def __init__(self, names: tuple[str, ...]) -> None:
        known = functions_by_name()
        unknown = next((name for name in names if name not in known), None)
        if unknown is not None:
            raise ValueError(f"the plan keeps {unknown!r} in FP32, which is no function of this torch")
        self.names, self.functions = names, {function for name in names for function in known[name]}

    def __reduce__(self) -> tuple[Any, ...]:
        return KeptFunctions, (self.names,)


class Keeping(TorchFunctionMode):
    """Calls of these functions compute in FP32, outside autocast; those that write to what they are given do not."""

    def __init__(self, kept: KeptFunctions, device: str) -> None:
        super().__init__()
        self.kept, self.device = kept, device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in self.kept.functions:
            return func(*args, **kwargs)
        if kwargs.get("inplace") or kwargs.get("out") is not None:
            return func(*args, **kwargs)
        with torch.autocast(self.device, enabled=False):
            return func(*convert(args, torch.float32), **convert(kwargs, torch.float32))


def inside(module: nn.Module, inner: Any, how: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """The forward that a scope wraps, with the functions that it keeps, in an autocast region if it has one."""
    device = device_type(module, (args, kwargs))
    run = functools.partial(call, module, inner, args, kwargs)
    if how["keep"] is not None:
        run = functools.partial(in_region, functools.partial(Keeping, how["keep"], device), run)
    if how["region"] is None:
        return run()
    low = how["region"] != "fp32"
    opened = functools.partial(torch.autocast, device, dtype=DTYPES[how["region"]] if low else None, enabled=low)
    return in_region(opened, run)


def precision_of(path: str, scopes: dict[str, Any]) -> str:
    """Precision of a module path: its own entry, or that of the nearest path above it."""
    while path and path not in scopes:
        path = path.rpartition(".")[0]
    return scopes[path]["precision"] if path in scopes else "fp32"


class Runtime:
    """What a strategy does to a live module: which tensors it stores low, which modules it wraps, how those run.

    regional: whether `run` enters an autocast region by itself.
    """

    regional = False

    @staticmethod
    def run(module: nn.Module, inner: Any, precision: str, output: str | None, args: Any, kwargs: Any) -> Any:
        """One call of a wrapped module; `call` runs what is wrapped. output: as `wrapping` gives it."""
        raise NotImplementedError

    @staticmethod
    def stored(model: nn.Module, scopes: dict[str, Any]) -> dict[int, str]:
        """{id of a parameter or buffer: precision it is stored in}; what is not among them stays as it is."""
        return {}

    @staticmethod
    def wrapping(
        module: nn.Module, paths: list[str], scopes: dict[str, Any], stored: dict[int, str]
    ) -> dict[str, Any] | None:
        """How the module with these paths is wrapped: its precision and its output; None where it is as what calls it.

        Under several paths FP32 wins, as it does for weights, and the result is handed on as the inputs came.
        """
        precisions = {precision_of(path, scopes) for path in paths} | (
            {"fp32"} if holds_fp32(module, stored) else set()
        )
        chosen = [scopes[path] for path in paths if path in scopes]
        if not chosen and len(precisions) == 1:
            return None
        callers = {precision_of(path.rpartition(".")[0], scopes) for path in paths if path}
        keep = not callers or any(choice.get("output") == "keep" for choice in chosen)
        output = None if keep else "input" if len(callers) > 1 else callers.pop()
        return {"precision": "fp32" if "fp32" in precisions else precisions.pop(), "output": output}

    @classmethod
    def keeping(cls, paths: list[str], precision: str, scopes: dict[str, Any]) -> dict[str, Any]:
        """Functions that a scope keeps in FP32; the precision of the autocast region it runs in beside `run`, if any.

        Where FP32 results of kept functions meet low weights, autocast lowers them again. FP32 scopes inside stay out.
        """
        names = {name for path in paths if path in scopes for name in scopes[path].get("keep", ())}
        keep = KeptFunctions(tuple(sorted(names))) if names and precision != "fp32" else None
        anywhere = any(scope.get("keep") for scope in scopes.values())
        opens = anywhere and not cls.regional and (keep is not None or precision == "fp32")
        return {"keep": keep, "region": precision if opens else None}


def by_scope(tensors: list[tuple[str, torch.Tensor]], scopes: dict[str, Any]) -> dict[int, str]:
    """{id of a named parameter or buffer: precision it is stored in}; FP32 as soon as one of several owners is."""
    wanted: dict[int, str] = {}
    for name, tensor in tensors:
        if wanted.get(id(tensor)) != "fp32":
            wanted[id(tensor)] = precision_of(name.rpartition(".")[0], scopes)
    return wanted


def holds_fp32(module: nn.Module, stored: dict[int, str]) -> bool:
    """Whether a layer's weight is stored in FP32: its plan may be low, and the weight tied to one that is not."""
    own = [x for _, x in module._parameters.items() if x is not None]  # a script's cannot be asked for its values alone
    return not module._modules and any(stored.get(id(x)) == "fp32" for x in own)
