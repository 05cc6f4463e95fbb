"""Features of texts for a model of sentence-transformers, whose `forward` takes one dict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..records import Batch

TEXTS = ("A man is eating food.", "The girl is carrying a baby, and two men push carts through the woods.")
"""Texts of generated inputs."""


def is_sentence_model(model: Any) -> bool:
    """Whether a model is of a class of sentence-transformers."""
    names = (kind.__module__.partition(".")[0] for kind in type(model).__mro__)
    return "sentence_transformers" in names and hasattr(model, "encode")


def features_of(model: Any, texts: Sequence[str]) -> Batch:
    """The argument of `forward`: token ids and masks by name, padded to the longest text. Raises: what the library does."""
    read = getattr(model, "preprocess", None) or model.tokenize
    features = read(list(texts))
    return ({name: x for name, x in features.items() if isinstance(x, Tensor)},), {}
