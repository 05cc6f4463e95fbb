"""The body of a `with` may do anything to a model and its inputs: all of it comes back."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from ..devices import generators
from ..errors import AuditorError
from .process import settings
from .reachable import Reachable
from .storages import plain_torch


@contextmanager
def unchanged(model: nn.Module, *holders: Any, watched: bool = True) -> Iterator[None]:
    """Whatever the body's runs of `model` write comes back: in the model, in `holders` and in the random generators.

    Comes back: the values and the identity of parameters, buffers, gradients, flags, hooks, submodules and of every
    plain attribute, as deep as lists, dicts and objects lead; attributes of the model's own classes; nested inputs; what
    the functions among all these keep in closures and defaults, and the globals that they name; what a thread keeps for
    itself. A functools.lru_cache forgets the tensors that it was given. Iterators over lists, tuples and ranges, counts
    and cycles stay where they are: the body moves copies on. So does what is set for the whole process (`settings`).
    Two runs in two such bodies therefore start from the same state, and the caller seeds once.
    Does not come back: `grad_fn` of a tensor that had one; what only generators or C++ objects hold.
    Gradients of what the body computes are to be taken inside it: the values that they need are put back after it.
    What the body records must not hang on the model or the holders, or it is undone too.
    Cost: small tensors are copied at once, a large one only when an operation is about to write into it. watched: False
    leaves out the latter, for a body that is timed in one that watches and has seen these writes.
    Raises: AuditorError(slug="state-not-restored"), torch.OutOfMemoryError where a GPU has no memory to compare with; if the body raised, its own error goes on, with a note.
    """
    back, settled = _generators(), settings()
    with plain_torch():
        reached = Reachable(model, holders)
        reached.lend_iterators()
    try:
        with reached.storages.saved_before_written() if watched else nullcontext():
            yield
    except BaseException as error:
        for problem in _restore(reached, back, settled):
            error.add_note(problem)
        if reached.full is not None:
            raise reached.full from None
        raise
    problems = _restore(reached, back, settled)
    if reached.full is not None:
        raise reached.full
    if problems:
        raise AuditorError("\n".join(problems), slug="state-not-restored")


def _restore(reached: Reachable, generators: Callable[[], None], settled: Callable[[], None]) -> list[str]:
    with plain_torch():
        problems = reached.restore()
    generators()
    settled()
    return problems


def _generators() -> Callable[[], None]:
    """Call the answer to put back the global generators of python, numpy and torch; CUDA only once it is in use."""
    with plain_torch():
        restores: list[Callable[[], object]] = [
            partial(random.setstate, random.getstate()),
            partial(np.random.set_state, np.random.get_state()),
            partial(torch.set_rng_state, torch.get_rng_state()),
            *generators(),
        ]

    def back() -> None:
        with plain_torch():
            for restore in restores:
                restore()

    return back
