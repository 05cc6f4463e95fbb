"""Inputs of the kind a library's model says it takes: its image size, its vocabulary, its spectrogram."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..records import Batch
from .state import in_eval

BATCH = 2
TOKENS = 16
SAMPLES = 16_000
"""One second of sound at the rate speech models take."""


def typical(model: nn.Module) -> tuple[Batch, str] | None:
    """Made-up values in the shapes that a timm or Hugging Face model declares; None where it declares none that run."""
    for batch, source in (*_timm(model), *_hugging_face(model)):
        if _runs(model, batch):
            return batch, source
    return None


def _timm(model: nn.Module) -> Iterator[tuple[Batch, str]]:
    declared = getattr(model, "pretrained_cfg", None)
    size = declared.get("input_size") if isinstance(declared, Mapping) else None
    if size:
        yield (((torch.randn(BATCH, *size),), {}), f"the size timm gives for it, {tuple(size)}, values made up")


def _hugging_face(model: nn.Module) -> Iterator[tuple[Batch, str]]:
    config, name = getattr(model, "config", None), str(getattr(model, "main_input_name", None))
    if config is None or name not in _MAKERS:
        return
    value = _MAKERS[name](model, config)
    if value is None:
        return
    decoder = _tokens(model, config) if getattr(config, "is_encoder_decoder", False) else None
    yield (
        ((), {name: value, **({"decoder_input_ids": decoder} if decoder is not None else {})}),
        f"{name} as the config has them, values made up",
    )


def _tokens(model: Any, config: Any) -> Tensor | None:
    """Token ids over the whole vocabulary but its first few, which tend to mean padding or the end."""
    size = getattr(config, "vocab_size", None)
    if not isinstance(size, int) or size < 2:
        return None
    longest = getattr(config, "max_position_embeddings", None) or TOKENS
    return torch.randint(min(4, size - 1), size, (BATCH, min(TOKENS, int(longest))))


def _pixels(model: Any, config: Any) -> Tensor | None:
    part = getattr(config, "vision_config", config)
    size, channels = getattr(part, "image_size", 224), getattr(part, "num_channels", 3)
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return torch.randn(BATCH, channels, height, width)


def _spectrogram(model: Any, config: Any) -> Tensor | None:
    bins, positions = getattr(config, "num_mel_bins", None), getattr(config, "max_source_positions", None)
    return torch.randn(BATCH, bins, 2 * positions) if bins and positions else None


def _sound(model: Any, config: Any) -> Tensor | None:
    return torch.randn(BATCH, SAMPLES)


_MAKERS: Mapping[str, Callable[[Any, Any], Tensor | None]] = {
    "input_ids": _tokens,
    "pixel_values": _pixels,
    "input_features": _spectrogram,
    "input_values": _sound,
}


def _runs(model: nn.Module, batch: Batch) -> bool:
    try:
        with in_eval(model), torch.no_grad():
            model(*batch[0], **batch[1])
    except Exception:  # what a config says need not fit; there are other ways to inputs
        return False
    return True
