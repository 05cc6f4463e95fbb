"""Builds the torch.fx graph of a recorded run node by node, and collects the values of its placeholders: parameters,
buffers, tensors of the batch, constants."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from ..emulation.regions import Region
from ..numerics.entries import over_tensors
from ..numerics.nodes import op_name, operation_of, tensors_in
from ..records import Batch, Call, Made
from .source import SourceLine

_aten = torch.ops.aten
_GRADIENT = "gradient"
"""Key in `node.meta` of a bool: whether the node depends, through floating-point or complex values, on a parameter that
requires gradients."""


@dataclass(frozen=True)
class Mark:
    """Facts about an operation that its fx node lacks. calls: the enclosing module calls, outermost first. depth:
    number of module calls that were running when the operation's autocast region was entered, at least 1. in_place:
    name of the in-place operation that the node replaces. function: the torch function call that ran the operation."""

    calls: tuple[Call, ...]
    written: SourceLine | None
    region: Region | None
    depth: int
    in_place: str | None = None
    function: Call | None = None


@dataclass
class Recording:
    """One recorded run of a model. names: {placeholder: name of the parameter or buffer}. constants: {placeholder:
    value}. marks: {node: its Mark}. reads: whether Python read values that depend on the inputs, so that the graph is
    valid for these inputs only. asked: whether Python read a dtype. elsewhere: whether modules ran in another thread,
    which is not recorded. operations: number of operations run, even if no output depends on them. returned: {node:
    keys of the module calls that returned it}. made: {constant: where the user's code made it}. steering: names of the
    operations on whose rounding a value depends that Python read, or that determined a shape."""

    graph: fx.Graph = field(default_factory=fx.Graph)
    names: dict[str, str] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    marks: dict[str, Mark] = field(default_factory=dict)
    reads: bool = False
    asked: bool = False
    elsewhere: bool = False
    operations: int = 0
    returned: dict[str, list[str]] = field(default_factory=dict)
    made: dict[str, Made] = field(default_factory=dict)
    steering: set[str] = field(default_factory=set)


Observer = Callable[[fx.Node, Any], None]
"""Called with each recorded operation and its result in the recorded run, which later operations may overwrite."""


class Builder:
    """Adds nodes to a recording, and stores `mark` for each. exact: nodes computed without floating-point values, so
    that rounding cannot change them. fed: nodes that depend on a tensor of the batch. read: nodes whose values Python
    read, or that determined a shape."""

    def __init__(self, recording: Recording, mark: Mark, observer: Observer | None = None) -> None:
        self.recording, self.mark, self._observer = recording, mark, observer
        self.exact: set[fx.Node] = set()
        self.fed: set[fx.Node] = set()
        self.read: dict[fx.Node, None] = {}
        self._first: fx.Node | None = None

    def emit(self, target: Any, args: Any, kwargs: Any, value: Any) -> fx.Node:
        """Add an operation to the graph and return its node. value: the operation's result in the recorded run."""
        row = operation_of(target)
        written = row.known_as or op_name(target)
        target = _aten.reshape.default if target is _aten.view.default else target  # strides may differ in a replay
        node = self.recording.graph.create_node("call_function", target, name=row.name)
        node.args = tuple(args)  # set after create_node, which would search the arguments for symbolic numbers
        if kwargs:
            node.kwargs = dict(kwargs)
        self._describe_value(node, value)
        node.meta["op"] = written
        self._first = self._first or node
        sources = node.all_input_nodes
        if _is_exact(value) and all(source in self.exact for source in sources):
            self.exact.add(node)
        if any(source in self.fed for source in sources):
            self.fed.add(node)
        self.recording.marks[node.name] = self.mark
        if self._observer is not None:
            self._observer(node, value)
        return node

    def constant(self, x: torch.Tensor, kind: str = "constant") -> fx.Node:
        """Add a placeholder for a tensor that has the same entries in every replay, and store a copy of them."""
        node = self._placeholder(f"{kind}_{len(self.recording.constants)}", kind, x)
        self.recording.constants[node.name] = x.detach().clone()
        return node

    def state(self, kind: str, path: str, x: torch.Tensor) -> fx.Node:
        """Add a placeholder for a parameter or buffer. path: the dotted name in the model."""
        letters = "".join(c if c.isalnum() else "_" for c in path)
        node = self._placeholder(f"{kind[0]}_{letters}", kind, x)
        self.recording.names[node.name] = path
        return node

    def input(self, name: str, x: torch.Tensor) -> fx.Node:
        """Add a placeholder for a tensor of the batch."""
        node = self._placeholder(name, "input", x)
        self.fed.add(node)
        return node

    def close(self, outputs: Sequence[fx.Node]) -> None:
        """Finish the graph with `outputs` as its outputs; remove operations and constants that no output depends on."""
        recording = self.recording
        recording.steering = self._steering()
        recording.graph.output(tuple(outputs))
        for node in reversed(list(recording.graph.nodes)):
            if node.users or (node.op != "call_function" and node.name not in recording.constants):
                continue
            recording.graph.erase_node(node)
            if node.op == "placeholder":
                del recording.constants[node.name], recording.kinds[node.name]
        recording.outputs = tuple(node.name for node in outputs)
        recording.marks = {
            node.name: recording.marks[node.name] for node in recording.graph.nodes if node.op == "call_function"
        }

    def _steering(self) -> set[str]:
        """Names of the operations on whose rounding the values in `read` depend."""
        waiting = [node for node in self.read if node not in self.exact]
        result = set[str]()
        while waiting:
            node = waiting.pop()
            if node.op == "call_function" and node.name not in result:
                result.add(node.name)
                waiting += node.all_input_nodes
        return result

    def _placeholder(self, name: str, kind: str, x: torch.Tensor) -> fx.Node:
        graph = self.recording.graph
        with graph.inserting_before(self._first) if self._first is not None else nullcontext():
            node = graph.create_node("placeholder", name, name=name)
        self._describe_value(node, x)
        self.recording.kinds[node.name] = kind
        if _is_exact(x):
            self.exact.add(node)
        return node

    def _describe_value(self, node: fx.Node, value: Any) -> None:
        node.meta["val"] = over_tensors(_outline, value)
        if isinstance(value, torch.Tensor) and value.is_nested and value.layout is torch.jagged:
            node.meta["rows"] = _outline(value.values())
        if node.op == "placeholder":
            node.meta[_GRADIENT] = isinstance(value, torch.nn.Parameter) and value.requires_grad
        else:
            cut = node.target is _aten.detach.default
            reached = not cut and any(source.meta[_GRADIENT] for source in node.all_input_nodes)
            node.meta[_GRADIENT] = reached and any(_differentiable(x) for x in tensors_in(value))


def _is_exact(value: Any) -> bool:
    """Whether a value has no floating-point or complex entries, so that computing it adds no rounding error."""
    return not any(map(_differentiable, tensors_in(value)))


def _outline(x: torch.Tensor) -> torch.Tensor:
    """A meta tensor with the same shape and dtype; of shape [0] for a nested tensor, int8 for a quantized one."""
    if x.is_nested:  # ragged: no shape
        return torch.empty(0, dtype=x.dtype, device="meta")
    if x.layout is torch.strided and not x.is_quantized:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    return torch.empty(x.shape, dtype=torch.int8 if x.is_quantized else x.dtype, device="meta")


def carries_gradient(node: fx.Node) -> bool:
    """Whether a recorded node's result depends on a parameter that requires a gradient, through differentiable values.

    Detached values and results of `no_grad` blocks are cut off only in recordings of runs with gradients enabled.
    """
    return bool(node.meta.get(_GRADIENT))


def ends(node: fx.Node, x: torch.Tensor) -> bool:
    """Whether `x` requires no gradient, although the result of `node` would require one in a replay.

    Always False inside `no_grad`, where an autograd.Function runs its forward although its result requires a gradient.
    """
    return torch.is_grad_enabled() and bool(node.meta[_GRADIENT]) and _differentiable(x) and not x.requires_grad


def _differentiable(x: torch.Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


class RecordedModule(fx.GraphModule):
    """A GraphModule that fx.Interpreter runs, without generated code, so that node arguments may have any type."""

    def recompile(self) -> Any:
        """Do nothing, since no code is generated."""
        return None

    def forward(self, *args: Any) -> Any:
        """Replay the recorded run on the given inputs of the graph."""
        return fx.Interpreter(self).run(*args)


@dataclass(frozen=True)
class Binder:
    """Collects the values of a graph's placeholders from a model and a batch, in order. names: {placeholder: name of
    the parameter or buffer}. constants: {placeholder: value}. keywords: names of the batch's keyword arguments."""

    order: tuple[str, ...]
    names: Mapping[str, str]
    constants: Mapping[str, torch.Tensor]
    keywords: tuple[str, ...]

    def __call__(self, model: nn.Module, batch: Batch) -> list[Any]:
        """The placeholders' values in order; parameters and buffers are the model's tensors, not copies."""
        args, kwargs = batch
        keywords = (*(k for k in self.keywords if k in kwargs), *(k for k in kwargs if k not in self.keywords))
        inputs = iter({id(x): x for x in tensors_in((args, {key: kwargs[key] for key in keywords}))}.values())
        result = []
        for name in self.order:
            if name in self.constants:
                result.append(self.constants[name])
            elif name in self.names:
                result.append(tensor_at(model, self.names[name]))
            else:
                result.append(next(inputs))
        return result


def tensor_at(model: nn.Module, path: str) -> torch.Tensor:
    """A parameter or buffer of the model by its dotted name; module names need not be Python identifiers."""
    module: Any = model
    *parents, name = path.split(".")
    for part in parents:
        module = module._modules[part]
    tensor: torch.Tensor = (module._parameters if name in module._parameters else module._buffers)[name]
    return tensor


def named_inputs(model: nn.Module, batch: Batch) -> dict[int, str]:
    """{id of an input tensor: name of its argument of `forward`}; `x_0` is the first tensor in the container `x`."""
    args, kwargs = batch
    try:
        bound: dict[str, Any] = dict(inspect.signature(model.forward).bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):  # scripted modules have no signature
        bound = {f"input_{i}": x for i, x in enumerate(args)} | kwargs
    result: dict[int, str] = {}
    for name, value in bound.items():
        tensors = tensors_in(value)
        for index, x in enumerate(tensors):
            result.setdefault(id(x), name if value is x else f"{name}_{index}")
    return result
