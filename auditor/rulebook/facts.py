"""The table of facts: every field of NodeFacts with its type, unit and meaning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ..numerics.formats import narrower
from ..numerics.schemes import SCHEMES

_TYPES = {"str": "text", "bool": "flag", "int": "number", "float": "number"}
EACH, SCHEME = "each", "scheme"
"""Words in a rule's formats that mean all audited formats or schemes that no other rule of its family covers."""


@dataclass(frozen=True)
class Fact:
    """type: text | flag | number | texts | numbers; unit: "1" for ratios and counts, "bits" for base-2 logarithms.

    by_format: whether each format has its own value, which a condition reads as `name.format`.
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
    operation: str = _fact("", "name of the operation in messages, without namespace and overload")
    owner: str = _fact("", "path of the module that contains the operation; empty for the root")
    owner_type: str = _fact("", "class of the module that contains the operation")
    torch_module: bool = _fact("", "whether torch defines that module, as it does Linear; else code runs the operation")
    dtype: str = _fact("", "dtype of the output in the captured FP32 run")
    input_dtype: str | None = _fact("", "dtype of the first tensor input in the captured FP32 run")
    numel: int | None = _fact("elements", "number of elements of the output")

    is_first_layer: bool = _fact("", "whether this is a layer with weights that depends on no other such layer")
    is_last_layer: bool = _fact("", "whether this is a layer with weights, and no other such layer follows")
    from_weights: bool = _fact("", "whether the result depends only on parameters, buffers and constants")
    consumers: tuple[str, ...] = _fact("", "operations that read the result, ignoring reshapes and casts")
    producers: tuple[str, ...] = _fact("", "operations that compute the inputs, ignoring reshapes and casts")
    upcast: bool = _fact("", "whether the code cast an input to float32 or wider, and not back")
    casts_up: bool = _fact("", "whether the operation casts to float32 or wider, or creates such a tensor")
    casts_up_input: bool = _fact("", "whether an input is the result of a cast to float32 or wider, ignoring reshapes")
    low_where: str | None = _fact(
        "", "in words, whether the operation is in low precision under autocast, with cast weights, or both"
    )
    mixed_where: str | None = _fact(
        "", "in words, whether the operation gets two dtypes and raises under autocast, with cast weights, or both"
    )
    fp32_origin: str | None = _fact("", "where the FP32 inputs among `mixed_where`'s dtypes were made, with the line")
    dtype_fix: str | None = _fact("", "change of one line after which the operation gets one dtype")
    fixed_where_read: bool = _fact(
        "", "whether `dtype_fix` changes the operation's line, not those that made the tensors"
    )
    unrounded: str | None = _fact(
        "", "operation that torch.compile computes again without rounding, where its values meet their rounded extreme"
    )
    unrounded_where: str | None = _fact(
        "", "in words, whether `unrounded` applies under autocast, with cast weights, or both"
    )
    autocast_off: bool = _fact("", "whether the user's code disables autocast for the operation")
    autocast: str = _fact("", "effect of CUDA autocast: lower, fp32, fp32_unless_dtype, promote, banned, none")

    reduction_length: int | None = _fact("elements", "number of input elements per output element or statistic")
    sequence_length: int | None = _fact("steps", "number of steps of a recurrence")
    gemm_m: int | None = _fact("elements", "rows of the result of one matrix product; for layers including the batch")
    gemm_n: int | None = _fact("elements", "columns of the result of one matrix product")
    gemm_k: int | None = _fact("elements", "number of products that are summed in one element of a matrix product")
    gemm_alignment: int | None = _fact(
        "elements", "largest power of two up to 64 that divides `gemm_n` and `gemm_k` (or channels)"
    )
    gemm_m_alignment: int | None = _fact("elements", "largest power of two up to 64 that divides `gemm_m`")
    gemm_padding: float | None = _fact("1", "share of extra work if `gemm_n` and `gemm_k` are padded to multiples of 8")
    misaligned: str | None = _fact("", "in words, the sizes among `gemm_n` and `gemm_k` that are not multiples of 8")
    additions: int = _fact("1", "number of successive additions to one value, if the operation is the last; else 0")
    absorbed: Mapping[str, float | None] = _fact("1", "sum of updates lost in `additions`, in a format's spacings")

    counts: bool | None = _fact(
        "", "whether an indexed addition, such as index_add, adds ones or other equal or whole terms"
    )
    added_terms: int | None = _fact("1", "largest number of terms that an indexed addition can add to one entry")
    largest_term: float | None = _fact("1", "largest magnitude of the terms of an indexed addition, measured in FP32")
    total_in_terms: float | None = _fact("1", "for an indexed addition: `output_max_abs` / `largest_term`")

    constants: tuple[float, ...] = _fact("1", "finite constants among the arguments, not computed from a dtype")
    constant_max_abs: float | None = _fact("1", "largest magnitude among `constants`")
    constant_largest: float | None = _fact("1", "the value among `constants` with the largest magnitude, with its sign")
    constant_min_abs: float | None = _fact("1", "smallest non-zero magnitude among `constants`")
    constant_gap_to_one: float | None = _fact("1", "smallest non-zero |1 - c| for c among `constants`")
    constants_beyond: tuple[str, ...] = _fact("", "formats whose range is exceeded by a value among `constants`")
    constants_as_one: tuple[str, ...] = _fact("", "formats that round a value of `constants` other than 1 to 1")
    cast_constant: float | None = _fact(
        "1", "for a cast: the constant that is the largest magnitude of its input, as of an additive mask made in FP32"
    )
    cast_constant_beyond: tuple[str, ...] = _fact("", "formats whose range `cast_constant` exceeds")
    follows_dtype: bool = _fact("", "whether a constant is computed from the dtype of a tensor")
    eps: float | None = _fact(
        "1", "guard against a division by zero: an eps argument, or a small constant in an addition or clamp"
    )
    reduce_op: str | None = _fact("", "reduction of a collective: sum, avg, max, min, product")
    whole_numbers: bool = _fact("", "whether the values are integers: an arange, or integers cast to a float")
    reads_whole_numbers: bool = _fact("", "whether an operand is an integer tensor, or has integer values")
    in_a_phase: bool = _fact("", "whether sin or cos reads a product, sum or concatenation of the result")
    squares: bool = _fact("", "whether the operation squares its input: pow 2, square, or a tensor times itself")
    centres: bool = _fact("", "whether the operation subtracts a tensor's mean from the tensor")
    shifts_by_max: bool = _fact("", "whether a tensor's maximum, or its logsumexp, is subtracted from the tensor")

    weight_uses: int | None = _fact("1", "number of operations that read the operation's most shared parameter")
    buffer_max_abs: float | None = _fact("1", "largest finite magnitude in the operation's floating-point buffers")
    input_max_abs: float | None = _fact("1", "largest magnitude among the input activations, measured in FP32")
    output_max_abs: float | None = _fact("1", "largest magnitude of the output, measured in FP32")
    divisor_min_abs: float | None = _fact("1", "smallest non-zero magnitude of the divisor, or of the log's argument")
    cancelled_bits: float | None = _fact("bits", "for a sum of two tensors: log2(`input_max_abs` / `output_max_abs`)")
    spacing: Mapping[str, float | None] = _fact("1", "spacing of a format's numbers near `output_max_abs`")
    headroom_bits: Mapping[str, float | None] = _fact("bits", "doublings of `output_max_abs` before a format overflows")
    verdict: Mapping[str, str] = _fact("", "measured verdict in a format: safe, sensitive, unsafe, untested")
    reason: Mapping[str, str] = _fact("", "reason for the verdict in a format, in one clause")

    makes_keys: bool = _fact(
        "", "whether attention's keys are computed from this layer's result, and no other layer computes them"
    )
    weight_bits: Mapping[str, float] = _fact("bits", "bits per weight of a layer under a [scheme](quantization.md)")
    cause: Mapping[str, str] = _fact("", "cause of a layer's error under a scheme, such as `outlier channel`")
    part: Mapping[str, str] = _fact("", "part of a layer with more effect under a scheme: weight, activation or both")
    place: Mapping[str, str] = _fact("", "channels, rows or slice with the cause of a layer's error, in words")
    gain: Mapping[str, str] = _fact("", "effect of a layer if its input is smoothed, in words; empty if not measured")


def _fact_about(annotation: str, unit: str, meaning: str) -> Fact:
    of_format = annotation.removeprefix("Mapping[str, ")
    item_type = of_format.removeprefix("tuple[")
    kind = next(kind for python, kind in _TYPES.items() if item_type.startswith(python))
    return Fact(kind if item_type == of_format else f"{kind}s", unit, meaning, of_format != annotation)


FACTS: Mapping[str, Fact] = {f.name: _fact_about(str(f.type), **f.metadata) for f in fields(NodeFacts)}


def fact_at(address: str) -> Fact:
    """The fact at an address: a name, followed by a dot and a format if the fact depends on the format."""
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
    return None if fmt in named_formats() else f"{fmt!r} is not one of {', '.join(named_formats())}"


def named_formats() -> tuple[str, ...]:
    """The formats and schemes that a rule may name, and the words EACH and SCHEME."""
    return *narrower(), *SCHEMES, EACH, SCHEME
