"""Capture: a Subject becomes one torch.fx graph of ATen operations, each with its owner and source line."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx, nn

from ..errors import CaptureError
from ..numerics.metrics import output_error
from ..outputs import forward, tensor_outputs
from ..records import Batch, Capture, Subject
from .concrete import trace_concrete
from .constants import dtype_constants
from .exported import trace_exported

__all__ = ["capture"]

AGREEMENT = 1e-4
"""Relative L2 difference up to which a graph counts as the model: sums may be taken in another order."""


def capture(subject: Subject, formats: tuple[str, ...] = ()) -> Capture:
    """Trace the subject on its first batch; fall back to the concrete path where export cannot follow the Python.

    formats: literals that Python derives from a dtype (`torch.finfo(x.dtype).min`) are looked up for each of them.
    Raises: CaptureError(slug="capture-failed") where both ways fail; the cause is the concrete run's.
    """
    batch: Batch = subject.batches[0]
    try:
        traced = _agreeing(trace_exported(subject.model, batch), subject.model, batch)
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


def _agreeing(traced: Capture, model: nn.Module, batch: Batch) -> Capture:
    """The capture, if its graph computes what the model computes; else the caller records a run of the model instead.

    A graph may differ where the author relies on a cast returning its own input. Models that draw random numbers in
    their forward are run from the same seed.
    """
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        expected = forward(model, batch)
        torch.manual_seed(0)
        found = tensor_outputs(fx.Interpreter(traced.graph_module).run(*traced.bind(model, batch)))
    if len(found) != len(expected) or not output_error(expected, found) <= AGREEMENT:
        raise CaptureError("the exported graph computes something else than the model", slug="capture-failed")
    return traced


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:160]}" if lines else type(error).__name__
