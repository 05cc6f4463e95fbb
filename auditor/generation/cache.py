"""Rounds a key-value cache after each decoding step, as if it were stored in fewer bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..numerics.casting import in_format, plain
from ..numerics.formats import FORMATS

INT8 = 127.0
STORED: dict[str, int] = {"bf16": 2, "fp8_e4m3": 1, "int8": 1}
"""{format of a stored cache: bytes per entry}. One-byte formats have a scale per tensor, as in vLLM and
TensorRT-LLM."""


def cached_tensors(state: Any) -> Iterator[torch.Tensor]:
    """The floating-point tensors that one step passes to the next: keys and values of each layer, or a step function's
    state."""
    if isinstance(state, torch.Tensor):
        shared = any(step == 0 and size > 1 for step, size in zip(state.stride(), state.shape, strict=True))
        yield from [state] * (state.is_floating_point() and not shared)  # entries that share memory cannot be written
    elif isinstance(state, dict):
        yield from cached_tensors([*state.values()])
    elif isinstance(state, list | tuple):
        for each in state:
            yield from cached_tensors(each)
    elif hasattr(state, "layers"):
        yield from cached_tensors([getattr(layer, name, None) for layer in state.layers for name in ("keys", "values")])
    elif hasattr(state, "self_attention_cache"):
        yield from cached_tensors([state.self_attention_cache, state.cross_attention_cache])


class CacheRounding:
    """Rounds all tensors of a cache after each step, in place.

    The prompt sets each tensor's scale, by the tensor's largest entry. Later entries beyond the scale saturate. sizes:
    entries per text after each step.
    """

    def __init__(self, stored: str, texts: int) -> None:
        self.stored, self.texts, self.sizes = stored, texts, list[float]()
        self._scales: list[torch.Tensor] = []
        self._beyond = self._entries = 0

    def __call__(self, state: Any) -> None:
        tensors = [*cached_tensors(state)]
        self.sizes.append(sum(x.numel() for x in tensors) / self.texts)
        largest = INT8 if self.stored == "int8" else FORMATS[self.stored].largest
        if STORED[self.stored] == 1 and not self._scales:
            self._scales = [x.abs().max().clamp_min(torch.finfo(torch.float32).tiny) / largest for x in tensors]
        for index, x in enumerate(tensors):
            if STORED[self.stored] > 1:
                x.copy_(plain(in_format(x, FORMATS[self.stored])))
                continue
            scaled = (x / self._scales[index]).nan_to_num()
            self._beyond += int((scaled.abs() > largest * (1 + 1e-6)).sum())
            self._entries += x.numel()
            scaled = scaled.clamp(-largest, largest)
            rounded = scaled.round() if self.stored == "int8" else plain(in_format(scaled, FORMATS[self.stored]))
            x.copy_(rounded * self._scales[index])

    @property
    def saturated_share(self) -> float:
        """Share of the entries that exceeded the scale, over all steps."""
        return self._beyond / max(self._entries, 1)

    def bytes_of(self, first: int) -> tuple[float, float]:
        """Cache bytes of a text that do not depend on its length, and bytes per token. first: tokens of the prompt."""
        steps = len(self.sizes) - 1
        each = (self.sizes[-1] - self.sizes[0]) / steps if steps else self.sizes[0] / max(first, 1)
        width = STORED[self.stored]
        return max(self.sizes[0] - first * each, 0.0) * width, each * width
