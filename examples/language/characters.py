"""The trained character model of example 03, with a step function, so that its tokens can be audited:

python -m auditor examples/language/characters.py --generate 256 --max-error 0.02
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
written = importlib.import_module("03_handwritten_transformer")


class Writer(written.CharacterLM):  # type: ignore[misc, name-defined]
    """It has no cache: its state is the text so far, which every step reads again."""

    def step(self, tokens: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Logits of what comes behind these tokens, and the text."""
        text = tokens if state is None else torch.cat([state, tokens], 1)
        return self(text)[:, -1], text


def get_model() -> nn.Module:
    model = written.get_model()
    model.__class__ = Writer
    return model


def get_inputs() -> tuple[Tensor, ...]:
    (tokens,) = written.get_inputs()
    return (tokens[:, :24],)


def get_eval_inputs() -> list[tuple[Tensor, ...]]:
    return [(tokens[:, :24],) for (tokens,) in written.get_eval_inputs()]
