"""Models that differ in one thing, and what a cache knows them by."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from auditor.cache.kept import Kept
from auditor.loading import from_object, in_eval
from auditor.tape import capture

SLOPE = 2.0


class Small(nn.Module):
    """Reads a parameter, a buffer, an attribute, a global and what a function of its own gives."""

    def __init__(self, factor: float = 3.0, shift: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.drop, self.last = nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 4)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 16))
        self.factor, self.shift = factor, shift or (lambda x: x + 1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.shift(self.drop(self.first(x)) * self.scale * self.factor * SLOPE)).softmax(-1)


def shifted(by: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that closes over a number."""
    return lambda x: x + by


def inputs() -> torch.Tensor:
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(1))


def known_by(model: nn.Module, x: Any, folder: Path, device: str = "cpu") -> tuple[str, str | None]:
    """What tells the model, and the batch."""
    subject, kept = from_object(model, x), Kept(folder)
    with in_eval(model):
        captured = capture(subject, ("fp16", "bf16"))
        kept.begun(captured, subject, device)
        assert kept.active, kept.without
        return kept.base, kept.batch(captured, model, subject.batches[0])
