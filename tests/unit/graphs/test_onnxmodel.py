"""ONNX models: what computes in FP32 is counted, and ends become low without changing what lies between."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir
import onnxruntime
import torch
from onnx import TensorProto, checker, helper

from auditor.graphs.onnxfile import as_bytes, counted, lowered_ends, read, tidied

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


def test_casts_are_no_arithmetic_and_fp32_is_what_reads_or_gives_it() -> None:
    assert counted(read(model().SerializeToString())) == (2, 1, 2)


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
    assert counted(read(whole.SerializeToString())) == (2, 1, 2)


def test_a_cast_to_the_type_that_is_there_is_gone() -> None:
    model = torch.nn.Sequential(torch.nn.Conv1d(4, 4, 1), torch.nn.GroupNorm(2, 4)).eval()
    made = torch.onnx.export(model, (torch.randn(1, 4, 4),), dynamo=True, verbose=False, optimize=False)
    found = tidied(made.model)  # type: ignore[union-attr]
    assert "CastLike" not in {node.op_type for node in found.graph}


def test_low_ends_need_fewer_casts_and_answer_the_same() -> None:
    x = np.array([1.0, 2.5, -3.0], dtype=np.float16)
    before, changed = ran(model(), x.astype(np.float32)), read(model().SerializeToString())
    lowered_ends(changed, "fp16")
    checker.check_model(as_bytes(changed), full_check=True)
    after = ran(onnx_ir.to_proto(changed), x)
    assert {found.dtype for found in after} == {np.dtype(np.float16)}
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    assert counted(changed) == (2, 1, 2)  # into the FP32 sum and out of it


def test_constants_are_folded_and_an_epsilon_is_left() -> None:
    scalar = {name: helper.make_tensor(name, FULL, [], [value]) for name, value in (("a", 4e-10), ("b", 6e-10))}
    nodes = [helper.make_node("Constant", [], [name], value=value) for name, value in scalar.items()]
    nodes += [helper.make_node("Add", ["a", "b"], ["eps"])]
    nodes += [helper.make_node("Add", ["x", "eps"], [f"apart_{i}"]) for i in range(2)]
    nodes += [helper.make_node("Div", ["eps", "apart_0"], ["y"]), helper.make_node("Sqrt", ["apart_1"], ["z"])]
    ports = [helper.make_tensor_value_info(name, FULL, [2]) for name in ("x", "y", "z")]
    graph = helper.make_graph(nodes, "apart", ports[:1], ports[1:])
    whole = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    found = onnx_ir.to_proto(tidied(onnx_ir.from_proto(whole)))
    checker.check_model(found, full_check=True)
    assert [node.op_type for node in found.graph.node] == ["Add", "Div", "Sqrt"]
    answer, root = ran(found, np.array([0.0, 1.0], dtype=np.float32))
    np.testing.assert_allclose(answer, [1.0, 1e-9], rtol=1e-5)
    np.testing.assert_allclose(root, [1e-9**0.5, 1.0], rtol=1e-5)
