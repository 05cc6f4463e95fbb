"""Exports programs as ONNX models, checks these models, and runs them in onnxruntime: as is, and with GPU rounding."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ...errors import AuditorError, MeasureError, first_line, let_through, origin_of
from ...isolation.process import quietly
from ...isolation.run_model import run_model
from ...numerics.entries import tensors_in
from ...numerics.formats import dtype_name, dtype_of, label
from ...numerics.metrics import output_error
from ...plan.context import worst_of
from ...records import Audit, Batch, Onnx, Plan
from ...verify.artefact import NotHandedOver, Verifier
from ...verify.loaders import AS_IT_IS, ONNX, PROVIDER, ProgramModule
from ...verify.running import Answers
from .exported import INNER
from .onnxgraph import attend, check_types, tidy
from .onnxrecurrent import TRANSLATIONS as RECURRENT

with suppress(ImportError):  # `require` reports what is not installed
    import onnx
    import onnx_ir
    import onnxruntime
    from onnx_ir.passes import common
    from onnxscript import opset18

_NO_ARITHMETIC = ("Cast", "Constant", "Identity", "Shape", "Size")


def _multiply(x: Any, y: Any, out_dtype: Any) -> Any:
    """A product of low-precision inputs with FP32 output, which ONNX lacks: cast the inputs to FP32, then multiply."""
    operators: Any = opset18
    return operators.MatMul(*(operators.Cast(each, to=onnx.TensorProto.FLOAT) for each in (x, y)))


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.aten.mm.dtype: _multiply,
    torch.ops.aten.bmm.dtype: _multiply,
    torch.ops.aten.scaled_dot_product_attention.default: attend,
    **RECURRENT,
}


def require() -> None:
    """Require the packages for ONNX. Raises: AuditorError(slug="missing-onnx") if one is not installed."""
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if find_spec(name) is None]
    if missing:
        raise AuditorError(
            f"ONNX models need packages that are not installed ({' and '.join(missing)}): pip install 'model-precision-auditor[onnx]'",
            slug="missing-onnx",
        )


def with_onnx(audit: Audit, ends: str = "fp32") -> Audit:
    """Add to the audit an ONNX model of each program, checked and run on the inputs used to verify the program.

    ends: "fp32", or "low": floating-point inputs and outputs in the plan's format. Raises:
    AuditorError(slug="missing-onnx" | "no-program" | "bad-option").
    """
    if ends not in ("fp32", "low"):
        raise AuditorError(f"ends must be 'fp32' or 'low' (the plan's format), not {ends!r}", slug="bad-option")
    plans = {name: plan for name, plan in audit.plans.items() if plan.program and plan.program.file in audit.programs}
    if not plans or audit.live is None:
        raise AuditorError(
            "ONNX export needs a plan of the strategy `graph` and the live model; an audit loaded from files has no model. "
            "Audit the model again with strategies=('graph',).",
            slug="no-program",
        )
    require()
    written, errors, notes = dict[str, bytes](), dict[str, float | str](), dict[str, str]()
    for name, plan in plans.items():
        try:
            written[name], notes[name] = _export_onnx(audit, plan, ends)
        except Exception as error:
            let_through(error)
            errors[name] = f"the ONNX model could not be written: {_reason(error)}"
    errors |= _run_models(audit, plans, written) if written else {}
    audited_plans = dict(audit.plans)
    for name, plan in plans.items():
        assert plan.program is not None
        result = _onnx_record(plan, ends, written.get(name), errors[name], errors.get(f"{name}{AS_IT_IS}"))
        result = replace(result, note=notes.get(name, ""))
        audited_plans[name] = replace(plan, program=replace(plan.program, onnx=result))
    files = {f"{name}{ONNX}": content for name, content in written.items()}
    return replace(audit, plans=audited_plans, programs={**audit.programs, **files})


def _export_onnx(audit: Audit, plan: Plan, ends: str) -> tuple[bytes, str]:
    """Export one program to ONNX bytes, with the first exporter whose file passes all checks; also why earlier exporters
    failed, "" if none did. Raises: the first exporter's error if all fail."""
    assert plan.program is not None
    assert audit.live is not None
    program, failed = torch.export.load(io.BytesIO(audit.programs[plan.program.file])), list[Exception]()
    batch, any_size = audit.live.batches[0], plan.program.fixed is None
    exporters: dict[str, Callable[[], Any]] = {
        "": lambda: _by_program(program),
        "of torch's core operations": lambda: _by_program(program.run_decompositions()),
        "of TorchScript": lambda: _by_torchscript(program, batch, any_size),
    }
    for name, export in exporters.items():
        # With gradients enabled, attention returns other strides, and the exporter writes a `view` that does not fit them.
        try:
            with quietly(), torch.no_grad():
                content = _finish(export(), audit, plan, ends)
        except Exception as error:
            let_through(error)
            failed.append(error)
            continue
        note = f"the exporter {name} wrote it, since the first one failed: {_reason(failed[0])}" if failed else ""
        return content, note
    raise failed[0]


def _by_program(program: torch.export.ExportedProgram) -> Any:
    """The ONNX model that torch's exporter makes of a program."""
    how: dict[str, Any] = {"dynamo": True, "verbose": False, "optimize": False}
    made = torch.onnx.export(program, custom_translation_table=TRANSLATIONS, **how)
    assert made is not None
    return made.model


class _Flat(ProgramModule):
    """An exported program whose outputs are a tuple of tensors, which TorchScript can trace."""

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Run the program; return its output tensors."""
        return tuple(pytree.tree_leaves(self.program(*args, **kwargs)))


def _by_torchscript(program: torch.export.ExportedProgram, batch: Batch, any_size: bool) -> Any:
    """The ONNX model that the older exporter traces. any_size: whether the first dimension of the inputs is variable."""
    file = io.BytesIO()
    args, kwargs = batch
    names = [f"input_{index}" for index in range(len(tensors_in(batch)))]
    axes = {name: {0: "batch"} for name in names} if any_size else None
    how: dict[str, Any] = {"dynamo": False, "input_names": names, "dynamic_axes": axes, "opset_version": 20}
    how |= {"kwargs": kwargs, "do_constant_folding": False}
    torch.onnx.export(_Flat(program.module()), args, file, **how)  # type: ignore[arg-type]
    model = onnx_ir.from_proto(onnx.load_from_string(file.getvalue()))
    common.ShapeInferencePass()(model)
    return model


def _finish(model: Any, audit: Audit, plan: Plan, ends: str) -> bytes:
    """Simplify an exported model, give it the requested inputs and outputs, and check its types. Raises: errors of the
    checks."""
    assert audit.live is not None
    weights = {f"{INNER}.{name}": x for name, x in audit.live.model.state_dict(keep_vars=True).items()}
    model = tidy(model, {name: x for name, x in weights.items() if isinstance(x, torch.Tensor)})
    if ends == "low":
        lower_ends(model, plan.format)
    content = as_bytes(model)
    onnx.checker.check_model(content, full_check=True)
    check_types(onnx.load_from_string(content))
    return content


def _reason(error: Exception) -> str:
    return first_line(origin_of(error))[:200]


def _run_models(audit: Audit, plans: Mapping[str, Plan], written: Mapping[str, bytes]) -> dict[str, float | str]:
    """{model: its error in onnxruntime, or why the run failed}, also for copies with GPU rounding (suffix AS_IT_IS)."""
    assert audit.live is not None
    are_held_out = any(
        plan.verification is not None and plan.verification.inputs == "held-out" for plan in plans.values()
    )
    batches = audit.live.held_out if are_held_out else audit.live.batches
    tried = dict(written)
    for name, content in written.items():
        try:
            model = read(content)
            insert_rounding(model, plans[name].format)
            tried[f"{name}{AS_IT_IS}"] = as_bytes(model)
        except Exception as error:  # the record then lacks this error
            let_through(error)
    try:
        with Verifier.start(batches, gradients=False) as (verifier, folder):
            for name, content in tried.items():
                (folder / f"{name}{ONNX}").write_bytes(content)
            answers = verifier.ask(folder, list(tried))
    except NotHandedOver as error:
        return dict.fromkeys(tried, f"the inputs cannot be passed to another process: {first_line(error)}")
    expected = [[x.cpu() for x in run_model(audit.live.model, batch, seed=audit.environment.seed)] for batch in batches]
    return {name: _error(expected, result) for name, result in answers.items()}


def _error(expected: list[list[torch.Tensor]], answers: Answers | str) -> float | str:
    if isinstance(answers, str):
        return answers
    try:
        worst = worst_of([output_error(r, c) for r, c in zip(expected, answers.outputs, strict=True)])
    except MeasureError as error:
        return str(error)
    return worst if math.isfinite(worst) else "an output is Inf or NaN where FP32 is finite"


def _onnx_record(
    plan: Plan, ends: str, content: bytes | None, ran: float | str, as_rounded: float | str | None
) -> Onnx:
    """Build the record of one exported ONNX model. content: the file's bytes, or None if no file was written."""
    failure = ran if isinstance(ran, str) else None
    if failure and "NOT_IMPLEMENTED" in failure:
        lacking = failure.partition("Could not find an implementation for ")[2].partition(" ")[0]
        failure = (
            f"onnxruntime's CPU provider has no {label(plan.format)} kernel for "
            f"{lacking or 'an operation'}; only the model's types were checked"
        )
    file = ""
    nodes, fp32_nodes, casts = 0, 0, 0
    if content:
        file = f"{plan.name}{ONNX}"
        nodes, fp32_nodes, casts = count_operations(read(content))
    program_error = None
    checked = plan.verification
    if checked is not None:
        program_error = checked.measured_error if checked.joint is None else checked.joint
    return Onnx(
        file=file,
        ends=ends,
        nodes=nodes,
        high=fp32_nodes,
        casts=casts,
        runtime=f"onnxruntime {onnxruntime.__version__}, {PROVIDER}",
        error=ran if isinstance(ran, float) else None,
        program_error=program_error,
        failure=failure,
        rounded_error=as_rounded if isinstance(as_rounded, float) else None,
    )


def read(content: bytes) -> Any:
    """Parse an ONNX model from bytes, and infer the types of all values."""
    model = onnx_ir.from_proto(onnx.load_from_string(content))
    common.ShapeInferencePass()(model)
    return model


def as_bytes(model: Any) -> bytes:
    """Serialize an ONNX model to bytes."""
    return bytes(onnx_ir.to_proto(model).SerializeToString())


def count_operations(model: Any) -> tuple[int, int, int]:
    """Count a model's floating-point operations, its FP32 operations, and its casts.

    Casts, constants and shape operations do not count. An operation has the dtype of its first input and output: Resize
    takes its scales in FP32 regardless of its own dtype.
    """
    types = onnx_ir.DataType
    floating = {types.FLOAT, types.DOUBLE, types.FLOAT16, types.BFLOAT16}
    operations = 0
    fp32_operations = 0
    casts = 0
    for node in model.graph:
        casts += node.op_type == "Cast"
        if node.op_type in _NO_ARITHMETIC:
            continue
        values = (*node.inputs[:1], node.outputs[0])
        dtypes = {value.dtype for value in values if value}
        operations += not dtypes.isdisjoint(floating)
        fp32_operations += types.FLOAT in dtypes
    return operations, fp32_operations, casts


def lower_ends(model: Any, format: str) -> None:
    """Change floating-point inputs and outputs to a format, in place, and remove casts that become redundant."""
    graph, low, wide = model.graph, onnx_ir.DataType[dtype_name(dtype_of(format)).upper()], onnx_ir.DataType.FLOAT
    for given in filter(lambda value: value.dtype == wide, graph.inputs):
        given.dtype, uses = low, given.uses()
        raised = onnx_ir.node("Cast", [given], {"to": wide})
        for user, index in uses:
            if _casts_to(user, low):
                user.outputs[0].replace_all_uses_with(given)
            else:
                user.replace_input_with(index, raised.outputs[0])
        graph.insert_before(graph[0], raised)
    for index, returned in enumerate(graph.outputs):
        if returned.dtype == wide:
            made = returned.producer()
            is_low = _casts_to(made, wide) and made.inputs[0].dtype == low
            end = onnx_ir.node("Identity", made.inputs) if is_low else onnx_ir.node("Cast", [returned], {"to": low})
            graph.append(end)
            _take_place(graph, index, end.outputs[0], low)
    common.RemoveUnusedNodesPass()(model)


def _casts_to(node: Any, kind: Any) -> bool:
    return node is not None and node.op_type == "Cast" and node.attributes["to"].as_int() == kind


def _take_place(graph: Any, index: int, value: Any, kind: Any) -> None:
    """Let `value` replace an output of the graph, and take the output's name."""
    before = graph.outputs[index]
    value.shape, value.dtype = before.shape, kind
    before.name, value.name = f"{before.name}_inner", before.name
    graph.outputs[index] = value


def insert_rounding(model: Any, format: str) -> None:
    """Rewrite the model in place to emulate a GPU: compute in FP32, and round low-precision values by pairs of casts.

    Without these casts, onnxruntime's CPU provider rounds nothing between operations for which it has no low-precision
    kernel. Raises: ValueError for a node with subgraphs.
    """
    graph = model.graph
    low = onnx_ir.DataType[dtype_name(dtype_of(format)).upper()]
    wide = onnx_ir.DataType.FLOAT
    for node in graph:
        _widen_attributes(node, low, wide)
    for stored in graph.initializers.values():
        if stored.dtype == low:
            stored.const_value = _widen_tensor(stored.const_value)
            stored.dtype = wide
    results = [value for node in graph for value in node.outputs]
    for value in [*graph.inputs, *results]:
        if value.dtype == low:
            _round_by_casts(graph, value, low, wide)


def _widen_attributes(node: Any, low: Any, wide: Any) -> None:
    """Make a node's constants FP32, and its casts to low precision casts to FP32. Raises: ValueError for subgraphs."""
    for name, attribute in node.attributes.items():
        if attribute.type in (onnx_ir.AttributeType.GRAPH, onnx_ir.AttributeType.GRAPHS):
            raise ValueError(f"{node.op_type} contains a subgraph")
        if attribute.type == onnx_ir.AttributeType.TENSOR and attribute.value.dtype == low:
            node.attributes[name] = onnx_ir.AttrTensor(name, _widen_tensor(attribute.value))
        if name in ("to", "dtype") and attribute.as_int() == low:
            node.attributes[name] = onnx_ir.AttrInt64(name, wide)


def _round_by_casts(graph: Any, value: Any, low: Any, wide: Any) -> None:
    """Make a value FP32, and let its readers read it after a cast to low precision and back."""
    value.dtype = wide
    uses = value.uses()
    narrow = onnx_ir.node("Cast", [value], {"to": low})
    back = onnx_ir.node("Cast", narrow.outputs, {"to": wide})
    for user, index in uses:
        user.replace_input_with(index, back.outputs[0])
    maker = value.producer()
    if maker is None:
        graph.insert_before(graph[0], [narrow, back])
    else:
        graph.insert_after(maker, [narrow, back])
    for index, returned in enumerate(graph.outputs):
        if returned is value:
            _take_place(graph, index, back.outputs[0], wide)


def _widen_tensor(tensor: Any) -> Any:
    return onnx_ir.tensor(tensor.numpy().astype("float32"), name=tensor.name)
