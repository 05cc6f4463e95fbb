"""Precision of every operation as a minimum cut; a cast is paid once, however many read it."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from ..plan.mincut import sink_side
from .operations import Operation, Table, Value

_LOW, _HIGH = ("low",), ("fp32",)
"""The ends of the network: no names of operations."""

LEAST = 1e-30
"""Squared errors below it count for nothing in the range of multipliers."""

Arc = tuple[Hashable, Hashable, float, float]
"""(tail, head, seconds, squared error) that it costs to have the tail low and the head FP32."""


@dataclass(frozen=True)
class Price:
    """seconds: of one forward, what has no choice left out; square: the squared error that is predicted."""

    seconds: float
    square: float

    def under(self, multiplier: float) -> float:
        """What a cut minimises."""
        return self.seconds + multiplier * self.square


class Network:
    """The choices of a table: which operations run low.

    Every operation is a node. For a value that is made FP32, a helper says whether some reader is low; for one that is
    made low, whether all are: so the energy is one of pairs that only penalise unequal labels, and its minimum a cut.
    Source: Kolmogorov and Zabih, What energy functions can be minimized via graph cuts? (2004).
    """

    def __init__(self, table: Table) -> None:
        self._table = table
        self._free = table.may_be_low()
        self._readers: dict[str, list[str]] = {name: [] for name in table.values}
        for operation in table.operations.values():
            for value in operation.reads:
                self._readers[value].append(operation.name)

    @cached_property
    def _given(self) -> dict[str, list[str]]:
        """{operation: FP32 values that it gives}."""
        found: dict[str, list[str]] = {}
        for value in self._table.values.values():
            if value.made_by is not None:
                found.setdefault(value.made_by, []).append(value.name)
        return found

    def low(self, multiplier: float) -> frozenset[str]:
        """The operations that are low at the minimum of seconds + multiplier * squared error; of equal minima, the most."""
        unit = sum(operation.low + operation.high for operation in self._table.operations.values()) or 1.0
        arcs = ((tail, head, _whole((time + multiplier * error) / unit)) for tail, head, time, error in self._arcs)
        high = sink_side(arcs, _LOW, _HIGH)
        return frozenset(name for name in self._free if name not in high)

    def price(self, low: frozenset[str]) -> Price:
        """What a choice comes to."""
        return self._sum(self._table.operations.values(), self._table.values.values(), low)

    def around(self, operation: Operation, low: frozenset[str]) -> Price:
        """Of that, what changes with one operation: its own share, and that of the values it reads and gives."""
        values = dict.fromkeys((*operation.reads, *self._given.get(operation.name, ())))
        return self._sum([operation], [self._table.values[name] for name in values], low)

    def _sum(self, operations: Iterable[Operation], values: Iterable[Value], low: frozenset[str]) -> Price:
        elapsed, square = 0.0, 0.0
        for operation in operations:
            elapsed += operation.low if operation.name in low else operation.high
            square += operation.error if operation.name in low else 0.0
        for value in values:
            lowered, raised = self._casts(value, low)
            square += value.error if lowered else 0.0
            once = value.stored and not raised  # all of them read it low: it is stored so
            elapsed += value.cast if (lowered and not once) or (raised and value.made_by in low) else 0.0
        return Price(elapsed, square)

    def multipliers(self) -> tuple[float, float]:
        """One so small that errors do not matter, and one so large that time does not."""
        saved = sum(abs(each.high - each.low) for each in self._table.operations.values())
        found = [each.error for each in self._table.operations.values()]
        errors = [error for error in (*found, *(each.error for each in self._table.values.values())) if error > LEAST]
        if not errors or not saved:
            return 1.0, 1.0
        return saved / sum(errors) * 1e-6, saved / min(errors)

    def _casts(self, value: Value, low: frozenset[str]) -> tuple[bool, bool]:
        """Whether it is FP32 and some reader is low; whether some reader is FP32, the caller among them."""
        readers = self._readers[value.name]
        lowered = value.made_by not in low and any(reader in low for reader in readers)
        return lowered, value.returned or any(reader not in low for reader in readers)

    @cached_property
    def _arcs(self) -> list[Arc]:
        found: list[Arc] = []
        for operation in self._table.operations.values():
            if operation.name in self._free:
                found += [(operation.name, _HIGH, operation.low, operation.error)]
                found += [(_LOW, operation.name, operation.high, 0.0)]
        for value in self._table.values.values():
            found += self._between(value)
        return [arc for arc in found if arc[0] != _HIGH and arc[0] != arc[1]]

    def _between(self, value: Value) -> Iterator[Arc]:
        """The casts of one value."""
        maker: Hashable = value.made_by if value.made_by in self._free else _HIGH
        names = dict.fromkeys(self._readers[value.name])
        readers: list[Hashable] = [name for name in names if name in self._free]
        fixed = value.returned or len(readers) < len(names)
        some: Hashable = readers[0] if len(readers) == 1 else ("some", value.name)
        every: Hashable = readers[0] if len(readers) == 1 and not fixed else ("every", value.name)
        every = _HIGH if fixed else every
        if len(readers) > 1:
            yield from ((reader, some, math.inf, 0.0) for reader in readers)
            if every != _HIGH and (maker != _HIGH or value.stored):
                yield from ((every, reader, math.inf, 0.0) for reader in readers)
        if readers:
            yield some, every if value.stored else maker, value.cast, 0.0
            yield some, maker, 0.0, value.error
        if maker != _HIGH and (readers or fixed):
            yield maker, every, value.cast, 0.0


def _whole(share: float) -> int:
    """Billionths of a billionth: integers make the cut exact. Prohibitions are large, not infinite, so that a cut exists."""
    return round(min(share, 1e9) * 1e18)
