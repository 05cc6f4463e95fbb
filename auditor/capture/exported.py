"""Capture by torch.export: non-strict, functionalised, composite operations kept whole."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export._tree_utils import reorder_kwargs
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree

from ..outputs import tensor_outputs
from ..records import Batch, Capture, Placeholder
from .casts import CudaPromotions, DistinctCasts, drop_aliases, protect_casts, restore_casts
from .in_place import mark_in_place, written_in_place
from .naming import aliases_of, describe_nodes, enclosing_calls
from .regions import cuda_regions_kept, inline_regions, recorded_depths, recorded_regions

_KINDS = {
    InputKind.PARAMETER: "parameter",
    InputKind.BUFFER: "buffer",
    InputKind.CONSTANT_TENSOR: "constant",
    InputKind.USER_INPUT: "input",
}


def trace_exported(model: nn.Module, batch: Batch, *, ambient: bool = True, functional: bool = True) -> Capture:
    """Graph of `model` on `batch`: functional, FP32, with the autocast regions of the author kept beside it.

    ambient: trace as if inside an autocast region of dtype float32. It inserts no cast, but code that asks whether
    autocast is on, in order to switch it off, then shows the regions that it protects.
    functional: without it, operations in place stay as they were written, and tracing takes a third of the time.
    """
    program = export_program(model, batch, ambient=ambient)
    if functional:
        program = decompose(program)
    else:
        _flatten(program)
        restore_casts(program.graph_module)
    graph_module = program.graph_module
    outputs = return_only(program)
    nodes = describe_nodes(graph_module, model)
    _tolerate_strides(graph_module)
    return Capture(
        graph_module=graph_module,
        nodes=nodes,
        placeholders=_placeholders(program),
        outputs=outputs,
        bind=_Binder(program),
        method="export",
        regions=recorded_regions(graph_module),
        in_place=written_in_place(graph_module),
        region_depths=recorded_depths(graph_module),
        calls=enclosing_calls(graph_module, model),
        aliases=aliases_of(model),
    )


def export_program(model: nn.Module, batch: Batch, *, ambient: bool) -> ExportedProgram:
    """torch.export in its training form: autocast regions are still in the graph, as `wrap_with_autocast`."""
    args, kwargs = batch
    outputs_only = model.register_forward_hook(lambda _module, _args, output: tensor_outputs(output))
    try:
        with (
            quiet(),
            cuda_regions_kept(),
            DistinctCasts(),
            CudaPromotions(),
            _ambient_autocast() if ambient else nullcontext(),
        ):
            program: ExportedProgram = torch.export.export(model, args, kwargs, strict=False)
            return program
    finally:
        outputs_only.remove()


def decompose(program: ExportedProgram) -> ExportedProgram:
    """Functionalise; explicit casts stay (casts.py), autocast regions are flattened, and remembered (regions.py)."""
    _flatten(program)
    with quiet():
        functional: ExportedProgram = program.run_decompositions({})
    _drop_assertions(functional.graph_module)
    restore_casts(functional.graph_module)
    return functional


def _flatten(program: ExportedProgram) -> None:
    inline_regions(program)
    renamed = drop_aliases(program.graph_module)
    for old, new in renamed.items():
        program.graph_signature.replace_all_uses(old, new)
    _drop_assertions(program.graph_module)
    protect_casts(program.graph_module)
    mark_in_place(program.graph_module)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the tracer, which warns, logs and prints whole graphs where it gives up; the caller reports the reason."""
    threshold = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with (
            warnings.catch_warnings(),
            Path(os.devnull).open("w") as nowhere,
            redirect_stdout(nowhere),
            redirect_stderr(nowhere),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(threshold)


@contextmanager
def _ambient_autocast() -> Iterator[None]:
    # torch.autocast refuses float32 on the CPU; the flags below it do not, and casting float32 to float32 is nothing.
    enabled, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    torch.set_autocast_enabled("cpu", True)
    torch.set_autocast_dtype("cpu", torch.float32)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cpu", enabled)
        torch.set_autocast_dtype("cpu", dtype)
        torch.clear_autocast_cache()


def _drop_assertions(graph_module: fx.GraphModule) -> None:
    # They pin the dtypes seen while tracing; the measurements run the same graph in others.
    for node in list(graph_module.graph.nodes):
        if "_assert" in str(node.target) and not node.users:
            graph_module.graph.erase_node(node)
    graph_module.recompile()


def return_only(program: ExportedProgram) -> tuple[str, ...]:
    """Reduce the graph's outputs to what the caller gets; returns their names."""
    graph_module, outputs = program.graph_module, _outputs(program)
    # A functional graph also returns what the forward writes into inputs and buffers; the caller never sees those.
    output = next(iter(reversed(graph_module.graph.nodes)))
    returned = {node.name: node for node in output.all_input_nodes}
    output.args = (tuple(returned[name] for name in outputs),)
    graph_module.graph.eliminate_dead_code()
    graph_module.recompile()
    return outputs


def _tolerate_strides(graph_module: fx.GraphModule) -> None:
    # `view` was chosen for the strides seen while tracing; other kernels of the same operation have others.
    for node in graph_module.graph.nodes:
        if node.target is torch.ops.aten.view.default:
            node.target = torch.ops.aten.reshape.default
    graph_module.recompile()


def _placeholders(program: ExportedProgram) -> tuple[Placeholder, ...]:
    specs = program.graph_signature.input_specs
    names = [node.name for node in program.graph.nodes if node.op == "placeholder"]
    return tuple(
        Placeholder(name, _KINDS.get(spec.kind, "constant"), spec.target)
        for name, spec in zip(names, specs, strict=True)
    )


def _outputs(program: ExportedProgram) -> tuple[str, ...]:
    specs = program.graph_signature.output_specs
    return tuple(spec.arg.name for spec in specs if spec.kind == OutputKind.USER_OUTPUT and hasattr(spec.arg, "name"))


class _Binder:
    """Flat graph inputs for a model and a batch of the traced shapes."""

    def __init__(self, program: ExportedProgram) -> None:
        self._specs = program.graph_signature.input_specs
        self._constants = program.constants
        self._in_spec = program.call_spec.in_spec

    def __call__(self, model: nn.Module, batch: Batch) -> list[Any]:
        """Tensors in placeholder order; parameters and buffers are the model's own, not copies."""
        args, kwargs = batch
        user = iter(pytree.tree_leaves((args, reorder_kwargs(kwargs, self._in_spec))))
        state = {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers(remove_duplicate=False)),
        }
        return [
            next(user)
            if spec.kind == InputKind.USER_INPUT
            else state[spec.target]
            if spec.target in state
            else self._constants[spec.target]
            for spec in self._specs
        ]
