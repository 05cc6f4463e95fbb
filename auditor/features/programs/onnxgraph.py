"""Rewrites ONNX models to fewer nodes with equal results, and checks the types that strongly typed engines require."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

import numpy as np
import torch

from ...errors import let_through
from .onnxrecurrent import drop_zero_states

with suppress(ImportError):  # onnxfile's `require` reports what is not installed
    import onnx
    import onnx_ir
    import onnxruntime
    from onnx_ir.passes import common
    from onnxscript import opset18
    from onnxscript.function_libs.torch_lib.ops.nn import aten_scaled_dot_product_attention
    from onnxscript.optimizer import fold_constants
    from onnxscript.rewriter import RewritePass

Originals = Mapping[str, torch.Tensor]
"""The model's FP32 weights, by the name of the ONNX model's initializer."""

RULES = (
    "_basic_rules.basic_optimization_rules",
    "_broadcast_to_matmul.rules",
    "_cast_constant_of_shape.rules",
    "_collapse_slices.rules",
    "_fuse_pad_into_conv.rules",
    "_fuse_relus_clips.rules",
    "_materialize_reshape_shape.rules",
    "_min_max_to_clip.rules",
    "_redundant_scatter_nd.rules",
    "_remove_expand_before_binary_op.expand_before_binary_op_rules",
    "_remove_optional_bias.rules",
)
"""Rules of onnxscript's rewriter: all but those for `x + 0` and `x * 1`, which take small numbers for 0, and those for
batch norms, which round twice."""

SIZES = (1, 2, 3, 5)
"""Batch sizes with which `fold_rows` tests whether all rows are equal."""

BROADCASTS = frozenset(
    "Add And Div Equal Greater GreaterOrEqual Less LessOrEqual Max Min Mul Or Pow Sub Where Xor".split()
)
"""Operators that broadcast all their inputs."""

LAYOUTS = ("Transpose", "Reshape", "Squeeze", "Unsqueeze", "Cast", "Slice", "Concat")
"""Operators that are folded if they read weights, however large: the result is not larger than the weights."""

ROUNDS = 3
"""How often the rewrites run: what one of them simplifies, another one can use."""

FLOATING = frozenset((1, 10, 11, 16))
"""Values of onnx.TensorProto: FLOAT, FLOAT16, DOUBLE and BFLOAT16."""

SAME_TYPE = {"Pow": (0, 1), "BatchNormalization": (0, 1, 2, 3, 4), "LayerNormalization": (0, 1, 2)}
"""By operator: inputs that may differ in type in ONNX, though strongly typed engines want one type."""


def tidy(model: Any, originals: Originals | None = None) -> Any:
    """Fold constants and batch norms, merge duplicates and remove what changes nothing, in the output of
    `torch.onnx.export(..., optimize=False)`. originals: FP32 weights, to round folded weights once instead of twice.

    The exporter's own optimizer replaces constants within 1e-8 of zero by zero, which removes an epsilon even in FP32;
    folds batch norms in low precision; and keeps the source lines of the user's code in the file.
    """
    common.InlinePass()(model)
    _fold(model)
    common.ShapeInferencePass()(model)
    _fold(model)  # also folds casts to the type of another value, whose type is known by now
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    fold_batch_norms(model.graph, originals or {})
    fold_scales(model.graph)
    for _ in range(ROUNDS):
        RewritePass(_rules())(model)
        for simplify in (_drop_identities, _divide, _drop_masks, drop_zero_states):
            simplify(model.graph)
        common.IdentityEliminationPass()(model)
        common.RemoveUnusedNodesPass()(model)
        _fold(model)
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
        common.ShapeInferencePass()(model)
        fold_rows(model)
    for finish in (
        common.RemoveUnusedNodesPass(),
        common.RemoveUnusedFunctionsPass(),  # type: ignore[no-untyped-call]
        common.RemoveUnusedOpsetsPass(),
        common.DeduplicateInitializersPass(),
        common.CommonSubexpressionEliminationPass(),
        common.OutputFixPass(),
        common.NameFixPass(),
        common.ShapeInferencePass(),
    ):
        finish(model)
    _clear_metadata(model)
    return model


def _fold(model: Any) -> None:
    """Fold constants, and layouts of weights of any size."""

    def is_layout(node: Any) -> bool | None:
        moves = node.op_type in LAYOUTS and not node.domain
        return True if moves and all(_array(value) is not None for value in node.inputs if value) else None

    fold_constants(model, should_fold=is_layout)


def _rules() -> list[Any]:
    """The rewriter's rules that change no result."""
    rules = list[Any]()
    for name in RULES:
        module, _, attribute = name.partition(".")
        with suppress(ImportError, AttributeError):  # versions of onnxscript differ
            some = getattr(import_module(f"onnxscript.rewriter.rules.common.{module}"), attribute)
            rules += some() if callable(some) else some
    return rules


def _clear_metadata(model: Any) -> None:
    """Remove stack traces, file names and other notes of the exporter. The module of each node stays, as `namespace`."""
    spaces = {node: node.metadata_props.get("namespace") for node in model.graph}
    common.ClearMetadataAndDocStringPass()(model)
    for node, space in spaces.items():
        if space:
            node.metadata_props["namespace"] = space


# Attention


def attend(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Translate attention to ONNX with one scaling and one transpose, as the exporter's translation does not.

    Shapes: [b, h, l, e], [b, h, s, e], [b, h, s, v] -> [b, h, l, v]; the mask broadcasts to [b, h, l, s].
    """
    operators: Any = opset18
    width = query.shape[3]
    rows = query.shape[2]
    columns = key.shape[2]
    is_size_known = isinstance(width, int)
    if is_causal:
        is_size_known = is_size_known and isinstance(rows, int) and isinstance(columns, int)
    repeats_heads = enable_gqa and query.shape[1] != key.shape[1]
    if dropout_p or not is_size_known or repeats_heads:
        return aten_scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if scale is None:
        scale = 1 / math.sqrt(width)

    def constant(number: float) -> Any:
        return operators.CastLike(operators.Constant(value_float=number), query)

    scaled = operators.Mul(query, constant(scale))
    transposed = operators.Transpose(key, perm=[0, 1, 3, 2])
    scores = operators.MatMul(scaled, transposed)
    if is_causal:
        lower_triangle = onnx_ir.tensor(np.tri(rows, columns, dtype=bool))
        attn_mask = operators.Constant(value=lower_triangle)
    elif attn_mask is not None and attn_mask.dtype != onnx_ir.DataType.BOOL:
        scores = operators.Add(scores, attn_mask)
        attn_mask = None
    if attn_mask is None:
        weights = operators.Softmax(scores, axis=-1)
        return operators.MatMul(weights, value)
    masked = operators.Where(attn_mask, scores, constant(-math.inf))
    weights = operators.Softmax(masked, axis=-1)
    zero = constant(0.0)
    weights = operators.Where(operators.IsNaN(weights), zero, weights)  # torch: a row without True is 0
    return operators.MatMul(weights, value)


def _drop_masks(graph: Any) -> None:
    """Remove masks that are True everywhere, and the replacement of NaN by 0 in attention whose rows all have a True: it
    would only hide a NaN of the model."""
    for node in list(graph):
        if not _is(node, "Where"):
            continue
        masked = _masked_scores(node)
        entries = _mask(masked.inputs[0]) if masked is not None else None
        if entries is not None and entries.any(-1).all() and _same_shape(node.inputs[2], node.outputs[0]):
            _replace(node, node.inputs[2])
    for node in list(graph):
        entries = _mask(node.inputs[0]) if _is(node, "Where") else None
        if entries is not None and entries.all() and _same_shape(node.inputs[1], node.outputs[0]):
            _replace(node, node.inputs[1])


def _masked_scores(node: Any) -> Any:
    """The node that masks scores, in Where(IsNaN(w), 0, w) with w = Softmax(Where(mask, scores, -inf)); else None."""
    weights = node.inputs[2]
    asked, softmax = node.inputs[0].producer(), weights.producer()
    if not _is(asked, "IsNaN") or asked.inputs[0] is not weights or not _is(softmax, "Softmax"):
        return None
    masked = softmax.inputs[0].producer()
    return masked if _is(masked, "Where") else None


def _mask(value: Any) -> Any:
    """The entries of a boolean value that are known without its variable sizes; None if unknown."""
    made = value.producer()
    while _is(made, "Expand"):
        value = made.inputs[0]
        made = value.producer()
    entries = _array(value)
    return entries if entries is not None and entries.dtype == bool and entries.ndim else None


# Values that are equal for every row of a batch


def fold_rows(model: Any) -> None:
    """Replace values that depend on the batch size alone, and are the same for each row, by one row that broadcasts: masks,
    positions. Equal rows are tested in batches of SIZES, as an exported program is in two."""
    graph = model.graph
    shapes = [given.shape or () for given in graph.inputs]
    variable = {place for shape in shapes for place, size in enumerate(shape) if not isinstance(size, int)}
    free = _free_of_data(graph)
    edge = [value for node in free for value in node.outputs if _broadcasting_uses(value, free)]
    if variable != {0} or not edge:  # inputs have one batch size, though perhaps several names for it
        return
    try:
        runs = _run_alone(model, free, edge)
    except Exception as error:  # onnxruntime lacks a kernel for one of the operations
        let_through(error)
        return
    for place, value in enumerate(edge):
        results = [run[place] for run in runs]
        row = results[0]
        if all(np.array_equal(result, np.broadcast_to(row, result.shape)) for result in results):
            name = f"{value.name}.row"
            constant = onnx_ir.val(name, const_value=onnx_ir.tensor(row, name=name))
            graph.register_initializer(constant)
            for user, index in _broadcasting_uses(value, free):
                user.replace_input_with(index, constant)
    common.RemoveUnusedNodesPass()(model)


def _free_of_data(graph: Any) -> list[Any]:
    """The nodes whose results depend on the shapes of the inputs alone, in order."""
    known = set[Any](graph.initializers.values())
    result = []
    for node in graph:
        of_input = _is(node, "Shape") and node.inputs[0].is_graph_input()
        kinds = (onnx_ir.AttributeType.GRAPH, onnx_ir.AttributeType.GRAPHS)
        inner = any(each.type in kinds for each in node.attributes.values())
        draws = node.op_type.startswith(("Random", "Bernoulli", "Multinomial"))
        if of_input or not (inner or draws or any(value is not None and value not in known for value in node.inputs)):
            known.update(node.outputs)
            result.append(node)
    return result


def _broadcasting_uses(value: Any, free: Collection[Any]) -> list[tuple[Any, int]]:
    """The operations on data that read `value`, and broadcast its first dimension if it is one."""
    if not value.shape or isinstance(value.shape[0], int) or value.dtype is None:
        return []
    result = []
    for user, index in value.uses():
        others = [each for place, each in enumerate(user.inputs) if place != index and each is not None]
        same = [each for each in others if each.shape is not None and len(each.shape) == len(value.shape)]
        rows = any(each.shape[0] == value.shape[0] for each in same)
        if user not in free and user.op_type in BROADCASTS and not user.domain and rows:
            result.append((user, index))
    return result


def _run_alone(model: Any, nodes: Collection[Any], values: Sequence[Any]) -> list[list[Any]]:
    """The values for each of SIZES, computed by a model of the given nodes."""
    proto = onnx_ir.to_proto(model)
    names = {node.outputs[0].name for node in nodes}
    kept = [node for node in proto.graph.node if node.output[0] in names]
    read = {name for node in kept for name in node.input}
    session = _session_of(proto, kept, read, values)
    inputs = [value for value in model.graph.inputs if value.name in read]
    results = list[list[Any]]()
    for size in SIZES:
        fed = dict[str, Any]()
        for value in inputs:
            shape = [length if isinstance(length, int) else size for length in value.shape]
            fed[value.name] = np.zeros(shape, value.dtype.numpy())
        results.append(session.run(None, fed))
    return results


def _session_of(proto: Any, nodes: list[Any], read: Collection[str], values: Sequence[Any]) -> Any:
    """An onnxruntime session of some nodes of a model. read: names that the nodes read; values: those to return."""
    weights = [tensor for tensor in proto.graph.initializer if tensor.name in read]
    inputs = [port for port in proto.graph.input if port.name in read]
    outputs = [onnx.helper.make_tensor_value_info(value.name, value.dtype.value, None) for value in values]
    graph = onnx.helper.make_graph(nodes, "rows", inputs, outputs, weights)
    alone = onnx.helper.make_model(graph, opset_imports=proto.opset_import, ir_version=proto.ir_version)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(alone.SerializeToString(), options, providers=["CPUExecutionProvider"])


# Batch norms


def fold_batch_norms(graph: Any, originals: Originals) -> None:
    """Fold each batch norm into the convolution or product before it, if both compute in the same type, and if no
    folded weight leaves the type's range."""
    for node in list(graph):
        before = node.inputs[0].producer() if _is(node, "BatchNormalization") else None
        if before is None or before.op_type not in ("Conv", "ConvTranspose", "Gemm"):
            continue
        made = before.outputs[0]
        is_scaled = any(before.attributes.get_float(name, 1.0) != 1.0 for name in ("alpha", "beta"))
        if _is_private(made) and not is_scaled and made.dtype == node.outputs[0].dtype:
            _fold_batch_norm(graph, node, before, originals)


def _fold_batch_norm(graph: Any, node: Any, before: Any, originals: Originals) -> None:
    """Scale the weights of `before`: y = (w x + b - mean) * gamma / sqrt(variance + eps) + beta, computed in FP64."""
    given = [*before.inputs[1:], *node.inputs[1:]]
    for value in given:
        if value is not None and _array(value) is None:
            return  # not a constant
    exact = [None if value is None else _exact(value, originals) for value in given]
    *own, gamma, beta, mean, variance = exact
    weight = own[0]
    bias = own[1] if len(own) > 1 else None
    if bias is None:
        bias = np.zeros_like(mean)
    eps = node.attributes.get_float("epsilon", 1e-5)
    scale = gamma / np.sqrt(variance + eps)  # [c]
    scaled = _by_channel(weight, scale, before)
    _put_weights(graph, node, before, scaled, (bias - mean) * scale + beta)


def _put_weights(graph: Any, node: Any, before: Any, weight: Any, bias: Any) -> bool:
    """Replace `before` and `node` by `before` with other weights, if their rounding stays in the type's range."""
    kind = before.inputs[1].dtype
    values = []
    for name, exact in (("weight", weight), ("bias", bias)):
        with np.errstate(over="ignore"):
            rounded = exact.astype(kind.numpy())
        if not _keeps(rounded.astype(np.float64), exact):
            return False
        named = f"{before.inputs[1].name}.{name}.{node.name}"
        values.append(onnx_ir.val(named, const_value=onnx_ir.tensor(rounded, dtype=kind, name=named)))
    for value in values:
        graph.register_initializer(value)
    attributes = [each for name, each in before.attributes.items() if name != "beta"]
    joint = onnx_ir.Node(before.domain, before.op_type, [before.inputs[0], *values], attributes, name=before.name)
    joint.metadata_props.update(before.metadata_props)
    _take_over(graph, node, joint)
    graph.remove(before, safe=True)
    return True


def _by_channel(weight: Any, scale: Any, before: Any) -> Any:
    """Multiply a weight by one factor per output channel. Shapes: Conv [c, i/g, ...], ConvTranspose [i, c/g, ...], Gemm
    [i, c], or [c, i] if transposed."""
    spread = (1,) * (weight.ndim - 2)
    if before.op_type == "ConvTranspose":
        groups = before.attributes.get_int("group", 1)
        grouped = weight.reshape(groups, -1, *weight.shape[1:])  # [g, i/g, c/g, ...]
        return (grouped * scale.reshape(groups, 1, -1, *spread)).reshape(weight.shape)
    if before.op_type == "Gemm" and not before.attributes.get_int("transB", 0):
        return weight * scale[None, :]
    return weight * scale.reshape(-1, 1, *spread)


def _exact(value: Any, originals: Originals) -> Any:
    """A weight's FP32 original, if the stored weight is its rounding; else the stored weight; in FP64."""
    stored = _array(value)
    original = originals.get(value.name)
    if original is not None and original.shape == stored.shape:
        entries = original.detach().to("cpu", torch.float32).numpy()
        with np.errstate(over="ignore"):
            if np.array_equal(entries.astype(stored.dtype), stored):
                return entries.astype(np.float64)
    return stored.astype(np.float64)


def _keeps(rounded: Any, exact: Any) -> bool:
    """Whether rounding keeps a tensor within its range: no Inf, and no more error than a unit in the last place of BF16
    (2^-8), which subnormal numbers exceed."""
    error = np.linalg.norm(rounded - exact)
    return bool(np.isfinite(rounded).all() and error <= 2.0**-8 * np.linalg.norm(exact))


def fold_scales(graph: Any) -> None:
    """Fold a product and a sum with one constant per channel into the convolution before them, as for a frozen batch
    norm, if no folded weight leaves the type's range."""
    for node in list(graph):
        if node.op_type not in ("Mul", "Add") or node.domain:
            continue
        for place in (0, 1):
            before, factor = node.inputs[place].producer(), node.inputs[1 - place]
            is_convolution = before is not None and before.op_type in ("Conv", "ConvTranspose")
            if is_convolution and _is_private(before.outputs[0]) and _fold_scale(graph, node, before, factor):
                break


def _fold_scale(graph: Any, node: Any, before: Any, factor: Any) -> bool:
    """Fold a product or a sum with `factor` into the convolution `before`; return whether that was possible."""
    shape = before.outputs[0].shape  # [batch, channels, *positions]
    entries = _array(factor)
    weight = _array(before.inputs[1])
    has_bias = len(before.inputs) > 2 and before.inputs[2] is not None
    bias = _array(before.inputs[2]) if has_bias else None
    if entries is None or weight is None or shape is None or not isinstance(shape[1], int):
        return False
    if has_bias and bias is None:
        return False
    by_channel = _by_output_channel(entries, shape)
    if by_channel is None:
        return False
    exact_bias = np.zeros(shape[1])
    if bias is not None:
        exact_bias = bias.astype(np.float64)
    exact = weight.astype(np.float64)
    if node.op_type == "Mul":
        scaled = _by_channel(exact, by_channel, before)
        return _put_weights(graph, node, before, scaled, exact_bias * by_channel)
    return _put_weights(graph, node, before, exact, exact_bias + by_channel)


def _by_output_channel(entries: Any, shape: Any) -> Any:
    """One factor for each channel, float64 [channels], of a constant that broadcasts to a result of this shape; None if
    the constant has other entries for each position or sample."""
    if entries.ndim > len(shape) or (entries.ndim == len(shape) and entries.shape[0] != 1):
        return None
    channels = (shape[1], *[1] * (len(shape) - 2))
    without_batch = entries.reshape(entries.shape[-len(channels) :])
    try:
        by_channel = np.broadcast_to(without_batch, channels)
    except ValueError:  # other entries for each position
        return None
    return by_channel.reshape(-1).astype(np.float64)


def _is_private(value: Any) -> bool:
    """Whether only one operation reads a value."""
    return len(value.uses()) == 1 and not value.is_graph_output()


# Operations that change nothing


def _drop_identities(graph: Any) -> None:
    """Remove sums with 0, products with 1, and dropout of inference, if the result has the input's shape."""
    neutral: dict[str, tuple[float, tuple[int, ...]]] = {
        "Add": (0.0, (0, 1)),
        "Sub": (0.0, (1,)),
        "Mul": (1.0, (0, 1)),
        "Div": (1.0, (1,)),
    }
    for node in list(graph):
        if node.op_type not in neutral or node.domain:
            continue
        number, places = neutral[node.op_type]
        for place in places:
            other = node.inputs[1 - place]
            entries = _array(node.inputs[place])
            is_neutral = entries is not None and bool((entries == number).all())
            if is_neutral and _same_shape(other, node.outputs[0]):
                _replace(node, other)
                break


def _divide(graph: Any) -> None:
    """Replace x * (1 / y) by x / y, which rounds once."""
    for node in list(graph):
        if not _is(node, "Mul"):
            continue
        for place in (0, 1):
            inverse = node.inputs[place].producer()
            if _is(inverse, "Reciprocal") and len(inverse.outputs[0].uses()) == 1:
                joint = onnx_ir.node("Div", [node.inputs[1 - place], inverse.inputs[0]])
                joint.metadata_props.update(node.metadata_props)
                _take_over(graph, node, joint)
                break


def _is(node: Any, op_type: str) -> bool:
    return node is not None and node.op_type == op_type and not node.domain


def _array(value: Any) -> Any:
    """The entries of a constant; None for any other value."""
    if value is None or value.const_value is None or value.is_graph_input():
        return None
    return value.const_value.numpy()


def _same_shape(one: Any, other: Any) -> bool:
    """Whether two values are known to have the same shape."""
    if one.shape is None or other.shape is None or len(one.shape) != len(other.shape):
        return False
    pairs = zip(one.shape, other.shape, strict=True)
    return all(a == b and (isinstance(a, int) or a.value is not None) for a, b in pairs)


def _replace(node: Any, value: Any) -> None:
    """Let all readers of a node's output read `value`; an output of the graph becomes an Identity of it."""
    made = node.outputs[0]
    if made.is_graph_output():
        identity = onnx_ir.node("Identity", [value])
        _take_over(node.graph, node, identity)
        return
    made.replace_all_uses_with(value)


def _take_over(graph: Any, node: Any, joint: Any) -> None:
    """Put `joint` in the place of a node with one output, whose name, type and shape its output takes."""
    made, other = node.outputs[0], joint.outputs[0]
    other.shape, other.type = made.shape, made.type
    graph.insert_before(node, joint)
    made.replace_all_uses_with(other, replace_graph_outputs=True)
    name = made.name
    graph.remove(node, safe=True)
    other.name = name


# Types


def check_types(model: Any) -> None:
    """Require that every value's type is known, that every node's types agree with its operator's, and that operators
    which accept several floating-point types at once get one, as strongly typed engines require.

    model: an onnx.ModelProto. Raises: TypeError that names the first node with other types.
    """
    inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    versions = {each.domain: each.version for each in model.opset_import}
    _check_graph(inferred.graph, versions, {})


def _check_graph(graph: Any, versions: Mapping[str, int], outer: Mapping[str, int]) -> None:
    """Check the nodes of a graph. outer: types of the values around it."""
    ports = (*graph.input, *graph.output, *graph.value_info)
    types = dict(outer) | {
        port.name: port.type.tensor_type.elem_type for port in ports if port.type.HasField("tensor_type")
    }
    types |= {each.name: each.data_type for each in graph.initializer}
    others = {port.name for port in ports if not port.type.HasField("tensor_type")}
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                _check_graph(inner, versions, types)
        if not others.intersection((*node.input, *node.output)):
            _check_node(node, types, onnx.defs.get_schema(node.op_type, versions[node.domain], node.domain))


def _check_node(node: Any, types: Mapping[str, int], schema: Any) -> None:
    bound = dict[str, int]()
    allowed = {each.type_param_str: set(each.allowed_type_strs) for each in schema.type_constraints}
    for names, formal in ((node.input, schema.inputs), (node.output, schema.outputs)):
        for place, name in enumerate(names):
            if not name:
                continue
            if not types.get(name):
                raise TypeError(f"{node.op_type} {node.name}: the type of {name} is unknown")
            port = formal[min(place, len(formal) - 1)]
            text = f"tensor({onnx.TensorProto.DataType.Name(types[name]).lower()})"
            if text not in allowed.get(port.type_str, {port.type_str}):
                raise TypeError(f"{node.op_type} {node.name}: {name} is {text}, which the operator does not accept")
            is_one = port.is_homogeneous and port.type_str in allowed
            if is_one and bound.setdefault(port.type_str, types[name]) != types[name]:
                raise TypeError(f"{node.op_type} {node.name}: {name} is {text}, unlike the other inputs")
    apart = {types[node.input[place]] for place in SAME_TYPE.get(node.op_type, ()) if place < len(node.input)}
    if len(apart & FLOATING) > 1:
        raise TypeError(f"{node.op_type} {node.name}: its inputs have two floating-point types")
