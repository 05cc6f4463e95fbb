"""Configurations of torchao, transformers, compressed-tensors and ModelOpt for layers {path: scheme}, as code."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..numerics.schemes import SCHEMES, Quantizer, Scheme
from .text import literal

_IMPORTS = {
    "torch.utils._pytree": "tree_map_only",
    "torchao.quantization": "Float8DynamicActivationFloat8WeightConfig FqnToConfig Int8DynamicActivationInt8WeightConfig "
    "Int8StaticActivationInt8WeightConfig Int8WeightOnlyConfig IntxWeightOnlyConfig MappingType PerBlock PerGroup PerRow "
    "PerTensor quantize_",
    "torchao.quantization.quantize_.common.kernel_preference": "KernelPreference",
    "torchao.prototype.mx_formats": "MXDynamicActivationMXWeightConfig NVFP4DynamicActivationNVFP4WeightConfig "
    "ScaleCalculationMode",
}


FLOORED = tuple(name for name, one in SCHEMES.items() if (one.config or "").startswith("Float8Dynamic"))
"""Schemes for which torchao can bound the scale of an input from below."""

LEAST_ACTIVATION = 1e-12
"""The lower bound of an input's largest magnitude: far below any useful one, and its scale is a normal number."""


def with_lower_bound(code: str) -> str:
    """Code for torchao, in which a row of zeros in an input gives zeros instead of NaN."""
    config = "Float8DynamicActivationFloat8WeightConfig("
    return code.replace(config, f"{config}activation_value_lb={LEAST_ACTIVATION}, ")


def _assign(name: str, value: Any) -> str:
    return f"{name} = {literal(value)}\n"


_QUANTIZE = """

def cast_inputs(dtype, module, *inputs):
    return tree_map_only(torch.Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, inputs)


def quantize(model, {batches}dtype=torch.bfloat16):
    \"\"\"Quantize LAYERS in place. dtype: for inputs and all other layers; None leaves them unchanged.{about}\"\"\"
    if dtype is not None:
        model.to(dtype).register_forward_pre_hook(partial(cast_inputs, dtype), with_kwargs=True)
    configs = {{path: CONFIGS[scheme] for path, scheme in LAYERS.items()}}
    for path, scheme in LAYERS.items():
        sizes = tuple(model.get_submodule(path).weight.shape[:2])
        if any(size % multiple for size, multiple in zip(sizes, MULTIPLES[scheme])):
            warnings.warn(f"{{path}} is not quantized: torchao has no {{scheme}} for a weight of {{sizes}}")
            del configs[path]
{static}    quantize_(model, FqnToConfig(configs), filter_fn=None)
    return model
"""

_STATIC = """    for path, scale in input_scales(model, [path for path in configs if LAYERS[path] == "int8_static"], batches):
        configs[path] = replace(configs[path], act_quant_scale=scale)
"""

_SCALES = """

def input_scales(model, paths, batches):
    \"\"\"List of (path, scale of the layer's inputs); batches: tuples of the model's arguments.\"\"\"
    largest = {}

    def look(path, module, args):
        value = args[0].abs().amax(keepdim=True)
        largest[path] = torch.maximum(largest.get(path, value), value)

    hooks = [model.get_submodule(path).register_forward_pre_hook(partial(look, path)) for path in paths]
    with torch.no_grad():
        for batch in batches:
            model(*batch)
    for hook in hooks:
        hook.remove()
    missing = [path for path in paths if path not in largest]
    if missing:
        raise ValueError(f"int8_static needs batches that reach these layers: {', '.join(missing)}")
    return [(path, value / 127.5) for path, value in largest.items()]
"""

_EMULATED = """if not torch.cuda.is_available():  # the kernels for MX need a GPU
    for config in CONFIGS.values():
        if hasattr(config, "kernel_preference"):
            config.kernel_preference = KernelPreference.EMULATED
"""


def torchao_code(layers: Mapping[str, str], kept: list[str]) -> str:
    """Code that defines `quantize(model)` with torchao."""
    imports, configs = _configs(layers, "FqnToConfig", "quantize_", "tree_map_only")
    multiples = {scheme: SCHEMES[scheme].multiples for scheme in dict.fromkeys(layers.values())}
    sizes = _assign("MULTIPLES", multiples)
    replaced, scales = "", ""
    quantize = _QUANTIZE.format(batches="", about="", static="")
    if "int8_static" in layers.values():
        replaced = "from dataclasses import replace\n"
        scales = _SCALES
        about = " batches: for the scales of inputs."
        quantize = _QUANTIZE.format(batches="batches, ", about=about, static=_STATIC)
    head = f"import warnings\n{replaced}from functools import partial\n\nimport torch\n{imports}\n"
    return f"{head}{configs}{sizes}{scales}{quantize}"


def _configs(layers: Mapping[str, str], *names: str) -> tuple[str, str]:
    """Code that imports `names` and torchao's configuration classes, and assigns LAYERS and CONFIGS."""
    used = {scheme: SCHEMES[scheme].config or "" for scheme in dict.fromkeys(layers.values())}
    emulates = any(config.startswith("MX") for config in used.values())
    text = " ".join([*used.values(), *names])
    if emulates:
        text += " KernelPreference"
    imports = ""
    for module, classes in _IMPORTS.items():
        listed = [name for name in classes.split() if name in text]
        if listed:
            imports += f"from {module} import {', '.join(listed)}\n"
    entries = "".join(f"    {scheme!r}: {config},\n" for scheme, config in used.items())
    code = f"{_assign('LAYERS', dict(layers))}CONFIGS = {{\n{entries}}}\n"
    if emulates:
        code += _EMULATED
    return imports, code


_METHODS = {
    "fp8": "FbgemmFp8Config(modules_to_not_convert=KEPT)",
    "fp8_block": "FineGrainedFP8Config(weight_block_size=(128, 128), modules_to_not_convert=KEPT)",
    "int8": "BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0, llm_int8_skip_modules=KEPT)",
}
"""{scheme: another quantization method of transformers, besides torchao, that computes the same scales}."""


_LOAD = '''

def load(model_class, checkpoint, dtype=torch.float32, **options):
    """Load and quantize a checkpoint. dtype: of all other layers; torch.bfloat16 halves their memory, and adds its error."""
    return model_class.from_pretrained(
        checkpoint, quantization_config=QUANTIZATION_CONFIG, dtype=dtype, **options
    )


'''


def transformers_code(layers: Mapping[str, str], kept: list[str]) -> str:
    """Code that defines QUANTIZATION_CONFIG for `from_pretrained`, and OTHER_CONFIG if another method fits.

    Its keys are weights: under a module's name transformers quantizes the bias too, with which torchao then fails.
    """
    imports, configs = _configs(layers, "FqnToConfig")
    schemes = set(layers.values())
    other = _METHODS.get(*schemes) if len(schemes) == 1 else None
    names = ["TorchAoConfig", *([other.partition("(")[0]] if other else [])]
    skipped = [_only(path, layers) for path in kept]
    lines = [
        f"import torch\n{imports}from transformers import {', '.join(sorted(names))}\n\n",
        configs,
        _assign("KEPT", skipped),
        "QUANTIZATION_CONFIG = TorchAoConfig(\n    FqnToConfig({f'{path}.weight': CONFIGS[scheme] for path, scheme in LAYERS.items()}), "
        "modules_to_not_convert=KEPT\n)\n",
        _LOAD,
        *([f"# Another method, whose scales may differ slightly:\nOTHER_CONFIG = {other}\n"] if other else []),
    ]
    return "".join(lines)


def _only(path: str, layers: Mapping[str, str]) -> str:
    """A path as an entry of KEPT. transformers matches entries as patterns at the start and end of names, so an entry
    that would match a quantized layer is anchored."""
    plain = re.fullmatch(r"[\w.]+", path) is not None
    if plain and not any(re.match(rf"{path}(?=\.|$)", layer) or layer.endswith(path) for layer in layers):
        return path
    return rf"^{re.escape(path)}(\.weight)?$"


def compressed_config(layers: Mapping[str, str], kept: list[str]) -> dict[str, Any]:
    """`quantization_config` of a model's config.json, as vLLM and transformers read it, for compressed-tensors."""
    groups = dict[str, dict[str, Any]]()
    for i, name in enumerate(dict.fromkeys(layers.values())):
        scheme = SCHEMES[name]
        activations = None
        if scheme.activation is not None:
            activations = _compressed_args(scheme.activation, is_weight=False)
        groups[f"group_{i}"] = {
            "targets": [path for path, scheme_of_layer in layers.items() if scheme_of_layer == name],
            "weights": _compressed_args(scheme.weight, is_weight=True),
            "input_activations": activations,
            "format": _format(scheme),
        }
    formats = {group["format"] for group in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "config_groups": groups,
        "ignore": kept,
    }


def _format(scheme: Scheme) -> str:
    """The name of the format in which compressed-tensors stores the weights."""
    family = scheme.name.split("_")[0]
    blocks = {"mxfp8": "mxfp8-", "mxfp4": "mxfp4-pack-", "nvfp4": "nvfp4-pack-", "int4": "pack-"}
    if family in blocks:
        kind = blocks[family]
    elif scheme.activation is None:
        kind = "pack-"
    elif scheme.weight.element.row:
        kind = "float-"
    else:
        kind = "int-"
    return f"{kind}quantized"


def _compressed_args(by: Quantizer, *, is_weight: bool) -> dict[str, Any]:
    """The QuantizationArgs of compressed-tensors for a tensor, without defaults."""
    is_nested = by.rule.startswith("e4m3")  # the E4M3 scales of a tensor share an FP32 scale
    strategies = {(0, 0): "tensor", (1, 0): "channel" if is_weight else "token", (128, 128): "block"}
    of_groups = "tensor_group" if is_nested else "group"
    dynamic: bool | str = "local" if is_nested else True
    if is_weight or by.calibrated:
        dynamic = False
    args: dict[str, Any] = {
        "num_bits": by.element.bits,
        "type": "float" if by.element.row else "int",
        "symmetric": by.rule != "asymmetric",
        "strategy": strategies.get(by.block, of_groups),
        "dynamic": dynamic,
    }
    if by.block == (128, 128):
        args["block_structure"] = list(by.block)
    elif by.block not in strategies:
        args["group_size"] = by.block[1]
    if _has_scale_format(by):
        dtype = "torch.float8_e4m3fn" if is_nested else "torch.uint8"
        args["scale_dtype"] = dtype
        args["zp_dtype"] = dtype
    return args


_LLM_COMPRESSOR = '''

def modifier():
    """For `llmcompressor.oneshot(model=..., recipe=modifier())`, which writes the checkpoint with this configuration."""
    from llmcompressor.modifiers.quantization import QuantizationModifier

    groups, ignore = QUANTIZATION_CONFIG["config_groups"], QUANTIZATION_CONFIG["ignore"]
    return QuantizationModifier(config_groups=groups, ignore=ignore)
'''


def compressed_code(layers: Mapping[str, str], kept: list[str]) -> str:
    """Code that defines QUANTIZATION_CONFIG and a modifier for llm-compressor."""
    return _assign("QUANTIZATION_CONFIG", compressed_config(layers, kept)) + _LLM_COMPRESSOR


_MODELOPT = '''
QUANT_CFG = {
    "quant_cfg": [
        {"quantizer_name": "*", "enable": False},
        *(
            {"quantizer_name": f"{path}.{part}_quantizer", "cfg": cfg}
            for path, scheme in LAYERS.items()
            for part, cfg in FORMATS[scheme].items()
        ),
    ],
    "algorithm": "max",
}


def quantize(model, forward_loop):
    """forward_loop(model) calls the model on calibration inputs."""
    import modelopt.torch.quantization as mtq

    return mtq.quantize(model, QUANT_CFG, forward_loop)
'''


def modelopt_code(layers: Mapping[str, str], kept: list[str]) -> str:
    """Code that defines QUANT_CFG for `modelopt.torch.quantization.quantize`."""
    formats = {}
    for name in dict.fromkeys(layers.values()):
        parts = {"weight": SCHEMES[name].weight, "input": SCHEMES[name].activation}
        formats[name] = {part: _attributes(by, is_weight=part == "weight") for part, by in parts.items() if by}
    return f"{_assign('LAYERS', dict(layers))}{_assign('FORMATS', formats)}{_MODELOPT}"


def _attributes(by: Quantizer, *, is_weight: bool) -> dict[str, Any]:
    """ModelOpt's QuantizerAttributeConfig for a tensor, without defaults."""
    row = by.element.row
    bits = by.element.bits
    attributes: dict[str, Any] = {"num_bits": bits}
    if row:
        attributes["num_bits"] = (bits - 1 - row.mantissa, row.mantissa)
    is_dynamic = not is_weight and not by.calibrated
    if is_dynamic and not _has_scale_format(by):
        attributes["type"] = "dynamic"
    if not any(by.block):
        attributes["axis"] = None
    elif is_weight and by.block == (1, 0):
        attributes["axis"] = 0
    else:
        attributes["block_sizes"] = _block_sizes(by)
    return attributes


def _block_sizes(by: Quantizer) -> dict[Any, Any]:
    """ModelOpt's block sizes: {axis, counted from the last: size, or None for the whole axis}, and the scales' format."""
    sizes = dict[Any, Any]()
    for axis, size in enumerate(reversed(by.block), 1):
        if size != 1:
            sizes[-axis] = size or None
    if _has_scale_format(by):
        sizes["type"] = "dynamic"
        sizes["scale_bits"] = (4, 3) if "e4m3" in by.rule else (8, 0)
    return sizes


def _has_scale_format(by: Quantizer) -> bool:
    """Whether the scales are stored in 8 bits, E4M3 or E8M0."""
    return by.rule.startswith("e")
