"""Autocast regions in a traced graph: flattened away, and remembered beside the nodes they enclosed."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import fx
from torch.export import ExportedProgram

Region = tuple[bool, str]
"""Whether autocast is enabled, and its dtype."""

_Mark = tuple[Region, int]
_KEY = "auditor_autocast"
_HOPS = torch.ops.higher_order


@contextmanager
def cuda_regions_kept() -> Iterator[None]:
    """While tracing without CUDA: `torch.autocast("cuda")` would switch itself off, and look as if its author had.

    It changes nothing for tensors on the CPU; only the region is recorded as it was written.
    """
    if torch.cuda.is_available():
        yield
        return
    common = torch.cuda.amp.common
    kept = common.amp_definitely_not_available, torch.cuda.is_bf16_supported
    common.amp_definitely_not_available = lambda: False
    torch.cuda.is_bf16_supported = lambda including_emulation=True: True
    try:
        yield
    finally:
        common.amp_definitely_not_available, torch.cuda.is_bf16_supported = kept


def inline_regions(program: ExportedProgram) -> None:
    """Replace every `wrap_with_autocast` and `wrap_with_set_grad_enabled` of the program by its body, in place.

    Functionalising such a node would retrace its body: owners and source lines would be lost, and on this machine's
    own device the casts of a region would be baked in.
    """
    renamed = _inline(program.graph_module)
    while renamed:
        for old, new in renamed.items():
            program.graph_signature.replace_all_uses(old, new)
        renamed = _inline(program.graph_module)
    program.graph_module.graph.eliminate_dead_code()
    program.graph_module.recompile()


def recorded_regions(graph_module: fx.GraphModule) -> dict[str, Region]:
    """{node: region} for the nodes inside an explicit autocast region."""
    marked = {node.name: (node.meta.get("custom") or {}).get(_KEY) for node in graph_module.graph.nodes}
    return {name: mark[0] for name, mark in marked.items() if mark is not None}


def recorded_depths(graph_module: fx.GraphModule) -> dict[str, int]:
    """{node: number of module calls that were open where its region was entered}."""
    marked = {node.name: (node.meta.get("custom") or {}).get(_KEY) for node in graph_module.graph.nodes}
    return {name: mark[1] for name, mark in marked.items() if mark is not None}


def mark_entered_regions(graph_module: fx.GraphModule) -> None:
    """Remember the regions of a graph that enters and leaves them by `_enter_autocast` and `_exit_autocast`."""
    stack: list[_Mark] = []
    for node in graph_module.graph.nodes:
        if node.target is torch.amp.autocast_mode._enter_autocast:
            stack.append(((bool(node.args[2]), _dtype_name(node.args[1])), _depth(node)))
        elif node.target is torch.amp.autocast_mode._exit_autocast:
            stack.pop()
        elif stack:
            _mark(node, stack[-1])


def _inline(graph_module: fx.GraphModule) -> dict[str, str]:
    """Inline one level; returns the new names of what the regions returned."""
    renamed: dict[str, str] = {}
    for node in list(graph_module.graph.nodes):
        if node.target is _HOPS.wrap_with_autocast:
            _, dtype, enabled, _, body, *operands = node.args
            renamed |= _splice(graph_module, node, body, operands, ((bool(enabled), _dtype_name(dtype)), _depth(node)))
        elif node.target is _HOPS.wrap_with_set_grad_enabled:
            _, body, *operands = node.args
            renamed |= _splice(graph_module, node, body, operands, None)
    return renamed


def _splice(
    graph_module: fx.GraphModule, call: fx.Node, body: fx.Node, operands: list[fx.Node], region: _Mark | None
) -> dict[str, str]:
    inner = getattr(graph_module, str(body.target))
    for name, child in inner.named_children():  # bodies of regions inside this one
        graph_module.add_module(f"{body.target}_{name}", child)
    for node in inner.graph.nodes:
        if node.op == "get_attr":
            node.target = f"{body.target}_{node.target}"
    mapping = dict(zip((node for node in inner.graph.nodes if node.op == "placeholder"), operands, strict=True))
    with graph_module.graph.inserting_before(call):
        for node in inner.graph.nodes:
            if node.op not in ("placeholder", "output"):
                mapping[node] = graph_module.graph.node_copy(node, lambda source: mapping[source])
                if region is not None or _KEY in (call.meta.get("custom") or {}):
                    _mark(mapping[node], region or call.meta["custom"][_KEY])
    results = [mapping[item] for item in next(iter(reversed(inner.graph.nodes))).args[0]]
    renamed = {}
    for user in list(call.users):
        result = results[operator.index(user.args[1])]  # type: ignore[arg-type]
        renamed[user.name] = result.name
        user.replace_all_uses_with(result)
        graph_module.graph.erase_node(user)
    graph_module.graph.erase_node(call)
    return renamed


def _mark(node: fx.Node, region: _Mark) -> None:
    custom = node.meta.get("custom") or {}
    node.meta["custom"] = {_KEY: region, **custom}  # the innermost region was marked first, and stands


def _depth(node: fx.Node) -> int:
    """Module calls that are open where a region is entered: the root's, at least."""
    return max(1, len(node.meta.get("nn_module_stack") or {}))


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
