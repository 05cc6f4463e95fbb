"""Programs as ONNX models: run in a fresh process, and what is said of them true of the files."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
import onnxruntime
import pytest
import torch
from onnx import TensorProto, checker, helper

import auditor
from auditor.errors import AuditorError
from auditor.features.programs import onnxfile
from auditor.features.programs.onnxfile import as_bytes, count_operations, insert_rounding, lower_ends, read, with_onnx
from auditor.features.programs.onnxgraph import tidy
from auditor.isolation.outputs import tensor_outputs
from auditor.numerics.metrics import output_error
from auditor.records.audit import Audit
from auditor.report.plans import program_line
from auditor.report.words import ratio
from tests.features.programs.conftest import flat
from tests.support.capturing import Function
from tests.support.refusing import refused


@pytest.fixture(scope="module", params=["fp32", pytest.param("low", marks=pytest.mark.slow)])
def found(audit: Audit, request: pytest.FixtureRequest) -> Audit:
    return with_onnx(audit, request.param)


def test_the_model_answers_with_the_stated_error(found: Audit) -> None:
    said = found.plans["graph_fp16"].program.onnx
    assert said.failure is None
    x = found.live.batches[0][0][0]
    with torch.no_grad():
        expected = tensor_outputs(flat()(x))
    session = onnxruntime.InferenceSession(found.programs["graph_fp16.onnx"], providers=["CPUExecutionProvider"])
    (taken,) = session.get_inputs()
    assert taken.type == ("tensor(float)" if said.ends == "fp32" else "tensor(float16)")
    given = x.numpy() if said.ends == "fp32" else x.half().numpy()
    answers = [torch.from_numpy(np.asarray(y, dtype=np.float32)) for y in session.run(None, {taken.name: given})]
    assert said.error == pytest.approx(output_error(expected, answers), rel=1e-6)
    assert 0 < said.error <= 0.01
    assert said.program_error == found.plans["graph_fp16"].measured_error


def test_bf16_is_checked_and_what_has_no_kernel_named(found: Audit) -> None:
    plan = found.plans["graph_bf16"]
    said = plan.program.onnx
    assert said.error is None
    model = onnx.load_from_string(found.programs["graph_bf16.onnx"])
    onnx.checker.check_model(model, full_check=True)
    graph = onnx.shape_inference.infer_shapes(model, strict_mode=True).graph
    ports = (*graph.input, *graph.output, *graph.value_info)
    types = {x.name: x.type.tensor_type.elem_type for x in ports} | {x.name: x.data_type for x in graph.initializer}
    assert onnx.TensorProto.FLOAT16 not in types.values()
    assert {types[name] for name in types if "weight" in name} == {onnx.TensorProto.BFLOAT16}
    wanted = onnx.TensorProto.FLOAT if said.ends == "fp32" else onnx.TensorProto.BFLOAT16
    assert {types[port.name] for port in (*model.graph.input, *model.graph.output)} == {wanted}
    refused = (said.failure or "").removeprefix("onnxruntime's CPU provider has no BF16 kernel for ")
    lacking, _, rest = refused.partition("(")
    (first, *_) = [node for node in model.graph.node if node.op_type == lacking]
    assert types[first.output[0]] == onnx.TensorProto.BFLOAT16
    assert rest.endswith("; only the model's types were checked")
    line = program_line(plan)
    assert f"No error of the file itself was measured: {said.failure}. Relative L2 error: " in line
    assert f"{ratio(said.rounded_error)} in onnxruntime with every BF16 value rounded as on a GPU" in line
    assert said.ends == "low" or said.rounded_error == pytest.approx(plan.measured_error, rel=0.1)


@pytest.mark.slow
def test_saving_writes_the_model_and_an_epsilon_stays_in_the_file(tmp_path: Path) -> None:
    """It is zero in FP16, and the exporter's own optimizer takes it for zero in FP32 too."""
    apart, x = Function(lambda x: 1e-9 / (x + 1e-9)), torch.tensor([[0.0, 1.0], [0.0, 2.0]])
    found = auditor.audit(apart, x, strategies="graph", formats="fp16", device="cpu")
    assert tmp_path / "graph_fp16.onnx" in found.save(tmp_path, onnx=True)
    said = auditor.load(tmp_path).plans["graph_fp16"].program.onnx
    assert said.failure is None
    assert said.error is not None
    session = onnxruntime.InferenceSession(tmp_path / "graph_fp16.onnx", providers=["CPUExecutionProvider"])
    (answer,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert answer[0, 0] == pytest.approx(1.0, rel=1e-3)
    assert answer[0, 1] == pytest.approx(1e-9, abs=1e-9)


def test_what_cannot_be_written_is_one_line(audit: Audit, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no such\noperation")

    monkeypatch.setattr(torch.onnx, "export", fails)
    programs = [plan.program for plan in with_onnx(audit).plans.values() if plan.program]
    assert {one.onnx.failure for one in programs} == {"the ONNX model could not be written: no such"}


def test_an_exporter_that_fails_is_followed_by_the_next_and_the_report_says_so(
    audit: Audit, monkeypatch: pytest.MonkeyPatch
) -> None:
    export = torch.onnx.export

    def fails(*given: Any, dynamo: bool, **others: Any) -> Any:
        if dynamo:
            raise RuntimeError("no such operation")
        return export(*given, dynamo=dynamo, **others)

    monkeypatch.setattr(torch.onnx, "export", fails)
    plan = with_onnx(audit).plans["graph_fp16"]
    said = plan.program.onnx
    assert said.note == "the exporter of TorchScript wrote it, since the first one failed: no such operation"
    assert said.failure is None
    assert 0 < said.error <= 0.01
    assert "The exporter of TorchScript wrote it" in program_line(plan)


def test_what_is_missing_is_one_line(audit: Audit, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AuditorError, match="must be 'fp32' or 'low'"):
        with_onnx(audit, "half")
    with refused(AuditorError, "no-program", match="with strategies="):
        with_onnx(replace(audit, programs={}))
    monkeypatch.setattr(onnxfile, "find_spec", lambda name: None if name == "onnxruntime" else object())
    with refused(AuditorError, "missing-onnx", match=r"need packages that are not installed \(onnxruntime\)"):
        with_onnx(audit)


# ONNX models: what computes in FP32 is counted, ends become low, and every value is rounded as on a GPU.

HALF, FULL = TensorProto.FLOAT16, TensorProto.FLOAT


def model() -> Any:
    """x is squared in FP16 and, beside it, doubled in FP32; the first is returned raised, and the second."""
    nodes = [
        helper.make_node("Cast", ["x"], ["x_low"], to=HALF),
        helper.make_node("Mul", ["x_low", "x_low"], ["squared"]),
        helper.make_node("Cast", ["squared"], ["y"], to=FULL),
        helper.make_node("Add", ["x", "x"], ["z"]),
    ]
    ports = [helper.make_tensor_value_info(name, FULL, [3]) for name in ("x", "y", "z")]
    graph = helper.make_graph(nodes, "two", ports[:1], ports[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def ran(made: Any, x: Any) -> list[Any]:
    session = onnxruntime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    return list(session.run(None, {"x": x}))


def test_what_looks_at_shapes_is_no_operation_and_what_has_to_be_fp32_no_choice() -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Cast", ["x"], ["x_low"], to=HALF),
        helper.make_node("Resize", ["x_low", "", "scales"], ["y_low"]),
        helper.make_node("Cast", ["y_low"], ["y"], to=FULL),
        helper.make_node("Mul", ["shape", "shape"], ["z"]),
        helper.make_node("Concat", ["x", "x", "x"], ["w"], axis=0),
    ]
    kinds = (("x", FULL, [2]), ("y", FULL, None), ("z", TensorProto.INT64, [1]), ("w", FULL, [6]))
    ports = [helper.make_tensor_value_info(name, kind, shape) for name, kind, shape in kinds]
    scales = helper.make_tensor("scales", FULL, [1], [2.0])
    graph = helper.make_graph(nodes, "moved", ports[:1], ports[1:], [scales])
    whole = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    assert count_operations(read(whole.SerializeToString())) == (2, 1, 2)


def test_a_cast_to_the_type_that_is_there_is_gone() -> None:
    model = torch.nn.Sequential(torch.nn.Conv1d(4, 4, 1), torch.nn.GroupNorm(2, 4)).eval()
    made = torch.onnx.export(model, (torch.randn(1, 4, 4),), dynamo=True, verbose=False, optimize=False)
    found = tidy(made.model)
    assert "CastLike" not in {node.op_type for node in found.graph}


def test_low_ends_need_fewer_casts_and_answer_the_same() -> None:
    x = np.array([1.0, 2.5, -3.0], dtype=np.float16)
    before, changed = ran(model(), x.astype(np.float32)), read(model().SerializeToString())
    assert count_operations(changed) == (2, 1, 2)  # casts are no arithmetic
    lower_ends(changed, "fp16")
    checker.check_model(as_bytes(changed), full_check=True)
    after = ran(onnx_ir.to_proto(changed), x)
    assert {found.dtype for found in after} == {np.dtype(np.float16)}
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    assert count_operations(changed) == (2, 1, 2)  # into the FP32 sum and out of it


KINDS = {"fp16": (TensorProto.FLOAT16, torch.float16), "bf16": (TensorProto.BFLOAT16, torch.bfloat16)}


def low_model(low: int, nodes: list[Any], *others: Any) -> bytes:
    """x and y in a low format, and what is between them."""
    ports = [helper.make_tensor_value_info(name, low, [2]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "low", ports[:1], ports[1:], list(others))
    made: Any = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    return made.SerializeToString()


@pytest.mark.parametrize("format", KINDS)
def test_every_value_is_rounded_the_input_too(format: str) -> None:
    low, dtype = KINDS[format]
    weight = helper.make_tensor("weight", low, [2], [1.5, 0.1])
    nodes = [
        helper.make_node("Mul", ["x", "weight"], ["product"]),
        helper.make_node("Cast", ["product"], ["wide"], to=TensorProto.FLOAT),
        helper.make_node("Exp", ["wide"], ["grown"]),
        helper.make_node("Cast", ["grown"], ["back"], to=low),
        helper.make_node("Add", ["back", "x"], ["y"]),
    ]
    made = read(low_model(low, nodes, weight))
    insert_rounding(made, format)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(as_bytes(made), options, providers=["CPUExecutionProvider"])
    given = torch.tensor([1.0001, 3.1416])
    (found,) = session.run(None, {session.get_inputs()[0].name: given.numpy()})
    x = given.to(dtype)
    product = x * torch.tensor([1.5, 0.1]).to(dtype)
    expected = product.float().exp().to(dtype) + x
    np.testing.assert_allclose(found, expected.float().numpy(), rtol=1e-6)
    assert not np.allclose(found, (given * torch.tensor([1.5, 0.1])).exp() + given, rtol=1e-5)


def test_nothing_is_left_in_the_format_but_what_casts_give() -> None:
    low = TensorProto.FLOAT16
    nodes = [
        helper.make_node("ConstantOfShape", ["shape"], ["ones"], value=helper.make_tensor("v", low, [1], [1.0])),
        helper.make_node("RandomNormalLike", ["x"], ["drawn"], dtype=low),
        helper.make_node("Sum", ["x", "ones", "drawn"], ["y"]),
    ]
    made = read(low_model(low, nodes, helper.make_tensor("shape", TensorProto.INT64, [1], [2])))
    insert_rounding(made, "fp16")
    again = read(as_bytes(made))
    left = [value for node in again.graph for value in node.outputs if value.dtype == low]
    assert [value.producer().op_type for value in left] == ["Cast"] * 4
    assert {value.dtype for value in (*again.graph.inputs, *again.graph.outputs)} == {TensorProto.FLOAT}


def test_a_graph_in_a_node_is_refused() -> None:
    low = TensorProto.FLOAT16
    branches = {
        f"{which}_branch": helper.make_graph(
            [helper.make_node(op, ["x"], [op])], which, [], [helper.make_tensor_value_info(op, low, [2])]
        )
        for which, op in (("then", "Exp"), ("else", "Neg"))
    }
    nodes = [helper.make_node("If", ["asked"], ["y"], **branches)]
    with pytest.raises(ValueError, match="If contains a subgraph"):
        insert_rounding(read(low_model(low, nodes, helper.make_tensor("asked", TensorProto.BOOL, [], [True]))), "fp16")
