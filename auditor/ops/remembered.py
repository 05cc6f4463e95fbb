"""Products that one run computed, for others like it: taken from there where all they read is the same bit for bit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch

from ..raised import let_through
from ..trees import over_tensors, tensors_in

T = TypeVar("T")

_MOST = 1 << 28
"""Bytes of results that are kept, at most; what comes later is computed twice."""

_WORDS = 1 << 15
"""Words of 64 bits that are told by two of them: they stay in the cache, and so do as many factors."""


@dataclass
class Products:
    """Results by all that they were computed from. taken: how many stood for one that was not computed again."""

    known: dict[Hashable, Any] = field(default_factory=dict)
    bytes: int = 0
    taken: int = 0
    earlier: set[Hashable] = field(default_factory=set)

    def begin(self) -> None:
        """What there is comes from earlier models; the first product that is none of theirs ends that, since what
        follows it is another too, and no more is held than the results of one model."""
        self.earlier = set(self.known)

    def keep(self, key: Hashable, result: Any) -> None:
        """Keep a copy of a result, which may be written to in the run it came from."""
        size = _size(result)
        if self.bytes + size <= _MOST:
            self.known[key] = _copied(result)
            self.bytes += size

    def take(self, key: Hashable, last: bool) -> Any:
        """A result of one's own; None where there is none. last: it is given up."""
        found = self.known.get(key)
        if found is None:
            for other in self.earlier:
                self._give_up(other)
            self.earlier.clear()
            return None
        self.taken += 1
        self.earlier.discard(key)
        return self._give_up(key) if last else _copied(found)

    def _give_up(self, key: Hashable) -> Any:
        found = self.known.pop(key)
        self.bytes -= _size(found)
        return found


def _size(result: Any) -> int:
    return sum(x.numel() * x.element_size() for x in tensors_in(result))


def _copied(result: Any) -> Any:
    """The same entries, laid out alike, as tensors that may be written to and that autograd may save."""
    with torch.inference_mode(False):
        return over_tensors(lambda x: x.detach().clone(memory_format=torch.preserve_format), result)


class _Run(threading.local):
    products: Products | None = None
    last = False


_RUN = _Run()


def is_remembering() -> bool:
    """Whether products are kept or taken in this thread."""
    return _RUN.products is not None


@contextmanager
def remembering(products: Products, last: bool = False) -> Iterator[None]:
    """In the body, in this thread, large products are computed once, and not at all where a body before it did.

    last: no body follows; nothing is kept.
    """
    before = _RUN.products, _RUN.last
    _RUN.products, _RUN.last = products, last
    try:
        yield
    finally:
        _RUN.products, _RUN.last = before


def remembered(compute: Callable[[], T], taken: Callable[[T], T], *read: Any) -> T:
    """`compute()`, or `taken` of what it was before: a tensor, or several. read: all that it depends on, tensors and
    others that hold none."""
    products, last = _RUN.products, _RUN.last
    key = _key(read) if products is not None else None
    if products is None or key is None:
        return compute()
    if (known := products.take(key, last)) is not None:
        return taken(known)
    result = compute()
    if not last:
        products.keep(key, result)
    return result


def _key(read: tuple[Any, ...]) -> Hashable | None:
    """All that a product reads, in little; None where that cannot be told."""
    try:
        return tuple(_told(x) if isinstance(x, torch.Tensor) else repr(x) for x in read)
    except Exception as error:  # a tensor whose memory cannot be read, as inside vmap
        let_through(error)
        return None


def _told(x: torch.Tensor) -> Hashable:
    """A tensor's entries, their order in memory and its dtype."""
    strides = x.stride()
    order = sorted(range(x.dim()), key=lambda dim: -strides[dim])
    laid = x.detach().permute(order).contiguous().view(torch.int16 if x.itemsize == 2 else torch.uint8)
    return x.dtype, tuple(x.shape), strides, _digest(laid.numpy().reshape(-1).view(np.uint8))


def _digest(content: np.ndarray[Any, np.dtype[np.uint8]]) -> Hashable:
    """What tells bytes from others, in a third of the time that sha256 takes.

    Words w of 64 bits are told by sum(w * a) and sum(w' * b) modulo 2^64, a and b odd random factors, w' the word with its
    bytes in reverse. Contents that were not made to agree do so with a chance of 2^-56 at most: where bit v is the lowest
    that differs, one in 2^(63 - v) factors takes the first sum to the same, and one in 2^(8 * (v // 8)) the other.
    Source: Carter and Wegman, Universal classes of hash functions (1979).
    """
    whole = content.size // 8 * 8
    words, factors = content[:whole].view(np.int64), _factors()
    found: list[Hashable] = [content[whole:].tobytes()]
    for start in range(0, words.size, _WORDS):
        part = words[start : start + _WORDS]
        found += [int(np.dot(part, factors[0, : part.size])), int(np.dot(part.byteswap(), factors[1, : part.size]))]
    return tuple(found)


@cache
def _factors() -> np.ndarray[Any, np.dtype[np.int64]]:
    drawn = np.random.default_rng(0).integers(-(1 << 63), (1 << 63) - 1, (2, _WORDS))
    return np.asarray(drawn | 1, dtype=np.int64)
