"""What is known about CUDA's kernels: the rows of cuda_kernels.toml, per operator overload."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Literal

import torch

from ..resources import table
from .formats import FORMATS
from .nodes import is_collective, is_torchs_own, mutates, operation_of

Mixture = Literal["any", "same"]
"""Whether a kernel refuses floating-point tensors of different dtypes."""

_CHECKED_BY_PARTS = ("einsum", "inner", "linear")
"""Products that accept some mixtures: without a contraction, or with a bias that is added apart."""

_COMPOSITE_KEYS = ("CompositeImplicitAutograd", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")


@dataclass(frozen=True)
class KernelFacts:
    """How CUDA computes one operator overload in low precision.

    composite: composed of other kernels, so that autograd and this emulation see those. parts: the dispatch key of the
    implementation that calls other kernels, each of which rounds; None: it runs as one kernel. whole: one kernel
    on CUDA, although the CPU composes it. sparse_by_dense: no half kernel for a sparse and a dense matrix. view, moves, moves_by_index, native: no arithmetic; moves run on the bits,
    `native` by torch's own code. cast: converts dtypes. rounding: key of the exception in cuda_roundings.ROUNDINGS.
    results: the dtype of each result: the name of the argument that has it, or "fp32"; empty: torch's promotion.
    writes: arguments that the kernel writes although its schema does not say so. checked, rounded: what happens to
    Python numbers: refused if outside the format's range; rounded to the format. None of both: kept in float32.
    mixture: whether tensors of different dtypes may meet. promotes: converts all tensors to their common dtype when it
    loads them, zero-dimensional and integer tensors too. equal: groups of arguments that must have one dtype.
    fp32_beside_low: arguments that have the first tensor's dtype, or float32 beside a low-precision one. fp32: arguments
    that are float32. out_equal: an `out=` argument must have the result's dtype. writes_arguments: by its schema.
    is_special: a recurrent layer or cell, or a Fourier transform.
    """

    composite: bool = False
    parts: Any = None
    whole: bool = False
    sparse_by_dense: bool = False
    view: bool = False
    moves: bool = False
    moves_by_index: bool = False
    native: bool = False
    cast: bool = False
    rounding: str | None = None
    results: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    checked: bool = False
    rounded: bool = False
    mixture: Mixture = "any"
    promotes: bool = False
    fp32_beside_low: tuple[str, ...] = ()
    fp32: tuple[str, ...] = ()
    out_equal: bool = False
    writes_arguments: bool = False
    is_special: bool = False
    equal: tuple[tuple[str, ...], ...] = ()

    @cached_property
    def is_simple(self) -> bool:
        """Whether the operation is one kernel wherever it is called, so that it can run without a dispatch mode."""
        return not (self.composite or self.whole or self.parts or self.is_special)

    @cached_property
    def restricts_dtypes(self) -> bool:
        """Whether the kernel refuses any mixture of dtypes."""
        return self.mixture == "same" or bool(self.equal or self.fp32_beside_low or self.fp32)


@cache
def facts_of(op: Any) -> KernelFacts:
    """The facts about an operator overload; of other callables, that they are composed of kernels."""
    if not isinstance(op, torch._ops.OpOverload):
        return KernelFacts(composite=True)
    known = operation_of(op)
    rows, name = table("numerics/cuda_kernels"), _listed_name(op)
    kernels = rows["kernels"]
    composite = _composite_key(op)
    unfolds = composite == _COMPOSITE_KEYS[0] or name in kernels["unfold"] or not is_torchs_own(op)
    return KernelFacts(
        composite=composite == _COMPOSITE_KEYS[0],
        parts=torch._C._dispatch_key_parse(composite or "CPU") if unfolds else None,
        whole=name in kernels["whole"],
        sparse_by_dense=name in rows["missing"]["sparse_by_dense"],
        view=_is_view(op),
        moves=name in kernels["move"],
        moves_by_index=name in kernels["move_by_index"],
        native=name in kernels["native"] or is_collective(str(op)),
        cast=known.cast or name == "copy_",
        rounding=_roundings().get(name),
        results=tuple(rows["results"].get(name, ())),
        writes=tuple(rows["writes"].get(name, ())),
        checked=name in rows["numbers"]["checked"],
        rounded=name in rows["numbers"]["rounded"],
        mixture=_mixture(op, name),
        promotes=name in rows["mixtures"]["promote"],
        fp32_beside_low=tuple(rows["mixtures"]["fp32_beside_low"].get(name, ())),
        out_equal=name in rows["mixtures"]["out"],
        fp32=tuple(rows["mixtures"]["fp32"].get(name, ())),
        writes_arguments=mutates(op),
        is_special=known.recurrent or known.cell or known.powers_of_two,
        equal=tuple(tuple(names) for names in rows["mixtures"]["equal"].get(name, ())),
    )


@cache
def _roundings() -> Mapping[str, str]:
    """{operation: the key of its exception}."""
    rows = table("numerics/cuda_kernels")["exceptions"]
    return {name: row["rule"] for row in rows for name in row["operations"]}


def _listed_name(op: Any) -> str:
    """The name by which cuda_kernels.toml lists an operator: without namespace, overload and in-place underscore."""
    name = op._schema.name.partition("::")[2]
    is_in_place = name.endswith("_") and not name.endswith("__")
    return name[:-1] if is_in_place and mutates(op) else name


def _composite_key(op: Any) -> str | None:
    """The dispatch key of an operator's composite implementation; None if the CPU has a kernel for the operator."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    if has_kernel(op.name(), "CPU"):
        return None
    return next((key for key in _COMPOSITE_KEYS if has_kernel(op.name(), key)), None)


def _is_view(op: Any) -> bool:
    """Whether an operator only returns other views of its argument's memory, or changes its shape in place."""
    if torch.Tag.inplace_view in op.tags:
        return True
    aliases = [result.alias_info for result in op._schema.returns]
    return not mutates(op) and any(alias is not None for alias in aliases)


def _mixture(op: Any, name: str) -> Mixture:
    known = operation_of(op)
    is_listed = name in table("numerics/cuda_kernels")["mixtures"]["same"]
    is_product = known.product and name not in _CHECKED_BY_PARTS
    return "same" if is_listed or is_product or known.recurrent or known.cell else "any"


def refuses_mixture(op: Any, formats: Mapping[str, Sequence[tuple[str, bool]]]) -> bool:
    """Whether CUDA refuses a call for the formats of its floating-point tensors.

    formats: {argument: the (name of the format, whether zero-dimensional) of each tensor in it}.
    """
    facts = facts_of(op)
    tensors = [tensor for of_argument in formats.values() for tensor in of_argument]
    if facts.mixture == "same":
        return _differ(tensors)
    for group in facts.equal:
        if _differ(_tensors_of_group(group, formats)):
            return True
    first = tensors[0][0] if tensors else ""
    accepted = {first}
    if first and FORMATS[first].low:
        accepted.add("fp32")
    beside = list[str]()  # the formats of arguments that may be FP32 beside low precision
    for argument in facts.fp32_beside_low:
        beside += [name for name, _ in formats.get(argument, ())]
    return not accepted.issuperset(beside)


def _tensors_of_group(
    group: Iterable[str], formats: Mapping[str, Sequence[tuple[str, bool]]]
) -> list[tuple[str, bool]]:
    """The tensors of arguments that must have one format. "~" after an argument's name: its zero-dimensional tensors are
    free."""
    tensors = list[tuple[str, bool]]()
    for argument in group:
        spares_scalars = argument.endswith("~")
        for name, is_scalar in formats.get(argument.removesuffix("~"), ()):
            if not (spares_scalars and is_scalar):
                tensors.append((name, is_scalar))
    return tensors


def _differ(formats: Iterable[tuple[str, bool]]) -> bool:
    return len({name for name, _ in formats}) > 1
