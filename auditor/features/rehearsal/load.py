"""Loads a training step and its batches from a TARGET."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ...emulation.emulate import scaled_as_on_cuda
from ...emulation.regions import written_as_meant
from ...loading.inputs import LOADERS
from ...loading.target import call, import_target, named_in, parse, user_code
from .loops import find_step, with_trainer

BATCHES = (*LOADERS, "get_inputs")
"""Names in the step's file that its batches may have."""


@contextmanager
def load_step(text: str, name: str | None, seed: int) -> Iterator[tuple[Any, Any, str]]:
    """Yield the step that a TARGET names, its batches, and the step's name; the rehearsal must run in the `with` block.

    name: of the batches, `f.py:name` or a name in the step's file; None for the first of BATCHES there. Autocast regions
    and GradScalers that the file creates are not disabled without a GPU. Raises: LoadError.
    """
    target = parse(text)
    with user_code(target, seed), written_as_meant(), scaled_as_on_cuda():
        module = import_target(target)
        if target.symbol is None:
            target = replace(target, symbol=find_step(module, target.label, text))
        advice = "name the function that runs one training step, as in train.py:step"
        step = named_in(target, advice, "missing-target", seed)
        if target.text.endswith(")"):  # a function or class that returns the step, with literal arguments
            step = call(step, target.text, "bad-step", *target.args, **target.kwargs)
        step = with_trainer(step, module)
        batches: Any = None
        if name := name or next((name for name in BATCHES if hasattr(module, name)), None):
            where = parse(name) if ":" in name else replace(target, symbol=name)
            value = named_in(where, "give --batches file.py:name", "missing-inputs", seed)
            made = call(value, f"{name}()", "bad-inputs") if callable(value) else value
            batches = value if isinstance(made, Iterator) else made  # a function is called again for the next pass
        yield step, batches, target.text
