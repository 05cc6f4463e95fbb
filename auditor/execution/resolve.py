"""Predicts the dtype of every node under a Policy without running kernels, by passing formats through the graph."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
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
from ..numerics.nodes import arguments, overload_of, row_of, tensors_in, written_argument
from ..records import Capture, Literals, Node
from .execute import Executor, Replay, Semantics, ValueOf
from .policy import Casts, Policy, plain


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

    def __init__(
        self, capture: Capture, lowered: frozenset[str] = frozenset(), made_low: frozenset[str] = frozenset()
    ) -> None:
        """lowered: FP32 values that are taken to be in low precision where they meet low-precision values. made_low:
        operations whose FP32 results are taken to be in low precision where their module is."""
        self._lowered, self._made_low = lowered, made_low
        self._executor = Executor(capture.graph_module)
        self._kinds = {n: _kind_of(n) for n in capture.graph_module.graph.nodes}

    def __call__(self, policy: Policy) -> Resolution:
        """Predict the dtype of every node under a policy."""
        executor = self._executor
        executor.semantics = _FormatSemantics(policy, self._kinds, self._lowered, self._made_low)
        result = dict(executor.before.values) if executor.before else {}
        for n, node_type in executor.steps(*policy.capture.placeholders):
            result[n.name] = node_type
        executor.before = Replay(result, executor.semantics)
        return Resolution(result)


class _Kind(NamedTuple):
    """What no policy changes about a node. format: of the recorded result, "" if discrete. scalar, complex: whether the
    result is zero-dimensional, or complex. sources: the nodes among the arguments, in order; a node that occurs twice
    counts twice. asks: whether an argument is a dtype.
    """

    format: str = ""
    scalar: bool = False
    complex: bool = False
    sources: tuple[fx.Node, ...] = ()
    asks: bool = False


class _InputFormats:
    """Formats of one operation's inputs, to which casts are applied.

    produced: {input: the format in which it was computed}. arrived: the formats after the casts at module boundaries.
    cast, rounded: as in NodeType.
    """

    def __init__(self, produced: dict[str, str]) -> None:
        self.produced = produced
        self.arrived = dict(produced)
        self.cast: list[str] = []
        self.rounded: list[str] = []

    def note_cast(self, source: str, format: str) -> None:
        """Count the cast of an input to a format, unless it has this format."""
        if self.arrived[source] == format:
            return
        self.cast.append(source)
        if is_low(format) and self.produced[source] == "fp32":  # a value once in low precision loses nothing
            self.rounded.append(source)

    def convert_in_source(self, sources: Iterable[str], format: str) -> None:
        """Take inputs to be converted by the model's source before any cast of a plan."""
        for source in sources:
            self.note_cast(source, format)
            self.produced[source] = self.arrived[source] = format

    def note_casts_of_kernel(self, format: str) -> None:
        """Count the casts of FP32 inputs to the format in which the kernel reads them, if that is low precision."""
        if is_low(format):
            for source, arrived in self.arrived.items():
                if arrived == "fp32":
                    self.note_cast(source, format)


class _FormatSemantics(Semantics):
    """Computes the format of each operation's result from the formats of its inputs."""

    def __init__(
        self,
        policy: Policy,
        kinds: Mapping[fx.Node, _Kind],
        lowered: frozenset[str],
        made_low: frozenset[str],
    ) -> None:
        self.policy = policy
        self._lowered, self._made_low = lowered, made_low
        self._kinds = kinds

    def differing_nodes(self, then: Semantics) -> Collection[str]:
        """Names of the nodes that the two policies treat differently."""
        assert isinstance(then, _FormatSemantics)
        return self.policy.differing_nodes(then.policy)

    def same(self, result: NodeType, other: NodeType) -> bool:
        """Whether two results have the same format, the only property that nodes use of their inputs."""
        return result.dtype == other.dtype

    def placeholder_value(self, n: fx.Node, value: Any) -> NodeType:
        """The format in which a placeholder is stored."""
        dtype = self._kinds[n].format
        if dtype:
            dtype = self.policy.stored.get(n.name, dtype)
        return NodeType(dtype, dtype)

    def compute(self, n: fx.Node, value_of: ValueOf) -> NodeType:
        """Predicted dtypes of an operation, or of the graph's output.

        An input is cast at the boundaries of modules, then by autocast, then by the kernel if the call asks for a dtype.
        """
        inputs = self._inputs(n, value_of)
        if n.op == "output":
            return NodeType("", "", tuple(inputs.cast), tuple(inputs.rounded))
        casts = self.policy.casts(self.policy.capture.nodes[n.name])
        asked = _asked_dtypes(n, casts.literals) if self._kinds[n].asks else []
        target = self._autocast_target(n, casts, inputs, bool(asked))
        asked_format = ""  # the format that the call asks for, unless autocast to low precision decides
        if asked and not (target is not None and target.low):
            asked_format = _name(asked[0])
        inputs.note_casts_of_kernel(asked_format if target is None else target.name)
        handed = self._handed(n, inputs, target)
        kernel, conflict = ("fp32", False) if casts.fp32_output else self._kernel(n, handed, asked_format)
        if n.name in self._made_low and kernel == "fp32" and is_low(casts.precision):
            return NodeType(casts.precision, casts.precision, reads_low=True)
        return NodeType(
            dtype=kernel if casts.literals.result is None else _name(casts.literals.result),
            kernel=kernel,
            cast=tuple(inputs.cast),
            rounded=tuple(inputs.rounded),
            reads_low=any(map(is_low, handed.values())),
            conflict=conflict,
            factors=casts.precision if casts.fp32_output else "",
        )

    def _inputs(self, n: fx.Node, value_of: ValueOf) -> _InputFormats:
        """The formats of a node's inputs, after the casts at the boundaries of modules."""
        produced = {source.name: value_of(source).dtype for source in n.all_input_nodes}
        inputs = _InputFormats(produced)
        low = next(filter(is_low, produced.values()), "")
        if low:
            wide = [name for name, format in produced.items() if name in self._lowered and format == "fp32"]
            inputs.convert_in_source(wide, low)
        for source in n.all_input_nodes:
            name = source.name
            if self._is_cast(source, inputs.produced[name]):
                for format in self.policy.conversions_between(name, n.name):
                    inputs.note_cast(name, format)
                    inputs.arrived[name] = format
        return inputs

    def _is_cast(self, source: fx.Node, format: str) -> bool:
        """Whether a plan or autocast casts this value; neither casts complex numbers."""
        return _moves(format) and not self._kinds[source].complex

    def _autocast_target(self, n: fx.Node, casts: Casts, inputs: _InputFormats, asks: bool) -> Format | None:
        """The format to which autocast casts the inputs; None if it casts none. asks: whether the call asks for a dtype."""
        if casts.autocast in ("none", "banned"):
            return None
        arrived = (FORMATS[name] for name in inputs.arrived.values() if name)
        return autocast_target(row_of(n), FORMATS[casts.precision], arrived, asks)

    def _handed(self, n: fx.Node, inputs: _InputFormats, target: Format | None) -> dict[str, str]:
        """{input: its format as the kernel receives it, after autocast}."""
        handed = dict(inputs.arrived)
        if target is None:
            return handed
        for source in n.all_input_nodes:
            if self._is_cast(source, handed[source.name]):
                handed[source.name] = target.name
        return handed

    def _kernel(self, n: fx.Node, handed: Mapping[str, str], asked_format: str) -> tuple[str, bool]:
        """The format of the kernel's result, and whether the kernel gets dtypes that it cannot promote."""
        recorded = self._kinds[n]
        if asked_format and recorded.format:
            return asked_format, False
        if recorded.complex:
            return self._complex_format(n, handed), False
        floats = self._floats(n, handed)
        if not _moves(recorded.format) or not floats:
            return recorded.format, False
        first, _ = floats[0]
        if self._is_refused(n, handed):
            # What reads the result is judged as after the fix, which converts FP32 arguments to low precision, but values
            # that are written into a tensor to that tensor's dtype.
            is_written = written_argument(n) is not None
            return first if is_written else next(filter(is_low, handed.values()), first), True
        if row_of(n).dtype_of_first or self.policy.capture.nodes[n.name].in_place:
            return first, _refuses_others(n, floats)
        # As in torch's promotion, scalars count only if there are no others.
        deciding = {format for format, is_scalar in floats if not is_scalar} or {format for format, _ in floats}
        return promoted_format(floats), len(deciding) > 1 and not _promotes(n)

    def _floats(self, n: fx.Node, handed: Mapping[str, str]) -> list[tuple[str, bool]]:
        """(format, whether a scalar) of every floating-point argument; complex numbers count as FP32."""
        result = []
        for source in self._kinds[n].sources:
            kind = self._kinds[source]
            format = handed[source.name]
            if kind.complex and not format:
                format = "fp32"
            if format:
                result.append((format, kind.scalar))
        return result

    def _complex_format(self, n: fx.Node, handed: Mapping[str, str]) -> str:
        """The format of a complex result: low precision if all inputs have one format with complex numbers on CUDA."""
        formats = set[str]()
        for source in self._kinds[n].sources:
            if handed[source.name] or self._kinds[source].complex:
                formats.add(handed[source.name])
        if len(formats) != 1:
            return ""
        (format,) = formats
        has_complex = is_low(format) and FORMATS[format].dtype is torch.float16
        return format if has_complex else ""

    def _is_refused(self, n: fx.Node, handed: Mapping[str, str]) -> bool:
        """Whether CUDA refuses the mixture of formats that the kernel's tensors have."""
        if len({format for format in handed.values() if format}) < 2:
            return False  # all tensors have one format
        op = overload_of(n.target)
        if not facts_of(op).restricts_dtypes:
            return False

        def formats(argument: Any) -> list[tuple[str, bool]]:
            sources = _nodes_in(argument)
            return [(handed[x.name], self._kinds[x].scalar) for x in sources if handed[x.name]]

        return refuses_mixture(op, {name: formats(argument) for name, argument in arguments(n).items()})


def _asked_dtypes(n: fx.Node, literals: Literals) -> list[Any]:
    """The dtypes among a node's arguments, in the low-precision version of the code if `literals` has another one."""
    written: list[tuple[int | str, Any]] = [*enumerate(n.args), *n.kwargs.items()]
    return [literals.arguments.get(key, value) for key, value in written if isinstance(value, torch.dtype)]


def _nodes_in(tree: Any) -> list[fx.Node]:
    """The nodes in a tree of arguments, in order; a node that occurs twice counts twice."""
    nodes: list[fx.Node] = []
    fx.node.map_arg(tree, nodes.append)
    return nodes


def _refuses_others(n: fx.Node, floats: list[tuple[str, bool]]) -> bool:
    """Whether an operation with its first input's dtype refuses the other inputs' dtypes: most norms accept FP32 weights
    beside a low-precision input, but not the reverse."""
    row = row_of(n)
    if not row.normalizes or row.packet == "rms_norm":
        return False
    (first, _), *others = floats
    return first == "fp32" and any(is_low(format) for format, _ in others)


def _promotes(n: fx.Node) -> bool:
    """Whether a kernel promotes inputs of different dtypes. Products do not, nor non-pointwise operations without a
    low-precision CUDA kernel, such as linalg.solve."""
    row = row_of(n)
    if row.autocast == "lower":
        return False
    if row.promotes or not row.refused_on_cuda:
        return True
    return torch.Tag.pointwise in getattr(n.target, "tags", ())


def kept_low(capture: Capture, strategies: Collection[str], format: str) -> dict[str, str]:
    """{node: its low-precision format}, for nodes that run in this format under every strategy, whether all modules are
    FP32 or all in `format`.

    The nodes lie in autocast regions of the model's code, or after explicit casts. If a node's result is FP32, its
    inputs' format counts: an upcast cannot restore lost bits.
    """
    result = dict.fromkeys(capture.nodes, "")
    for precision in ("fp32", format):
        for strategy in strategies:
            if not result:
                return {}
            resolution = resolve(Policy(capture, strategy, plain(precision), format))
            formats = {name: _low_format(capture.nodes[name], resolution) for name in result}
            result = {name: own for name, own in formats.items() if own is not None and result[name] in ("", own)}
    return result


def _low_format(node: Node, resolution: Resolution) -> str | None:
    """The only low-precision format that a node computes in or reads; None if the node uses none or several."""
    if resolution.low(node.name):
        return resolution.dtypes[node.name]
    if node.name not in resolution.reads_low:
        return None
    read = {resolution.dtypes[source] for source in node.inputs if is_low(resolution.dtypes[source])}
    return read.pop() if len(read) == 1 else None


def _kind_of(n: fx.Node) -> _Kind:
    given = (*n.args, *n.kwargs.values())
    sources = tuple(_nodes_in((n.args, n.kwargs)))
    asks = any(isinstance(value, torch.dtype) for value in given)
    kind = _Kind(sources=sources, asks=asks)
    value = next(iter(tensors_in(n.meta.get("val"))), None)
    if value is None:
        return kind
    return kind._replace(format=_name(value.dtype), scalar=value.dim() == 0, complex=value.is_complex())


def _moves(name: str) -> bool:
    """Whether casts of autocast or of a plan convert values of this format: true for FP32 and low precision."""
    return name == "fp32" or is_low(name)


def _name(dtype: torch.dtype | Format) -> str:
    """Name of the format of a torch dtype or a Format; "" if discrete."""
    row = asked_for(dtype)
    return "" if row is None else row.name
