"""What torch's own lists say of an operation: autocast's, and those of half kernels."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import cache
from typing import Literal

from ..resources import table
from .formats import FORMATS

Treatment = Literal["lower", "fp32", "fp32_unless_dtype", "promote", "banned", "none"]

_LISTS: tuple[tuple[str, Treatment], ...] = (
    ("lower_precision", "lower"),
    ("fp32", "fp32"),
    ("fp32_append_dtype", "fp32"),
    ("fp32_unless_dtype_given", "fp32_unless_dtype"),
    ("promote", "promote"),
    ("banned", "banned"),
)


@cache
def treatment(op: str, device: str = "cuda") -> Treatment:
    """How autocast on `device` treats an operation such as `aten.softmax.int`; "none": it runs in its inputs' dtype.

    An entry without an overload covers all of them, since the others are composites of it. In-place variants are
    other operators, which autocast leaves alone.
    """
    packet, _, overload = op.removeprefix("aten.").partition(".")
    names = {packet, f"{packet}.{overload}"}
    policy = table("numerics/autocast")[device]
    for rows in (policy, policy.get("composites", {})):
        for key, result in _LISTS:
            if names & set(rows.get(key, ())):
                return result
    return "none"


@cache
def only_fp16(op: str) -> bool:
    """Whether what autocast on CUDA lowers to is FP16 in a region of BF16 too, as for cuDNN's recurrent layers."""
    return op.removeprefix("aten.").partition(".")[0] in table("numerics/autocast")["cuda"]["only_fp16"]


@cache
def refused_on_cuda(packet: str) -> frozenset[str]:
    """Names of the low formats that CUDA has no kernel in."""
    held = table("numerics/half_kernels")
    return frozenset(
        row.name
        for row in FORMATS.values()
        if row.low
        and row.native
        and _matches(packet, (*held["missing_on_cuda"], *held.get(f"missing_on_cuda_in_{row.name}", ())))
    )


@cache
def takes_powers_of_two(packet: str) -> bool:
    """Whether CUDA has half kernels for lengths that are powers of two alone."""
    return _matches(packet, table("numerics/half_kernels")["powers_of_two_on_cuda"])


@cache
def lacks_half_on_cpu(packet: str) -> bool:
    """Whether half-precision tensors may be refused on a CPU, though CUDA takes them."""
    return _matches(packet, table("numerics/half_kernels")["missing_on_cpu"])


def _matches(packet: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(packet, pattern) for pattern in patterns)


def lists_any(op: str) -> bool:
    """Whether one of the lists has the operation."""
    packet = op.removeprefix("aten.").partition(".")[0]
    listed = treatment(op) != "none" or treatment(op, "cpu") != "none"
    return listed or bool(refused_on_cuda(packet)) or lacks_half_on_cpu(packet)
