"""Literals that Python derived from a tensor's dtype, found by tracing the model once more in each format."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from ..patch.temporary import restored
from ..records import Batch, Capture
from .concrete import trace_concrete
from .exported import trace_exported
from .naming import op_name

Literals = dict[str, dict[int | str, Any]]

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_INFO = torch.finfo(torch.float32)
_TELLTALE = (_INFO.max, _INFO.tiny, _INFO.eps, _INFO.resolution)


def dtype_constants(
    captured: Capture, model: nn.Module, batch: Batch, formats: tuple[str, ...]
) -> Mapping[str, Mapping[str, Mapping[int | str, Any]]]:
    """{format: {node: {argument: value}}} for nodes whose literals change with the dtype of the model.

    Two keys are no arguments. "result": a cast that Python puts behind the node in the low model alone. "dtype": on a
    placeholder, a constant that Python makes in the model's dtype. "autocast_<format>" holds the literals under autocast.
    More traces are made only where the first holds a dtype or a limit of float32, since only then may Python
    have looked at a dtype. An exported trace runs on shapes alone, so operations without a half kernel do not stop it;
    a concrete one needs them, and without it the FP32 literals stand.
    """
    if not _suspicious(captured.graph_module):
        return {}
    found = {}
    outline = trace_exported(model, batch, functional=False) if captured.method == "export" else captured
    names = _names(outline, captured)
    for name in formats:
        dtype = _DTYPES.get(name)
        if dtype is None:
            continue
        changed = _stored_low(outline, model, batch, dtype)
        if changed is not None:
            found[name] = _renamed(changed, names)
        with torch.autocast("cpu", dtype=dtype):
            regional = _trace_in(model, batch, captured.method)
        if regional is not None:
            changed = _differences(outline.graph_module, regional.graph_module, casts=False)
            found[f"autocast_{name}"] = _renamed(changed, names)
    return found


def _names(outline: Capture, captured: Capture) -> dict[str, str]:
    """{node of the outline: the same node of the functional graph}."""
    if outline is captured:
        return {node.name: node.name for node in captured.graph_module.graph.nodes}
    known = {placeholder.fqn: placeholder.name for placeholder in captured.placeholders}
    found = {p.name: known[p.fqn] for p in outline.placeholders if p.fqn is not None and p.fqn in known}
    twins = _twins(_operations(outline.graph_module, True), _operations(captured.graph_module, True))
    return found | {ours.name: theirs.name for ours, theirs in twins}


def _renamed(literals: Literals, names: Mapping[str, str]) -> Literals:
    return {names[name]: changed for name, changed in literals.items() if name in names}


def _suspicious(graph_module: fx.GraphModule) -> bool:
    literals = [leaf for node in graph_module.graph.nodes for leaf in pytree.tree_leaves((node.args, node.kwargs))]
    return any(isinstance(leaf, torch.dtype) or (isinstance(leaf, float) and _is_telltale(leaf)) for leaf in literals)


def _is_telltale(value: float) -> bool:
    return value == 1 - _INFO.eps or any(math.isclose(abs(value), limit, rel_tol=1e-6) for limit in _TELLTALE)


def _stored_low(outline: Capture, model: nn.Module, batch: Batch, dtype: torch.dtype) -> Literals | None:
    """What changes in a model that is stored in `dtype`; None where it cannot be traced in it."""
    inputs = pytree.tree_map_only(torch.Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, batch)
    constants = outline.bind(model, batch)
    with restored(model):  # the model itself: not every one can be copied
        try:
            low = _trace_in(model.to(dtype), inputs, outline.method)
        except Exception:  # a `to` of the model's own: the FP32 literals stand
            return None
        if low is None:
            return None
        changed = _differences(outline.graph_module, low.graph_module)
        return changed | _constants_in(outline, constants, low, low.bind(model, inputs))


def _trace_in(model: nn.Module, batch: Batch, method: str) -> Capture | None:
    try:
        if method == "concrete":
            return trace_concrete(model, batch)
        return trace_exported(model, batch, ambient=False, functional=False)
    except Exception:  # a dtype mismatch: the measurements meet it and name it
        return None


def _constants_in(captured: Capture, own: list[Any], low: Capture, others: list[Any]) -> Literals:
    """Constants that the low model makes in another dtype than the FP32 one; own, others: what the graphs take."""
    theirs = {p.fqn: tensor for p, tensor in zip(low.placeholders, others, strict=True)}
    found: Literals = {}
    for placeholder, ours in zip(captured.placeholders, own, strict=True):
        other = theirs.get(placeholder.fqn)
        if placeholder.kind == "constant" and other is not None and other.dtype != ours.dtype:
            found[placeholder.name] = {"dtype": other.dtype}
    return found


def _differences(reference: fx.GraphModule, lowered: fx.GraphModule, *, casts: bool = True) -> Literals:
    ours, theirs = _operations(reference, casts), _operations(lowered, casts)
    found: Literals = {}
    twins: dict[fx.Node, fx.Node] = {}
    for mine, other in _twins(ours, theirs):
        twins[other] = mine
        changed = _changed_literals(mine, other)
        if changed:
            found[mine.name] = changed
    for other in theirs if casts else ():
        if other in twins or op_name(other.target) != "aten.to.dtype":
            continue
        (source,) = other.all_input_nodes
        if source in twins and len(source.users) == 1:
            found.setdefault(twins[source].name, {})["result"] = other.args[1]
    return found


def _twins(ours: Sequence[fx.Node], theirs: Sequence[fx.Node]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Nodes of two graphs that are the same operation of the same module, in the same order."""
    matcher = SequenceMatcher(None, [_key(node) for node in ours], [_key(node) for node in theirs], autojunk=False)
    for block in matcher.get_matching_blocks():
        yield from zip(ours[block.a :][: block.size], theirs[block.b :][: block.size], strict=True)


def _operations(graph_module: fx.GraphModule, casts: bool) -> list[fx.Node]:
    nodes = [node for node in graph_module.graph.nodes if node.op == "call_function"]
    left_out = ("aten._assert",) if casts else ("aten._assert", "aten.to.", "aten._to_copy")
    return [node for node in nodes if not op_name(node.target).startswith(left_out)]


def _key(node: fx.Node) -> tuple[str, str]:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return op_name(node.target).replace("_.", "."), stack[-1][0] if stack else ""  # in place or not


def _changed_literals(mine: fx.Node, other: fx.Node) -> dict[int | str, Any]:
    pairs: list[tuple[int | str, Any, Any]] = [
        *((index, a, b) for index, (a, b) in enumerate(zip(mine.args, other.args, strict=False))),
        *((key, mine.kwargs[key], other.kwargs[key]) for key in mine.kwargs.keys() & other.kwargs.keys()),
    ]
    return {key: b for key, a, b in pairs if type(a) is type(b) and isinstance(a, (float, torch.dtype)) and a != b}
