"""Capture by running: the path that these inputs take, for models whose Python branches on tensor values."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.export.graph_signature import InputKind
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from ..fxnodes import mutates, tensors_of
from ..outputs import tensor_outputs, tensors_only
from ..records import Batch, Capture, Placeholder
from .casts import CudaPromotions, DistinctCasts, drop_aliases
from .exported import decompose, quiet, return_only
from .in_place import mark_in_place, written_in_place
from .naming import aliases_of, describe_nodes, enclosing_calls
from .regions import cuda_regions_kept, mark_entered_regions, recorded_depths, recorded_regions


def trace_concrete(model: nn.Module, batch: Batch) -> Capture:
    """Graph of the operations that `model(batch)` really executes, in the vocabulary of torch.export."""
    state = _state(model)
    places = _places(model, state)
    leaves, spec = pytree.tree_flatten(batch)
    inputs = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def call(tensors: list[torch.Tensor]) -> list[Any]:
        merged = list(leaves)
        for index, tensor in zip(inputs, tensors[len(state) :], strict=True):
            merged[index] = tensor
        args, kwargs = pytree.tree_unflatten(merged, spec)
        values = {name: tensors[place] for name, place in places.items()}
        with tensors_only(model):
            return tensor_outputs(torch.func.functional_call(model, values, args, kwargs, tie_weights=False))

    flat = [*state.values(), *(leaves[index] for index in inputs)]
    with quiet(), cuda_regions_kept(), _owners_recorded(model), torch.no_grad(), DistinctCasts(), CudaPromotions():
        traced = make_fx(
            call,
            tracing_mode="real",
            pre_dispatch=True,
            _error_on_data_dependent_ops=False,
            record_stack_traces=True,
        )([tensor.detach().clone() for tensor in flat])
    mark_entered_regions(traced)
    mark_in_place(traced)
    drop_aliases(traced)
    _drop_reads(traced)
    traced, constants = _functional(traced, flat)
    names = [node.name for node in traced.graph.nodes if node.op == "placeholder"]
    kinds = ["parameter" if isinstance(value, nn.Parameter) else "buffer" for value in state.values()]
    kinds = ["constant"] * len(constants) + kinds + ["input"] * len(inputs)
    fqns = [*[None] * len(constants), *state, *[None] * len(inputs)]
    placeholders = [Placeholder(*fields) for fields in zip(names, kinds, fqns, strict=True)]
    output = next(node for node in traced.graph.nodes if node.op == "output")
    return Capture(
        graph_module=traced,
        nodes=describe_nodes(traced, model),
        placeholders=tuple(placeholders),
        outputs=tuple(item.name for item in pytree.tree_leaves(output.args[0]) if isinstance(item, torch.fx.Node)),
        bind=_Binder(tuple(batch[1]), constants, copied=_writes(traced)),
        method="concrete",
        regions=recorded_regions(traced),
        in_place=written_in_place(traced),
        region_depths=recorded_depths(traced),
        calls=enclosing_calls(traced, model),
        aliases=aliases_of(model),
    )


def _drop_reads(traced: torch.fx.GraphModule) -> None:
    # `.item()` and the comparisons that feed it chose the path; on the path they compute nothing.
    for node in reversed(traced.graph.nodes):
        if not node.users and node.op == "call_function" and not mutates(node.target):
            traced.graph.erase_node(node)
    traced.recompile()


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _places(model: nn.Module, state: dict[str, torch.Tensor]) -> dict[str, int]:
    """{name: index in `state`}, a tensor that several modules share under the name it has in each of them.

    A module under two names is listed once: functional_call would put back the wrong tensor where the model raises.
    """
    index = {id(tensor): place for place, tensor in enumerate(state.values())}
    return {
        f"{path}.{name}".removeprefix("."): index[id(tensor)]
        for path, module in model.named_modules()
        for store in (module._parameters, module._buffers)
        for name, tensor in store.items()
        if tensor is not None
    }


@dataclass(frozen=True)
class _Binder:
    """Flat graph inputs: constants, the model's state, then a batch's tensors, keywords in the traced order.

    copied: the graph writes into its inputs, so it is given copies.
    """

    keywords: tuple[str, ...]
    constants: list[torch.Tensor]
    copied: bool

    def __call__(self, model: nn.Module, batch: Batch) -> list[Any]:
        args, kwargs = batch
        inputs = tensors_of((args, {key: kwargs[key] for key in self.keywords}))
        flat = [*self.constants, *_state(model).values(), *inputs]
        return [tensor.detach().clone() for tensor in flat] if self.copied else flat


def _functional(
    traced: torch.fx.GraphModule, flat: list[torch.Tensor]
) -> tuple[torch.fx.GraphModule, list[torch.Tensor]]:
    """The recorded path without writes into tensors, and the constants it takes before its other inputs.

    The path no longer depends on values, so torch.export can follow it; where one of its operations still does, or it
    enters autocast regions, it stays as recorded.
    """
    if not _writes(traced) or recorded_regions(traced):
        return traced, []
    try:
        program = decompose(torch.export.export(traced, ([tensor.detach().clone() for tensor in flat],), strict=False))
    except Exception:
        return traced, []
    return_only(program)
    held = {**program.state_dict, **program.constants}
    lifted = [spec.target for spec in program.graph_signature.input_specs if spec.kind != InputKind.USER_INPUT]
    return program.graph_module, [held[name] for name in lifted if name is not None]


def _writes(traced: torch.fx.GraphModule) -> bool:
    return any(mutates(node.target) for node in traced.graph.nodes)


@contextmanager
def _owners_recorded(model: nn.Module) -> Iterator[None]:
    stack: dict[str, tuple[str, str]] = {}
    calls = itertools.count()
    handles = []

    def enter(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, *_: Any) -> None:
            stack[f"{path}#{next(calls)}"] = (path, type(module).__name__)
            fx_traceback.current_meta["nn_module_stack"] = dict(stack)

        return hook

    def leave(*_: Any) -> None:
        stack.popitem()
        fx_traceback.current_meta["nn_module_stack"] = dict(stack)

    for path, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(enter(path)))
        handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        with fx_traceback.preserve_node_meta():
            yield
    finally:
        for handle in handles:
            handle.remove()
