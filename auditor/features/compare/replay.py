"""Replays a recorded graph in FP64, where rounding is about a billion times smaller than in FP32."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ...capture.functional import PinnedDraw
from ...errors import let_through
from ...execution.execute import Semantics, ValueOf, hold_decisions, separate_tensors
from ...measure.reference import batch_norm, run_with_gradients
from ...numerics.entries import over_tensors, tensors_in
from ...numerics.nodes import row_of, target_of, wait_for_result
from ...numerics.operations import operation
from .fingerprint import Fingerprint, fingerprint

Gradients = Literal["none", "values", "all"]

_NARROWER = (torch.float64, torch.float32, torch.bfloat16)
"""Dtypes to try in order: an operation without a kernel for one runs in the next."""

MOST_INNER = 200
"""Maximum number of fingerprints inside one operation: the first steps of a recurrent layer are enough."""


@contextmanager
def double_by_default() -> Iterator[None]:
    """In the `with` block, new tensors are FP64 unless a dtype is given, as are quotients of whole numbers."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def to_double(x: torch.Tensor) -> torch.Tensor:
    """The tensor in FP64, or in complex numbers of FP64; whole numbers and booleans are returned unchanged."""
    return _cast(x, torch.float64)


def _cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if x.is_complex():
        return x.to(torch.complex128 if dtype is torch.float64 else torch.complex64)
    return x.to(dtype) if x.is_floating_point() else x


def _argument_in(value: Any, dtype: torch.dtype) -> Any:
    """An argument of an operation that computes in `dtype`: tensors and requested dtypes are converted."""
    if isinstance(value, torch.Tensor):
        return _cast(value, dtype)
    if isinstance(value, torch.dtype) and value.is_floating_point:
        return dtype
    if isinstance(value, torch.dtype) and value.is_complex:
        return torch.complex128 if dtype is torch.float64 else torch.complex64
    return value


class InDouble(Semantics):
    """Computes every operation in FP64, whatever dtypes the run used: casts round nothing.

    gradients: of what autograd computes derivatives: "none"; "values", the results of operations, which shows the entries on
    which the outputs depend, at half the cost of "all", which includes inputs and parameters. held: {operation: its result in the run}, whose
    decisions are kept. leaves: where derivatives end. narrow: operations without a kernel for FP64. lost: operations
    without a derivative. inner: {operation: fingerprints of values inside it}.
    """

    def __init__(self, gradients: Gradients = "none", held: Mapping[str, Any] | None = None) -> None:
        self.gradients = gradients
        self.held = held or {}
        self.leaves: list[torch.Tensor] = []
        self.narrow: set[str] = set()
        self.lost: set[str] = set()
        self.inner: dict[str, tuple[Fingerprint, ...]] = {}

    def placeholder_value(self, n: fx.Node, value: Any) -> Any:
        """The input, parameter or buffer in FP64."""
        if not isinstance(value, torch.Tensor):
            return value
        x = over_tensors(to_double, value.detach())
        return self._as_leaf(x) if self.gradients == "all" else x

    def _as_leaf(self, x: torch.Tensor) -> torch.Tensor:
        """The tensor as a leaf of the autograd graph, if it can have a derivative and gradients are asked for."""
        if self.gradients == "none" or x.requires_grad or not (x.is_floating_point() or x.is_complex()):
            return x
        leaf = x.detach().clone().requires_grad_()
        self.leaves.append(leaf)
        return leaf

    def compute(self, n: fx.Node, value_of: ValueOf) -> Any:
        """Compute an operation in FP64, or in the widest dtype that it has a kernel for."""
        if n.op == "output":
            return super().compute(n, value_of)
        if n.name in self.held:
            return over_tensors(to_double, hold_decisions(n, self.held[n.name], value_of))
        args, kwargs = fx.node.map_arg((n.args, n.kwargs), value_of)
        if isinstance(n.target, PinnedDraw):
            return self._drawn(n, args, kwargs)
        result = self._widest(n, args, kwargs)
        if self.gradients == "none":
            return result
        result = separate_tensors(result, [value_of(source) for source in n.all_input_nodes])
        is_cut = self.gradients == "all" and row_of(n).packet == "detach"
        return result if is_cut else over_tensors(self._as_leaf, result)

    def _drawn(self, n: fx.Node, args: Any, kwargs: Any) -> Any:
        """A random operation draws the run's numbers: in FP64 it would draw others."""
        args, kwargs = over_tensors(lambda x: _cast(x.detach(), torch.float32), (args, kwargs))
        torch.set_default_dtype(torch.float32)
        try:
            return over_tensors(to_double, target_of(n)(*args, **kwargs))
        finally:
            torch.set_default_dtype(torch.float64)

    def _widest(self, n: fx.Node, args: Any, kwargs: Any) -> Any:
        refused: Exception | None = None
        for dtype in _NARROWER:
            own_args, own_kwargs = pytree.tree_map(
                lambda value, dtype=dtype: _argument_in(value, dtype), (args, kwargs)
            )
            try:
                result = self._call(n, own_args, own_kwargs)
            except (RuntimeError, NotImplementedError) as error:
                let_through(error)
                refused = refused or error
                continue
            if dtype is not torch.float64:
                self.narrow.add(n.name)
            return over_tensors(to_double, result)
        assert refused is not None
        raise refused

    def _call(self, n: fx.Node, args: Any, kwargs: Any) -> Any:
        target = target_of(n)
        row = row_of(n)
        if row.packet == "_grouped_mm":
            return _grouped_mm(*args, **kwargs)
        if self.gradients == "none":
            return wait_for_result(target, target(*args, **kwargs))
        if self.gradients == "all" and row.normalizes == "statistics" and isinstance(target, torch._ops.OpOverload):
            return batch_norm(target, *args)
        result, lost = run_with_gradients(target, args, kwargs)
        if lost:
            self.lost.add(n.name)
        return result

    def note_inner(self, n: fx.Node, value_of: ValueOf) -> None:
        """Fingerprint the values inside an operation that other implementations write out."""
        row = row_of(n)
        normalizes = row.normalizes and row.normalizes != "statistics"  # those of a batch norm are stored already
        if n.op != "call_function" or not (normalizes or row.attention or row.recurrent or row.cell):
            return
        args, kwargs = fx.node.map_arg((n.args, n.kwargs), value_of)
        args, kwargs = pytree.tree_map(lambda value: _argument_in(value, torch.float64), (args, kwargs))
        args, kwargs = over_tensors(torch.Tensor.detach, (args, kwargs))
        inside = _Inside()
        try:
            with torch.no_grad(), inside:
                if row.packet == "scaled_dot_product_attention":
                    torch.ops.aten._scaled_dot_product_attention_math.default(*args, **kwargs)
                else:
                    target_of(n)(*args, **kwargs)
        except _EnoughError:
            pass
        except Exception as error:  # the operation has no parts that can be run one by one
            let_through(error)
            return
        self.inner[n.name] = tuple(inside.prints)


class _EnoughError(Exception):
    """Ends an operation that has more parts than are needed."""


class _Inside(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fingerprints the results of all operations into which torch takes an operation apart."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.prints: list[Fingerprint] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        written_out = _written_out().get(func)
        if written_out is not None:
            with self:
                return written_out(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        if len(self.prints) >= MOST_INNER:
            raise _EnoughError
        if not operation(str(func)).entries:
            self.prints += [fingerprint(x) for x in tensors_in(result) if x.is_floating_point()]
        return result


def _written_out() -> Mapping[Any, Any]:
    """{operation: its formula in smaller operations}, from torch's decompositions."""
    from torch._decomp import get_decompositions

    aten = torch.ops.aten
    fused = [aten.native_layer_norm, aten.native_group_norm, aten.native_batch_norm, aten._fused_rms_norm]
    if not _FORMULAS:
        _FORMULAS.update(get_decompositions([op for op in fused if op is not None]))
    return _FORMULAS


_FORMULAS: dict[Any, Any] = {}


def _grouped_mm(
    x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor, bias: Any = None, out_dtype: Any = None
) -> torch.Tensor:
    """torch's product of groups of rows, each with its own matrix, which has no FP64 kernel.

    Shapes: x [n, k], weights [g, k, m], ends [g] -> [n, m]. Group i has the rows from ends[i - 1] to ends[i].
    """
    bounds = [0, *ends.tolist()]
    groups = zip(bounds, bounds[1:], weights, strict=False)
    parts = [x[start:end] @ weight for start, end, weight in groups]
    rest = x.new_zeros(len(x) - bounds[-1], weights.shape[-1])
    return torch.cat([*parts, rest])
