"""Which recorded operation an operation of the exported graph is: measured was the one, and it is the other that runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import fx

from ..capture.paths import aligned as match
from ..numerics.nodes import row_of, tensors_of
from ..numerics.operations import operation, packet
from ..records import Capture
from .exported import INNER

Key = tuple[str, tuple[int, ...]]


def aligned(graph: fx.Graph, values: Mapping[str, Any], capture: Capture) -> dict[str, str]:
    """{operation of the exported graph: recorded operation}: in each module the same ones in the same order.

    values: results by name, from the run that was recorded. What has no counterpart is left out.
    """
    recorded = [
        (_first_path(capture, node.owner), _key(node.op, node.shape), name) for name, node in capture.nodes.items()
    ]
    ours = [
        (_first_path(capture, owner_of(node)), _key(row_of(node).op, tuple(tensors[0].shape)), node.name)
        for node in graph.nodes
        if node.op == "call_function" and (tensors := tensors_of(values.get(node.name)))
    ]
    return dict(match(ours, recorded))


def owner_of(node: fx.Node) -> str:
    """Path of the module whose forward wrote it, "" for the model itself."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(stack[-1][0]).partition("@")[0] if stack else ""
    parts = [part for part in path.split(".") if part not in ("L['self']", "L__self__")]
    return ".".join(parts[1:] if parts[:1] == [INNER] else parts)


def _first_path(capture: Capture, path: str) -> str:
    """A module that has several paths goes by one of them."""
    return next((first for first, others in capture.aliases.items() if path in others), path)


def _key(op: str, shape: Iterable[int]) -> Key:
    """Names that differ by tracer alone are one."""
    name = packet(op).removesuffix("_copy")
    return operation(op).traced_as or name, tuple(shape)
