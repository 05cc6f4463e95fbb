"""The nouns that flow from stage to stage; every record is frozen and holds data, not behaviour."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

FORMAT_VERSION = 1
"""Version of plan.json; raised when a field changes its meaning or goes."""

Batch = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of one call of the model."""

Progress = Callable[[str, str, int, int], None]
"""Called as progress(stage, detail, done, total); total is 0 where it is not known."""


@dataclass(frozen=True)
class Origin:
    """How the model was made, so that `patched_model.py` can make it again. `kind`: factory | instance | class | spec."""

    path: str | None
    module: str | None
    symbol: str
    kind: str
    init_args: tuple[Any, ...] = ()
    init_kwargs: Mapping[str, Any] = field(default_factory=dict)
    weights: str | None = None


@dataclass(frozen=True)
class Objective:
    """What a training step minimises. loss_fn(outputs, *targets) -> scalar; None: the model returns its own loss.

    targets: positional and keyword arguments of `loss_fn` after the outputs, one pair per batch. source: where the loss
    came from, in words.
    """

    loss_fn: Callable[..., Any] | None
    targets: tuple[Batch, ...]
    source: str


@dataclass(frozen=True)
class Subject:
    """A model, the inputs it is audited on, and where both came from."""

    model: nn.Module
    batches: tuple[Batch, ...]
    name: str
    target: str
    inputs_source: str
    weights_source: str
    held_out: tuple[Batch, ...] = ()
    origin: Origin | None = None
    synthetic_inputs: bool = False
    random_weights: bool = False
    warnings: tuple[str, ...] = ()
    objective: Objective | None = None


@dataclass(frozen=True)
class Node:
    """One operation of the graph in the user's own terms.

    op: ATen overload name, for example `aten.softmax.int`; owner: module path ("" is the root); source: `file.py:line`
    of the innermost line of the user's code, None where there is none; inputs: names of the graph nodes it reads.
    """

    name: str
    op: str
    owner: str
    owner_type: str
    source: str | None
    source_path: str | None
    code: str | None
    inputs: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    floating: bool


@dataclass(frozen=True)
class Placeholder:
    """An input of the graph. kind: parameter | buffer | constant | input; fqn: state-dict name where it has one."""

    name: str
    kind: str
    fqn: str | None


@dataclass(frozen=True)
class Call:
    """One call of a module. path: its first name; depth: how many calls enclose it; key: differs from call to call."""

    path: str
    depth: int
    key: str


@dataclass(frozen=True)
class Capture:
    """One torch.fx graph of ATen operations. `bind(model, batch)` gives the flat list of tensors the graph takes.

    method: "run" (one recorded run, as good for other inputs of these shapes) or "path" (Python read values in it: it holds
    for inputs that take the same path). same_path: what tells the other batches that do, see tape/paths.py.
    constants: {format: {node: {argument position: value}}} for literals that Python derived from a tensor's dtype.
    regions: {node: (enabled, dtype)} where the author put the operation in an autocast region of their own.
    region_depths: {node: number of module calls open where its region was entered}.
    in_place: nodes that the author wrote as operations in place: autocast leaves those alone, and their result has the
    dtype of what they write to.
    calls: {node: the module calls that enclose it, the root's first}. aliases: {first path of a module: its other paths}.
    outputs: names of the nodes the model returns, in flattened order.
    """

    graph_module: torch.fx.GraphModule
    nodes: Mapping[str, Node]
    placeholders: tuple[Placeholder, ...]
    outputs: tuple[str, ...]
    bind: Callable[[nn.Module, Batch], list[Any]]
    method: str
    constants: Mapping[str, Mapping[str, Mapping[int | str, Any]]] = field(default_factory=dict)
    regions: Mapping[str, tuple[bool, str]] = field(default_factory=dict)
    region_depths: Mapping[str, int] = field(default_factory=dict)
    in_place: frozenset[str] = frozenset()
    calls: Mapping[str, tuple[Call, ...]] = field(default_factory=dict)
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    same_path: frozenset[tuple[int, ...]] = frozenset()
    warnings: tuple[str, ...] = ()


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
class NodeRange:
    """Magnitudes of a node's FP32 output over the audited inputs; None for non-floating outputs.

    max_abs: largest finite magnitude; min_abs: smallest non-zero one; zeros: share of exact zeros.
    exponents: counts per power of two, {floor(log2|x|): count}.
    """

    max_abs: float
    min_abs: float
    zeros: float
    exponents: Mapping[int, int]


@dataclass(frozen=True)
class Weight:
    """Magnitudes of a parameter or buffer. name: its state-dict name, or the graph's where it has none."""

    name: str
    kind: str
    range: NodeRange


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


@dataclass(frozen=True)
class ScopeChoice:
    """Precision of one scope. output: "keep" leaves an FP32 island's result FP32 (cast strategy), "cast" lowers it.

    cost: share of the plan's predicted time that lowering this island's own operations would save, casts not counted;
    None if it is low.
    """

    precision: str
    because: tuple[str, ...] = ()
    output: str = "cast"
    cost: float | None = None


@dataclass(frozen=True)
class Verification:
    """The emitted artefact, run for real. error: relative L2 of all outputs, worst run; None if it failed.

    Runs are the batches without gradients, and the first one with them. worst_output: the largest error of any single
    output tensor. inputs: "held-out" or "audited". execution: native | emulated. failure: why, in one line.
    """

    error: float | None
    finite: bool
    worst_output: float | None
    inputs: str
    execution: str
    failure: str | None = None


@dataclass(frozen=True)
class Memory:
    """Bytes a forward pass needs: its weights and buffers, and the most its inputs and activations take at one time."""

    weights: int
    activations: int


@dataclass(frozen=True)
class Plan:
    """Precision of every scope under one strategy and format, with what it costs and how it held up.

    target: the device that the speed-up is predicted for; memory, fp32_memory: predicted, with the plan and without.
    """

    name: str
    strategy: str
    format: str
    scopes: Mapping[str, ScopeChoice]
    predicted_error: float
    low_precision_flops: float
    predicted_speedup: float
    measured_error: float | None = None
    verified: bool = False
    verification: Verification | None = None
    pareto: tuple[tuple[float, float], ...] = ()
    note: str = ""
    target: str | None = None
    memory: Memory | None = None
    fp32_memory: Memory | None = None


@dataclass(frozen=True)
class Baseline:
    """What happens without a plan: the whole model under plain autocast, or plainly cast. None if it raised.

    rules_only: the same with FP32 wherever a rule fired; low_precision_flops: of that, the share that is low.
    """

    measured_error: float | None
    finite: bool
    failure: str | None = None
    low_precision_flops: float | None = None
    rules_only: Baseline | None = None


@dataclass(frozen=True)
class NodeReport:
    """Everything known about one node, formats keyed by name."""

    node: Node
    findings: tuple[str, ...]
    errors: Mapping[str, NodeError]
    contributions: Mapping[str, Contribution]
    verdicts: Mapping[str, Verdict]
    exposed: Mapping[str, tuple[str, ...]]
    range: NodeRange | None
    flops: int
