"""Exports a model as a graph of functional ATen operations in FP32, for any batch size if possible."""

from __future__ import annotations

import inspect
import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from ...errors import PlanError, first_line, let_through
from ...execution.execute import Executor
from ...isolation import isolate
from ...isolation.outputs import tensor_outputs
from ...isolation.process import disable_fused_path, quietly
from ...isolation.run_model import run_model
from ...numerics.entries import over_tensors, tensors_in
from ...numerics.metrics import output_error
from ...numerics.nodes import mutates, row_of
from ...records import Batch

_aten = torch.ops.aten

SAME = 1e-3
"""Largest relative L2 difference between the outputs of the program and the model that counts as rounding."""

INNER = "model"
"""Attribute that holds the model inside the exported wrapper."""


@dataclass(frozen=True)
class ExportedModel:
    """A model as a graph. graph_module: the exported graph, with outputs of user-defined classes as {name: tensor};
    `meta["val"]` of its nodes has the shapes and dtypes of their results for the audited batch.

    audited: the batch for which the model was exported. fixed: why the batch size is fixed; "" if any size works.
    """

    graph_module: fx.GraphModule
    audited: Batch
    fixed: str


class SavedProgram(NamedTuple):
    """A saved program. content: bytes that `torch.export.load` reads. casts: number of dtype conversions in the graph.
    fixed: why the batch size is fixed, or ""."""

    content: bytes
    casts: int
    fixed: str


def export_model(model: nn.Module, batch: Batch) -> ExportedModel:
    """Export the model, with a variable batch size if possible. The model and the batch are unchanged.

    Raises: PlanError(slug="cannot-export") for a model that torch.export rejects.
    """
    wrapped = _Plain(model, batch[1])
    batch = over_tensors(torch.Tensor.contiguous, batch)  # torch.export would require the same strides of all inputs

    def agrees(program: ExportedProgram) -> bool:
        """Whether the program agrees with the model on the audited batch and on the doubled batch. Raises: errors of
        these runs."""
        module = program.module()
        both = (batch, _twice(batch))
        return all(output_error(run_model(wrapped, each), run_model(module, each)) <= SAME for each in both)

    try:
        program, fixed = _program(wrapped, batch, takes=agrees)
        module = _functional(program)
        with isolate(module, batch), torch.no_grad():
            for node, result in Executor(module).steps(*pytree.tree_leaves(batch)):
                node.meta["val"] = outlines(result)
    except Exception as error:
        let_through(error)
        raise export_error(f"the model cannot be exported as a graph ({first_line(error)[:240]})") from error
    return ExportedModel(module, batch, fixed)


def save_program(module: fx.GraphModule, of: ExportedModel) -> SavedProgram:
    """Serialize a graph in low precision. Raises: PlanError(slug="cannot-export") if torch.export cannot write the program."""
    try:
        program, fixed = _program(module, of.audited, of.fixed)
        _allow_any_strides(program.graph_module)
        file = io.BytesIO()
        torch.export.save(program, file)
    except Exception as error:
        let_through(error)
        raise export_error(f"the model's graph cannot be saved as a program ({first_line(error)[:240]})") from error
    return SavedProgram(file.getvalue(), sum(node.target is _aten.to.dtype for node in program.graph.nodes), fixed)


def export_error(reason: str) -> PlanError:
    """The error for a model that torch.export cannot export. reason: why, as a clause."""
    return PlanError(f"{reason}: use plans of other strategies, which need no export.", slug="cannot-export")


def _program(
    module: nn.Module, batch: Batch, fixed: str = "", takes: Callable[[ExportedProgram], bool] = lambda program: True
) -> tuple[ExportedProgram, str]:
    """Export a module for any batch size if possible; also return why the batch size is fixed ("" if variable). Raises:
    errors of torch.export."""
    sizes = {x.shape[0] if x.dim() else 0 for x in tensors_in(batch)}
    if len(sizes) != 1 or 0 in sizes:
        fixed = "the inputs do not share a first dimension" if sizes else "the model takes no tensors"
    if not fixed:
        try:
            program = _trace(module, batch, dynamic=True)
            names = set(program.graph_signature.user_inputs)
            placeholders = [n.meta.get("val") for n in program.graph.nodes if n.op == "placeholder" and n.name in names]
            firsts = [value.shape[0] for value in placeholders if isinstance(value, torch.Tensor) and value.dim()]
            if firsts and not any(isinstance(size, int) for size in firsts) and takes(program):
                return program, ""
            fixed = "the model's code fixes the batch size"
        except Exception as error:
            let_through(error)
            fixed = f"torch.export cannot make the batch size variable ({first_line(error)[:160]})"
    return _trace(module, batch, dynamic=False), fixed


def _trace(module: nn.Module, batch: Batch, *, dynamic: bool) -> ExportedProgram:
    """Trace the model. dynamic: the first dimension is variable; size one, which torch would fix, is doubled."""
    if dynamic and any(x.shape[0] == 1 for x in tensors_in(batch)):
        batch = _twice(batch)
    args, kwargs = batch
    shapes = None
    if dynamic:
        bound = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        shapes = pytree.tree_map(lambda leaf: {0: Dim.AUTO} if isinstance(leaf, torch.Tensor) else None, dict(bound))
    with isolate(module, batch), torch.no_grad(), quietly(), disable_fused_path():
        return torch.export.export(module, args, kwargs, dynamic_shapes=shapes, strict=False)


def _twice(batch: Batch) -> Batch:
    """Concatenate every tensor of a batch with itself."""
    return over_tensors(lambda x: torch.cat([x, x]), batch)


def outlines(value: Any, fp32: torch.dtype = torch.float32) -> Any:
    """Replace a value's tensors by meta tensors of the same shapes. fp32: the dtype that replaces FP32."""

    def outline(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x, dtype=fp32 if x.dtype is torch.float32 else x.dtype, device="meta")

    return over_tensors(outline, value)


class _Plain(nn.Module):
    """Wraps a model so that its outputs are tensors in tuples, lists and dicts, which need no user-defined class.

    given: names of the keyword arguments in calls of the model.
    """

    def __init__(self, model: nn.Module, given: Iterable[str]) -> None:
        super().__init__()
        self.add_module(INNER, model)

        def forward(*args: Any, **kwargs: Any) -> Any:
            output = model(*args, **kwargs)
            if _is_plain(output):
                return output
            result = tensor_outputs(output)
            return dict(zip(result.names, result, strict=True))

        # torch.export needs names for variable sizes: `**kwargs` are spelt out.
        signature = inspect.signature(model.forward)
        known = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        if len(known) < len(signature.parameters):
            others = [name for name in given if name not in {p.name for p in known}]
            known += [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in others]
        forward.__signature__ = signature.replace(parameters=known)  # type: ignore[attr-defined]
        self.__dict__["forward"] = forward
        self.train(model.training)


def _is_plain(output: Any) -> bool:
    if type(output) in (tuple, list, dict):
        return all(map(_is_plain, output.values() if isinstance(output, dict) else output))
    return isinstance(output, torch.Tensor)


def _functional(program: ExportedProgram) -> fx.GraphModule:
    """Remove in-place writes, redundant casts, inactive dropout, and checks of inputs and dtypes from the graph, and let
    it run with kernels that return other strides."""
    if any(node.op == "call_function" and mutates(node.target) for node in program.graph.nodes):
        with torch.no_grad(), quietly():
            program = program.run_decompositions({})
    module = program.module()
    assert isinstance(module, fx.GraphModule)
    for node in list(module.graph.nodes):
        if node.target in ("_guards_fn", _aten._assert_tensor_metadata.default):
            module.graph.erase_node(node)
        elif node.op == "call_function" and (same := _same(node)) is not None:
            node.replace_all_uses_with(same)
            module.graph.erase_node(node)
        elif node.target is _aten._native_batch_norm_legit_no_training.default:
            # restore the batch norm that removing in-place writes replaced
            x, weight, bias, mean, variance, momentum, eps = node.args
            node.target = _aten.batch_norm.default
            node.args = (x, weight, bias, mean, variance, False, momentum, eps, False)
            for first in list(node.users):
                first.replace_all_uses_with(node)
                module.graph.erase_node(first)
    module.graph.eliminate_dead_code()
    _allow_any_strides(module)
    return module


def _allow_any_strides(module: fx.GraphModule) -> None:
    """Replace each `view` by `reshape`, which returns the same entries for any strides. The tracer writes `view` where
    the strides of its run allow it; attention returns other strides in FP16, with gradients, and in ONNX's translation.
    """
    for node in module.graph.find_nodes(op="call_function", target=_aten.view.default):
        node.target = _aten.reshape.default
    module.recompile()


def _same(node: fx.Node) -> fx.Node | None:
    """The input of an operation that changes nothing, such as a cast to the same dtype; else None."""
    row = row_of(node)
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or any(user.op == "output" for user in node.users):
        return None
    if row.thins:  # dropout, which changes nothing in evaluation mode
        is_training = len(node.args) <= 2 or node.args[2] is not False
        return None if is_training else source
    is_cast = row.cast and "memory_format" not in node.kwargs
    before = source.meta.get("val")
    after = node.meta.get("val")
    if not is_cast or not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return None
    is_unchanged = before.dtype == after.dtype and before.device == after.device
    return source if is_unchanged else None
