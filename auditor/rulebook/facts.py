"""The table of facts: every field of NodeFacts with its type, unit and meaning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ..numerics.formats import narrower

_TYPES = {"str": "text", "bool": "flag", "int": "number", "float": "number"}
EACH = "each"
"""In a rule's formats: every audited format that no other rule of the family covers; see `spread`."""


@dataclass(frozen=True)
class Fact:
    """type: text | flag | number | texts | numbers; unit: "1" for ratios and counts, "bits" for powers of two.

    by_format: whether each format has its own value, with the address `name.format`.
    """

    type: str
    unit: str
    meaning: str
    by_format: bool = False


def _fact(unit: str, meaning: str) -> Any:
    return field(default=None, metadata={"unit": unit, "meaning": meaning})


@dataclass(frozen=True)
class NodeFacts:
    """Facts about one node; None if a fact does not apply or is unknown."""

    op: str = _fact("", "ATen overload name")
    operation: str = _fact("", "the op's name in messages, without namespace and overload")
    owner: str = _fact("", "module path of the owning module, empty for the root")
    owner_type: str = _fact("", "class of the owning module")
    dtype: str = _fact("", "dtype of the output as captured")
    input_dtype: str | None = _fact("", "dtype of its first tensor input as captured")
    numel: int | None = _fact("elements", "elements of the output")

    is_first_layer: bool = _fact("", "a layer with weights, and no such layer upstream")
    is_last_layer: bool = _fact("", "a layer with weights, and no such layer between it and an output")
    from_weights: bool = _fact("", "computed from parameters, buffers and constants alone")
    consumers: tuple[str, ...] = _fact("", "operations that read it, looking through reshapes and casts")
    producers: tuple[str, ...] = _fact("", "operations whose results it reads, looking through reshapes and casts")
    upcast: bool = _fact("", "one of its inputs was explicitly cast to float32 or more, and not back")
    casts_up: bool = _fact("", "is itself a cast to float32 or more, or creates a tensor in it")
    casts_up_input: bool = _fact("", "one of its inputs is directly a cast to float32 or more, ignoring reshapes")
    low_where: str | None = _fact(
        "", "strategies under which it computes low: under autocast, with cast weights, or both"
    )
    autocast_off: bool = _fact("", "the user's code disabled autocast around it")
    autocast: str = _fact("", "what CUDA autocast does to it: lower, fp32, fp32_unless_dtype, promote, banned, none")

    reduction_length: int | None = _fact("elements", "input elements that go into one output element or statistic")
    sequence_length: int | None = _fact("steps", "steps a recurrent state is carried through")
    gemm_m: int | None = _fact("elements", "rows of the result of one matrix product, batch included for layers")
    gemm_n: int | None = _fact("elements", "columns of the result of one matrix product")
    gemm_k: int | None = _fact("elements", "products summed into one element of a matrix product")
    gemm_alignment: int | None = _fact(
        "elements", "largest power of two up to 64 that divides columns and summed products"
    )
    gemm_m_alignment: int | None = _fact("elements", "largest power of two up to 64 that divides the rows")
    gemm_padding: float | None = _fact("1", "share of extra work after padding both to multiples of 8")
    misaligned: str | None = _fact("", "columns and summed products that are not multiples of 8, in words")
    additions: int = _fact("1", "length of the run of additions to one value that ends here; 0 elsewhere")
    absorbed: Mapping[str, float | None] = _fact("1", "error of that run in a format, in units of the format's spacing")

    constants: tuple[float, ...] = _fact("1", "finite literals among the arguments, except those computed from a dtype")
    constant_max_abs: float | None = _fact("1", "largest magnitude among the literals")
    constant_largest: float | None = _fact("1", "the literal with the largest magnitude, with its sign")
    constant_min_abs: float | None = _fact("1", "smallest non-zero magnitude among the literals")
    constant_gap_to_one: float | None = _fact("1", "smallest non-zero |1 - c| over the literals c")
    constants_beyond: tuple[str, ...] = _fact("", "formats whose range one of the literals exceeds")
    constants_as_one: tuple[str, ...] = _fact("", "formats that round a literal other than one to one")
    follows_dtype: bool = _fact("", "one of its literals is computed from the dtype of a tensor")
    eps: float | None = _fact(
        "1", "guard of a denominator: an eps argument, or a small literal that is added or clamped to"
    )
    reduce_op: str | None = _fact("", "what a collective reduces by: sum, avg, max, min, product")
    whole_numbers: bool = _fact("", "has integer values by construction: an arange, or integers cast to a float")
    reads_whole_numbers: bool = _fact("", "one of its operands is an integer tensor, or has integer values")
    in_a_phase: bool = _fact("", "sin or cos is applied to a product, sum or concatenation of it")
    squares: bool = _fact("", "squares its input: pow 2, square, or a tensor times itself")
    centres: bool = _fact("", "subtracts from a tensor its own mean")
    shifts_by_max: bool = _fact("", "subtracts from a tensor its own maximum, or an upper bound of it (logsumexp)")

    weight_uses: int | None = _fact("1", "number of operations that read its most shared parameter")
    buffer_max_abs: float | None = _fact("1", "largest finite magnitude in the floating buffers it reads")
    input_max_abs: float | None = _fact("1", "largest magnitude among its input activations, measured in FP32")
    output_max_abs: float | None = _fact("1", "largest magnitude of its output, measured in FP32")
    divisor_min_abs: float | None = _fact("1", "smallest non-zero magnitude of its divisor or of its log's argument")
    cancelled_bits: float | None = _fact("bits", "log2(input_max_abs / output_max_abs) of a sum of two tensors")
    spacing: Mapping[str, float | None] = _fact("1", "spacing of a format's numbers at output_max_abs")
    headroom_bits: Mapping[str, float | None] = _fact("bits", "doublings of output_max_abs before a format overflows")
    verdict: Mapping[str, str] = _fact("", "safe, sensitive, unsafe or untested in a format, by measurement")
    reason: Mapping[str, str] = _fact("", "the measurement's reason for a format, in one clause, as reason.fp16")


def _fact_about(annotation: str, unit: str, meaning: str) -> Fact:
    of_format = annotation.removeprefix("Mapping[str, ")
    held = of_format.removeprefix("tuple[")
    kind = next(kind for python, kind in _TYPES.items() if held.startswith(python))
    return Fact(kind if held == of_format else f"{kind}s", unit, meaning, of_format != annotation)


FACTS: Mapping[str, Fact] = {f.name: _fact_about(str(f.type), **f.metadata) for f in fields(NodeFacts)}


def fact_at(address: str) -> Fact:
    """The fact at an address: a name, followed by a dot and a format if the fact depends on it."""
    return FACTS[address.partition(".")[0]]


def value_at(facts: NodeFacts, address: str) -> Any:
    """The value of the fact at an address; None if unknown."""
    name, _, fmt = address.partition(".")
    value = getattr(facts, name)
    return value.get(fmt) if fmt else value


def address_problem(address: str) -> str | None:
    """Why the address of a fact is invalid, or None."""
    name, dot, fmt = address.partition(".")
    if name not in FACTS:
        return f"{address!r} is not a fact"
    if not FACTS[name].by_format:
        return f"{name!r} does not depend on the format" if dot else None
    if not dot:
        return f"{name} depends on the format: name one, as in {name}.fp16"
    return None if fmt in (*narrower(), EACH) else f"{fmt!r} is not one of {', '.join(narrower())}"
