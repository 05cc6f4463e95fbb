"""Plans that are programs of their own, each in one line."""

from __future__ import annotations

from ..records import Program
from .words import count, ratio


def program_line(program: Program) -> str:
    """What there is to say of a program: its file, how much of it is low, and which batches it takes."""
    low = f"{program.low:,} of {count(program.operations, 'operation')} low, {count(program.casts, 'conversion')}"
    batch = "any batch size" if program.fixed is None else f"the audited batch size alone: {program.fixed}"
    return f"{program.file}: {low}, {batch}{_onnx(program)}"


def _onnx(program: Program) -> str:
    found = program.onnx
    if found is None:
        return ""
    if not found.file:
        return f"; as ONNX {found.failure}"
    ends = "FP32" if found.ends == "fp32" else "low"
    said = f"; {found.file}: {found.high:,} of {count(found.nodes, 'node')} in FP32, inputs and outputs {ends}"
    if found.error is None:
        return f"{said}, checked, not run: {found.failure}"
    return f"{said}, relative L2 error {ratio(found.error)} in {found.runtime}, {ratio(found.program_error)} as {program.file}"
