"""Predicts the dtype of every node under a Policy without running kernels, by passing formats through the graph."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import fx

from ..artefact.strategies import SHIPPED
from ..numerics.autocast import autocast_target
from ..numerics.casting import asked_for
from ..numerics.cuda_facts import facts_of, refuses_mixture
from ..numerics.formats import FORMATS, Format
from ..numerics.kernels import promoted_format
from ..numerics.nodes import arguments, overload_of, row_of, tensors_in
from ..records import Capture, Node
from .execute import Executor, Run, Semantics, ValueOf
from .policy import Policy, plain


def is_low(name: str) -> bool:
    """Whether a format is a low-precision format; the name "" stands for discrete values."""
    row = FORMATS.get(name)
    return row is not None and row.low


class NodeType(NamedTuple):
    """Predicted dtypes of one node. dtype: the format of the node's result, "" for discrete; kernel: the format of the
    kernel's result, before an explicit cast of that result.

    cast: inputs that are cast, to low precision or to FP32, which takes time. rounded: FP32 inputs that are cast to low
    precision. reads_low: whether the kernel receives a low-precision tensor, after all casts. conflict: whether the
    kernel receives tensors of two dtypes that it cannot promote. factors: the low-precision format of the inputs of a
    product with FP32 output; "" for other operations.
    """

    dtype: str
    kernel: str
    cast: tuple[str, ...] = ()
    rounded: tuple[str, ...] = ()
    reads_low: bool = False
    conflict: bool = False
    factors: str = ""


@dataclass(frozen=True)
class Resolution:
    """Predicted dtypes of all nodes and placeholders, by name."""

    nodes: Mapping[str, NodeType]

    @cached_property
    def dtypes(self) -> Mapping[str, str]:
        """{node or placeholder: the name of a format, or "" for discrete}."""
        return {name: typed.dtype for name, typed in self.nodes.items()}

    @cached_property
    def readers_of_rounded(self) -> Mapping[str, frozenset[str]]:
        """{FP32 value that is cast to low precision: its readers in low precision}. Each value is rounded once."""
        result: dict[str, list[str]] = {}
        for name, typed in self.nodes.items():
            for source in typed.rounded:
                result.setdefault(source, []).append(name)
        return {source: frozenset(readers) for source, readers in result.items()}

    @cached_property
    def reads_low(self) -> frozenset[str]:
        """Nodes whose kernel receives a low-precision tensor, after all casts."""
        return frozenset(name for name, typed in self.nodes.items() if typed.reads_low)

    @cached_property
    def conflicts(self) -> frozenset[str]:
        """Nodes that receive tensors of two dtypes and cannot promote them."""
        return frozenset(name for name, typed in self.nodes.items() if typed.conflict)

    def computed_format(self, name: str) -> str:
        """The format of the kernel's result, before an explicit cast by the same node."""
        return self.nodes[name].kernel if name in self.nodes else ""

    def low(self, name: str) -> bool:
        """Whether the node's result is in low precision."""
        return name in self.nodes and is_low(self.nodes[name].dtype)

    def touches_low(self, name: str) -> bool:
        """Whether the node's result, or an input of its kernel, is low-precision: upcasts cannot restore lost bits."""
        return self.low(name) or (name in self.nodes and self.nodes[name].reads_low)


def resolve(policy: Policy) -> Resolution:
    """Predict the dtype of every node under a policy, as a Resolution."""
    return Resolver(policy.capture)(policy)


def reached_by(capture: Capture, format: str) -> dict[str, tuple[str, ...]]:
    """{node: strategies that run it on low-precision values, with all modules in `format`}."""
    used = {strategy: resolve(Policy(capture, strategy, plain(format), format)) for strategy in SHIPPED}
    return {node: tuple(name for name, dtypes in used.items() if dtypes.touches_low(node)) for node in capture.nodes}


class Resolver:
    """Predicts dtypes for many policies of one capture; recomputes only nodes that differ from the previous policy."""

    def __init__(self, capture: Capture) -> None:
        self._executor = Executor(capture.graph_module)
        self._kinds = {n: _kind_of(n) for n in capture.graph_module.graph.nodes}

    def __call__(self, policy: Policy) -> Resolution:
        """Predict the dtype of every node under a policy."""
        executor, algebra = self._executor, _Algebra(policy, self._kinds)
        result = dict(executor.before.values) if executor.before else {}
        executor.semantics = algebra
        for n, typed in executor.steps(*policy.capture.placeholders):
            result[n.name] = typed
        executor.before = Run(result, algebra)
        return Resolution(result)


class _Kind(NamedTuple):
    """A recorded result: its format, "" if discrete; whether it is a scalar (zero-dimensional), or complex."""

    format: str = ""
    scalar: bool = False
    complex: bool = False


class _Algebra(Semantics):
    """Computes the format of each operation's result from the formats of its inputs."""

    def __init__(self, policy: Policy, kinds: Mapping[fx.Node, _Kind]) -> None:
        self.policy, self._kinds = policy, kinds

    def differing_nodes(self, then: Semantics) -> Collection[str]:
        """Names of the nodes that the two policies treat differently."""
        assert isinstance(then, _Algebra)
        return self.policy.differing_nodes(then.policy)

    def same(self, result: NodeType, other: NodeType) -> bool:
        """Whether two results have the same format, the only property that nodes use of their inputs."""
        return result.dtype == other.dtype

    def placeholder_value(self, n: fx.Node, value: Any) -> NodeType:
        """The format in which a placeholder is stored."""
        own = self._kinds[n].format
        dtype = self.policy.stored.get(n.name, own) if own else own
        return NodeType(dtype, dtype)

    def compute(self, n: fx.Node, value_of: ValueOf) -> NodeType:
        """Predicted dtypes of an operation, or of the graph's output."""
        given = {source.name: value_of(source).dtype for source in n.all_input_nodes}
        stays = {x.name for x in n.all_input_nodes if self._kinds[x].complex}  # no cast by autocast or scopes
        arrived, cast, rounded = dict(given), list[str](), list[str]()

        def convert(source: str, format: str) -> None:
            if arrived[source] != format:
                cast.append(source)
                if is_low(format) and given[source] == "fp32":  # a value already in low precision loses nothing
                    rounded.append(source)

        for source in given:
            moves = _moves(given[source]) and source not in stays
            for step in self.policy.conversions_between(source, n.name) if moves else ():
                convert(source, step)
                arrived[source] = step
        if n.op == "output":
            return NodeType("", "", tuple(cast), tuple(rounded))
        casts, target = self.policy.casts(self.policy.capture.nodes[n.name]), None
        written: list[tuple[int | str, Any]] = [*enumerate(n.args), *n.kwargs.items()]
        dtypes = [(key, value) for key, value in written if isinstance(value, torch.dtype)]
        asked = [casts.literals.arguments.get(key, dtype) for key, dtype in dtypes]
        if casts.autocast not in ("none", "banned"):
            rows = (FORMATS[name] for name in arrived.values() if name)
            target = autocast_target(row_of(n), FORMATS[casts.precision], rows, bool(asked))
        told = _name(asked[0]) if asked and not (target and target.low) else ""
        for source, dtype in arrived.items():
            if dtype == "fp32" and is_low(into := target.name if target else told):
                convert(source, into)
        handed = {s: target.name if target and _moves(x) and s not in stays else x for s, x in arrived.items()}
        kernel, conflict = ("fp32", False) if casts.fp32_output else self._kernel(n, handed, told)
        result = kernel if casts.literals.result is None else _name(casts.literals.result)
        reads_low = any(map(is_low, handed.values()))
        factors = casts.precision if casts.fp32_output else ""
        return NodeType(result, kernel, tuple(cast), tuple(rounded), reads_low, conflict, factors)

    def _kernel(self, n: fx.Node, handed: Mapping[str, str], told: str) -> tuple[str, bool]:
        """The format of the kernel's result, and whether the kernel gets dtypes that it cannot promote. Products, and
        non-pointwise operations without a low-precision CUDA kernel, such as linalg.solve, cannot promote."""
        own, kinds = self._kinds[n].format, self._kinds
        if told and own:
            return told, False
        read: list[fx.Node] = []
        fx.node.map_arg((n.args, n.kwargs), read.append)
        given = [(handed[source.name] or "fp32" * kinds[source].complex, kinds[source].scalar) for source in read]
        floats = [(format, scalar) for format, scalar in given if format]
        if kinds[n].complex:  # low if all inputs are in one low format and CUDA computes with complex numbers of it
            formats = {handed[source.name] for source in read if handed[source.name] or kinds[source].complex}
            low = formats.pop() if len(formats) == 1 else ""
            return low if is_low(low) and FORMATS[low].dtype is torch.float16 else "", False
        if not _moves(own) or not floats:
            return own, False
        row = row_of(n)
        if self._is_refused(n, handed):
            return floats[0][0], True
        if row.dtype_of_first or self.policy.capture.nodes[n.name].in_place:
            first, *others = (dtype for dtype, _ in floats)  # of a norm, its input; an FP32 input needs FP32 weights
            promotes = not row.normalizes or row.packet == "rms_norm"
            return first, not promotes and first == "fp32" and any(map(is_low, others))
        shaped = {dtype for dtype, scalar in floats if not scalar} or {dtype for dtype, _ in floats}
        strict = (
            bool(row.refused_on_cuda) and not row.promotes and torch.Tag.pointwise not in getattr(n.target, "tags", ())
        )
        return promoted_format(floats), len(shaped) > 1 and (row.autocast == "lower" or strict)

    def _is_refused(self, n: fx.Node, handed: Mapping[str, str]) -> bool:
        """Whether CUDA refuses the mixture of formats that the kernel's tensors have."""

        if not facts_of(overload_of(n.target)).restricts_dtypes:
            return False

        def formats(argument: Any) -> list[tuple[str, bool]]:
            read: list[fx.Node] = []
            fx.node.map_arg(argument, read.append)
            return [(handed[source.name], self._kinds[source].scalar) for source in read if handed[source.name]]

        return refuses_mixture(overload_of(n.target), {name: formats(value) for name, value in arguments(n).items()})


def kept_low(capture: Capture, strategies: Collection[str], format: str) -> dict[str, str]:
    """{node: its low-precision format}, for nodes that run in this format under every strategy, whether all modules are
    FP32 or all in `format`.

    The nodes lie in autocast regions of the model's code, or after explicit casts. If a node's result is FP32, its
    inputs' format counts: an upcast cannot restore lost bits.
    """

    def low_format(node: Node, resolution: Resolution) -> str | None:
        """The only low-precision format that a node computes in or reads; None if the node uses none or several."""
        if resolution.low(node.name):
            return resolution.dtypes[node.name]
        read = {resolution.dtypes[source] for source in node.inputs if is_low(resolution.dtypes[source])}
        return read.pop() if len(read) == 1 and node.name in resolution.reads_low else None

    result = dict.fromkeys(capture.nodes, "")
    for precision in ("fp32", format):
        for strategy in strategies if result else ():
            resolution = resolve(Policy(capture, strategy, plain(precision), format))
            found = {name: low_format(capture.nodes[name], resolution) for name in result}
            result = {name: own for name, own in found.items() if own is not None and result[name] in ("", own)}
    return result


def _kind_of(n: fx.Node) -> _Kind:
    value = next(iter(tensors_in(n.meta.get("val"))), None)
    return _Kind() if value is None else _Kind(_name(value.dtype), value.dim() == 0, value.is_complex())


def _moves(name: str) -> bool:
    """Whether casts of autocast or of a plan convert values of this format: true for FP32 and low precision."""
    return name == "fp32" or is_low(name)


def _name(dtype: torch.dtype | Format) -> str:
    """Name of the format of a torch dtype or a Format; "" if discrete."""
    row = asked_for(dtype)
    return "" if row is None else row.name
