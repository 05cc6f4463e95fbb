"""Names a user recognises: owner module, source line and ATen name of every node of a tape."""

from __future__ import annotations

import torch
from torch import fx, nn

from ..isolation.members import modules_of
from ..numerics.nodes import row_of
from ..records import AutocastRegion, Node
from .builder import Mark, Tape
from .calls import first_paths
from .source import code_at, line_of


def describe_nodes(tape: Tape, model: nn.Module) -> dict[str, Node]:
    """Every operation of the tape, in execution order, keyed by node name."""
    paths = first_paths(model)
    types = {paths[id(module)]: type(module).__name__ for module in modules_of(model)}
    return {
        node.name: _describe(node, tape.marks[node.name], types)
        for node in tape.graph.nodes
        if node.op == "call_function"
    }


def _describe(node: fx.Node, mark: Mark, types: dict[str, str]) -> Node:
    owner = mark.calls[-1].path
    value = node.meta.get("val")
    if isinstance(value, (tuple, list)):
        value = next((item for item in value if isinstance(item, torch.Tensor)), None)
    tensor = value if isinstance(value, torch.Tensor) else None
    written = mark.written
    caller = written.caller if written else None
    return Node(
        name=node.name,
        op=node.meta["op"],
        owner=owner,
        owner_type=types.get(owner, ""),
        source=line_of(written.place) if written else None,
        source_path=written.place[0] if written else None,
        code=code_at(written.place) if written else None,
        inputs=tuple(source.name for source in node.all_input_nodes),
        shape=tuple(tensor.shape) if tensor is not None else (),
        dtype=str(tensor.dtype).removeprefix("torch.") if tensor is not None else "",
        floating=tensor is not None and (tensor.is_floating_point() or tensor.is_complex()),
        calls=mark.calls,
        region=AutocastRegion(mark.region.enabled, mark.region.dtype, mark.depth) if mark.region is not None else None,
        in_place=_stands_for_one(node, mark),
        function=mark.function,
        called_from=f"{line_of(caller)} in {written.function}" if written and caller else None,
        caller_path=caller[0] if caller else None,
    )


def _stands_for_one(node: fx.Node, mark: Mark) -> bool:
    """Whether the operation is what the author wrote in place, and not one that tells others of what was written."""
    if mark.in_place is None:
        return False
    return row_of(node).name in (mark.in_place, mark.in_place.removesuffix("_"))
