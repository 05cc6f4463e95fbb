"""Names a user recognises: owner module, source line and ATen name of every node of a graph."""

from __future__ import annotations

import os
import re
import sysconfig
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from ..records import Call, Node

_FRAME = re.compile(r'File "(?P<path>[^"]+)", line (?P<line>\d+), in .*\n\s*(?P<code>.*)')
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_INSTALLED = tuple(
    {sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"], sysconfig.get_paths()["stdlib"]}
)


def describe_nodes(graph_module: fx.GraphModule, model: nn.Module) -> dict[str, Node]:
    """Every operation of the graph, in execution order, keyed by node name."""
    canonical = _canonical_paths(model)
    types = {path: type(module).__name__ for path, module in model.named_modules(remove_duplicate=False)}
    return {
        node.name: _describe(node, canonical, types) for node in graph_module.graph.nodes if node.op == "call_function"
    }


def enclosing_calls(graph_module: fx.GraphModule, model: nn.Module) -> dict[str, tuple[Call, ...]]:
    """The module calls around every operation, the root's first: what its values pass on their way to another one."""
    canonical = _canonical_paths(model)
    known: dict[tuple[str, ...], tuple[Call, ...]] = {}
    found = {}
    for node in graph_module.graph.nodes:
        if node.op == "call_function":
            stack = node.meta.get("nn_module_stack") or {}
            if tuple(stack) not in known:
                known[tuple(stack)] = _calls(stack, canonical)
            found[node.name] = known[tuple(stack)]
    return found


def aliases_of(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """{first path: the others} of every module that has several."""
    paths: dict[nn.Module, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(module, []).append(path)
    return {first: tuple(others) for first, *others in paths.values() if others}


def _calls(stack: dict[str, Any], canonical: dict[str, str]) -> tuple[Call, ...]:
    calls = [Call("", 0, "")]
    for key, (path, _) in stack.items():
        path = re.sub(r"@\d+", "", path)
        if path:
            calls.append(Call(canonical.get(path, path), len(calls), key))
    return tuple(calls)


def op_name(target: Any) -> str:
    """`aten.softmax.int` for an operator overload, the function's name for anything else (`getitem`)."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return str(getattr(target, "__name__", target))


def _describe(node: fx.Node, canonical: dict[str, str], types: dict[str, str]) -> Node:
    owner = _owner(node, canonical)
    path, line, code = _source(node.meta.get("stack_trace"))
    value = node.meta.get("val")
    if isinstance(value, (tuple, list)):
        value = next((item for item in value if isinstance(item, torch.Tensor)), None)
    tensor = value if isinstance(value, torch.Tensor) else None
    return Node(
        name=node.name,
        op=op_name(node.target),
        owner=owner,
        owner_type=types.get(owner, ""),
        source=f"{Path(path).name}:{line}" if path else None,
        source_path=path,
        code=code,
        inputs=tuple(source.name for source in node.all_input_nodes),
        shape=tuple(int(size) for size in tensor.shape) if tensor is not None else (),
        dtype=str(tensor.dtype).removeprefix("torch.") if tensor is not None else "",
        floating=tensor is not None and (tensor.is_floating_point() or tensor.is_complex()),
    )


def _canonical_paths(model: nn.Module) -> dict[str, str]:
    first: dict[int, str] = {}
    paths = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths[path] = first.setdefault(id(module), path)
    return paths


def _owner(node: fx.Node, canonical: dict[str, str]) -> str:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    for path, _ in reversed(stack):
        path = re.sub(r"@\d+", "", path)  # a module called again is traced as "path@1"
        if path in canonical:
            return canonical[path]
    return ""


@lru_cache(maxsize=8192)
def _source(trace: str | None) -> tuple[str | None, int, str | None]:
    """Innermost frame of the user's own code; of an installed library where there is none; never of torch itself."""
    frames = [
        (match["path"], int(match["line"]), match["code"].strip())
        for match in _FRAME.finditer(trace or "")
        if not match["path"].startswith(_TORCH)
    ]
    own = [frame for frame in frames if not frame[0].startswith(_INSTALLED)]
    return (own or frames or [(None, 0, None)])[-1]
