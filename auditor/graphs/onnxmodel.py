"""ONNX models looked at and changed: which nodes compute in FP32, and inputs and outputs in a low format."""

from __future__ import annotations

from typing import Any

_TYPES = {"fp16": "FLOAT16", "bf16": "BFLOAT16"}

_NO_ARITHMETIC = ("Cast", "Constant", "Identity")


def tidied(model: Any) -> Any:
    """What `torch.onnx.export(..., optimize=False)` made, constants folded and nothing there twice; returns its proto.

    The exporter's own optimizer also takes constants within 1e-8 of zero for zero: an epsilon is gone, even in FP32.
    """
    import onnx_ir
    from onnx_ir.passes import common
    from onnxscript.optimizer import fold_constants

    common.InlinePass()(model)
    fold_constants(model)
    for tidy in (
        common.RemoveUnusedNodesPass(),
        common.RemoveUnusedOpsetsPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.DeduplicateInitializersPass(),
        common.CommonSubexpressionEliminationPass(),
        common.OutputFixPass(),
        common.NameFixPass(),
    ):
        tidy(model)
    return onnx_ir.serde.serialize_model(model)


def counted(content: bytes) -> tuple[int, int, int]:
    """Nodes of a model, casts and constants aside; those that read or give FP32; casts."""
    import onnx

    model = onnx.shape_inference.infer_shapes(onnx.load_from_string(content), strict_mode=True)
    types = _types(model)
    computing = [node for node in model.graph.node if node.op_type not in _NO_ARITHMETIC]
    wide = onnx.TensorProto.FLOAT
    high = [node for node in computing if any(types.get(name) == wide for name in (*node.input, *node.output))]
    return len(computing), len(high), sum(node.op_type == "Cast" for node in model.graph.node)


def lowered_ends(model: Any, format: str) -> None:
    """Floating inputs and outputs in a format, in place: what is cast to it at once needs no cast any more."""
    import onnx

    low, wide = getattr(onnx.TensorProto, _TYPES[format]), onnx.TensorProto.FLOAT
    types = _types(onnx.shape_inference.infer_shapes(model, strict_mode=True))
    for given in model.graph.input:
        if given.type.tensor_type.elem_type == wide:
            given.type.tensor_type.elem_type = low
            _input(model.graph, given.name, low, wide)
    for returned in model.graph.output:
        if returned.type.tensor_type.elem_type == wide:
            returned.type.tensor_type.elem_type = low
            _output(model.graph, returned.name, low, types)


def _input(graph: Any, name: str, low: int, wide: int) -> None:
    import onnx

    kept, raised = [], f"{name}_fp32"
    for node in graph.node:
        if node.op_type == "Cast" and node.input[0] == name and node.attribute[0].i == low:
            kept.append(onnx.helper.make_node("Identity", [name], list(node.output)))
            continue
        _rename(node, name, raised)
        kept.append(node)
    if any(raised in node.input for node in kept):
        kept.insert(0, onnx.helper.make_node("Cast", [name], [raised], to=wide))
    del graph.node[:]
    graph.node.extend(kept)


def _output(graph: Any, name: str, low: int, types: dict[str, int]) -> None:
    import onnx

    made = next(node for node in graph.node if name in node.output)
    inner = f"{name}_inner"
    from_low = made.op_type == "Cast" and types.get(made.input[0]) == low
    for node in graph.node:
        _rename(node, name, inner)
    made.output[list(made.output).index(name)] = inner
    if from_low:
        graph.node.append(onnx.helper.make_node("Identity", [made.input[0]], [name]))
        if not any(inner in node.input for node in graph.node):
            graph.node.remove(made)
    else:
        graph.node.append(onnx.helper.make_node("Cast", [inner], [name], to=low))


def _rename(node: Any, old: str, new: str) -> None:
    for index, name in enumerate(node.input):
        if name == old:
            node.input[index] = new


def _types(model: Any) -> dict[str, int]:
    graph = model.graph
    found = {each.name: each.type.tensor_type.elem_type for each in (*graph.input, *graph.output, *graph.value_info)}
    return found | {each.name: each.data_type for each in graph.initializer}
