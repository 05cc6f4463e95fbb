"""ONNX converters: the nodes of an exported graph that stay in FP32."""

from __future__ import annotations

from .offer import Chosen
from .text import comment, mapping
from .tool import Tool

_NOTE = (
    "A converter lowers every node that it is not told to leave, which is what a cast plan does. Names of nodes are the "
    "exporter's own and differ between its versions and options, so they are read from your exported file: "
    "torch.onnx.export(..., dynamo=True) writes into each node the module it comes from "
    "(`pkg.torch.onnx.name_scopes`), and the plan says which modules stay FP32. Export the FP32 model as it was audited, "
    "not the patched one.",
    "The graph is not the one that was measured: the exporter splits and merges operations, and a runtime fuses them "
    "again. Check the converted model.",
)

_NAMES = '''

def module_of(node):
    """Path of the module that a node comes from; None where the exporter left none, as for folded constants."""
    for entry in node.metadata_props:
        if entry.key == "pkg.torch.onnx.name_scopes":
            return ["", *ast.literal_eval(entry.value)][-2]  # root, ..., module, operation
    return None


def stays_fp32(path):
    while path and path not in PRECISION:
        path = path.rpartition(".")[0]
    return PRECISION.get(path, "fp32") == "fp32"


def nodes_of(graph):
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from nodes_of(inner)


def names_to_exclude(file):
    """Names of the nodes that stay in FP32."""
    nodes = list(nodes_of(onnx.load(file, load_external_data=False).graph))
    paths = [module_of(node) for node in nodes]
    if all(path is None for path in paths):
        raise ValueError(f"no node of {file} names its module: export it with torch.onnx.export(..., dynamo=True)")
    return [n.name for n, path in zip(nodes, paths) if n.name and path is not None and stays_fp32(path)]
'''

_MODELOPT = '''

def convert_with_modelopt(file):
    """NVIDIA ModelOpt AutoCast: expressions matched from the start of a name. Infinite limits switch off its own rules."""
    from modelopt.onnx.autocast import convert_to_mixed_precision

    excluded = [f"{re.escape(name)}$" for name in names_to_exclude(file)]
    return convert_to_mixed_precision(
        file,
        low_precision_type="%s",
        nodes_to_exclude=excluded,
        data_max=float("inf"),
        init_max=float("inf"),
        keep_io_types=True,
    )
'''

_COMMON = '''

def convert_with_onnxconverter_common(file):
    """onnxconverter-common: exact names. Its default limits would clip at 10000 and raise what is below 1e-7."""
    from onnxconverter_common import float16

    model = onnx.load(file)
    weights = {tensor.name for tensor in model.graph.initializer}
    kept = [info for info in model.graph.value_info if info.name not in weights]
    del model.graph.value_info[:]  # a weight listed there would be rounded to FP16 and cast back for an excluded node
    model.graph.value_info.extend(kept)
    return float16.convert_float_to_float16(
        model,
        keep_io_types=True,
        node_block_list=names_to_exclude(file),
        min_positive_val=2.0**-24,
        max_finite_val=65504.0,
    )
'''

_NO_BF16 = "onnxconverter-common converts to FP16 alone and cannot follow this plan."


def render(chosen: Chosen) -> str:
    """A function `names_to_exclude(file)`, and one for each converter that knows the format."""
    fp16 = chosen.format == "fp16"
    table = {path: repr(precision) for path, precision in _precisions(chosen).items()}
    return "".join(
        (
            comment(*_NOTE, "" if fp16 else _NO_BF16),
            "\nimport ast\nimport re\n\nimport onnx\n\n",
            mapping("PRECISION", table),
            _NAMES,
            _MODELOPT % chosen.format,
            _COMMON if fp16 else "",
        )
    )


def _precisions(chosen: Chosen) -> dict[str, str]:
    """The scopes, and every other name of a shared module: the exporter uses the one it is called by. FP32 wins."""
    found = {path: precision for path, (precision, _) in chosen.scopes.items()}
    for paths in chosen.shared:
        precisions = {chosen.precision(path) for path in paths}
        if len(precisions) > 1:
            found |= dict.fromkeys(paths, "fp32")
    return found


TOOL = Tool(
    title="ONNX converters",
    strategies=("cast",),
    otherwise="Converters lower every node but those excluded, also those that autocast keeps in FP32 by its own lists: "
    "use a plan of strategy cast.",
    render=render,
    impossible=lambda chosen: chosen.exceptions,
)
