"""What was measured of a graph, and what was judged by it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Distance = Callable[["Sequence[torch.Tensor]", "Sequence[torch.Tensor]"], float]
"""How far outputs are from reference outputs: the measure that an error budget speaks of."""


@dataclass(frozen=True)
class NodeError:
    """What one format does to one node, measured on the reference inputs.

    local_error: relative L2 of the node's output when its inputs are rounded to the format and the op runs in it.
    propagated_error: the same node inside a run that is low from the start. disagreement: share of discrete outputs
    that differ (None for floating outputs). overflow, nan: elements that are finite in the reference. underflow,
    subnormal: share of the non-zero reference elements that become zero / fall below the smallest normal number.
    max_ulp: largest local error in units of the format's last place. sqnr_db: 20 log10(1 / local_error).
    unsupported: why the op cannot run in the format. cause: overflow | underflow | cancellation | rounding |
    discrete | unsupported | nan | nested (not measured). born: a non-finite or wrong value appears here and in none of the node's inputs.
    """

    local_error: float | None = None
    propagated_error: float | None = None
    disagreement: float | None = None
    overflow: int = 0
    nan: int = 0
    underflow: float = 0.0
    subnormal: float = 0.0
    max_ulp: float | None = None
    sqnr_db: float | None = None
    unsupported: str | None = None
    cause: str | None = None
    born: bool = False


@dataclass(frozen=True)
class Contribution:
    """How far one node in one format moves the model's outputs (relative L2 of the outputs, unit 1).

    isolated: inputs, op and result low, all else FP32; this decides the verdict. own: the op and its result alone.
    cast: rounding the node's FP32 result on its way into a low consumer. decided_by: first-order | re-run.
    """

    isolated: float
    own: float
    cast: float
    decided_by: str = "first-order"


@dataclass(frozen=True)
class Verdict:
    """safe | sensitive | unsafe | untested, and why, in one clause. limited_by: range | precision | None."""

    verdict: str
    reason: str
    limited_by: str | None = None


@dataclass(frozen=True)
class Magnitudes:
    """Magnitudes of one tensor, or of several together: a histogram by powers of two, from which any scaling can be read.

    max_abs: largest finite magnitude; min_abs: smallest non-zero one, 0 if there is none. zeros, nonfinite: counts of the
    entries that are. exponents: {floor(log2|x|): count} of the others. norm: L2 norm of the finite entries.
    rounding: {format: relative L2 error of rounding them without overflow}: the bits that a format takes; where measured.
    """

    max_abs: float
    min_abs: float
    zeros: int
    exponents: Mapping[int, int]
    nonfinite: int = 0
    norm: float = 0.0
    rounding: Mapping[str, float] = field(default_factory=dict)

    @property
    def nonzero(self) -> int:
        """How many entries are finite and not zero."""
        return sum(self.exponents.values())

    @property
    def zero_share(self) -> float:
        """Share of exact zeros among the finite entries; 0 where there are none."""
        finite = self.nonzero + self.zeros
        return self.zeros / finite if finite else 0.0


@dataclass(frozen=True)
class Weight:
    """Magnitudes of a parameter or buffer. name: its state-dict name, or the graph's where it has none."""

    name: str
    kind: str
    range: Magnitudes


@dataclass(frozen=True)
class Finding:
    """A rule that fired on a node. severity: error | warning | info; confidence: high | medium | low.

    agrees: whether the measurement bears the rule out (None where it was not measured). declared: the severity in the
    rule's file. measurable: whether running the operation low can bear the rule out at all.
    """

    rule: str
    name: str
    node: str
    owner: str
    op: str
    source: str | None
    severity: str
    confidence: str
    formats: tuple[str, ...]
    message: str
    why: str
    advice: str
    evidence: Mapping[str, Any] = field(default_factory=dict)
    agrees: bool | None = None
    references: tuple[str, ...] = ()
    declared: str = ""
    measurable: bool = True


@dataclass(frozen=True)
class FlaggedRegion:
    """Connected nodes that are sensitive or unsafe in a format, low together while all else is FP32; relative L2, unit 1.

    scope: deepest module that holds them. local_error: of the values that leave the region, the worst; error: of the
    model's outputs, both None where it cannot run, for the reason in failure. explained: what the nodes' own errors and
    the rounding of what enters add up to in quadrature; an error far from it shows that they interact.
    """

    format: str
    nodes: tuple[str, ...]
    scope: str
    local_error: float | None
    error: float | None
    explained: float
    failure: str | None = None
