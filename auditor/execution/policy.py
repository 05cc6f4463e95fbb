"""What an assignment of precisions means for a recorded graph: the one statement of where casts are."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx

from ..artefact.base import Strategy
from ..artefact.strategies import strategy_of
from ..numerics.autocast import autocast_arguments
from ..numerics.casting import asked_for, format_in, like, round_tree
from ..numerics.formats import FORMATS, format_of, is_low
from ..numerics.kernels import UnsupportedInFormat, run_op
from ..numerics.nodes import dtype, target_of, tensors_of
from ..numerics.operations import Treatment, operation
from ..paths import enclosing, function_in, nearest, nearest_above, of_function, within
from ..records import AutocastRegion, Call, Capture, Literals, Node, ScopeChoice
from .execute import Semantics, ValueOf, with_literals

KEPT = function_in("", "")
"""The path of calls of functions that a scope keeps in FP32."""


@dataclass(frozen=True)
class PrecisionChoice:
    """Precision of any module path. keep: {module: functions that stay FP32 in it and in what it calls, where it is low}."""

    precision: Callable[[str], str]
    keep: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def __call__(self, path: str) -> str:
        """The precision of a module, or of a function in it (see paths.function_in)."""
        result = of_function(path)
        if result is None:
            return self.precision(path)
        owner, name = result
        return "fp32" if name in self.keep.get(owner, ()) else self.precision(owner)


def choice_keeping(high: Collection[str], format: str) -> PrecisionChoice:
    """Everything in a format but these modules, and functions in modules."""
    keep: dict[str, set[str]] = {}
    for owner, name in filter(None, map(of_function, high)):
        if owner not in high:
            keep.setdefault(owner, set()).add(name)
    functions = {path: frozenset(names) for path, names in keep.items()}
    return PrecisionChoice(lambda path: "fp32" if path in high else format, functions)


def choice_from_scopes(scopes: Mapping[str, ScopeChoice]) -> PrecisionChoice:
    """What a plan chooses: of a module that it does not list, as of the nearest above."""

    def precision(path: str) -> str:
        listed = nearest(path, scopes)
        return "fp32" if listed is None else scopes[listed].precision

    return PrecisionChoice(precision, {path: frozenset(choice.keep) for path, choice in scopes.items() if choice.keep})


def plain(format: str) -> Callable[[str], str]:
    """Everything in one format: what a user gets without a plan."""
    return lambda owner: format


class Layout:
    """What all policies of one capture under a strategy have in common."""

    def __init__(self, capture: Capture, how: Strategy) -> None:
        self.capture, self.how = capture, how

    @cached_property
    def owners(self) -> tuple[str, ...]:
        """Modules whose precision is up for choice: the root, those of the operations, and those that hold a stored tied
        weight.

        Of the last some may never be called: their precision decides how the weight is stored, as any holder's does.
        """
        capture, stores = self.capture, self.how.stores
        tied = (
            path for place in capture.placeholders if place.is_shared and place.kind in stores for path in place.holders
        )
        return tuple(dict.fromkeys(("", *(node.owner for node in capture.nodes.values()), *tied)))

    @cached_property
    def outermost(self) -> tuple[str, ...]:
        """The owners, those above others first."""
        return tuple(sorted(self.owners, key=lambda path: (path.count(".") + bool(path), path)))

    @cached_property
    def exited_modules(self) -> Mapping[str, frozenset[str]]:
        """{owner: modules that the values which its nodes read have come out of}, itself and those above it not among them."""
        nodes, result = self.capture.nodes, dict[str, set[str]]()
        read = {(nodes[source].owner, n.owner) for n in nodes.values() for source in n.inputs if source in nodes}
        for producer, reader in read:
            result.setdefault(reader, set()).update(path for path in enclosing(producer) if not within(reader, path))
        return {reader: frozenset(paths) for reader, paths in result.items()}

    @cached_property
    def deciding(self) -> Mapping[str, tuple[str, ...]]:
        """{placeholder: owners that share in deciding how it is stored}: those that read it, and all that hold a tied one."""
        held = {place.name: place.holders for place in self.capture.placeholders if place.is_shared}
        readers = readers_of(self.capture).items()
        return {name: tuple(dict.fromkeys((*owners, *held.get(name, ())))) for name, owners in readers}

    @cached_property
    def low(self) -> frozenset[str]:
        """Parameters and buffers that were low when the model was recorded: the author's own, which no plan converts."""
        state = {place.name for place in self.capture.placeholders if place.kind in ("parameter", "buffer")}
        nodes = (node for node in self.capture.graph_module.graph.nodes if node.name in state)
        return frozenset(node.name for node in nodes if (held := dtype(node)) is not None and is_low(held))

    @cached_property
    def inputs(self) -> frozenset[str]:
        """Placeholders that are inputs of the model."""
        return frozenset(place.name for place in self.capture.placeholders if place.kind == "input")

    @cached_property
    def around(self) -> Mapping[str, frozenset[str]]:
        """{module: nodes that run inside a call of it, and those that read them}."""
        result: dict[str, set[str]] = {}
        for n in self.capture.graph_module.graph.nodes:
            for name in (n.name, *(source.name for source in n.all_input_nodes)):
                for call in self.capture.nodes[name].calls if name in self.capture.nodes else ():
                    result.setdefault(call.path, set()).add(n.name)
        return {path: frozenset(names) for path, names in result.items()}


def readers_of(capture: Capture) -> dict[str, tuple[str, ...]]:
    """{placeholder: owners of the nodes that read it}."""
    readers: dict[str, dict[str, None]] = {place.name: {} for place in capture.placeholders}
    for node in capture.nodes.values():
        for source in readers.keys() & set(node.inputs):
            readers[source][node.owner] = None
    return {name: tuple(owners) for name, owners in readers.items() if owners}


@dataclass(frozen=True)
class Boundary:
    """A module whose forward is wrapped. entry, exit: precision that what goes in, and comes out, is converted to.

    exit "input": that of whatever calls it, since its callers differ. keep: functions that stay FP32 in a low one.
    """

    precision: str
    keeps: bool
    entry: str | None
    exit: str | None
    keep: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Setting:
    """Precision of the scope a node belongs to. autocast: whether the node sits in an enabled autocast region.

    kept: whether it is part of a function that a low scope keeps in FP32. wins: the scope is entered inside the region
    that the author put the node in, and sets autocast anew.
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


@dataclass(frozen=True)
class Casts:
    """What is done to the arguments and the result of one operation, beside what the scopes on the way convert.

    autocast: what autocast does to the arguments; "none" where it is off, and to what the author wrote in place.
    precision: what it lowers them to. literals: what Python writes otherwise.
    """

    autocast: Treatment
    precision: str
    literals: Literals


class Policy(Semantics):
    """A capture as it runs under a strategy, wrapped as a plan that gives every owner its precision would wrap it.

    wrapped: the root, and every owner whose precision differs from that of the owner above it. stored: precision of every
    placeholder that the strategy stores. layout: what it has in common with other policies, where that is known.
    """

    def __init__(
        self,
        capture: Capture,
        strategy: str,
        precision_of: Callable[[str], str],
        format: str,
        layout: Layout | None = None,
    ) -> None:
        self.capture, self.how, self.format = capture, strategy_of(strategy), format
        self.layout = layout or Layout(capture, self.how)
        self._keep = precision_of.keep if isinstance(precision_of, PrecisionChoice) else {}
        self._assigned = self._owner_precisions(precision_of)
        self.wrapped = self._boundaries()
        self._keeping = {path: boundary.keep for path, boundary in self.wrapped.items() if boundary.keep}
        self.stored = self._storage_precisions()
        self._enclosing: dict[str, tuple[Call, ...]] = {}

    @classmethod
    def wide(cls, capture: Capture) -> Policy:
        """Everything in FP32 but what the author's own regions lower."""
        return cls(capture, "autocast", plain("fp32"), "fp32")

    def _owner_precisions(self, precision_of: Callable[[str], str]) -> Mapping[str, str]:
        """The precision of every owner; a module that has several paths, in scopes that differ, is FP32."""
        owners, result = self.layout.owners, dict[str, str]()
        for owner in owners:
            others = self.capture.aliases.get(owner, ())
            paths = (owner, *(nearest(path, frozenset(owners)) or "" for path in others)) if others else (owner,)
            asked = [precision_of(path) for path in paths]
            result[owner] = "fp32" if "fp32" in asked else asked[0]
        return result

    def _boundaries(self) -> dict[str, Boundary]:
        precisions: dict[str, str] = {}
        above: dict[str, str | None] = {"": None}
        for owner in self.layout.outermost:
            precision = self._assigned[owner]
            listed = (nearest_above(path, precisions) for path in (owner, *self.capture.aliases.get(owner, ())))
            callers = {None if path is None else precisions[path] for path in listed}
            if callers != {precision} or (owner in self._keep and precision != "fp32"):
                precisions[owner], above[owner] = precision, callers.pop() if len(callers) == 1 else "input"
        handed_low: set[str] = set()
        for reader, paths in self.layout.exited_modules.items() if "fp32" in precisions.values() else ():
            if self._assigned[reader] != "fp32":
                handed_low |= paths
        result = {}
        for path, precision in precisions.items():
            keeps = precision == "fp32" and path not in handed_low
            kept = self._keep.get(path, frozenset()) if precision != "fp32" else frozenset()
            entry, exit = self.how.boundary(precision, above[path], keeps)
            result[path] = Boundary(precision, keeps, entry, exit, kept)
        return result

    def _storage_precisions(self) -> dict[str, str]:
        """FP32 as soon as one of the scopes with a say is."""
        result = {}
        for place in self.capture.placeholders:
            if place.kind not in self.how.stores or place.name in self.layout.low:
                continue
            if place.kind == "input":
                result[place.name] = self._assigned[""]
            elif place.kind in ("parameter", "buffer") or self.format in place.made_in:
                owners = self.layout.deciding.get(place.name, ())
                low = bool(owners) and all(self._assigned[owner] != "fp32" for owner in owners)
                result[place.name] = self.format if low else "fp32"
        return result

    def enclosing(self, name: str) -> tuple[Call, ...]:
        """Wrapped calls around a node, outermost first, with that of a function that a scope keeps in FP32."""
        if name not in self._enclosing:
            node = self.capture.nodes.get(name)
            calls = () if node is None else tuple(call for call in node.calls if call.path in self.wrapped)
            function = node.function if node is not None else None
            if function and any(function.path in self._keeping.get(call.path, ()) for call in calls):
                calls = (*calls, Call(KEPT, function.depth, function.key))
            self._enclosing[name] = calls
        return self._enclosing[name]

    def keeps(self, name: str) -> bool:
        """Whether a node is part of a call that a scope around it keeps in FP32."""
        return bool(self._keeping) and bool(around := self.enclosing(name)) and around[-1].path == KEPT

    def setting(self, name: str) -> Setting:
        """What a node's scope asks for; the author's own regions win over it."""
        if self.keeps(name):
            return Setting("fp32", autocast=False, wins=True, kept=True)
        around = self.enclosing(name)
        opens = around[-1] if self.how.regional else self._opening(around) if self._keeping else None
        region = self.capture.nodes[name].region
        inside = region is not None and opens is not None and opens.depth >= region.depth
        low = opens is not None and self._computes_in(opens) != "fp32"
        return Setting(self._computes_in(around[-1]), low, wins=inside)

    def _computes_in(self, call: Call) -> str:
        precision: str = self.how.computes_in(self.wrapped[call.path].precision)
        return precision

    def _opening(self, around: tuple[Call, ...]) -> Call | None:
        """The innermost scope that enters or leaves autocast, under a strategy that does so only where functions are kept."""
        opening = [call for call in around if (result := self.wrapped[call.path]).keep or result.precision == "fp32"]
        return opening[-1] if opening else None

    def crossing(self, source: str, reader: str) -> tuple[str, ...]:
        """What a value is converted to on its way to a node that reads it; the graph's output lies outside of the root.

        It leaves every wrapped call that encloses its producer and not its reader, innermost first, of which those convert it
        that return it: an attribute of a module is read as it is. It enters those that enclose its reader alone. Inputs of the model come from outside of the root; weights pass no boundary. A function
        that a scope keeps raises what it is given, weights too, and hands on what it computed.
        """
        if self.how.raises_weights and source in self.stored:
            return ("fp32",)
        if source not in self.capture.nodes and source not in self.layout.inputs:
            return ("fp32",) if self.keeps(reader) else ()
        left, entered = self.enclosing(source), self.enclosing(reader)
        shared = 0
        while shared < min(len(left), len(entered)) and left[shared] == entered[shared]:
            shared += 1
        by = {"", *self.capture.nodes[source].returned} if left else set[str]()
        passed = [i for i in range(shared, len(left)) if left[i].key in by or left[i].path == KEPT]
        exits = [self._exit(left, index) for index in reversed(passed)]
        entries = ["fp32" if call.path == KEPT else self.wrapped[call.path].entry for call in entered[shared:]]
        return tuple(step for step in (*exits, *entries) if step is not None)

    def _exit(self, calls: tuple[Call, ...], index: int) -> str | None:
        path = calls[index].path
        handed_on = None if path == KEPT else self.wrapped[path].exit
        return self.wrapped[calls[index - 1].path].precision if handed_on == "input" else handed_on

    def casts(self, node: Node) -> Casts:
        """The one account of a node's casts, for whoever runs it and for whoever foretells its dtype."""
        setting = self.setting(node.name).in_region(node.region)
        on = setting.autocast and not node.in_place
        return Casts(operation(node.op).autocast if on else "none", setting.precision, self._literals(node))

    def _literals(self, node: Node) -> Literals:
        """What Python writes where it looks at low tensors: where a dtype was handed on as an argument, its caller does."""
        result = self.how.literals(node).get(self.format)
        if result is None:
            return Literals()
        depth = next((call.depth for call in reversed(node.calls) if not call.handed), 0)
        looking = next(call for call in reversed(self.enclosing(node.name)) if call.depth <= depth)
        return result if self._computes_in(looking) != "fp32" else Literals()

    def given(self, n: fx.Node, value: Any) -> Any:
        """What is handed over, as it is stored."""
        precision = self.stored.get(n.name)
        return value if precision is None else round_tree(value, FORMATS[precision])

    def compute(self, n: fx.Node, value_of: ValueOf) -> Any:
        """What the node computes, in the dtype its scope and autocast give it. Raises: UnsupportedInFormat."""
        if n.op == "output":
            return self.arriving(n, n.args, value_of)[0]
        node = self.capture.nodes[n.name]
        try:
            args, kwargs = self.kernel_arguments(n, value_of)
            result = run_op(target_of(n), args, kwargs)
        except UnsupportedInFormat as error:
            where = f"{node.owner or 'the model'} ({node.source or node.op})"
            raise UnsupportedInFormat(f"{error} in {where}", node.owner) from error
        if node.in_place and isinstance(result, torch.Tensor) and format_in(result) is not None:
            result = like(result, tensors_of(args)[0])
        cast = asked_for(self._literals(node).result)
        return result if cast is None else round_tree(result, cast)

    def kernel_arguments(self, n: fx.Node, value_of: ValueOf) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments that an operation's kernel is handed."""
        node = self.capture.nodes[n.name]
        casts = self.casts(node)
        args, kwargs = self.arriving(n, (n.args, n.kwargs), value_of)
        args, kwargs = with_literals(args, kwargs, casts.literals)
        if casts.autocast == "none":
            return args, kwargs
        return autocast_arguments(node.op, args, kwargs, FORMATS[casts.precision])

    def arriving(self, n: fx.Node, arguments: Any, value_of: ValueOf) -> Any:
        """Arguments of a node once the wrapped modules on the way have converted them."""

        def arrived(source: fx.Node) -> Any:
            value = value_of(source)
            for precision in self.crossing(source.name, n.name):
                value = round_tree(value, FORMATS[precision])
            return value

        return fx.node.map_arg(arguments, arrived)

    def differing(self, then: Semantics) -> Collection[str]:
        """Nodes in and behind modules that the other policy wraps otherwise, and placeholders that it stores otherwise."""
        assert isinstance(then, Policy)
        if (self.how, self.format, not self._keeping) != (then.how, then.format, not then._keeping):
            return {n.name for n in self.capture.graph_module.graph.nodes}
        names, now, before = set[str](), self.wrapped, then.wrapped
        for path in now.keys() | before.keys():
            if now.get(path) != before.get(path):
                names |= self.layout.around.get(path, frozenset())
        return names | {name for name, precision in self.stored.items() if then.stored.get(name) != precision}
