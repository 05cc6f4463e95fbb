"""Which recorded operation an operation of the exported graph is: measured was the one, and it is the other that runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import SequenceMatcher
from typing import Any

from torch import fx

from ..numerics.nodes import row_of, tensors_of
from ..numerics.operations import operation, packet
from ..records import Capture
from .exported import INNER

Key = tuple[str, tuple[int, ...]]


def aligned(graph: fx.Graph, values: Mapping[str, Any], capture: Capture) -> dict[str, str]:
    """{operation of the exported graph: recorded operation}: in each module the same ones in the same order.

    values: results by name, from the run that was recorded. What has no counterpart is left out.
    """
    recorded: dict[str, list[tuple[Key, str]]] = {}
    for name, node in capture.nodes.items():
        recorded.setdefault(_first_path(capture, node.owner), []).append((_key(node.op, node.shape), name))
    ours: dict[str, list[tuple[Key, str]]] = {}
    for node in graph.nodes:
        tensors = tensors_of(values.get(node.name))
        if node.op == "call_function" and tensors:
            key = _key(row_of(node).op, tuple(tensors[0].shape))
            ours.setdefault(_first_path(capture, owner_of(node)), []).append((key, node.name))
    found: dict[str, str] = {}
    for owner, several in ours.items():
        found |= _matched(several, recorded.get(owner, []))
    return found


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


def _matched(ours: list[tuple[Key, str]], recorded: list[tuple[Key, str]]) -> dict[str, str]:
    matcher = SequenceMatcher(None, [key for key, _ in ours], [key for key, _ in recorded], autojunk=False)
    return {
        ours[block.a + step][1]: recorded[block.b + step][1]
        for block in matcher.get_matching_blocks()
        for step in range(block.size)
    }
