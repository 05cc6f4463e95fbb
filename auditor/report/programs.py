"""Plans that are programs of their own, each in one line."""

from __future__ import annotations

from ..records import Onnx, Plan
from .words import count, label, ratio


def program_line(plan: Plan) -> str:
    """What there is to say of a plan's program: its file, how much of it is low, and which batches it takes; "" of others."""
    program = plan.program
    if program is None:
        return ""
    low = f"{program.low:,} of {count(program.operations, 'operation')} low, {count(program.casts, 'conversion')}"
    batch = "any batch size" if program.fixed is None else f"the audited batch size alone: {program.fixed}"
    return f"{program.file}: {low}, {batch}{_onnx(plan, program.onnx) if program.onnx else ''}"


def _onnx(plan: Plan, found: Onnx) -> str:
    if not found.file:
        return f"; as ONNX {found.failure}"
    ends = "FP32" if found.ends == "fp32" else "low"
    said = f"; {found.file}: {found.high:,} of {count(found.nodes, 'node')} in FP32, inputs and outputs {ends}"
    return f"{said}, {_errors(plan, found)}"


def _errors(plan: Plan, found: Onnx) -> str:
    """Predicted, as a program, and in the runtime, as it is and rounding as a GPU does."""
    joint = plan.verification is not None and plan.verification.joint is not None
    errors = [] if joint else [f"{ratio(plan.predicted_error)} predicted"]
    if plan.program is not None and found.program_error is not None:
        errors.append(f"{ratio(found.program_error)} as {plan.program.file}")
    if found.error is not None:
        errors.append(
            f"{ratio(found.error)} in {found.runtime}, which has FP32 for what it lacks in {label(plan.format)}"
        )
    if found.rounded_error is not None:
        errors.append(
            f"{ratio(found.rounded_error)} in onnxruntime with every {label(plan.format)} value rounded as on a GPU"
        )
    lacking = f"checked, not run: {found.failure}" if found.error is None else ""
    told = f"relative L2 error {'; '.join(errors)}" if errors else ""
    return "; ".join(filter(None, (lacking, told)))
