"""Casts that the user's step itself makes to FP16 or BF16: in a recipe, they give the recipe's dtype."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from ...emulation.intercept import Handler
from ...emulation.regions import Region
from ...isolation.tensors import written_by
from ...numerics.entries import over_tensors, tensors_in
from ...numerics.nodes import mutates
from ...training.blame import NO_PASS

LOW = (torch.float16, torch.bfloat16)


class OwnCasts(Handler):
    """Passes operations on to another handler, with `dtype` in place of FP16 and BF16.

    So `z.half()` in an FP32 recipe stays FP32, and a memory bank that the step stores in FP16 is read in FP32. An
    operation that writes to a tensor keeps the dtype of that tensor. was_needed: whether an operation was changed.
    """

    def __init__(self, inner: Handler, dtype: torch.dtype) -> None:
        self._inner, self._dtype = inner, dtype
        self.was_needed = False

    def run_op(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], region: Region) -> Any:
        if isinstance(op, torch._ops.OpOverload) and torch._C._current_graph_task_id() == NO_PASS:
            args, kwargs = self._convert(op, args, kwargs)
        return self._inner.run_op(op, args, kwargs, region)

    def cast_arguments(
        self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], region: Region
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return self._inner.cast_arguments(op, args, kwargs, region)

    def run_leaf_op(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], region: Region) -> Any:
        return self._inner.run_leaf_op(op, args, kwargs, region)

    def _convert(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
        if mutates(op):
            return self._for_writing(op, args, kwargs)
        args, kwargs = tree_map_only(torch.dtype, self._dtype_for, (args, kwargs))
        return over_tensors(self._tensor_for, args), over_tensors(self._tensor_for, kwargs)

    def _dtype_for(self, dtype: torch.dtype) -> torch.dtype:
        if dtype not in LOW or dtype is self._dtype:
            return dtype
        self.was_needed = True
        return self._dtype

    def _tensor_for(self, x: torch.Tensor) -> torch.Tensor:
        dtype = self._dtype_for(x.dtype)
        return x if dtype is x.dtype else x.to(dtype)

    def _for_writing(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
        """The arguments of an operation that writes, in the dtype of the tensor to which it writes."""
        places = written_by(op) or ()
        written = tensors_in([args[i] if i < len(args) else kwargs.get(name) for i, name in places])
        dtypes = {x.dtype for x in written if x.is_floating_point()}
        others = {x.dtype for x in tensors_in((args, kwargs)) if x.is_floating_point()} - dtypes
        if len(dtypes) != 1 or dtypes.union(others).isdisjoint(LOW) or not others:
            return args, kwargs
        (dtype,) = dtypes
        self.was_needed = True

        def fit(x: torch.Tensor) -> torch.Tensor:
            is_source = x.is_floating_point() and all(x is not one for one in written)
            return x.to(dtype) if is_source else x

        return over_tensors(fit, args), over_tensors(fit, kwargs)
