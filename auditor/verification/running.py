"""Runs of a patched model: natively on a GPU; on a CPU with a GPU's arithmetic and autocast policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..capture.concrete import trace_concrete
from ..capture.exported import trace_exported
from ..outputs import forward, tensor_outputs
from ..records import Batch, Capture
from ..simulation.execute import PolicyInterpreter, Setting


def run_patched(model: nn.Module, batches: Sequence[Batch], device: str) -> list[list[torch.Tensor]]:
    """Output tensors, on the CPU, of a model that carries its own scopes; one list per batch.

    device "cuda": the model is simply run. Otherwise it is traced with its autocast regions, and every operation runs
    under CUDA's autocast lists in the dtype that its region asks for. Raises: whatever the model raises.
    """
    run = _native(model) if device == "cuda" else _Imitation(model)
    with torch.no_grad():
        return [[output.detach().cpu() for output in run(batch)] for batch in batches]


def _native(model: nn.Module) -> Any:
    return lambda batch: forward(model, batch)


class _Imitation:
    """Traces the model once per shape of its inputs, since a trace by export holds for all values of that shape."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.captures: dict[str, Capture] = {}

    def __call__(self, batch: Batch) -> list[torch.Tensor]:
        shape = str(pytree.tree_map_only(torch.Tensor, lambda x: (tuple(x.shape), x.dtype), batch))
        capture = self.captures.get(shape) or self._trace(batch)
        if capture.method == "export":
            self.captures[shape] = capture
        # No setting but the regions that the graph itself recorded.
        interpreter = PolicyInterpreter(capture, lambda name: Setting("fp32", autocast=False))
        return tensor_outputs(interpreter.run(*capture.bind(self.model, batch)))

    def _trace(self, batch: Batch) -> Capture:
        try:
            return trace_exported(self.model, batch, ambient=False)
        except Exception:  # Python that branches on values: the run itself is recorded instead
            return trace_concrete(self.model, batch)
