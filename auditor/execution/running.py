"""How a capture runs: the precision of every scope, what scopes convert, and so what is cast at every operation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from ..numerics.formats import FORMATS, format_of
from ..numerics.lists import Treatment
from ..numerics.operations import operation
from ..records import AutocastRegion, Literals, Node


@dataclass(frozen=True)
class Setting:
    """Precision of the scope a node belongs to. autocast: whether the node sits in an enabled autocast region.

    kept: whether it is part of a function that a low scope keeps in FP32. wins: the scope is entered inside the region that the author put the node in, and sets autocast anew.
    """

    precision: str
    autocast: bool
    wins: bool = False
    kept: bool = False

    def in_region(self, region: AutocastRegion | None) -> Setting:
        """What holds for a node in a region of the author's own: the region, unless the scope is entered inside it."""
        if region is None or self.wins:
            return self
        named = format_of(getattr(torch, region.dtype))
        return Setting(self.precision if named is None else named.name, autocast=region.enabled)


Crossing = Callable[[str, str], tuple[str, ...]]
"""Precisions that a value is converted to, one after the other, on its way from a node to one that reads it."""


def straight(source: str, reader: str) -> tuple[str, ...]:
    """No module is wrapped: values reach their readers as they are."""
    return ()


@dataclass(frozen=True)
class Casts:
    """What a run does to the arguments and the result of one operation, beside what the scopes on the way convert.

    autocast: what autocast does to the arguments; "none" where it is off, and to what the author wrote in place.
    precision: what it lowers them to. literals: what Python writes otherwise.
    """

    autocast: Treatment
    precision: str
    literals: Literals


AS_WRITTEN = Literals()
"""Python writes what it writes in FP32."""


@dataclass(frozen=True)
class Wrapping:
    """Where a way to run comes from: a strategy and a format, and the modules that are wrapped, {path: its Boundary}.

    Of two with the same strategy and format, that both keep functions or both do not, an operation's casts and crossings differ only where one of the modules called
    around it, or around what it reads, is wrapped otherwise. keeps: whether functions stay FP32 in some of them, without
    which they enter no autocast regions under a strategy that is none of regions.
    """

    strategy: str
    format: str
    wrapped: Mapping[str, object]
    keeps: bool = False

    def otherwise(self, other: Wrapping | None) -> set[str] | None:
        """Modules that the other wraps otherwise; None where the two cannot be compared so."""
        if other is None or (self.strategy, self.format, self.keeps) != (other.strategy, other.format, other.keeps):
            return None
        paths = self.wrapped.keys() | other.wrapped.keys()
        return {path for path in paths if self.wrapped.get(path) != other.wrapped.get(path)}


@dataclass(frozen=True)
class Running:
    """How a capture runs. setting: what each node's scope asks for; the author's own regions win over it.

    crossing: what the scopes on the way convert. placeholder_precision: what weights and inputs are stored in, where that
    is not FP32. literals: what Python writes otherwise then, {node: Literals} of those where it looks at low tensors.
    wrapping: where all this comes from, of a run that a plan asks for.
    """

    setting: Callable[[str], Setting]
    crossing: Crossing = straight
    placeholder_precision: Mapping[str, str] = field(default_factory=dict)
    literals: Mapping[str, Literals] = field(default_factory=dict)
    wrapping: Wrapping | None = None

    def casts(self, node: Node) -> Casts:
        """The one account of a node's casts, for whoever runs it and for whoever foretells its dtype."""
        scope = self.setting(node.name)
        setting, row = scope.in_region(node.region), operation(node.op)
        fixed = FORMATS[setting.precision].autocast and row.only_fp16
        on = setting.autocast and not node.in_place
        return Casts(
            row.autocast if on else "none",
            "fp16" if fixed else setting.precision,
            self.literals.get(node.name, AS_WRITTEN),
        )


FULL = Running(lambda name: Setting("fp32", autocast=False))
"""Everything in FP32."""
