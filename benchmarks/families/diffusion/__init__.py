"""Sizes and inputs of the diffusers classes whose names do not tell them, from the tables beside this file.

[CLASS]                                # all keys may be left out
like = "OTHER"                         # its `make` and its `call`, as far as this class takes them; what is said here goes before
make = { num_layers = 2 }              # arguments of the constructor; `controlnets` names classes
transformer = "OTHER"                  # what it takes layers from, by its `from_transformer`
part_of = "OTHER"                      # the class cannot run by itself, and this says what it is built into
then = "enable_tiling"                 # a method called on the model that was made
call = { hidden_states = "2x16x4" }    # arguments of one run; text is a tensor, [KIND [NUMBER ...]] SHAPE or
                                       # exact [SHAPE] NUMBER ..., or an object: object CLASS NUMBER ..., or word WORD
"""

from __future__ import annotations

import inspect
import math
import pydoc
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Entry = dict[str, Any]

ENTRIES: dict[str, Entry] = {
    name: entry
    for file in sorted(Path(__file__).parent.glob("*.toml"))
    for name, entry in tomllib.loads(file.read_text()).items()
}


def entry(kind: type) -> Entry:
    """What the tables say of a class, with what it takes over from another."""
    return _entry(
        kind.__name__,
        set(inspect.signature(kind).parameters),
        set(inspect.signature(kind.forward).parameters),  # type: ignore[attr-defined]
    )


def _entry(name: str, made: set[str], called: set[str]) -> Entry:
    own = ENTRIES[name]
    if "like" not in own:
        return {"make": {}, "call": {}} | own
    other = _entry(own["like"], made, called)
    make = {key: value for key, value in other["make"].items() if key in made} | own.get("make", {})
    call = {key: value for key, value in other["call"].items() if key in called} | own.get("call", {})
    return {"make": make, "call": call, "then": own.get("then")}


def filled(value: Any) -> Any:
    """The value, with a tensor for every text in it."""
    if isinstance(value, str):
        return _made(*value.split())
    if isinstance(value, dict):
        return {key: filled(each) for key, each in value.items()}
    return [filled(each) for each in value] if isinstance(value, list) else value


def _made(*words: str) -> Any:
    if words[0] == "word":
        return words[1]
    if words[0] == "object":
        return pydoc.locate(words[1])(*map(int, words[2:]))
    if words[0] == "exact":
        flat = torch.tensor([int(word) for word in words[1:] if "x" not in word])
        return flat.reshape(_shape(words[1])) if "x" in words[1] else flat
    kind, numbers = words[0] if len(words) > 1 else "normal", [int(word) for word in words[1:-1]]
    return _KINDS[kind](_shape(words[-1]), *numbers)


def _shape(word: str) -> list[int]:
    return [int(size) for size in word.split("x")]


def _positions(shape: list[int], batch: int = 0) -> Tensor:
    """Coordinates of the cells of a grid. Shapes: [cells, axes]; with a batch [batch, cells, axes]."""
    grid = torch.stack(torch.meshgrid(*map(torch.arange, shape), indexing="ij"), -1)
    cells = grid.reshape(math.prod(shape), len(shape))
    return cells.repeat(batch, 1, 1) if batch else cells


_KINDS: dict[str, Callable[..., Tensor]] = {
    "normal": lambda shape: torch.randn(shape),
    "steps": lambda shape: 1000 * torch.rand(shape),
    "uniform": lambda shape: torch.rand(shape),
    "complex": lambda shape: torch.polar(torch.ones(shape), torch.randn(shape)),
    "below": lambda shape, end: torch.randint(end, shape),
    "ones": lambda shape: torch.ones(shape),
    "true": lambda shape: torch.ones(shape, dtype=torch.bool),
    "from": lambda shape, first: (torch.arange(shape[-1]) >= first).expand(shape),
    "false": lambda shape: torch.zeros(shape, dtype=torch.bool),
    "positions": _positions,
}
