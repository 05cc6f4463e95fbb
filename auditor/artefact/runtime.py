"""How a strategy's runtime patches a live module. `patched_model.py` copies this code from `DTYPES` on."""

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

from ..numerics.fp32_output import multiply
from ..numerics.functions import functions_by_name

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
MOVABLE = (torch.float16, torch.bfloat16, torch.float32)
LAZY = (types.GeneratorType, map, filter, zip)


def convert(tree: Any, dtype: torch.dtype) -> Any:
    """Convert the floating-point tensors in `tree` to `dtype`; float64, complex and integer tensors are unchanged.

    A container without a tensor to convert is returned itself, since the caller may write to it.
    """
    if isinstance(tree, torch.Tensor):
        return tree.to(dtype) if tree.dtype in MOVABLE else tree
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return tree
    if not needs_conversion(tree, dtype):
        return tree
    if type(tree) in (tuple, list):  # the usual case, faster than a general traversal
        return type(tree)([convert(item, dtype) for item in tree])
    if type(tree) is dict:
        return {key: convert(item, dtype) for key, item in tree.items()}
    return pytree.tree_map_only(torch.Tensor, lambda x: convert(x, dtype), tree)


def needs_conversion(tree: Any, dtype: torch.dtype) -> bool:
    """Whether `convert` would change the dtype of a tensor in `tree`."""
    if isinstance(tree, torch.Tensor):
        return tree.dtype in MOVABLE and tree.dtype is not dtype
    if type(tree) in (tuple, list):
        return any(needs_conversion(item, dtype) for item in tree)
    if type(tree) is dict:
        return any(needs_conversion(item, dtype) for item in tree.values())
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return False
    return any(isinstance(x, torch.Tensor) and needs_conversion(x, dtype) for x in pytree.tree_leaves(tree))


def call(module: nn.Module, inner: Any, args: Any, kwargs: Any) -> Any:
    """Call a wrapped module's original forward: the instance attribute `forward`, if set, else the class's method."""
    if inner is not None:
        return inner(*args, **kwargs)
    if isinstance(module, torch.jit.ScriptModule):  # the class of a ScriptModule has no forward
        return module.__getattr__("forward")(*args, **kwargs)
    return type(module).forward(module, *args, **kwargs)


def in_region(region: Callable[[], AbstractContextManager[Any]], run: Callable[[], Any]) -> Any:
    """Call `run` inside a context such as autocast. A generator that `run` returns also computes inside the context."""
    with region():
        result = run()
        return iter(list(result)) if isinstance(result, LAZY) else result


def device_type(module: nn.Module, inputs: Any) -> str:
    """Device type of the inputs, or else of the first parameter; tensors on the CPU count only if no other is used."""
    args, _ = inputs
    if args and isinstance(args[0], torch.Tensor) and args[0].device.type not in ("cpu", "meta"):
        return str(args[0].device.type)
    leaves = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    used = [leaf.device.type for leaf in (*leaves, next(module.parameters(), None)) if leaf is not None]
    return next((str(kind) for kind in used if kind not in ("cpu", "meta")), "cpu")


def floating_dtype(inputs: Any) -> torch.dtype | None:
    """Dtype of the first input tensor that `convert` would convert."""
    leaves = (leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor))
    return next((leaf.dtype for leaf in leaves if leaf.dtype in MOVABLE), None)


class KeptFunctions:
    """Functions that a scope keeps in FP32; or, with `low`, products with inputs in `low` and FP32 output. Pickle
    stores the functions by name."""

    def __init__(self, names: tuple[str, ...], low: torch.dtype | None = None) -> None:
        known = functions_by_name()
        unknown = next((name for name in names if name not in known), None)
        if unknown is not None:
            raise ValueError(
                f"torch {torch.__version__} has no function {unknown[:80]!r}, which the plan keeps in FP32: audit again"
            )
        self.names, self.low = names, low
        self.functions = {function: name for name in names for function in known[name]}

    def __reduce__(self) -> tuple[Any, ...]:
        return KeptFunctions, (self.names, self.low)


class KeepFunctions(TorchFunctionMode):
    """Runs calls of the kept functions outside autocast, except for calls that write in place or to `out=`."""

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
            if self.kept.low is not None:
                low = convert((args, kwargs), self.kept.low)
                return multiply(self.kept.functions[func], func, low, lambda low: convert(low, torch.float32))
            args, kwargs = convert((args, kwargs), torch.float32)
            return func(*args, **kwargs)


def inside(module: nn.Module, inner: Any, how: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Call the forward of a wrapped scope: in its autocast region, with its kept functions in FP32."""
    device = device_type(module, (args, kwargs))
    run = functools.partial(call, module, inner, args, kwargs)
    for kept in how["keep"]:
        run = functools.partial(in_region, functools.partial(KeepFunctions, kept, device), run)
    if how["region"] is None:
        return run()
    low = how["region"] != "fp32"
    opened = functools.partial(torch.autocast, device, dtype=DTYPES[how["region"]] if low else None, enabled=low)
    return in_region(opened, run)


def precision_of(path: str, scopes: dict[str, Any]) -> str:
    """Precision of a module path in `scopes`, or of its nearest parent in `scopes`; FP32 without a parent."""
    while path and path not in scopes:
        path = path.rpartition(".")[0]
    return scopes[path]["precision"] if path in scopes else "fp32"


class Runtime:
    """How a strategy patches a live module: which tensors are converted, which modules wrapped, and how they run.

    regional: whether `run` enters an autocast region.
    """

    regional = False

    @staticmethod
    def run(module: nn.Module, inner: Any, precision: str, output: str | None, args: Any, kwargs: Any) -> Any:
        """Run one call of a wrapped module; `call` runs the original forward. output: the result's precision."""
        raise NotImplementedError

    @staticmethod
    def storage_precisions(model: nn.Module, scopes: dict[str, Any]) -> dict[int, str]:
        """{id of a parameter or buffer: the precision in which it is stored}; tensors not listed are not converted."""
        return {}

    @staticmethod
    def wrapper_of(
        module: nn.Module, paths: list[str], scopes: dict[str, Any], stored: dict[int, str]
    ) -> dict[str, Any] | None:
        """Settings of a module's wrapper: precision, and dtype of its results. None if the caller has the same
        precision.

        If a shared module's paths differ in precision, FP32 wins; if its callers differ, results get the inputs' dtype.
        """
        precisions = {precision_of(path, scopes) for path in paths}
        own = [x for _, x in module._parameters.items() if x is not None]  # TorchScript's dict lacks values()
        if not module._modules and any(stored.get(id(x)) == "fp32" for x in own):
            precisions.add("fp32")  # the layer may share its weight with an FP32 layer
        chosen = [scopes[path] for path in paths if path in scopes]
        if not chosen and len(precisions) == 1:
            return None
        callers = {precision_of(path.rpartition(".")[0], scopes) for path in paths if path}
        keeps_output = not callers or any(choice.get("output") == "keep" for choice in chosen)
        output = None
        if not keeps_output:
            output = "input" if len(callers) > 1 else callers.pop()
        precision = "fp32" if "fp32" in precisions else precisions.pop()
        return {"precision": precision, "output": output}

    @classmethod
    def kept_functions(cls, paths: list[str], precision: str, scopes: dict[str, Any]) -> dict[str, Any]:
        """Functions that a scope keeps in FP32 or gives FP32 output, and the precision of an extra autocast region.

        In the extra region, autocast casts FP32 results of kept functions that meet low-precision weights. FP32 scopes
        switch this region off.
        """
        keep = dict[str, KeptFunctions]()
        if precision != "fp32":
            for key, dtype in (("keep", None), ("fp32_output", DTYPES[precision])):
                names = {name for path in paths for name in scopes.get(path, {}).get(key, ())}
                if names:
                    keep[key] = KeptFunctions(tuple(sorted(names)), dtype)
        region = None
        any_keeps = any(scope.get("keep") for scope in scopes.values())
        if any_keeps and not cls.regional and ("keep" in keep or precision == "fp32"):
            region = precision
        return {"keep": tuple(keep.values()), "region": region}


def by_scope(tensors: list[tuple[str, torch.Tensor]], scopes: dict[str, Any]) -> dict[int, str]:
    """{id of a parameter or buffer: the precision in which it is stored}; FP32 if any module that has it is FP32."""
    wanted: dict[int, str] = {}
    for name, tensor in tensors:
        if wanted.get(id(tensor)) != "fp32":
            wanted[id(tensor)] = precision_of(name.rpartition(".")[0], scopes)
    return wanted
