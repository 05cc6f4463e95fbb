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
from .lists import Treatment, lacks_half_on_cpu, lists_any, only_fp16, refused_on_cuda, takes_powers_of_two, treatment

ENTRIES = {
    "same": "all, in their order, under another shape at most",
    "turned": "all, with the dimensions in another order",
    "moved": "some, some several times, or all at other places",
}
VIEW = {
    "always": "the result lies in the argument's memory",
    "if_strides_allow": "it does where strides can express its shape, and is a copy otherwise",
}
NORMALISES = {
    "dim": "the entries along the dimension that the call names",
    "trailing": "those along as many trailing dimensions as the call names",
    "sample": "all of its sample",
    "statistics": "statistics that the call may be given",
}
DISTRIBUTION = {"probabilities": "probabilities that sum to 1", "logarithms": "the logarithms of such"}
SHAPE_FROM = {
    "first": "entries of the first argument",
    "second": "entries of the second argument, where it is a tensor",
    "masks": "masks among the indices",
    "classes": "the largest entry, where the call does not say how many classes there are",
    "sizes": "shapes alone, though torch tags it as depending on entries",
}


@dataclass(frozen=True)
class Operation:
    """A row of operations.toml, with what autocast.toml and half_kernels.toml say of the same operation.

    op: the name that was asked for. packet: the row's. known: whether there is one, or one of the other lists has it.
    """

    op: str = ""
    packet: str = ""
    known: bool = False

    # What becomes of the entries of the first argument.
    entries: Literal["", "same", "turned", "moved"] = ""  # the result holds these alone: see ENTRIES
    view: Literal["", "always", "if_strides_allow"] = ""  # when the result is in its memory: VIEW
    thins: bool = (
        False  # zeros in the place of some entries, and the rest scaled: patterns look through it all the same
    )
    identity: bool = False  # what comes back is the argument under another name
    inverse: str = ""  # the packet that undoes the view
    scatter: str = ""  # the packet that writes to the part that the view shows
    complement: str = ""  # the packet that shows the other part of complex numbers
    exact: bool = False  # entries are moved, chosen or repeated: no error is added
    masks: bool = False  # some entries stay, and others come in the place of the rest
    cast: bool = False  # the same values in another dtype
    joins: bool = False  # entries of several tensors, beside each other or each against each

    # Products and layers.
    product: bool = False  # a matrix product or convolution, summed in FP32 on tensor cores
    attention: bool = False  # a product with a softmax inside, and so not linear in each argument
    flops: str = ""  # the formula for its operations, in ops/flops.py
    gemm: str = ""  # the formula for m, n and k, in facts/dimensions.py
    scan: str = ""  # how partial results along one dimension are joined, in ops/scans.py
    reduces: str = ""  # the formula for how many entries one result stands for, in facts/dimensions.py
    recurrent: bool = False  # a recurrent layer over time
    cell: bool = False  # one step of a recurrent layer
    embedding: bool = False  # reads, or keeps in bounds, rows of a table
    layer: bool = False  # makes a layer when an argument comes from parameters; products and recurrent ones always do

    # Other arithmetic.
    sum: bool = False  # adds or subtracts entries of two tensors
    cancels: bool = False  # the result may be far smaller than what is added up
    scales: bool = False  # multiplies or divides entry by entry
    guards: bool = False  # a small literal in it keeps a denominator from zero
    wide_literals: bool = False  # CUDA's kernels hold literals in FP32: none is too large for the format
    promotes: bool = False  # takes the wider dtype of its operands; others refuse two dtypes, or take the first
    dtype_of_first: bool = False  # floating results have the dtype of the first tensor, whatever the others have
    wave: bool = False  # sine or cosine
    maximum: bool = False  # a largest entry, or about as much
    kink: bool = False  # the derivative jumps: an error that takes a value across changes the gradient at once
    steps: bool = False  # constant between leaps: its derivative, zero, says nothing of what an error does
    singular: int | None = None  # position of the argument at whose zero it has no finite value, or jumps
    normalises: Literal["", "dim", "trailing", "sample", "statistics"] = ""  # what an entry depends on: NORMALISES
    distribution: Literal["", "probabilities", "logarithms"] = ""  # what rows of the result are: of DISTRIBUTION
    batch_norm: bool = False  # one of the spellings of a batch norm
    writes_statistics: bool = False  # writes running statistics, which its schema does not say

    # What is no arithmetic.
    asks_shape: bool = False  # needs the shape of its argument and no entries
    uninitialised: bool = False  # returns memory that nothing was written to
    asks_finite: bool = False  # asks what rounding hardly changes
    draws_by: bool = False  # draws numbers, the argument being their probabilities
    late: bool = False  # autograd takes it in and refuses on the way back
    truth: bool = False  # returns truths, which its variant in place writes as numbers
    reads: bool = False  # hands Python a number or a truth
    assertion: bool = False  # computes nothing
    traced_as: str = ""  # the packet that another tracer records of the same call
    unfolds: bool = False  # its kernel calls others, some of which autocast lowers: those are seen in its place
    shape_from: Literal["", "first", "second", "masks", "classes", "sizes"] = (
        ""  # what the result's shape depends on: SHAPE_FROM
    )

    # In place, and under other names.
    replaces_memory: bool = False  # the argument has other memory afterwards
    writes_nothing: bool = False  # in place: entries, shape and memory stay
    twin: str = ""  # the packet that returns what this one writes in place, where it has another name
    known_as: str = ""  # the overload with the same arguments that rules know it by

    # From the lists of torch: autocast.toml and half_kernels.toml.
    autocast: Treatment = "none"  # what autocast on CUDA does to it
    only_fp16: bool = False  # autocast lowers it to FP16 in a region of BF16 too
    refused_on_cuda: frozenset[str] = frozenset()  # the low formats that CUDA has no kernel in
    powers_of_two: bool = False  # and has them elsewhere for lengths that are powers of two
    half_on_cpu: bool = True  # has half kernels on the CPU wherever it has them on CUDA

    @property
    def name(self) -> str:
        """Without namespace and overload, as messages call it."""
        return packet(self.op).rpartition(".")[2]

    @property
    def transparent(self) -> bool:
        """Whether it only reshapes, selects, casts or drops out, so that a pattern may look through it."""
        return bool(self.entries) or self.thins or self.cast

    @property
    def linear(self) -> bool:
        """Whether it is a product that is linear in each tensor argument."""
        return self.product and not self.attention

    @property
    def makes_layer(self) -> bool:
        """Whether it makes a layer when an argument comes from parameters."""
        return self.layer or self.linear or self.recurrent or self.cell


_COLUMNS = {field.name: field for field in fields(Operation)}
_NOT_IN_ROWS = ("op", "packet", "known", "autocast", "only_fp16", "refused_on_cuda", "powers_of_two", "half_on_cpu")
_WORDS = {
    "entries": ENTRIES,
    "view": VIEW,
    "normalises": NORMALISES,
    "distribution": DISTRIBUTION,
    "shape_from": SHAPE_FROM,
}
_ADDED: dict[str, Operation] = {}

BY_TARGET: dict[int, tuple[Any, Operation]] = {}
"""{id of an overload: itself and its row}: every operation of a run asks several times, and torch hashes one in Python."""


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
        refused_on_cuda=refused_on_cuda(own),
        powers_of_two=takes_powers_of_two(own),
        half_on_cpu=not lacks_half_on_cpu(own),
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
    forget()
    try:
        yield
    finally:
        for name in new:
            del _ADDED[name]
        forget()


def forget() -> None:
    """Rows are made again from the tables as they are."""
    operation.cache_clear()
    BY_TARGET.clear()


def packets() -> tuple[str, ...]:
    """Every packet that has a row."""
    return (*_rows(), *_ADDED)


@cache
def _rows() -> dict[str, Operation]:
    held = table("numerics/operations")
    plain = {name: Operation(packet=name) for name in held["plain"]}
    return plain | {name: _checked(name, row) for name, row in held["operations"].items()}


def _checked(name: str, row: Mapping[str, Any]) -> Operation:
    unknown = sorted(set(row) - (_COLUMNS.keys() - set(_NOT_IN_ROWS)))
    if unknown:
        raise ValueError(f"the row of {name} has columns that there are not: {', '.join(unknown)}")
    for column, words in _WORDS.items():
        if column in row and row[column] not in words:
            raise ValueError(f"the row of {name} says {row[column]!r} of {column}, which is one of {', '.join(words)}")
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
