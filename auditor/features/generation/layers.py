"""Chooses the layers whose keys or values a cache stores in one byte per entry: the fewest bytes within the limits."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import nn

from ...criteria.criterion import Criterion
from ...isolation.run_model import Around
from ...records.generation import CachedTensor, CachePlan, StoredCache, TokenComparison
from ...stages import tick
from .compare import STORED, WIDER, CacheRounding, Decoding, Observe, ReferenceTokens, are_met, stored_cache
from .decode import decode

GROUPS = 16
"""Maximum number of groups of keys or values. Of a deeper model, neighbouring layers are measured together."""

CLOSE = 4
"""Number of sets that are run at one size: those with the smallest predicted divergence."""

SKETCH = 4096
"""Number of entries to which a change of the probabilities is compressed."""

_PLACE = re.compile(r"(.*?)layer (\d+) (keys|values)$")


class Group(NamedTuple):
    """Tensors of a cache in one format. names: as in `named_tensors_of`; entries: number of entries of a text."""

    name: str
    names: tuple[str, ...]
    layers: tuple[int, ...]
    entries: float


def groups_of(entries: dict[str, float]) -> list[Group]:
    """Groups of the tensors {name: entries of a text}: the keys, or the values, of each layer or of neighbouring layers."""
    by_kind = dict[str, list[tuple[int, str]]]()
    for name in entries:
        place = _PLACE.match(name)
        kind = f"{place[1]}{place[3]}" if place else ""
        by_kind.setdefault(kind, []).append((int(place[2]) if place else -1, name))
    together = math.ceil(len(entries) / GROUPS)
    result = []
    for kind, members in by_kind.items():
        for start in range(0, len(members), together):
            part = members[start : start + together]
            layers = tuple(layer for layer, _ in part if layer >= 0)
            names = tuple(name for _, name in part)
            span = f"layers {layers[0]} to {layers[-1]} {kind}" if len(layers) > 1 else " and ".join(names)
            result.append(Group(span, names, layers, sum(entries[name] for name in names)))
    return sorted(result, key=lambda group: group.layers)


class Change:
    """Sums up the change of the next tokens' probabilities in one decoding run: sqrt(p) (d - mean of d under p), where d is
    the change of the logits and p FP32's probabilities. To second order, half of its square is the divergence; so the
    divergence of two changes together has their product. made: [SKETCH], compressed with random signs."""

    def __init__(self) -> None:
        self.made = torch.zeros(SKETCH, dtype=torch.float64)

    def __call__(self, step: int, expected: torch.Tensor, logits: torch.Tensor) -> None:
        """Add one step. expected, logits: [prompts, vocabulary]."""
        p = expected.double().softmax(-1)
        d = logits.double() - expected.double()
        moved = (p.sqrt() * (d - (p * d).sum(-1, keepdim=True))).flatten().nan_to_num()
        generator = torch.Generator().manual_seed(step)
        signs = torch.randint(0, 2, moved.shape, generator=generator) * 2 - 1
        places = torch.randint(0, SKETCH, moved.shape, generator=generator)
        self.made.index_add_(0, places, moved * signs)


Chosen = frozenset[int]
"""The indices of the groups that are stored in one byte per entry."""


@dataclass
class CacheSearch:
    """Searches the set of groups in one byte per entry that has the fewest bytes and meets the limits. beside: the
    comparison of the recommended plan, whose errors are added. known: the sets that were run; spent: number of runs."""

    decoding: Decoding
    model: nn.Module
    batches: Sequence[ReferenceTokens]
    around: Around
    limits: Sequence[Criterion]
    beside: tuple[TokenComparison, ...]
    stored: str
    scale: str
    groups: Sequence[Group]
    known: dict[Chosen, StoredCache] = field(default_factory=dict)
    spent: int = 0

    def run(self, chosen: Chosen, observe: Observe | None = None) -> StoredCache:
        """Decode with the groups in one byte per entry, and all others in BF16."""
        if chosen not in self.known or observe is not None:
            tick(f"{len(chosen)} of {len(self.groups)} groups in {self.stored}")
            only = frozenset(name for index in chosen for name in self.groups[index].names)
            how = self.stored, self.scale, only, observe
            self.spent += 1
            self.known[chosen] = stored_cache(self.decoding, self.model, self.batches, self.around, *how)
        return self.known[chosen]

    def holds(self, chosen: Chosen) -> bool:
        """Whether the set meets the limits in a run, together with the plan."""
        return are_met(self.limits, self.run(chosen).generated, *self.beside)

    def bytes_of(self, chosen: Chosen) -> float:
        """Bytes of a text's cache."""
        return sum(
            group.entries * STORED[self.stored if index in chosen else WIDER] for index, group in enumerate(self.groups)
        )

    def best(self) -> Chosen | None:
        """The set with the fewest bytes that meets the limits; of equal ones, the one with the smallest divergence. None if
        even the cache in BF16 violates a limit.

        Each group is run alone. Their changes, summed up, predict the divergence of every set. Of each size, the sets with
        the smallest predictions are run, and the smallest size is found by bisection.
        """
        if not self.holds(frozenset()):
            return None
        sizes = self._sets_by_size()
        bounds = sorted(sizes)
        low, high = -1, len(bounds) - 1  # the largest size, BF16, meets the limits
        while high - low > 1:
            middle = (low + high) // 2
            if self._accepted(sizes[bounds[middle]][:1]):
                high = middle
            else:
                low = middle
        while high > 0 and self._accepted(sizes[bounds[high - 1]]):  # another set of the next smaller size may hold
            high -= 1
        accepted = self._accepted(sizes[bounds[high]])
        return min(accepted, key=lambda chosen: self.run(chosen).generated.kl or 0.0)

    def _accepted(self, sets: Sequence[Chosen]) -> list[Chosen]:
        return [chosen for chosen in sets if self.holds(chosen)]

    def _sets_by_size(self) -> dict[float, list[Chosen]]:
        """{bytes: the CLOSE sets of this size with the smallest predicted divergence, the best first}, for sizes at which no
        smaller cache is predicted to have a smaller divergence."""
        count = len(self.groups)
        alone = [Change() for _ in range(count)]
        for index, change in enumerate(alone):
            self.run(frozenset({index}), change)
        changes = torch.stack([change.made for change in alone])  # [groups, SKETCH]
        products = changes @ changes.T
        masks = (torch.arange(1 << count)[:, None] >> torch.arange(count)) & 1  # [sets, groups]
        members = masks.double()
        predicted = ((members @ products) * members).sum(1)
        saved = members @ torch.tensor([group.entries for group in self.groups], dtype=torch.float64)
        result = dict[float, list[Chosen]]()
        least = math.inf
        for size in sorted({float(x) for x in saved}, reverse=True):  # the smallest cache saves most
            places = (saved == size).nonzero()[:, 0]
            nearest = places[predicted[places].argsort()[:CLOSE]]
            if not float(predicted[nearest[0]]) < least and size > 0:
                continue
            least = float(predicted[nearest[0]])
            sets = [frozenset(masks[place].nonzero()[:, 0].tolist()) for place in nearest]
            result[self.bytes_of(sets[0])] = sets
        return result


def plan_cache(
    decoding: Decoding,
    model: nn.Module,
    batches: Sequence[ReferenceTokens],
    around: Around,
    caches: Sequence[StoredCache],
    limits: Sequence[Criterion],
    beside: tuple[TokenComparison, ...] = (),
) -> CachePlan | None:
    """The smallest cache with a format for each layer's keys and values that meets the limits, with the plan `beside` it.

    caches: the whole cache in each format and scale; of those with one byte per entry, the one with the smallest
    divergence is taken. None without such a cache, without limits, or if the cache in BF16 violates them.
    """
    small = list[tuple[float, StoredCache]]()
    for cache in caches:
        kl = cache.generated.kl
        if STORED[cache.stored] == 1 and kl is not None and math.isfinite(kl):
            small.append((kl, cache))
    if not small or not limits:
        return None
    _, base = min(small, key=itemgetter(0))
    groups = groups_of(_entries_of(decoding, model, batches[0], around))
    search = CacheSearch(decoding, model, batches, around, limits, beside, base.stored, base.scale, groups)
    every = frozenset(range(len(groups)))
    search.known[every] = base
    search.known.update({frozenset(): one for one in caches if one.stored == WIDER})
    chosen = every if search.holds(every) else search.best()
    if chosen is None:
        return None
    made = search.run(chosen)
    entries = sum(group.entries for group in groups)
    return CachePlan(
        stored=base.stored,
        scale=base.scale,
        tensors=tuple(_tensors(search, chosen)),
        bits=8 * search.bytes_of(chosen) / entries,
        fixed_bytes=made.fixed_bytes,
        bytes_per_token=made.bytes_per_token,
        generated=made.generated,
        runs=search.spent,
    )


def _entries_of(decoding: Decoding, model: nn.Module, batch: ReferenceTokens, around: Around) -> dict[str, float]:
    """{name of a tensor of the cache: its entries for one text}, once the cache holds the prompt."""
    rounding = CacheRounding(WIDER, len(batch.tokens))

    def choose(step: int, logits: torch.Tensor) -> torch.Tensor:
        return logits.argmax(-1)

    decode(model, batch.prompts, 1, choose, seed=decoding.seed, around=around, store=rounding)
    return rounding.entries_by_name


def _tensors(search: CacheSearch, chosen: Chosen) -> Iterator[CachedTensor]:
    for index, group in enumerate(search.groups):
        stored = search.stored if index in chosen else WIDER
        alone = search.known.get(frozenset({index}))
        kl = alone.generated.kl if alone is not None else None
        flips = alone.generated.flips if alone is not None else None
        yield CachedTensor(group.name, group.layers, stored, kl, flips)
