"""Literals that Python derived from a tensor's dtype, found by tracing the model once more in each format."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from difflib import SequenceMatcher
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from ..records import Batch, Capture
from .concrete import trace_concrete
from .exported import decompose, export_program
from .naming import op_name

Literals = dict[str, dict[int | str, Any]]

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_INFO = torch.finfo(torch.float32)
_TELLTALE = (_INFO.max, _INFO.tiny, _INFO.eps, _INFO.resolution)


def dtype_constants(
    captured: Capture, model: nn.Module, batch: Batch, formats: tuple[str, ...]
) -> Mapping[str, Mapping[str, Mapping[int | str, Any]]]:
    """{format: {node: {argument: value}}} for nodes whose literals change with the dtype of the model.

    The second trace is made only where the first holds a dtype or a limit of float32, since only then may Python
    have looked at a dtype. An exported trace runs on shapes alone, so operations without a half kernel do not stop it;
    a concrete one needs them, and without it the FP32 literals stand.
    """
    if not _suspicious(captured.graph_module):
        return {}
    found = {}
    for name in formats:
        dtype = _DTYPES.get(name)
        graph_module = _trace_in(model, batch, dtype, captured.method) if dtype is not None else None
        if graph_module is not None:
            found[name] = _differences(captured.graph_module, graph_module)
    return found


def _suspicious(graph_module: fx.GraphModule) -> bool:
    literals = [leaf for node in graph_module.graph.nodes for leaf in pytree.tree_leaves((node.args, node.kwargs))]
    return any(isinstance(leaf, torch.dtype) or (isinstance(leaf, float) and _is_telltale(leaf)) for leaf in literals)


def _is_telltale(value: float) -> bool:
    return any(math.isclose(abs(value), limit, rel_tol=1e-6) for limit in _TELLTALE)


def _trace_in(model: nn.Module, batch: Batch, dtype: torch.dtype, method: str) -> fx.GraphModule | None:
    lowered = copy.deepcopy(model).to(dtype)
    inputs = pytree.tree_map_only(torch.Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, batch)
    try:
        if method == "concrete":
            return trace_concrete(lowered, inputs).graph_module
        graph_module: fx.GraphModule = decompose(export_program(lowered, inputs, ambient=False)).graph_module
        return graph_module
    except Exception:  # a dtype mismatch: the measurements meet it and name it
        return None


def _differences(reference: fx.GraphModule, lowered: fx.GraphModule) -> Literals:
    ours, theirs = _operations(reference), _operations(lowered)
    matcher = SequenceMatcher(None, [_key(node) for node in ours], [_key(node) for node in theirs], autojunk=False)
    found: Literals = {}
    for block in matcher.get_matching_blocks():
        for mine, other in zip(ours[block.a :][: block.size], theirs[block.b :][: block.size], strict=True):
            changed = _changed_literals(mine, other)
            if changed:
                found[mine.name] = changed
    return found


def _operations(graph_module: fx.GraphModule) -> list[fx.Node]:
    nodes = [node for node in graph_module.graph.nodes if node.op == "call_function"]
    return [node for node in nodes if not op_name(node.target).startswith("aten._assert")]


def _key(node: fx.Node) -> tuple[str, str]:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return op_name(node.target), stack[-1][0] if stack else ""


def _changed_literals(mine: fx.Node, other: fx.Node) -> dict[int | str, Any]:
    pairs: list[tuple[int | str, Any, Any]] = [
        *((index, a, b) for index, (a, b) in enumerate(zip(mine.args, other.args, strict=False))),
        *((key, mine.kwargs[key], other.kwargs[key]) for key in mine.kwargs.keys() & other.kwargs.keys()),
    ]
    return {key: b for key, a, b in pairs if type(a) is type(b) and isinstance(a, (float, torch.dtype)) and a != b}
