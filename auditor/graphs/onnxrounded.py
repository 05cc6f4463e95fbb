"""ONNX models in which onnxruntime rounds as a GPU does: its CPU provider runs low formats without a kernel, and all between, in FP32."""

from __future__ import annotations

from typing import Any

from .onnxmodel import element_type, types_of


def rounded(content: bytes, format: str) -> bytes:
    """The model with every value of a format in FP32, rounded by two casts: operations compute in FP32 and round once.

    Raises: ValueError where a node has graphs of its own.
    """
    import onnx

    model = onnx.shape_inference.infer_shapes(onnx.load_from_string(content), strict_mode=True)
    low = element_type(format)
    made = _Rounding(low, {name for name, kind in types_of(model).items() if kind == low}).nodes(model.graph)
    del model.graph.node[:], model.graph.value_info[:]
    model.graph.node.extend(made)
    result: bytes = model.SerializeToString()
    return result


class _Rounding:
    """names: values of the format, whose element type in ONNX is `low`."""

    def __init__(self, low: int, names: set[str]) -> None:
        import onnx

        self.low, self.names, self.full = low, names, onnx.TensorProto.FLOAT

    def nodes(self, graph: Any) -> list[Any]:
        """Those of the rounding graph; its ports and weights are changed in place."""
        found = []
        for port in graph.input:
            if port.name in self.names:
                port.type.tensor_type.elem_type = self.full
                found += self._casts(f"{port.name}_unrounded", port.name)
                port.name = f"{port.name}_unrounded"
        for port in graph.output:
            if port.name in self.names:
                port.type.tensor_type.elem_type = self.full
        for stored in graph.initializer:
            self._widen(stored)
        return [*found, *(each for node in graph.node for each in self._of(node))]

    def _of(self, node: Any) -> list[Any]:
        """The node in FP32, and casts for each of its outputs that was low."""
        import onnx

        if node.op_type in ("Cast", "CastLike") and node.output[0] in self.names:
            return self._casts(node.input[0], node.output[0])
        for attribute in node.attribute:
            if attribute.type in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS):
                raise ValueError(f"{node.op_type} has a graph of its own")
            if attribute.type == onnx.AttributeProto.TENSOR:
                self._widen(attribute.t)
            if attribute.name == "dtype" and attribute.i == self.low:
                attribute.i = self.full
        found = [node]
        for index, name in enumerate(node.output):
            if name in self.names:
                node.output[index] = f"{name}_unrounded"
                found += self._casts(node.output[index], name)
        return found

    def _casts(self, source: str, name: str) -> list[Any]:
        import onnx

        return [
            onnx.helper.make_node("Cast", [source], [f"{name}_low"], to=self.low),
            onnx.helper.make_node("Cast", [f"{name}_low"], [name], to=self.full),
        ]

    def _widen(self, tensor: Any) -> None:
        import onnx

        if tensor.data_type == self.low:
            wide = onnx.numpy_helper.to_array(tensor).astype("float32")
            tensor.CopyFrom(onnx.numpy_helper.from_array(wide, tensor.name))
