"""States of the random generators that a step may use: those of the process, and those of the user's own code."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

Own = Mapping[str, Any]
"""{name: generator} of the user's code, such as `rng` of the step's file or `encoder.rng` of the model."""


def state_of_process() -> dict[str, Any]:
    """States of the generators of Python, NumPy and torch, and of torch on every GPU that is in use."""
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    if is_on_gpu() and not torch.cuda.is_current_stream_capturing():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def is_on_gpu() -> bool:
    """Whether this process has used a GPU of CUDA."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def restore(state: Mapping[str, Any]) -> None:
    """Put back the states of the generators of Python, NumPy and torch on the CPU."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])


def own_generators(step: Callable[..., Any] | None, model: nn.Module) -> dict[str, Any]:
    """The generators that the step's function reads by name, and those that are attributes of modules."""
    found = {name: value for name, value in _names_of(step) if _is_generator(value)}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if _is_generator(value):
                found[f"{path}.{name}"] = value
    return found


def states_of(own: Own) -> dict[str, Any]:
    """The states of generators of the user's code."""
    return {name: _state(generator) for name, generator in own.items()}


def restore_own(own: Own, states: Mapping[str, Any]) -> None:
    """Put back the states of generators of the user's code. Those of a GPU cannot be set on a CPU."""
    for name, generator in own.items():
        if name not in states:
            continue
        state = states[name]
        if isinstance(generator, torch.Generator) and state.numel() == generator.get_state().numel():
            generator.set_state(state)
        elif isinstance(generator, np.random.Generator):
            generator.bit_generator.state = state
        elif isinstance(generator, np.random.RandomState):
            generator.set_state(state)
        elif isinstance(generator, random.Random):
            generator.setstate(state)


def _names_of(step: Callable[..., Any] | None) -> Iterator[tuple[str, Any]]:
    """(name, value) of the global names and of the outer variables that the step's function reads."""
    code = getattr(step, "__code__", None)
    if code is None:
        return
    scope = getattr(step, "__globals__", {})
    yield from ((name, scope[name]) for name in code.co_names if name in scope)
    for name, cell in zip(code.co_freevars, getattr(step, "__closure__", None) or (), strict=False):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue


def _is_generator(value: Any) -> bool:
    kinds = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
    return isinstance(value, kinds)


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state() if isinstance(generator, np.random.RandomState) else generator.getstate()
