"""Decides where casts occur when a recorded graph runs with given precisions; no other file decides about casts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import fx

from ..artefact.base import Strategy
from ..artefact.strategies import strategy_of
from ..numerics.autocast import autocast_arguments
from ..numerics.autocast_lists import Treatment
from ..numerics.casting import asked_for, carried_in, format_in, like, round_tree, widen
from ..numerics.entries import is_plain
from ..numerics.formats import FORMATS, format_of, is_low
from ..numerics.fp32_output import multiply
from ..numerics.kernels import UnsupportedInFormat, run_op
from ..numerics.nodes import dtype, target_of, tensors_in
from ..numerics.operations import operation
from ..records import AutocastRegion, Call, Capture, Literals, Node, Placeholder, ScopeChoice
from ..records.paths import FP32_OUTPUT, enclosing_paths, function_in, nearest, nearest_above, of_function, within
from .execute import Semantics, ValueOf, readers_of, with_literals

KEPT = function_in("", "")
"""Stands, in lists of module paths, for a call of a torch function that is kept in FP32."""


@dataclass(frozen=True)
class PrecisionChoice:
    """Assigns precisions to modules. keep: {low-precision module: functions kept in FP32, also in its submodules}.
    fp32_output: {low-precision module: functions whose products have low-precision inputs and FP32 output}."""

    precision: Callable[[str], str]
    keep: Mapping[str, frozenset[str]] = field(default_factory=dict)
    fp32_output: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def __call__(self, path: str) -> str:
        """The precision of a module, or of a function in it (see paths.function_in)."""
        result = of_function(path)
        if result is None:
            return self.precision(path)
        owner, name = result
        return "fp32" if name in self.keep.get(owner, ()) else self.precision(owner)


def choice_keeping(high: Collection[str], format: str) -> PrecisionChoice:
    """The choice of `format` everywhere, except for modules and functions in `high`: these run in or return FP32."""
    keep = dict[str, frozenset[str]]()
    fp32_output = dict[str, frozenset[str]]()
    for owner, name in filter(None, map(of_function, high)):
        if owner in high:
            continue
        function = name.removesuffix(FP32_OUTPUT)
        functions = fp32_output if name.endswith(FP32_OUTPUT) else keep
        functions[owner] = functions.get(owner, frozenset()) | {function}
    return PrecisionChoice(lambda path: "fp32" if path in high else format, keep, fp32_output)


def choice_from_scopes(scopes: Mapping[str, ScopeChoice]) -> PrecisionChoice:
    """The PrecisionChoice of a plan; a module that is not in `scopes` has the precision of its nearest parent there."""

    def precision(path: str) -> str:
        listed = nearest(path, scopes)
        return "fp32" if listed is None else scopes[listed].precision

    keep = {path: frozenset(choice.keep) for path, choice in scopes.items() if choice.keep}
    return PrecisionChoice(precision, keep, {p: frozenset(c.fp32_output) for p, c in scopes.items() if c.fp32_output})


def plain(format: str) -> Callable[[str], str]:
    """A function that returns the same precision for every module."""
    return lambda owner: format


class Layout:
    """Properties of a graph that depend only on the strategy, so that all policies of that strategy share them."""

    def __init__(self, capture: Capture, how: Strategy) -> None:
        self.capture, self.how = capture, how

    @cached_property
    def owners(self) -> tuple[str, ...]:
        """Paths of modules with a precision in a plan: the root, and modules with operations or stored tied weights.

        A module with a tied weight may never be called; its precision still decides how the weight is stored.
        """
        capture, stores = self.capture, self.how.stores
        tied = (
            path for place in capture.placeholders if place.is_shared and place.kind in stores for path in place.holders
        )
        return tuple(dict.fromkeys(("", *(node.owner for node in capture.nodes.values()), *tied)))

    @cached_property
    def callers(self) -> Mapping[str, tuple[str | None, ...]]:
        """{path in `owners`: for each path of this module, its nearest parent in `owners`}, outer modules first."""
        result = dict[str, tuple[str | None, ...]]()
        for owner in sorted(self.owners, key=lambda path: (path.count(".") + bool(path), path)):
            paths = (owner, *self.capture.aliases.get(owner, ()))
            result[owner] = tuple(nearest_above(path, result) for path in paths)
        return result

    @cached_property
    def exited_modules(self) -> Mapping[str, frozenset[str]]:
        """{module: other modules, except parents, whose calls returned values that the module's operations read}."""
        nodes, result = self.capture.nodes, dict[str, set[str]]()
        read = {(nodes[source].owner, n.owner) for n in nodes.values() for source in n.inputs if source in nodes}
        for producer, reader in read:
            result.setdefault(reader, set()).update(
                path for path in enclosing_paths(producer) if not within(reader, path)
            )
        return {reader: frozenset(paths) for reader, paths in result.items()}

    @cached_property
    def deciding_owners(self) -> Mapping[str, tuple[str, ...]]:
        """{placeholder: modules whose precision decides its storage}: the modules that read or share it."""
        holders = {place.name: place.holders for place in self.capture.placeholders if place.is_shared}
        readers = readers_of(self.capture).items()
        return {name: tuple(dict.fromkeys((*owners, *holders.get(name, ())))) for name, owners in readers}

    @cached_property
    def stored_placeholders(self) -> tuple[tuple[Placeholder, tuple[str, ...]], ...]:
        """Placeholders that the strategy may store low, each with the modules whose precision decides (inputs: the
        root)."""
        result = list[tuple[Placeholder, tuple[str, ...]]]()
        for place in self.capture.placeholders:
            if place.kind not in self.how.stores or place.name in self.low:
                continue
            deciding = ("",) if place.kind == "input" else self.deciding_owners.get(place.name, ())
            result.append((place, deciding))
        return tuple(result)

    @cached_property
    def low(self) -> frozenset[str]:
        """Parameters and buffers that the user's model stores in low precision; no plan converts them."""
        state = {place.name for place in self.capture.placeholders if place.kind in ("parameter", "buffer")}
        nodes = (node for node in self.capture.graph_module.graph.nodes if node.name in state)
        return frozenset(
            node.name for node in nodes if (stored_dtype := dtype(node)) is not None and is_low(stored_dtype)
        )

    @cached_property
    def inputs(self) -> frozenset[str]:
        """Names of the placeholders that are inputs of the model."""
        return frozenset(place.name for place in self.capture.placeholders if place.kind == "input")

    @cached_property
    def around(self) -> Mapping[str, frozenset[str]]:
        """{module: nodes that run inside a call of this module, and nodes that read the results of these nodes}."""
        result: dict[str, set[str]] = {}
        for n in self.capture.graph_module.graph.nodes:
            for name in (n.name, *(source.name for source in n.all_input_nodes)):
                for call in self.capture.nodes[name].calls if name in self.capture.nodes else ():
                    result.setdefault(call.path, set()).add(n.name)
        return {path: frozenset(names) for path, names in result.items()}


@dataclass(frozen=True)
class Boundary:
    """Conversions at a module whose forward the plan wraps. entry, exit: precisions to which the module's inputs and
    result are cast; None: no cast.

    exit "input": the caller's precision, if callers differ. keeps: whether the result of an FP32 module remains FP32.
    keep: functions kept in FP32 in a low-precision module. fp32_output: functions whose products return FP32.
    """

    precision: str
    keeps: bool
    entry: str | None
    exit: str | None
    keep: frozenset[str] = frozenset()
    fp32_output: frozenset[str] = frozenset()


class Setting(NamedTuple):
    """Precision of a node's scope, the innermost module around it that has a precision in the plan. autocast: whether
    the node runs in an enabled autocast region.

    kept: whether the node belongs to a function kept in FP32 in a low-precision scope. wins: whether the scope lies
    inside an autocast region of the model's code, and overrides the region.
    """

    precision: str
    autocast: bool
    wins: bool = False
    kept: bool = False

    def in_region(self, region: AutocastRegion | None) -> Setting:
        """The setting in an autocast region of the model's code. The region wins unless the node's scope is inside."""
        if region is None or self.wins:
            return self
        named = format_of(getattr(torch, region.dtype))
        return Setting(self.precision if named is None else named.name, autocast=region.enabled)


class Casts(NamedTuple):
    """Conversions of the arguments and the result of one operation, except casts at the boundaries of modules.

    autocast: how autocast treats the arguments; "none" outside autocast, and for in-place operations. precision: the
    format to which autocast casts. literals: constants that Python derives from a dtype, for low precision.
    fp32_output: whether the operation is a product with FP32 output, whose inputs are cast as by autocast.
    """

    autocast: Treatment
    precision: str
    literals: Literals
    fp32_output: bool = False


class Policy(Semantics):
    """How a recorded graph runs under a strategy, given a precision for every module. wrapped: modules at which values
    are cast: the root, modules with another precision than their parent, and low-precision modules with exceptions.
    stored: precision of every placeholder that the strategy stores. layout: another policy's Layout, if computed."""

    def __init__(
        self,
        capture: Capture,
        strategy: str,
        precision_of: Callable[[str], str],
        format: str,
        layout: Layout | None = None,
    ) -> None:
        self.capture = capture
        self.how = strategy_of(strategy)
        self.format = format
        self.layout = layout or Layout(capture, self.how)
        choice = precision_of if isinstance(precision_of, PrecisionChoice) else PrecisionChoice(precision_of)
        self._keep = choice.keep
        self._fp32_output = choice.fp32_output
        self._assigned = self._assign(choice)
        self.wrapped = self._boundaries()
        self._keeping = {path: boundary.keep for path, boundary in self.wrapped.items() if boundary.keep}
        self.stored = self._stored_formats()
        self._enclosing: dict[str, tuple[Call, ...]] = {}

    def _assign(self, choice: PrecisionChoice) -> dict[str, str]:
        """{owner: its precision}. A shared module is FP32 if any of its paths is."""
        owners = self.layout.owners
        assigned = {owner: choice.precision(owner) for owner in owners}
        aliases = self.capture.aliases
        for owner in aliases.keys() & assigned.keys():
            paths = [nearest(path, frozenset(owners)) or "" for path in aliases[owner]]
            if any(choice.precision(path) == "fp32" for path in paths):
                assigned[owner] = "fp32"
        return assigned

    def _stored_formats(self) -> dict[str, str]:
        """{placeholder of a stored tensor: its format}: low only if all its owners are."""
        low = {owner for owner, precision in self._assigned.items() if precision != "fp32"}
        stored = dict[str, str]()
        for place, deciding in self.layout.stored_placeholders:
            if place.kind == "constant" and self.format not in place.made_in:
                continue
            is_low = bool(deciding) and low.issuperset(deciding)
            stored[place.name] = self.format if is_low else "fp32"
        return stored

    @classmethod
    def wide(cls, capture: Capture) -> Policy:
        """The Policy with every module in FP32; autocast regions of the model's code still apply."""
        return cls(capture, "autocast", plain("fp32"), "fp32")

    def _boundaries(self) -> dict[str, Boundary]:
        """The modules whose precision differs from a caller's, or that keep some functions in FP32."""
        with_exceptions = {*self._keep, *self._fp32_output}
        precisions = dict[str, str]()
        above = dict[str, str | None]()  # the callers' precision; "input" if they have several
        for owner, callers in self.layout.callers.items():
            precision = self._assigned[owner]
            outer = {None if path is None else self._assigned[path] for path in callers}
            if outer != {precision} or (owner in with_exceptions and precision != "fp32"):
                precisions[owner] = precision
                above[owner] = outer.pop() if len(outer) == 1 else "input"
        handed_low = set[str]()  # modules whose results a low-precision module reads
        if "fp32" in precisions.values():
            for reader, paths in self.layout.exited_modules.items():
                if self._assigned[reader] != "fp32":
                    handed_low |= paths
        result = {}
        for path, precision in precisions.items():
            kept = frozenset[str]()
            wide = frozenset[str]()
            if precision == "fp32":
                keeps = path not in handed_low
            else:
                kept = self._keep.get(path, kept)
                wide = self._fp32_output.get(path, wide)
                keeps = bool(wide) and not self.how.regional
            entry, exit = self.how.boundary(precision, above[path], keeps)
            result[path] = Boundary(precision, keeps, entry, exit, kept, wide)
        return result

    def enclosing_calls(self, name: str) -> tuple[Call, ...]:
        """Calls of `wrapped` modules that enclose a node, outermost first; then the call of a function kept in FP32."""
        if name not in self._enclosing:
            node = self.capture.nodes.get(name)
            calls = () if node is None else tuple(call for call in node.calls if call.path in self.wrapped)
            function = node.function if node is not None else None
            if function and any(function.path in self._keeping.get(call.path, ()) for call in calls):
                calls = (*calls, Call(KEPT, function.depth, function.key))
            self._enclosing[name] = calls
        return self._enclosing[name]

    def keeps(self, name: str) -> bool:
        """Whether a node belongs to a torch function call that the plan keeps in FP32 in the node's module."""
        return bool(self._keeping) and bool(around := self.enclosing_calls(name)) and around[-1].path == KEPT

    def has_fp32_output(self, node: Node) -> bool:
        """Whether a node is a product of low-precision inputs with FP32 output."""
        if node.function is None or not self._fp32_output or not operation(node.op).product:
            return False
        for call in self.enclosing_calls(node.name):
            boundary = self.wrapped.get(call.path)
            if boundary is not None and node.function.path in boundary.fp32_output:
                return True
        return False

    def setting(self, name: str) -> Setting:
        """The Setting of a node, before `Setting.in_region` applies the autocast regions of the model's code."""
        if self.keeps(name):
            return Setting("fp32", autocast=False, wins=True, kept=True)
        around = self.enclosing_calls(name)
        opens = around[-1] if self.how.regional else None
        for call in around if self._keeping and not self.how.regional else ():  # only if functions are kept in FP32
            scope = self.wrapped[call.path]
            opens = call if scope.keep or scope.precision == "fp32" else opens
        region = self.capture.nodes[name].region
        inside = region is not None and opens is not None and opens.depth >= region.depth
        low = opens is not None and self._computes_in(opens) != "fp32"
        return Setting(self._computes_in(around[-1]), low, wins=inside)

    def _computes_in(self, call: Call) -> str:
        return str(self.how.computes_in(self.wrapped[call.path].precision))

    def conversions_between(self, source: str, reader: str) -> tuple[str, ...]:
        """The precisions to which patched modules cast a value, in order, on its way from its producer to a reader.

        First, each module call that encloses the producer but not the reader casts the value if the call returns it,
        innermost call first. Then each call that encloses only the reader casts its inputs. Inputs of the model come
        from outside the root module, and its outputs leave the root. Weights are inputs of no module call; but a
        function kept in FP32 casts all its arguments, weights included, to FP32.
        """
        if source not in self.capture.nodes and source not in self.layout.inputs:
            return ("fp32",) if self.keeps(reader) else ()
        left = self.enclosing_calls(source)
        entered = self.enclosing_calls(reader)
        if left == entered:
            return ()
        shared = 0  # number of calls that enclose both
        while shared < min(len(left), len(entered)) and left[shared] == entered[shared]:
            shared += 1
        returning = {"", *self.capture.nodes[source].returned} if left else set[str]()
        steps = list[str | None]()
        for index in reversed(range(shared, len(left))):
            if left[index].key in returning or left[index].path == KEPT:
                steps.append(self._exit(left, index))
        for call in entered[shared:]:
            steps.append("fp32" if call.path == KEPT else self.wrapped[call.path].entry)
        return tuple(step for step in steps if step is not None)

    def _exit(self, calls: tuple[Call, ...], index: int) -> str | None:
        path = calls[index].path
        handed_on = None if path == KEPT else self.wrapped[path].exit
        return self.wrapped[calls[index - 1].path].precision if handed_on == "input" else handed_on

    def casts(self, node: Node) -> Casts:
        """The casts of a node; the replay and the dtype prediction both use this method."""
        setting = self.setting(node.name).in_region(node.region)
        fp32_output = self.has_fp32_output(node)
        treatment: Treatment = "none"
        if (setting.autocast or fp32_output) and not node.in_place:
            treatment = operation(node.op).autocast
        return Casts(treatment, setting.precision, self._literals(node), fp32_output)

    def _literals(self, node: Node) -> Literals:
        """The node's constants that depend on a dtype, if the code that reads the dtype runs in low precision. If the
        dtype was passed as an argument, the caller's code counts."""
        result = self.how.literals(node).get(self.format)
        if result is None:
            return Literals()
        depth = next((call.depth for call in reversed(node.calls) if not call.handed), 0)
        looking = next(call for call in reversed(self.enclosing_calls(node.name)) if call.depth <= depth)
        return result if self._computes_in(looking) != "fp32" else Literals()

    def placeholder_value(self, n: fx.Node, value: Any) -> Any:
        """A placeholder's value, in the precision in which it is stored."""
        precision = self.stored.get(n.name)
        return value if precision is None else round_tree(value, FORMATS[precision])

    def compute(self, n: fx.Node, value_of: ValueOf) -> Any:
        """Compute the node in the dtype that the plan and autocast give it. Raises: UnsupportedInFormat."""
        if n.op == "output":
            return self.converted_arguments(n, n.args, value_of)[0]
        node = self.capture.nodes[n.name]
        try:
            args, kwargs = self.kernel_arguments(n, value_of)
            if self.has_fp32_output(node):
                return multiply(operation(node.op).packet, target_of(n), (args, kwargs), widen)
            result = run_op(target_of(n), args, kwargs)
        except UnsupportedInFormat as error:
            where = f"{node.owner or 'the model'} ({node.source or node.op})"
            raise UnsupportedInFormat(f"{error} in {where}", node.owner) from error
        if node.in_place and isinstance(result, torch.Tensor) and format_in(result) is not None:
            result = like(result, tensors_in(args)[0])
        cast = asked_for(self._literals(node).result)
        return result if cast is None else round_tree(result, cast)

    def kernel_arguments(self, n: fx.Node, value_of: ValueOf) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments that an operation's kernel receives, after all casts."""
        node = self.capture.nodes[n.name]
        casts = self.casts(node)
        args, kwargs = self.converted_arguments(n, (n.args, n.kwargs), value_of)
        args, kwargs = with_literals(args, kwargs, casts.literals)
        if casts.autocast == "none":
            return args, kwargs
        return autocast_arguments(node.op, args, kwargs, FORMATS[casts.precision])

    def converted_arguments(self, n: fx.Node, arguments: Any, value_of: ValueOf) -> Any:
        """The arguments of a node after the casts at the boundaries of modules that the plan wraps."""

        def convert(source: fx.Node) -> Any:
            value = value_of(source)
            for precision in self.conversions_between(source.name, n.name):
                value = round_tree(value, FORMATS[precision])
            return value

        return fx.node.map_arg(arguments, convert)

    def same(self, result: Any, other: Any) -> bool:
        """Whether two results have the same bits in the same layout, so that every reader computes the same from both.

        Results with anything but real, strided tensors count as different.
        """
        ours, theirs = tensors_in(result), tensors_in(other)
        leaves = len(result) if isinstance(result, (tuple, list)) else 1
        if not ours or not len(ours) == len(theirs) == leaves:
            return False
        return all(map(_same_bits, ours, theirs))

    def differing_nodes(self, then: Semantics) -> Collection[str]:
        """Names of nodes affected by modules that the policies wrap differently, and of placeholders that they store
        differently. If strategy or format differs, all names."""
        assert isinstance(then, Policy)
        is_alike = self.how == then.how and self.format == then.format
        if not is_alike or (not self._keeping) != (not then._keeping):
            return {n.name for n in self.capture.graph_module.graph.nodes}
        names = set[str]()
        for path in self.wrapped.keys() | then.wrapped.keys():
            if self.wrapped.get(path) != then.wrapped.get(path):
                names |= self.layout.around.get(path, frozenset())
        for name, precision in self.stored.items():
            if then.stored.get(name) != precision:
                names.add(name)
        return names


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""{bytes of an entry: the dtype of its bits}."""


def _same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors have the same bits, strides and format; unlike numbers, equal NaNs do, and -0 and 0 do not."""
    if not (_has_bits(x) and _has_bits(y)):
        return False
    if (x.dtype, x.shape, x.stride()) != (y.dtype, y.shape, y.stride()) or carried_in(x) is not carried_in(y):
        return False
    bits = _BITS[x.itemsize]
    return torch.equal(x.view(bits), y.view(bits))


def _has_bits(x: torch.Tensor) -> bool:
    """Whether the entries are stored as they are: not sparse, quantized, complex or negated on reading."""
    return is_plain(x) and not (x.is_quantized or x.is_complex() or x.is_neg())
