"""||J d||, the effect of a node's error d on the outputs, for all nodes at once from a few vector-Jacobian products."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from ..fxnodes import target_of, viewed
from ..numerics.inner import inner_products
from ..numerics.kernels import is_tensor_core
from ..records import Contribution
from ..simulation.execute import DTYPES
from .measure import Measurement

MAX_PROBES = 8
LIGHT = 3_000_000
"""Elements of all results together up to which a backward pass costs next to nothing, and MAX_PROBES are made."""

FEW_PROBES = {1: 4, 2: 3, 3: 3}
"""{samples in the batch: passes} of larger models; 2 with more samples."""

_DOUBT = 2.33
"""Standard normal quantile of 1 %: beyond it on either side, the parts of an error are held to be correlated."""


@dataclass
class _Sums:
    """Running sums over probes and samples: of squared inner products, and of those of parts of the error."""

    whole: float = 0.0
    parts: float = 0.0

    def add(self, inner: torch.Tensor) -> None:
        """inner: <gradient, error> per sample and part, shape [samples, parts]."""
        inner = inner.double()
        self.whole += float(inner.sum(1).square().sum())
        self.parts += float(inner.square().sum())

    def square(self, samples: int) -> float:
        """Estimate of the mean of `samples` squares.

        Errors of rounding are independent from part to part, so the squares of the parts add up, and being many they
        scatter little. Where the sum of the whole lies beyond what chance explains, the parts pull together or cancel
        each other, and the whole, which scatters more and errs on no side, decides.
        """
        low, high = _chance(samples)
        return self.parts if low * self.parts <= self.whole <= high * self.parts else self.whole


def _chance(samples: int) -> tuple[float, float]:
    """Quantiles of 1 and 99 % of the mean of `samples` squared standard normals (Wilson and Hilferty, 1931)."""
    spread = 2 / (9 * samples)
    low, high = (1 - spread + side * _DOUBT * math.sqrt(spread) for side in (-1, 1))
    return max(low, 0.0) ** 3, high**3


@dataclass
class Estimates:
    """What the passes found, per node, format and kind of error.

    samples: of a value, how many inner products a pass gives: one for each sample of the batch that it has a part for.
    passes: those that reached it. returned: {id of an output: its random signs in this pass}, the part of its gradient
    that no reader has.
    """

    outputs_norm: float
    probe: int = 0
    sums: dict[tuple[str, str, str], _Sums] = field(default_factory=dict)
    samples: dict[str, int] = field(default_factory=dict)
    passes: dict[str, set[int]] = field(default_factory=dict)
    returned: dict[int, torch.Tensor] = field(default_factory=dict)

    def contribution(self, name: str, fmt: str) -> Contribution:
        """Relative L2 of the outputs, unit 1."""
        isolated, own, cast = (self._relative(name, fmt, kind) for kind in ("isolated", "own", "cast"))
        return Contribution(isolated, own, cast)

    def _relative(self, name: str, fmt: str, kind: str) -> float:
        found = self.sums.get((name, fmt, kind))
        if found is None or not self.outputs_norm:
            return 0.0
        passes = len(self.passes[name])
        return math.sqrt(found.square(passes * self.samples[name]) / passes) / self.outputs_norm


def estimate(measurement: Measurement, seed: int) -> Estimates:
    """One backward pass per probe, a hook on every value.

    For a random sign vector v on the outputs, E<v, J d>^2 = ||J d||^2, and a backward pass gives <v, J d> = <J^T v, d>
    for all nodes at once; with a batch, one independent estimate per sample.
    Source: Hutchinson, A stochastic estimator of the trace (1989).
    """
    outputs = [x for x in measurement.outputs if x.is_floating_point() and x.requires_grad]
    norm = math.sqrt(sum(float(finite(x.detach()).double().square().sum()) for x in outputs))
    batch = _batch_size(outputs)
    probes = _probes(measurement, batch) if outputs else 0
    estimates = Estimates(norm)
    views = _lone_views(measurement)
    handles = _hooked(measurement, estimates, batch, views)
    generator = torch.Generator().manual_seed(seed)
    try:
        for probe in range(probes):
            weights = [_signs(x, generator) for x in outputs]
            estimates.probe = probe
            estimates.returned = {id(x): weight for x, weight in zip(outputs, weights, strict=True)}
            ends = _cheap_ends(measurement) if probe and probes < MAX_PROBES else None
            torch.autograd.backward(outputs, weights, retain_graph=probe < probes - 1, inputs=ends)
    finally:
        for handle in handles:
            handle.remove()
        for anchor in measurement.anchors:
            anchor.grad = None
    for name, source in views.items():
        estimates.samples[name] = estimates.samples.get(source, 1)
        estimates.passes[name] = estimates.passes.get(source, set())
        for fmt in measurement.formats:
            if (source, fmt, "cast") in estimates.sums:
                same = estimates.sums[source, fmt, "cast"]
                estimates.sums |= {(name, fmt, "cast"): same, (name, fmt, "isolated"): same}
    return estimates


def _signs(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Random signs; zero at masked entries, which hold infinities on purpose: nothing can move them."""
    signs = torch.randint(0, 2, x.shape, generator=generator, dtype=torch.int8).to(x).mul_(2).sub_(1)
    return signs.masked_fill_(~torch.isfinite(x.detach()), 0.0)


def _hooked(
    measurement: Measurement, estimates: Estimates, batch: int | None, views: dict[str, str]
) -> list[torch.utils.hooks.RemovableHandle]:
    handles = []
    sampled = _sampled(measurement, batch)
    for name, leaves in measurement.live.items():
        if name in views:
            continue
        for index, leaf in enumerate(leaves):
            if leaf.is_floating_point() and leaf.requires_grad:
                hook = _Hook(measurement, estimates, name, index, batch if name in sampled else None)
                handles.append(leaf.register_hook(hook))  # type: ignore[no-untyped-call]
                if leaf.is_leaf:
                    handles.append(leaf.register_post_accumulate_grad_hook(_dropped))  # type: ignore[no-untyped-call]
    return handles


def _dropped(leaf: torch.Tensor) -> None:
    leaf.grad = None


def _probes(measurement: Measurement, batch: int | None) -> int:
    elements = sum(x.numel() for leaves in measurement.live.values() for x in leaves)
    return MAX_PROBES if elements < LIGHT else FEW_PROBES.get(batch or 1, 2)


def _cheap_ends(measurement: Measurement) -> list[torch.Tensor] | None:
    """Where a backward pass may end, but for the weights of products: their gradients cost as much as all the others.

    A weight has many entries, rounded independently of each other, so one pass tells enough of it. None: everywhere.
    """
    found = []
    for node in measurement.capture.graph_module.graph.nodes:
        multiplied = any(is_tensor_core(target_of(user)) for user in node.users if user.op == "call_function")
        if node.op in ("placeholder", "get_attr") and not (multiplied and node.name in measurement.weights):
            found += [leaf for leaf in measurement.live[node.name] if leaf.requires_grad]
    return [*found, *measurement.anchors] or None


def _sampled(measurement: Measurement, batch: int | None) -> set[str]:
    """Values with one part per sample, side by side: what is computed from inputs that have a row per sample."""
    inputs = {placeholder.name for placeholder in measurement.capture.placeholders if placeholder.kind == "input"}
    found = {name for name in inputs if any(x.dim() and x.shape[0] == batch for x in measurement.live.get(name, []))}
    for node in measurement.capture.graph_module.graph.nodes:
        if any(source.name in found for source in node.all_input_nodes):
            found.add(node.name)
    return found


def _lone_views(measurement: Measurement) -> dict[str, str]:
    """{view: what it views} where nothing else reads that value: both have the same gradient and the same rounding."""
    found: dict[str, str] = {}
    for node in measurement.capture.graph_module.graph.nodes:
        source = viewed(node)
        if (
            source is not None
            and len(source.users) == 1
            and not any(x.numel() for x in measurement.live[source.name][1:])
        ):
            found[node.name] = found.get(source.name, source.name)
    return found


class _Hook:
    """Turns the gradient at one value into squared inner products with its errors."""

    def __init__(
        self, measurement: Measurement, estimates: Estimates, name: str, index: int, batch: int | None
    ) -> None:
        self.measurement, self.estimates, self.name, self.index = measurement, estimates, name, index
        self.live = measurement.live[name][index].detach()
        self.key = id(measurement.live[name][index])
        self.samples = batch if batch and self.live.dim() and self.live.shape[0] % batch == 0 else 1
        estimates.samples[name] = max(estimates.samples.get(name, 1), self.samples)

    def __call__(self, gradient: torch.Tensor | None) -> None:
        if gradient is None:  # an output of a several-output operation that nothing reads
            return
        with torch.no_grad():
            gradient = gradient.detach()
            self.estimates.passes.setdefault(self.name, set()).add(self.estimates.probe)
            if gradient.numel():
                for fmt in self.measurement.formats:
                    self._add(fmt, gradient)

    def _add(self, fmt: str, gradient: torch.Tensor) -> None:
        trace = self.measurement.traces.get(self.name, {}).get(fmt)
        isolated, own = (None, None) if trace is None else (trace.isolated, trace.own)
        returned = self.estimates.returned.get(self.key)
        if returned is not None:  # an output stays as it is where its low readers round it
            self._sum(fmt, ("cast",), self._by_rounding(gradient - returned, fmt))
        rounded = {"cast": returned is None, "isolated": isolated is None, "own": own is None}
        kinds = tuple(kind for kind, wanted in rounded.items() if wanted)
        if kinds:
            self._sum(fmt, kinds, self._by_rounding(gradient, fmt))
        for kind, gaps in (("isolated", isolated), ("own", own)):
            gap = gaps[self.index] if gaps is not None and self.index < len(gaps) else None
            if gap is not None and gap.shape == gradient.shape:
                self._sum(fmt, (kind,), inner_products(gradient, gap, self.samples))

    def _by_rounding(self, gradient: torch.Tensor, fmt: str) -> torch.Tensor:
        return inner_products(gradient, self.live, self.samples, DTYPES[fmt])

    def _sum(self, fmt: str, kinds: tuple[str, ...], inner: torch.Tensor) -> None:
        for kind in kinds:
            self.estimates.sums.setdefault((self.name, fmt, kind), _Sums()).add(inner)


def _batch_size(outputs: list[torch.Tensor]) -> int | None:
    sizes = {x.shape[0] if x.dim() else None for x in outputs}
    return sizes.pop() if len(sizes) == 1 else None


def finite(x: torch.Tensor) -> torch.Tensor:
    """`x` with zeros where it is not finite."""
    return torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0)
