"""Capture: a Subject becomes one torch.fx graph of ATen operations, each with its owner and source line."""

from __future__ import annotations

from dataclasses import replace

from ..errors import CaptureError
from ..records import Batch, Capture, Subject
from .concrete import trace_concrete
from .constants import dtype_constants
from .exported import trace_exported

__all__ = ["capture"]


def capture(subject: Subject, formats: tuple[str, ...] = ()) -> Capture:
    """Trace the subject on its first batch; fall back to the concrete path where export cannot follow the Python.

    formats: literals that Python derives from a dtype (`torch.finfo(x.dtype).min`) are looked up for each of them.
    Raises: CaptureError(slug="capture-failed") where both ways fail; the cause is the concrete run's.
    """
    batch: Batch = subject.batches[0]
    try:
        traced = trace_exported(subject.model, batch)
    except Exception as export_error:
        try:
            traced = trace_concrete(subject.model, batch)
        except Exception as error:
            raise CaptureError(
                f"{subject.name} could not be traced: {_first_line(error)}. "
                "Check that the model runs on these inputs in FP32, outside torch.compile.",
                slug="capture-failed",
            ) from error
        reason = f"torch.export could not trace the model ({_first_line(export_error)})"
        note = f"{reason}; the audit covers the path these inputs take."
        traced = replace(traced, warnings=(*traced.warnings, note))
    if not any(node.floating for node in traced.nodes.values()):
        raise CaptureError(
            f"{subject.name} has no floating-point operation, so there is no precision to audit. "
            "Pass a model that computes on floating-point tensors.",
            slug="nothing-to-audit",
        )
    return replace(traced, constants=dtype_constants(traced, subject.model, batch, formats))


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:160]}" if lines else type(error).__name__
