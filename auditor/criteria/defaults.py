"""Adds default criteria to outputs without one; suggests others from the recorded operations, never from names."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence

import torch
import torch.fx as fx

from ..capture.paths import reach
from ..isolation.outputs import NamedTensors
from ..numerics.entries import is_number
from ..numerics.metrics import output_error
from ..numerics.nodes import adds_by_index, arguments, dtype, readers, row_of, shape, source
from ..records import Capture, Distance, Proposal, Verification
from .criterion import Criterion
from .measure import Criteria, names_of

NATS, KL, UNITS = 0.02, 0.001, 0.5
"""Suggested limits: 2 % change of any probability; 0.001 nats of KL divergence; half a unit, such as half a pixel."""

DECIBELS = 40.0
"""Suggested limit of PSNR for an image: an error of a hundredth of its range."""

RGB, SIDE, MOST_ENTRYWISE = 3, 16, 5
"""An image has three channels and at least this height and width; operations between its convolution and the output."""

FLIPS = 0.001
"""Default limit of `flips` for a large discrete output: one entry in a thousand may differ from FP32."""

LARGE = 1000
"""Number of entries from which a discrete output is large: 1 / FLIPS, so that FLIPS allows at least one entry."""

_SIGNS = ("sign", "sgn", "heaviside")
"""Operations whose floating-point results are choices."""
_COUNTING = ("sum", "count_nonzero", "cumsum", "bincount", "histc")
"""Operations that count, if their result is discrete; operations that add by an index count as well."""
_COMBINING = ("clamp", "clamp_min", "clamp_max", "maximum", "minimum", "amax", "amin", "floor_divide")
"""Operations whose result is a number if their inputs are; sums, products and concatenations are as well."""

APART = 10.0
"""A criterion is suggested for an output whose own error exceeds this multiple of the error of all outputs together."""


def by_default(
    criteria: Sequence[Criterion], outputs: NamedTensors, capture: Capture, max_error: float
) -> tuple[Criterion, ...]:
    """Criteria for discrete outputs that have no criterion and that floating-point values may affect.

    The limit is `flips <= 0.001` for an output of at least LARGE entries, else `flips <= 0`. An entry flips if the
    margin of its decision is below the error of its scores. If margins have a bounded density near 0, an error of e
    times the usual margin flips a share of about e, and the smallest of n margins is about 1/n of the usual one. A limit
    of zero for 65,536 pixels thus demands an error of 1.5e-5, below FP16's unit roundoff of 4.9e-4; FLIPS is twice
    that. In an output of fewer entries, one entry is a larger share: a class label, a decision per box or a short list
    of indices may not change. Entries are compared by position. Where order matters (`topk`, `sort`, non-maximum
    suppression), two swapped entries count as two flips, and one inserted or missing entry shifts all later ones, which
    exceeds the limit.

    A floating-point output that only names choices, such as a mask of zeros and ones, is limited alike. Integers that count
    choices are numbers: their limit is the error budget.
    """
    nodes = _output_nodes(capture)
    told_apart = len(nodes) == len(outputs)
    constants = {place.name for place in capture.placeholders if place.kind == "constant"}
    result = list[Criterion]()
    for index, (name, output) in enumerate(zip(outputs.names, outputs, strict=True)):
        node = nodes[index] if told_apart else None
        is_free = bool(output.numel()) and not _is_covered(criteria, name)
        criterion = _default_of(name, output, node, max_error, constants) if is_free else None
        if criterion is not None:
            result.append(criterion)
    return tuple(result)


def _default_of(
    name: str, output: torch.Tensor, node: fx.Node | None, max_error: float, constants: Collection[str]
) -> Criterion | None:
    """The default criterion of one output; None for numbers. node: the operation that returns it, if known. constants:
    names of the graph's constants, such as choices that `bincount` counts: a result's shape depends on them."""
    limit = FLIPS if output.numel() >= LARGE else 0.0
    if node is None:
        return None if is_number(output) else Criterion(name, "flips", limit)
    if is_number(output):
        return Criterion(name, "flips", limit, (("by", "values"),)) if _names_choices(node) else None
    if _counts_choices(node):
        reads_constant = any(at.name in constants for at in reach([node], lambda at: at.all_input_nodes))
        return Criterion(name, "rel_l2", max_error) if reads_constant or _reads_floating(node) else None
    return Criterion(name, "flips", limit) if _reads_floating(node) else None


def may_flip(capture: Capture) -> bool:
    """Whether the model returns choices that are computed from floating-point values, such as indices or a mask."""
    return any(
        (not _is_floating(node) and _reads_floating(node)) or _names_choices(node) for node in _output_nodes(capture)
    )


def _names_choices(node: fx.Node) -> bool:
    """Whether a floating-point value has one number for each choice, such as a mask of zeros and ones, or signs."""
    if not _is_floating(node):
        return False
    chosen = source(node, lambda at: not _is_floating(at))
    if not _is_floating(chosen):
        return _reads_floating(chosen) and not _counts_choices(chosen)
    row = row_of(chosen)
    if row.name == "where":
        condition, *chosen_from = chosen.all_input_nodes
        return _reads_floating(condition) and not any(map(_depends_on_inputs, chosen_from))
    return row.name in _SIGNS


def _counts_choices(node: fx.Node) -> bool:
    """Whether integers are numbers of choices, such as the pixels above a threshold or a histogram, or are computed from
    such numbers."""
    counted = source(node)
    row = row_of(counted)
    if row.name in _COUNTING or adds_by_index(counted):
        return True
    is_extreme = row.packet in ("max", "min") and "dim" not in arguments(counted)  # with `dim`: indices, too
    combines = row.sum or row.scales or row.joins or row.packet in _COMBINING or is_extreme
    read = [each for each in counted.all_input_nodes if each.op == "call_function"]
    combined = [each for each in read if _reads_floating(each)] or read
    return combines and bool(combined) and all(map(_counts_choices, combined))


def _depends_on_inputs(node: fx.Node) -> bool:
    """Whether a value depends on the model's inputs or weights."""
    return any(at.op == "placeholder" for at in reach([node], lambda at: at.all_input_nodes))


def propose(
    distance: Distance,
    given: Sequence[Criterion],
    outputs: Sequence[torch.Tensor],
    capture: Capture,
    runs: Iterable[tuple[str, Verification]],
    max_error: float,
) -> Iterator[Proposal]:
    """The criteria that were added by default, and suggestions for outputs without a criterion; nothing if `distance` is
    the user's own metric.

    given: the user's criteria. outputs: of the first batch. Suggested are a limit for each output whose error is far
    larger than the joint error of all outputs, in its first such run of `runs` (title of a plan, its run); and
    limits for log-probabilities, probable logits and positions, by the operations that compute them. max_error: the
    error budget.
    """
    measure, criteria = (distance.joint, distance.each) if isinstance(distance, Criteria) else (distance, ())
    if measure is not output_error:
        return
    for one in sorted(set(criteria) - set(given), key=str):
        because = "it is discrete, but computed from floating-point values"
        if one.kind == "rel_l2":
            because = "it counts choices among floating-point values"
        yield Proposal(one.output, str(one), because, holds=True)
    proposed = set[str]()
    for title, run in runs:
        joint = run.joint if run.joint is not None else run.measured_error
        for name, error in run.apart.items():
            if name in proposed or _is_covered(criteria, name):
                continue
            proposed.add(name)
            times = f", {error / joint:,.0f} times the error of all outputs together" if joint else ""
            because = f"its own relative error is {error:.2g} in {title}{times}"
            yield Proposal(name, f"{name}: rel_l2 <= {max_error:g}", because)
    names, nodes = names_of(outputs), _output_nodes(capture)
    inputs = _input_shapes(capture)
    if len(nodes) == len(names):
        for name, node in zip(names, nodes, strict=True):
            if not _is_covered(criteria, name) and (suggestion := _suggestion(node, inputs)):
                yield Proposal(name, f"{name}: {suggestion[0]}", suggestion[1])


def _suggestion(node: fx.Node, inputs: Collection[tuple[int, ...]]) -> tuple[str, str] | None:
    """(criterion, evidence) for an output, from the operations that compute it; None without a suggestion.

    inputs: shapes of the inputs; an output of such a shape, like the noise that a denoiser predicts, has no logits.
    """
    given = source(node)
    columns = shape(given)[-1:]
    if row_of(given).distribution == "logarithms":
        dim, rank = arguments(given).get("dim"), len(shape(given))
        other = f"(dim={dim})" if isinstance(dim, int) and dim % rank != rank - 1 else ""  # not the last dimension
        return f"nats{other} <= {NATS:g}", "its last operation is a log_softmax"
    if (
        row_of(given).gemm == "linear"
        and columns > (1,)
        and columns == shape(node)[-1:]
        and tuple(shape(node)) not in inputs
        and not any(row_of(one).distribution for one in readers(given))
    ):
        linear = f"its last operation is a linear layer of {columns[0]:,} columns"
        return f"kl <= {KL:g}", f"{linear}, and no softmax follows in the model: probably logits"
    if _is_image(node):
        perceptual = "for a perceptual limit, name a function of your own, such as LPIPS or SSIM"
        return f"psnr >= {DECIBELS:g}", f"it has the shape of an image, computed by a convolution; {perceptual}"
    if _is_floating(node) and _counts(node):
        return f"max_abs <= {UNITS:g}", "integers such as positions are added to it: probably in units such as pixels"
    return None


def measure_outliers(runs: Sequence[tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]]) -> dict[str, float]:
    """{output: relative L2 error in its worst run}, for outputs with a far larger error than all outputs together.

    runs: pairs (reference, candidate); references without names are ignored.
    """
    worst: dict[str, float] = {}
    joint = 0.0
    for reference, candidate in runs:
        names = reference.names if isinstance(reference, NamedTensors) else ()
        floats = [(n, r, c) for n, r, c in zip(names, reference, candidate, strict=False) if is_number(r)]
        joint = max(joint, output_error([r for _, r, _ in floats], [c for _, _, c in floats]))
        for name, r, c in floats:
            worst[name] = max(worst.get(name, 0.0), output_error([r], [c]))
    return {name: error for name, error in worst.items() if APART * joint < error < math.inf}


def _output_nodes(capture: Capture) -> list[fx.Node]:
    nodes = {node.name: node for node in capture.graph_module.graph.nodes}
    return [nodes[name] for name in capture.outputs]


def _is_covered(criteria: Sequence[Criterion], name: str) -> bool:
    return any(one.covers(name) for one in criteria)


def _input_shapes(capture: Capture) -> set[tuple[int, ...]]:
    """Shapes of the model's floating-point inputs."""
    given = {one.name for one in capture.placeholders if one.kind == "input"}
    nodes = capture.graph_module.graph.find_nodes(op="placeholder")
    return {tuple(shape(node)) for node in nodes if node.name in given and _is_floating(node)}


def _is_image(node: fx.Node) -> bool:
    """Whether an output is [batch, 3, height, width], and a convolution computes it, up to entrywise operations."""
    size = shape(node)
    if len(size) != 4 or size[1] != RGB or min(size[2:]) < SIDE:
        return False
    at = source(node)
    for _ in range(MOST_ENTRYWISE):
        if "convolution" in str(row_of(at).gemm):
            return True
        if tuple(shape(at)) != tuple(size) or not at.all_input_nodes:
            return False
        at = source(at.all_input_nodes[0])
    return False


def _is_floating(node: fx.Node) -> bool:
    result = dtype(node)
    return result is not None and (result.is_floating_point or result.is_complex)


def _reads_floating(node: fx.Node) -> bool:
    """Whether a node's value depends on floating-point values, and not only on their shapes."""
    upstream = reach([node], lambda at: () if row_of(at).asks_shape else at.all_input_nodes)
    return any(map(_is_floating, upstream))


def _counts(node: fx.Node) -> bool:
    """Whether integers are added to a node's value, which is afterwards only summed, scaled or rearranged."""

    def upstream(item: tuple[fx.Node, bool]) -> list[tuple[fx.Node, bool]]:
        at, added = item
        is_discrete = dtype(at) is not None and not _is_floating(at)
        if is_discrete:
            return []
        row = row_of(at)
        passes = row.sum or row.scales or row.transparent or row.joins
        if not passes:
            return []
        return [(source, added or row.sum) for source in at.all_input_nodes]

    reached = reach([(node, False)], upstream)
    summands = [at for at, added in reached if added and not _is_floating(at)]
    return any(dtype(at) not in (None, torch.bool) for at in summands)
