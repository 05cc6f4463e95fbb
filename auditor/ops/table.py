"""The one table of operations: what every ATen packet is, behind one function.

Names: `aten.add.Tensor` is an overload, its packet is `add`; packets of other namespaces keep theirs, as in
`prims.convert_element_type`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, Literal

from ..resources import table
from .lists import Treatment, lacks_half_kernel, lists_any, only_fp16, treatment


@dataclass(frozen=True)
class Operation:
    """A row of operations.toml, and what autocast.toml and half_kernels.toml say of the same operation.

    op: the name that was asked for. packet: the row; known: whether there is one, or a sourced list has the name.

    What becomes of the entries of the first argument:
    entries: the result holds these and nothing else: "same": all in their order, under another shape at most; "turned":
    all, with the dimensions in another order; "moved": some, some several times, or all at other places.
    view: "always" in its memory; "if_strides_allow": copied otherwise; "outside_training": the argument itself there.
    identity: what is handed on is the argument. inverse: the packet that undoes the view; scatter: the one that writes
    to the part it shows; complement: the one that shows the other part of complex numbers. exact: entries are moved, chosen or repeated, so that no error is added. cast: the same values in another
    dtype. joins: entries of several tensors beside each other, or each against each.

    Arithmetic:
    product: a matrix product or convolution, summed in FP32 on tensor cores; linear in each argument but for
    `attention`, which has a softmax inside. bf16_on_cpu: some processors multiply BF16 in hardware. flops, gemm, reduces:
    names of formulas: operations (ops/flops.py), (m, n, k), and entries behind one result (facts/dimensions.py).
    recurrent: a recurrent layer over time; cell: one step of it. embedding: reads rows of a table. layer: makes a layer,
    as products do, when an argument comes from parameters.
    sum: adds or subtracts entries. cancels: its result may be far smaller than what it adds up. scales: multiplies or
    divides entries. guards: keeps a small literal under a denominator. promotes: takes the wider dtype of its operands;
    dtype_of_first: the dtype of its first, whatever the others have. wave: sine or cosine. maximum: a largest entry.
    kink: the derivative jumps. singular: position of the argument at whose zero there is no finite value, or a jump.
    normalises: what else an entry of the result depends on: its "dim", "trailing" dimensions or "sample" of the
    argument, or "statistics" that are given. batch_norm: one of the spellings of it. writes_statistics: the running
    statistics, which the schema does not say.

    Gradients, and what is no arithmetic:
    late: autograd takes it in and refuses on the way back. asks_shape: needs no entries. draws_by: draws, its argument
    being the probabilities. asks_finite: rounding hardly changes what it answers. truth: returns truths. reads: hands
    Python a number or a truth. assertion: computes nothing. shape_from: what entries the shape of the result depends on:
    of the "first" or "second" argument, of the "masks" among indices, of "classes" where their number is not given.

    In place, and under other names:
    replaces_memory: the argument has other memory afterwards. writes_nothing: entries, shape and memory stay. twin: what
    returns the same, where it is not named like it. known_as: the overload that rules and autocast know it by;
    same_arguments: and that takes the same arguments.

    From the sourced lists: autocast: what autocast on CUDA does; only_fp16: it lowers to FP16 in a region of BF16 too.
    half_on_cuda, half_on_cpu: whether there is a half kernel, or, on the CPU, may be one.
    """

    op: str = ""
    packet: str = ""
    known: bool = False

    entries: Literal["", "same", "turned", "moved"] = ""
    view: Literal["", "always", "if_strides_allow", "outside_training"] = ""
    identity: bool = False
    inverse: str = ""
    scatter: str = ""
    complement: str = ""
    exact: bool = False
    cast: bool = False
    joins: bool = False

    product: bool = False
    attention: bool = False
    bf16_on_cpu: bool = False
    flops: str = ""
    gemm: str = ""
    reduces: str = ""
    recurrent: bool = False
    cell: bool = False
    embedding: bool = False
    layer: bool = False
    sum: bool = False
    cancels: bool = False
    scales: bool = False
    guards: bool = False
    promotes: bool = False
    dtype_of_first: bool = False
    wave: bool = False
    maximum: bool = False
    kink: bool = False
    singular: int | None = None
    normalises: Literal["", "dim", "trailing", "sample", "statistics"] = ""
    batch_norm: bool = False
    writes_statistics: bool = False

    late: bool = False
    asks_shape: bool = False
    draws_by: bool = False
    asks_finite: bool = False
    truth: bool = False
    reads: bool = False
    assertion: bool = False
    shape_from: Literal["", "first", "second", "masks", "classes"] = ""

    replaces_memory: bool = False
    writes_nothing: bool = False
    twin: str = ""
    known_as: str = ""
    same_arguments: bool = False

    autocast: Treatment = "none"
    only_fp16: bool = False
    half_on_cuda: bool = True
    half_on_cpu: bool = True

    @property
    def name(self) -> str:
        """Without namespace and overload, as messages call it."""
        return packet(self.op).rpartition(".")[2]

    @property
    def transparent(self) -> bool:
        """Whether it only reshapes, selects or casts, so that a pattern may look through it."""
        return bool(self.entries) or self.cast

    @property
    def linear(self) -> bool:
        """Whether it is a product that is linear in each tensor argument."""
        return self.product and not self.attention

    @property
    def makes_layer(self) -> bool:
        """Whether it makes a layer when an argument comes from parameters."""
        return self.layer or self.linear or self.recurrent or self.cell


_COLUMNS = {field.name: field for field in fields(Operation)}
_NOT_IN_ROWS = ("op", "packet", "known", "autocast", "only_fp16", "half_on_cuda", "half_on_cpu")
_ADDED: dict[str, Operation] = {}


@cache
def packet(op: str) -> str:
    """`aten.softmax.int` -> `softmax`; `getitem` and packets come back as they are."""
    return ".".join(op.split(".")[:2]).removeprefix("aten.")


@cache
def operation(op: str) -> Operation:
    """What is known of an overload (`aten.softmax.int`) or packet (`softmax`, `_c10d_functional.wait_tensor`).

    In-place variants share the row of their base, `add_` that of `add`; so do copies of views, `view_copy`, which are
    no views, and `prims`. What has no row is no product, no view and so on, with `known` False.
    """
    own = packet(op)
    row = _row(own)
    listed = lists_any(op)
    return replace(
        row or Operation(packet=own),
        op=op,
        known=row is not None or listed,
        autocast=treatment(op),
        only_fp16=only_fp16(op),
        half_on_cuda=not lacks_half_kernel(own, "cuda"),
        half_on_cpu=not lacks_half_kernel(own, "cpu"),
    )


@contextmanager
def rows_added(rows: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    """In the body the table has these rows too: {packet: {column: value}}, as for operations of one's own.

    Example: `rows_added({"mylib.fused_linear": {"product": True, "flops": "product"}})`.
    Raises: ValueError for a packet that has a row, and for columns that there are not.
    """
    new = {name: _checked(name, row) for name, row in rows.items()}
    for name in new:
        if name in _rows() or name in _ADDED:
            raise ValueError(f"{name} has a row already")
    _ADDED.update(new)
    operation.cache_clear()
    try:
        yield
    finally:
        for name in new:
            del _ADDED[name]
        operation.cache_clear()


def packets() -> tuple[str, ...]:
    """Every packet that has a row."""
    return (*_rows(), *_ADDED)


@cache
def _rows() -> dict[str, Operation]:
    held = table("ops/operations")
    plain = {name: Operation(packet=name) for name in held["plain"]}
    return plain | {name: _checked(name, row) for name, row in held["operations"].items()}


def _checked(name: str, row: Mapping[str, Any]) -> Operation:
    unknown = sorted(set(row) - (_COLUMNS.keys() - set(_NOT_IN_ROWS)))
    if unknown:
        raise ValueError(f"the row of {name} has columns that there are not: {', '.join(unknown)}")
    return Operation(packet=name, **row)


def _row(own: str) -> Operation | None:
    """The row of a packet, or of what it is a variant of."""
    found = _ADDED.get(own) or _rows().get(own)
    if found is not None:
        return found
    if own.endswith("_") and not own.endswith("__"):
        return _row(own[:-1])
    if own.startswith("prims."):
        return _row(own.removeprefix("prims."))
    base = _row(own.removesuffix("_copy")) if own.endswith("_copy") else None
    if base is not None and base.view:
        return replace(base, view="", identity=False, inverse="", scatter="", complement="", writes_nothing=False)
    return None
