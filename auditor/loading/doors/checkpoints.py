"""Reads checkpoints of built models: which weights are missing, and which are stored in low precision."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ...isolation.members import size_of
from ...numerics.formats import dtype_name, is_low
from ..state import convert_errors
from ..statedicts import read_checkpoint


def tensors_in(files: Iterable[Path]) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of all tensors in checkpoint files, memory-mapped. Raises: LoadError(slug="missing-weights" |
    "bad-weights")."""
    for file in files:
        with convert_errors(slug="bad-weights"):
            yield from read_checkpoint(file).items()


def low_entries(
    stored: Iterable[tuple[str, Tensor]], model: nn.Module, left: Collection[str] = ()
) -> Mapping[str, int]:
    """{dtype: number of the checkpoint's FP16 or BF16 entries, at most those of the model}. left: names that the model
    does not use."""
    counts = Counter[str]()
    by_storage = {x.data_ptr(): x for name, x in stored if name not in left}
    for value in by_storage.values():
        if is_low(value.dtype):
            counts[dtype_name(value.dtype)] += value.numel()
    return {name: min(count, size_of(model)) for name, count in counts.items()}


def silence(library: str) -> None:
    """Let transformers or diffusers log errors only, without progress bars: the notes of a BuiltModel say the rest."""
    logging: Any = importlib.import_module(f"{library}.utils.logging")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
