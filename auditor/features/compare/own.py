"""Gradients of the model's own backward pass: an autograd.Function has a backward that no recording shows."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...capture.paths import reach
from ...errors import describe, let_through
from ...isolation.outputs import tensor_outputs
from ...isolation.process import disable_compilers, disable_fused_path
from ...isolation.run_model import copy_batch, from_the_start, lowered_batch, stored_in
from ...records import Batch
from .fingerprint import project


@dataclass
class OwnBackward:
    """What the model's own backward pass gives.

    gradients: {parameter: derivative of the projection of all outputs}, zeros for a parameter without one. functions:
    autograd functions with a backward of their own, each with its source line. failure: why there are no gradients.
    """

    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    functions: tuple[str, ...] = ()
    failure: str | None = None


def run_backward(model: nn.Module, batch: Batch, seed: int, dtype: torch.dtype | None) -> OwnBackward:
    """Run the model's own forward and backward pass, stored in `dtype` or, for None, as it is. The model is restored."""
    found = OwnBackward()
    stored = nullcontext() if dtype is None else stored_in(model, dtype)
    given = batch if dtype is None else lowered_batch(batch, dtype)
    try:
        with stored:
            _differentiate(found, model, given, seed)
    except Exception as error:
        let_through(error)
        found.failure = describe(error)
    return found


def _differentiate(found: OwnBackward, model: nn.Module, batch: Batch, seed: int) -> None:
    """Add the functions, then the gradients, of one run."""
    parameters = {name: x for name, x in model.named_parameters() if x.requires_grad}

    def run() -> None:
        args, kwargs = copy_batch(batch)
        with disable_fused_path(), disable_compilers():
            outputs = tensor_outputs(model(*args, **kwargs))
        projected = [project(x).real.double() for x in outputs if x.requires_grad]
        if not projected:
            return
        total = torch.stack(projected).sum()
        found.functions = tuple(_functions_behind(total))
        result = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
        for (name, x), gradient in zip(parameters.items(), result, strict=True):
            found.gradients[name] = torch.zeros_like(x).detach() if gradient is None else gradient.detach()

    from_the_start(model, batch, run, seed, gradients=True)


def _functions_behind(x: torch.Tensor) -> Iterable[str]:
    """The user's autograd functions that a backward pass from `x` runs, each once."""

    def following(node: Any) -> list[Any]:
        return [source for source, _ in node.next_functions if source is not None]

    classes = dict[type, None]()
    for node in reach([x.grad_fn], following):
        function = getattr(node, "_forward_cls", None)  # of a node that a user's function made
        if function is not None:
            classes[function] = None
    return [_described(each) for each in classes if not each.__module__.startswith("torch.")]


def _described(function: type) -> str:
    """The name of an autograd function, with the line of its backward."""
    code = getattr(getattr(function, "backward", None), "__code__", None)
    where = f" ({Path(code.co_filename).name}:{code.co_firstlineno})" if code is not None else ""
    return f"{function.__name__}{where}"
