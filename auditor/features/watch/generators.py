"""States of the random generators that a step may use: those of the process, and those of the user's own code."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from .reads import Place

Own = Mapping[str, Any]
"""{name: generator} of the user's code, such as `rng` of the step's file or `encoder.rng` of the model."""
WORDS = 4 * (624 + 1)
"""Bytes of MT19937: 624 words, and the position in them."""


def state_of_process() -> dict[str, Any]:
    """States of the generators of Python, NumPy and torch, and of torch on every GPU that is in use."""
    state = {"python": random.getstate(), "numpy": _numpy.state(), "torch": torch.get_rng_state()}
    if is_on_gpu():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


class _NumpyState:
    """The state of NumPy's own generator. To read it takes as long as ten operations of torch, so that it is read again
    only if its bytes have changed."""

    def __init__(self) -> None:
        self._bytes = b""
        self._state: Any = None

    def state(self) -> Any:
        """As `numpy.random.get_state()`."""
        now = self._read()
        # The second number of a pair of normal numbers is kept outside the bytes: such a state is read each time.
        is_known = self._state is not None and now == self._bytes and bool(now) and not self._state[3]
        if not is_known:
            self._state = np.random.get_state()
            self._bytes = now
        return self._state

    def _read(self) -> bytes:
        """The generator's words and its position in them; no bytes if it is not the default one, MT19937."""
        generator: Any = getattr(np.random, "get_bit_generator", lambda: None)()
        if type(generator).__name__ != "MT19937":
            return b""
        return ctypes.string_at(generator.ctypes.state_address, WORDS)


_numpy = _NumpyState()


def is_on_gpu() -> bool:
    """Whether this process has used a GPU of CUDA."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def restore(state: Mapping[str, Any]) -> None:
    """Put back the states of the generators of Python, NumPy and torch on the CPU."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])


def own_generators(places: Sequence[Place], model: nn.Module) -> dict[str, Any]:
    """The generators that the step's function reads by name, and those that are attributes of modules."""
    found = {place.name: place.get() for place in places if _is_generator(place.get())}
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


def _is_generator(value: Any) -> bool:
    kinds = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
    return isinstance(value, kinds)


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state() if isinstance(generator, np.random.RandomState) else generator.getstate()
