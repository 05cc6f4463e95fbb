"""What a capsule shows without a replay: entries of the batch and weights that are not finite, and other circumstances."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ...numerics.entries import entries, is_number
from .capsule import Capsule
from .encoding import NotSaved
from .watched import code_of

LARGER = 10.0
"""Factor by which the values of a batch exceed those of the batches before it, from which the replay says so."""


def facts_of(capsule: Capsule, loop: Any) -> Iterator[str]:
    """Sentences on the batch, the weights, the code and the versions. loop: the user's step."""
    about = capsule.about
    for text in (*_missing_in_batch(capsule), *broken_batch(capsule), *_larger_batch(capsule)):
        yield f"{text[0].upper()}{text[1:]}."
    broken = list(broken_weights(capsule))
    if broken:
        yield f"Before the step, {len(broken)} weights or buffers are not finite, the first is {broken[0]}."
    if about.changed:
        yield "The batch was written to after the step began: the capsule has its later values."
    here = code_of(inspect.unwrap(loop)) if callable(loop) else None
    if about.code is not None and here is not None and here.digest != about.code.digest:
        yield f"{Path(here.file).name} is not as it was in the training: lines may differ."
    recorded = about.versions.get("torch", "")
    if recorded and recorded.partition("+")[0] != torch.__version__.partition("+")[0]:
        yield f"The training used torch {recorded}, this replay uses {torch.__version__}."


def _missing_in_batch(capsule: Capsule) -> Iterator[str]:
    """Values that a capsule cannot contain, such as an iterator over batches."""
    for call in capsule.calls:
        args, kwargs = call.batch
        for path, value in pytree.tree_flatten_with_path((tuple(args), dict(kwargs)))[0]:
            if isinstance(value, NotSaved):
                yield f"{_argument(path)} is not in the capsule ({value.text}): give the step its tensors"


def broken_batch(capsule: Capsule) -> Iterator[str]:
    for number, call in enumerate(capsule.calls):
        of_call = f" of call {number}" if len(capsule.calls) > 1 else ""
        for path, x in _named_tensors(call.batch):
            values = entries(x)
            broken = int((~values.isfinite()).sum())
            if broken:
                kind = "NaN" if bool(values.isnan().any()) else "Inf"
                at = f", first at {_first_index(x)}" if x.layout is torch.strided else ""
                yield f"{path}{of_call} has {broken} entries of {values.numel()} that are {kind} or not finite{at}"


def _larger_batch(capsule: Capsule) -> Iterator[str]:
    """Tensors of the batch whose largest value is far above those of the batches before it."""
    earlier: dict[str, float] = {}
    for batches in capsule.previous:
        for batch in batches:
            for path, x in _named_tensors(batch):
                earlier[path] = max(earlier.get(path, 0.0), _largest(x))
    for call in capsule.calls:
        for path, x in _named_tensors(call.batch):
            before, now = earlier.get(path, 0.0), _largest(x)
            if before and math.isfinite(now) and now > LARGER * before:
                yield f"{path} has values up to {now:.4g}, in the batch before up to {before:.4g}"


def broken_weights(capsule: Capsule) -> Iterator[str]:
    for name, x in (*capsule.weights.items(), *capsule.buffers.items()):
        if is_number(x) and name in capsule.weights and not bool(entries(x).isfinite().all()):
            yield f"{name} with Inf or NaN"


def _named_tensors(batch: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """(words, tensor) of the floating-point tensors of a batch: `argument 0`, `argument x['mask']`."""
    args, kwargs = batch
    for path, x in pytree.tree_flatten_with_path((tuple(args), dict(kwargs)))[0]:
        if isinstance(x, torch.Tensor) and is_number(x) and not x.is_nested:
            yield _argument(path), x


def _argument(path: Any) -> str:
    """An entry of a step's arguments (args, kwargs) in words."""
    first = path[1]
    name = getattr(first, "idx", getattr(first, "key", ""))
    return f"argument {name}{pytree.keystr(path[2:])}"


def _largest(x: torch.Tensor) -> float:
    values = entries(x)
    return float(values.abs().max()) if values.numel() else 0.0


def _first_index(x: torch.Tensor) -> str:
    return str((~x.isfinite()).nonzero()[0].tolist()) if x.dim() else "[]"
