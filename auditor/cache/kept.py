"""What an audit takes from the folder and keeps there, and what it says of that."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from ..records import Batch, Capture, Subject
from ..sparing import now
from .content import Contents, Uncomparable
from .sources import code_of, digests, imported_since
from .store import Store
from .surroundings import surroundings


class Runs:
    """What single runs of the recorded graph came to, by what was low in them: all of one batch, by one measure."""

    def __init__(self, kept: Kept | None = None, key: str = "") -> None:
        self._kept, self._key = kept, key
        self._known: dict[str, list[Any]] = {} if kept is None else _runs_in(kept.store.get(key))
        self._found: dict[str, list[Any]] = {}
        self._taken: set[str] = set()

    def __bool__(self) -> bool:
        return self._kept is not None

    def get(self, run: str, *kinds: type[Any]) -> list[Any] | None:
        """What a run came to that was made before, in this audit or an earlier one: a value of each kind."""
        if self._kept is None:
            return None
        if run in self._found:
            return self._found[run]
        found = self._known.get(run)
        if found is None or [type(value) for value in found] != [*kinds]:
            return None
        if run not in self._taken:
            self._taken.add(run)
            self._kept.counts["runs"] += 1
        return found

    def put(self, run: str, came_to: Sequence[Any]) -> None:
        """Keep what a run came to."""
        if self._kept is not None:
            self._found[run] = list(came_to)

    def write(self) -> None:
        """Those that were made here, beside those that lie there by now."""
        if self._kept is not None and self._found:
            self._kept.store.put(self._key, {**_runs_in(self._kept.store.get(self._key)), **self._found})


NO_RUNS = Runs()


class Met(Runs):
    """Runs of one audit, kept for as long as that takes."""

    def __bool__(self) -> bool:
        return True

    def get(self, run: str, *kinds: type[Any]) -> list[Any] | None:
        """What a run came to that was made before."""
        return self._found.get(run)

    def put(self, run: str, came_to: Sequence[Any]) -> None:
        """Keep what a run came to."""
        self._found[run] = list(came_to)


def _runs_in(held: Any) -> dict[str, list[Any]]:
    if not isinstance(held, dict):
        return {}
    return {key: run for key, run in held.items() if isinstance(run, list)}


@dataclass(eq=False)
class Kept:
    """Of one audit. store_at: the folder, None where nothing is kept. without: why nothing can be.

    counts: what was taken, by a key of _COUNTED; times: on how many of the `batches`.
    """

    store_at: Path | None = None
    without: str = ""
    base: str = ""
    contents: Contents = field(default_factory=Contents)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_COUNTED, 0))
    times: dict[str, int] = field(default_factory=dict)
    batches: int = 0
    _open: dict[str, Runs] = field(default_factory=dict)
    _late: str = ""
    _before: frozenset[str] = frozenset()

    @classmethod
    def at(cls, folder: str | PathLike[str] | None) -> Kept:
        """Of one audit; nothing is taken or kept where there is no folder."""
        return NOTHING if folder is None else cls(Path(folder))

    @cached_property
    def store(self) -> Store:
        assert self.store_at is not None
        return Store(self.store_at)

    @property
    def active(self) -> bool:
        """Whether anything is taken from the folder, or kept there."""
        return bool(self.base)

    def begun(self, capture: Capture, subject: Subject, device: str) -> Capture:
        """The same capture; what all measurements of it depend on, but for the inputs, is known from here on."""
        if self.store_at is None:
            return capture
        try:
            flat = capture.bind(subject.model, subject.batches[0])
            held = [x for place, x in zip(capture.placeholders, flat, strict=True) if place.kind != "input"]
            code = code_of(subject.model, [*_beside(subject), *_written_in(capture)])
            found = self.contents.digest(
                self._graph(capture),
                self.contents.tensors(held),
                code,
                surroundings(device),
                repr(now()),
                subject.raised,
            )
            self._late, self._before = f"late-{found}", frozenset(sys.modules)
            known = self._known_late()
            self.base = (
                found if digests(known) == known else self.contents.digest(found, sorted(digests(known).items()))
            )
        except Uncomparable as reason:
            self.without = str(reason)
        return capture

    def _known_late(self) -> dict[str, str]:
        """Files that were imported while an earlier audit measured, as they were then: a derivative may name a module."""
        held = self.store.get(self._late)
        return {path: str(digest) for path, digest in held.items()} if isinstance(held, dict) else {}

    def graph(self, capture: Capture) -> str | None:
        """What tells one recorded graph from others; None where nobody can."""
        with suppress(Uncomparable):
            return self.contents.digest(self._graph(capture)) if self.active else None
        return None

    def _graph(self, capture: Capture) -> list[Any]:
        nodes = [
            (
                n.name,
                n.op,
                n.owner,
                n.inputs,
                n.shape,
                n.dtype,
                n.floating,
                n.region,
                n.in_place,
                n.literals,
                n.autocast_literals,
            )
            for n in capture.nodes.values()
        ]
        return [self.contents.graph(capture.graph_module), nodes, capture.placeholders, capture.outputs, capture.method]

    def batch(self, capture: Capture, model: torch.nn.Module, batch: Batch) -> str | None:
        """What tells one batch from others, with all that the graph takes; None where nobody can tell."""
        return self.of_flat(capture.bind(model, batch)) if self.active else None

    def of_flat(self, flat: Sequence[Any]) -> str | None:
        """The same of what a graph takes."""
        with suppress(Uncomparable):
            return self.contents.tensors(flat) if self.active else None
        return None

    def key(self, kind: str, *parts: Any) -> str:
        """Of an entry; "" where nothing is kept of it."""
        if not self.active or not all(part is not None for part in parts):
            return ""
        with suppress(Uncomparable):
            return f"{kind}-{self.contents.digest(self.base, *parts)}"
        return ""

    def get(self, key: str, kind: Any) -> Any:
        """A record of a kind that was kept; None where there is none."""
        held = self.store.get(key) if key else None
        if held is None:
            return None
        from pydantic import (
            TypeAdapter,
            ValidationError,
        )  # 4 MiB and a tenth of a second, of which other audits have no use

        try:
            return TypeAdapter(kind).validate_python(held)
        except (ValidationError, RecursionError):
            return None

    def put(self, key: str, record: Any, kind: Any) -> None:
        """Keep a record."""
        if key:
            from pydantic import TypeAdapter

            self.store.put(key, TypeAdapter(kind).dump_python(record, mode="json"))

    def generators(self) -> str:
        """What the next random numbers are: what draws some is not kept, since nothing that follows would draw the same."""
        if not self.active:
            return ""
        numpy = sys.modules.get("numpy")
        of_numpy = repr(numpy.random.get_state()) if numpy else ""
        return self.contents.digest(torch.get_rng_state().clone(), repr(random.getstate()), of_numpy)

    def runs(self, *parts: Any) -> Runs:
        """Runs on one batch, by one measure; none that are kept where a part is None."""
        key = self.key("runs", *parts)
        if not key:
            return NO_RUNS
        if key not in self._open:
            self._open[key] = Runs(self, key)
        return self._open[key]

    @contextmanager
    def written(self) -> Iterator[None]:
        """What runs in the body come to is written after it, whatever it raises."""
        try:
            yield
        finally:
            for runs in self._open.values():
                runs.write()
            if self.active and (found := imported_since(self._before)).keys() - (known := self._known_late()).keys():
                self.store.put(self._late, {**found, **known})

    @property
    def said(self) -> str | None:
        """What was taken and why not more, in a sentence; None where there is no folder."""
        if self.store_at is None:
            return None
        if self.without:
            return f"nothing was taken from the cache or kept there, since nobody can tell if it is the same: {self.without}"
        taken = [_COUNTED[what](number) + self._batches(what) for what, number in self.counts.items() if number]
        none = "nothing in the cache is of this model with these inputs, formats and settings"
        found = f"taken from the cache: {', '.join(taken)}" if taken else none
        return f"{found}; nothing more could be kept there: {self.store.failed}" if self.store.failed else found

    def took(self, what: str, number: int) -> None:
        """So many operations of a batch were taken."""
        self.counts[what] = number
        self.times[what] = self.times.get(what, 0) + 1

    def _batches(self, what: str) -> str:
        times = self.times.get(what, self.batches)
        return "" if times == self.batches else f" (on {times} of {self.batches} batches)"


def _operations(number: int) -> str:
    return "1 operation" if number == 1 else f"{number:,} operations"


_COUNTED: Mapping[str, Callable[[int], str]] = {
    "operations": lambda n: f"what each format does to {_operations(n)}",
    "effects": lambda n: f"what {'it does' if n == 1 else 'they do'} to the outputs",
    "steps": lambda n: f"the backward pass{'' if n == 1 else 'es'} of {_operations(n)}",
    "runs": lambda n: "1 run of the recorded graph" if n == 1 else f"{n:,} runs of the recorded graph",
}


NOTHING = Kept()
"""No folder: nothing is taken, and nothing kept."""


def _beside(subject: Subject) -> list[Any]:
    loss = subject.objective.loss_fn if subject.objective else None
    return [loss, subject.origin.path if subject.origin else None]


def _written_in(capture: Capture) -> list[str]:
    """Files whose lines ran, however the model came to them: it may import some by name as it runs."""
    places = ((node.source_path, node.caller_path) for node in capture.nodes.values())
    return sorted({path for pair in places for path in pair if path is not None})
