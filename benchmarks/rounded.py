"""ONNX models in which onnxruntime rounds as a GPU does: its CPU provider runs FP16 without a kernel, and all between, in FP32."""

from __future__ import annotations

from typing import Any

import onnx
from onnx import TensorProto, helper, numpy_helper

HALF, FULL = TensorProto.FLOAT16, TensorProto.FLOAT


def rounded(content: bytes) -> bytes:
    """The model with every FP16 value in FP32, rounded to FP16 by two casts: operations compute in FP32 and round once.

    Raises: ValueError where a node has graphs of its own.
    """
    model = onnx.shape_inference.infer_shapes(onnx.load_from_string(content), strict_mode=True)
    graph = model.graph
    ports = (*graph.input, *graph.output, *graph.value_info)
    half = {each.name for each in ports if each.type.tensor_type.elem_type == HALF}
    for port in (*graph.input, *graph.output):
        if port.name in half:
            port.type.tensor_type.elem_type = FULL
    for stored in graph.initializer:
        _widen(stored)
    nodes: list[Any] = [found for node in graph.node for found in _rounding(node, half)]
    del graph.node[:], graph.value_info[:]
    graph.node.extend(nodes)
    result: bytes = model.SerializeToString()
    return result


def _rounding(node: Any, half: set[str]) -> list[Any]:
    """The node in FP32, and casts for each of its outputs that was FP16."""
    if node.op_type == "CastLike" and node.output[0] in half:
        return _casts(node.input[0], node.output[0])
    if node.op_type == "Cast" and node.attribute[0].i == HALF:
        return _casts(node.input[0], node.output[0])
    for attribute in node.attribute:
        if attribute.type in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS):
            raise ValueError(f"{node.op_type} has a graph of its own")
        if attribute.type == onnx.AttributeProto.TENSOR:
            _widen(attribute.t)
    found = [node]
    for index, name in enumerate(node.output):
        if name in half:
            node.output[index] = f"{name}_unrounded"
            found += _casts(node.output[index], name)
    return found


def _casts(source: str, name: str) -> list[Any]:
    return [
        helper.make_node("Cast", [source], [f"{name}_fp16"], to=HALF),
        helper.make_node("Cast", [f"{name}_fp16"], [name], to=FULL),
    ]


def _widen(tensor: Any) -> None:
    if tensor.data_type == HALF:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype("float32"), tensor.name))
