"""ONNX models looked at and changed: which nodes compute in FP32, and inputs and outputs in a low format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TYPES = {"fp16": "FLOAT16", "bf16": "BFLOAT16"}

_NO_ARITHMETIC = ("Cast", "Constant", "Identity", "Shape", "Size")


def tidied(model: Any) -> Any:
    """What `torch.onnx.export(..., optimize=False)` made, constants folded and nothing there twice; returns its proto.

    The exporter's own optimizer also takes constants within 1e-8 of zero for zero: an epsilon is gone, even in FP32.
    """
    import onnx_ir
    from onnx_ir.passes import common
    from onnxscript.optimizer import fold_constants

    common.InlinePass()(model)
    fold_constants(model)
    common.ShapeInferencePass()(model)
    fold_constants(model)  # casts to the type of another value, which is known by now
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
    """Operations of a model, those of them that are in FP32, and casts.

    Operations read or give floating values; casts, constants and what only looks at shapes are none. One that reads or gives
    FP32 where its operator would take another type is in FP32.
    """
    import onnx

    model = onnx.shape_inference.infer_shapes(onnx.load_from_string(content), strict_mode=True)
    types, versions = types_of(model), {each.domain: each.version for each in model.opset_import}
    computing = [node for node in model.graph.node if node.op_type not in _NO_ARITHMETIC]
    found = [{types.get(name) for name in _open(node, versions)} for node in computing]
    floating = {onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE, *map(element_type, _TYPES)}
    high = [each for each in found if onnx.TensorProto.FLOAT in each]
    casts = sum(node.op_type == "Cast" for node in model.graph.node)
    return sum(bool(each & floating) for each in found), len(high), casts


def element_type(format: str) -> int:
    """What ONNX calls a format."""
    import onnx

    found: int = getattr(onnx.TensorProto, _TYPES[format])
    return found


def _open(node: Any, versions: Mapping[str, int]) -> list[str]:
    """Values that a node reads or gives in a type that its operator leaves open: Resize wants its scales in FP32."""
    import onnx

    try:
        schema = onnx.defs.get_schema(node.op_type, versions[node.domain], node.domain)
    except onnx.defs.SchemaError:
        return [*node.input, *node.output]
    found = []
    for names, formal in ((node.input, schema.inputs), (node.output, schema.outputs)):
        for index, name in enumerate(names):
            port = formal[min(index, len(formal) - 1)]  # the last one may stand for any number of them
            found += [name] if port.type_str in {each.type_param_str for each in schema.type_constraints} else []
    return found


def lowered_ends(model: Any, format: str) -> None:
    """Floating inputs and outputs in a format, in place: what is cast to it at once needs no cast any more."""
    import onnx

    low, wide = element_type(format), onnx.TensorProto.FLOAT
    types = types_of(onnx.shape_inference.infer_shapes(model, strict_mode=True))
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


def types_of(model: Any) -> dict[str, int]:
    """{value: its element type}, of a model whose shapes were inferred."""
    graph = model.graph
    found = {each.name: each.type.tensor_type.elem_type for each in (*graph.input, *graph.output, *graph.value_info)}
    return found | {each.name: each.data_type for each in graph.initializer}
