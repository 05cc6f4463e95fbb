"""One run of a patched model: natively on a GPU; on a CPU with a GPU's arithmetic and autocast policy."""

from __future__ import annotations

import torch
from torch import nn

from ..capture.concrete import trace_concrete
from ..capture.exported import trace_exported
from ..execute import PolicyInterpreter, Setting
from ..outputs import tensor_outputs
from ..records import Batch, Capture


def run_patched(model: nn.Module, batch: Batch, device: str) -> list[torch.Tensor]:
    """Output tensors of a model that carries its own scopes, on the CPU.

    device "cuda": the model is simply run. Otherwise it is traced with its autocast regions, and every operation runs
    under CUDA's autocast lists in the dtype that its region asks for. Raises: whatever the model raises.
    """
    if device == "cuda":
        with torch.no_grad():
            args, kwargs = batch
            outputs = tensor_outputs(model(*args, **kwargs))
    else:
        outputs = _imitate(model, batch)
    return [output.detach().cpu() for output in outputs]


def _imitate(model: nn.Module, batch: Batch) -> list[torch.Tensor]:
    try:
        capture = trace_exported(model, batch, ambient=False)
    except Exception:  # Python that branches on values: the run itself is recorded instead
        capture = trace_concrete(model, batch)
    return interpret(capture, capture.bind(model, batch))


def interpret(capture: Capture, flat: list[object]) -> list[torch.Tensor]:
    """The capture's outputs, every operation in the region that the graph recorded for it."""
    interpreter = PolicyInterpreter(capture, lambda name: Setting("fp32", autocast=False))
    with torch.no_grad():
        return tensor_outputs(interpreter.run(*flat))
