"""The table of operations: properties of every ATen operation ("packet": its name without the overload).

`aten.add.Tensor` is an overload of the packet `add`; packets of other namespaces keep the namespace, as in
`prims.convert_element_type`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from typing import Literal

from ..resources import release, table, torch_release
from .autocast_lists import Treatment, autocast_lists
from .devices import target_type
from .formats import FORMATS


@dataclass(frozen=True)
class Operation:
    """Properties of an operation, from operations.toml, autocast.toml and cuda_kernels.toml.

    op: the requested name. packet: the row's name. known: whether any of these files lists it.
    """

    op: str = ""
    packet: str = ""
    known: bool = False

    # How the result contains the entries of the first argument.
    entries: Literal["", "same", "turned", "moved"] = ""  # all in their order, all in another order, or some
    view: Literal["", "always", "if_strides_allow"] = ""  # when the result uses the argument's memory
    thins: bool = False  # dropout: some entries become zero, the rest is scaled; patterns ignore it
    identity: bool = False  # the result is the argument under another name
    inverse: str = ""  # the packet of the operation that undoes the view
    scatter: str = ""  # the packet of the operation that writes to the viewed part
    complement: str = ""  # the packet that views the other part of complex numbers: `imag` for `real`
    exact: bool = False  # entries are moved, selected or repeated: no error is added
    masks: bool = False  # some entries are kept, the rest is replaced
    cast: bool = False  # the same values in another dtype
    joins: bool = False  # entries of several tensors, concatenated or in all pairs

    # Products and layers.
    product: bool = False  # a matrix product or convolution, summed in FP32 on tensor cores
    attention: bool = False  # a product with a softmax inside, so not linear in each argument
    flops: str = ""  # the name of its FLOP formula, in numerics/flops.py
    gemm: str = ""  # the formula for m, n and k, in rulebook/dimensions.py
    scan: str = ""  # how partial results along one dimension are combined, in numerics/scans.py
    reduces: str = ""  # the formula for how many entries are reduced to one, in rulebook/dimensions.py
    recurrent: bool = False  # a recurrent layer over time
    cell: bool = False  # one step of a recurrent layer
    embedding: bool = False  # reads rows of a table, or limits their norm
    layer: bool = False  # forms a layer if an argument is a parameter; products and recurrent layers always do

    # Other arithmetic.
    sum: bool = False  # adds or subtracts entries of two tensors
    cancels: bool = False  # the result may be far smaller than the terms
    scales: bool = False  # multiplies or divides entry by entry
    guards: bool = False  # a small literal in it keeps a denominator from zero
    promotes: bool = False  # computes in the widest dtype of its operands; other operations raise, or use the first's
    dtype_of_first: bool = False  # floating-point results have the first tensor's dtype
    wave: bool = False  # sine or cosine
    maximum: bool = False  # the largest entry, or a smooth maximum
    kink: bool = False  # the derivative jumps: a small error can change the gradient at once
    steps: bool = False  # a step function: its derivative, zero, does not show the effect of errors
    jumps: bool = False  # the result jumps at some inputs, though its derivative is defined nearly everywhere
    singular: int | None = None  # position of an argument at whose zeros the result is not finite, or jumps
    normalizes: Literal["", "dim", "trailing", "sample", "statistics"] = ""  # the entries that one result depends on
    distribution: Literal["", "probabilities", "logarithms"] = ""  # whether rows of the result are a distribution
    batch_norm: bool = False  # one of the forms of batch norm
    writes_statistics: bool = False  # writes running statistics, which its schema does not declare

    # Operations without arithmetic.
    asks_shape: bool = False  # needs only the shape of its argument
    uninitialized: bool = False  # returns uninitialized memory
    asks_finite: bool = False  # tests a property that rounding hardly changes, such as finiteness
    draws_by: bool = False  # draws random numbers; the argument is their probabilities
    late: bool = False  # autograd accepts it, and raises only in the backward
    truth: bool = False  # returns booleans, which its in-place variant writes as numbers
    reads: bool = False  # returns a number or a boolean to Python
    assertion: bool = False  # checks its arguments and computes nothing
    traced_as: str = ""  # the packet that another tracer records for the same call
    unfolds: bool = False  # its kernel calls others, some of which autocast lowers: these are recorded instead
    # The result's shape depends on entries of the first or second argument, on masks among the indices, or on the
    # largest entry; "sizes": only on shapes, although torch tags it otherwise.
    shape_from: Literal["", "first", "second", "masks", "classes", "sizes"] = ""

    # In place, and under other names.
    replaces_memory: bool = False  # like `set_` and `resize_`: the argument may have another storage afterwards
    writes_nothing: bool = False  # in-place, but changes neither entries nor shape nor memory
    twin: str = ""  # the packet of the functional variant, if its name differs
    known_as: str = ""  # the overload with the same arguments by which rules name it

    # From the lists of torch: autocast.toml and cuda_kernels.toml.
    autocast: Treatment = "none"  # what autocast on the target does to its arguments
    only_fp16: bool = False  # autocast casts to FP16 even in a BF16 region
    refused_on_cuda: frozenset[str] = frozenset()  # low formats without a CUDA kernel
    powers_of_two: bool = False  # low formats with a CUDA kernel only for lengths that are powers of two

    @property
    def name(self) -> str:
        """The operation's name without namespace and overload, for messages."""
        return packet(self.op).rpartition(".")[2]

    @property
    def transparent(self) -> bool:
        """Whether the operation only reshapes, selects, casts or applies dropout, so that rules look through it."""
        return bool(self.entries) or self.thins or self.cast

    @property
    def linear(self) -> bool:
        """Whether the operation is a matrix product or convolution, linear in each tensor argument."""
        return self.product and not self.attention


@cache
def packet(op: str) -> str:
    """The packet of an overload: `aten.softmax.int` -> `softmax`; `getitem` and packets are unchanged."""
    return ".".join(op.split(".")[:2]).removeprefix("aten.")


def operation(op: str) -> Operation:
    """The table row of an overload (`aten.softmax.int`) or packet (`softmax`, `_c10d_functional.wait_tensor`).

    Variants use the row of their base: `add_` and `prims.add` use the row of `add`; `view_copy` uses the row of
    `view`, without the properties of a view. Without a row, boolean properties have their defaults, and `known` is False.
    Where the CPU is the target, autocast is the CPU's, and no operation is refused by a list: the CPU's kernels refuse.
    """
    return _operation(op, target_type())


@cache
def _operation(op: str, target: str) -> Operation:
    result = _operation_on_cuda(op)
    if target == "cuda":
        return result
    return replace(
        result,
        autocast=treatment(op, target),
        only_fp16=False,
        refused_on_cuda=frozenset(),
    )


def _operation_on_cuda(op: str) -> Operation:
    own, lists, missing = packet(op), table("numerics/autocast"), table("numerics/cuda_kernels")["missing"]
    row = _row(own)
    refused = frozenset(
        each.name
        for each in FORMATS.values()
        if each.low
        and each.native
        and _matches(own, missing["in_both"], missing.get(f"in_{each.name}", ()))
        and not _matches(own, *_added(each.name))
    )
    listed = refused or any(treatment(op, device) != "none" for device in ("cuda", "cpu"))
    return replace(
        row or Operation(packet=own),
        op=op,
        known=row is not None or bool(listed),
        autocast=treatment(op),
        only_fp16=own in lists["cuda"]["only_fp16"],
        refused_on_cuda=refused,
        powers_of_two=_matches(own, missing["but_powers_of_two"]),
    )


@cache
def treatment(op: str, device: str = "cuda") -> Treatment:
    """How autocast on `device` treats an operation such as `aten.softmax.int`; "none": it runs in its inputs' dtype.

    An entry without an overload covers all overloads. Autocast casts nothing for in-place variants, which are separate
    operators.
    """
    name, _, overload = op.removeprefix("aten.").partition(".")
    lists = autocast_lists(device)
    return lists.get(f"{name}.{overload}", lists.get(name, "none"))


def _added(fmt: str) -> list[Sequence[str]]:
    """The operations for which releases up to the torch at hand have added a CUDA kernel in a format."""
    rows = table("numerics/cuda_kernels")["missing"]["added"]
    return [row[f"in_{fmt}"] for row in rows if release(row["torch"]) <= torch_release()]


def _matches(packet: str, *patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(packet, pattern) for several in patterns for pattern in several)


def packets() -> tuple[str, ...]:
    """Names of all packets with a row in operations.toml."""
    return tuple(_rows())


@cache
def _rows() -> dict[str, Operation]:
    rows_of_file = table("numerics/operations")
    rows = {**{name: {} for name in rows_of_file["plain"]}, **rows_of_file["operations"]}
    return {name: Operation(packet=name, **row) for name, row in rows.items()}


def _row(own: str) -> Operation | None:
    """The table row of a packet (operation name), or of the packet whose variant it is; None without a row."""
    result = _rows().get(own)
    if result is not None:
        return result
    if own.endswith("_") and not own.endswith("__"):
        return _row(own[:-1])
    if own.startswith("prims."):
        return _row(own.removeprefix("prims."))
    base = _row(own.removesuffix("_copy")) if own.endswith("_copy") else None
    if base is not None and base.view:
        return replace(base, view="", identity=False, inverse="", scatter="", complement="", writes_nothing=False)
    return None
