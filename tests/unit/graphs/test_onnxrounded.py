"""Models that round as a GPU does: what onnxruntime makes of them against the same sums with tensors of torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper

from auditor.graphs.onnxfile import as_bytes, read, rounded

KINDS = {"fp16": (TensorProto.FLOAT16, torch.float16), "bf16": (TensorProto.BFLOAT16, torch.bfloat16)}


def model(low: int, nodes: list[Any], *others: Any) -> bytes:
    """x and y in a low format, and what is between them."""
    ports = [helper.make_tensor_value_info(name, low, [2]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "low", ports[:1], ports[1:], list(others))
    made: Any = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    content: bytes = made.SerializeToString()
    return content


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
    made = read(model(low, nodes, weight))
    rounded(made, format)
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
    made = read(model(low, nodes, helper.make_tensor("shape", TensorProto.INT64, [1], [2])))
    rounded(made, "fp16")
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
    with pytest.raises(ValueError, match="If has a graph of its own"):
        rounded(read(model(low, nodes, helper.make_tensor("asked", TensorProto.BOOL, [], [True]))), "fp16")
