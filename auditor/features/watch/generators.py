"""States of the random generators that a step may use: those of the process, and those of the user's own code."""

from __future__ import annotations

import _random
import ctypes
import random
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from .reads import Place

Own = Mapping[str, Any]
"""{name: generator} of the user's code, such as `rng` of the step's file or `encoder.rng` of the model."""
WORDS = 4 * (624 + 1)
"""Bytes of MT19937: 624 words, and the position in them."""
HEADER = object.__basicsize__
"""Bytes of an object of Python before its own: in `random.Random` the position and the words of MT19937."""


def state_of_process() -> dict[str, Any]:
    """States of the generators of Python, NumPy and torch, and of torch on every GPU that is in use."""
    state = {"python": _python.state(), "numpy": _numpy.state(), "torch": torch.get_rng_state()}
    if is_on_gpu():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


class _Known:
    """The state of a generator of kind MT19937. To read it takes as long as ten operations of torch, so that it is read
    again only if its bytes have changed.

    get_state: reads the state; its item `spare` is the second number of a pair of normal numbers, which is kept outside
    the bytes. get_bytes: the generator's words and its position in them; no bytes if they are unknown.
    """

    def __init__(self, get_state: Callable[[], Any], spare: int, get_bytes: Callable[[], bytes]) -> None:
        self._get_state, self._spare, self._get_bytes = get_state, spare, get_bytes
        self._bytes = b""
        self._state: Any = None

    def state(self) -> Any:
        """As `get_state()`."""
        now = self._get_bytes()
        # A state with a spare number is read each time.
        is_known = self._state is not None and now == self._bytes and bool(now) and not self._state[self._spare]
        if not is_known:
            self._state = self._get_state()
            self._bytes = now
        return self._state


def _bytes_of_numpy() -> bytes:
    generator: Any = getattr(np.random, "get_bit_generator", lambda: None)()
    if type(generator).__name__ != "MT19937":
        return b""
    return ctypes.string_at(generator.ctypes.state_address, WORDS)


def _bytes_of_python() -> bytes:
    return ctypes.string_at(id(_generator) + HEADER, WORDS) if _has_words_inside else b""


def _is_laid_out_as_known() -> bool:
    """Whether the bytes of Python's generator are its position and its words, as in every CPython until now."""
    is_large_enough = _random.Random.__basicsize__ >= HEADER + WORDS
    if not isinstance(_generator, random.Random) or not is_large_enough:
        return False
    position, *words = struct.unpack("=i624I", ctypes.string_at(id(_generator) + HEADER, WORDS))
    return random.getstate()[1] == (*words, position)


_generator: Any = getattr(random.getstate, "__self__", None)
_has_words_inside = _is_laid_out_as_known()
_python = _Known(random.getstate, 2, _bytes_of_python)
_numpy = _Known(np.random.get_state, 3, _bytes_of_numpy)


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
