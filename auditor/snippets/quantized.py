"""Plans of quantization schemes as code for torchao, compressed-tensors, transformers and ModelOpt."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pprint import pformat
from typing import Any

from ..errors import PlanError
from ..numerics.schemes import SCHEMES, Quantizer, Scheme
from ..records import Audit
from ..records.quantization import QuantizedPlan
from .offer import WIDTH, comment

KINDS = {
    "linear": "linear",
    "addmm": "transposed linear",
    "embedding": "embedding",
    "conv2d": "convolution",
}
"""{operation: kind of its layer}; further convolutions are `other convolution`."""

_IMPORTS = {
    "torchao.quantization": (
        "Float8DynamicActivationFloat8WeightConfig",
        "FqnToConfig",
        "Int8DynamicActivationInt8WeightConfig",
        "Int8StaticActivationInt8WeightConfig",
        "Int8WeightOnlyConfig",
        "IntxWeightOnlyConfig",
        "MappingType",
        "PerBlock",
        "PerGroup",
        "PerRow",
        "PerTensor",
        "quantize_",
    ),
    "torchao.quantization.quantize_.common.kernel_preference": ("KernelPreference",),
    "torchao.prototype.mx_formats": (
        "MXDynamicActivationMXWeightConfig",
        "NVFP4DynamicActivationNVFP4WeightConfig",
        "ScaleCalculationMode",
    ),
}


@dataclass(frozen=True)
class Library:
    """A library that quantizes. kinds: the kinds of layers that it quantizes under a scheme, none if it lacks the scheme.
    file: the file in an audit's directory. render: code for layers {path: scheme}, and for those kept in 16 bits.
    notes: {scale rule: how the library's rule differs}."""

    title: str
    file: str
    kinds: Callable[[Scheme], tuple[str, ...]]
    render: Callable[[QuantizedPlan, Mapping[str, str], Mapping[str, str]], str]
    notes: Mapping[str, str]


def quantized_plan(audit: Audit, name: str | None = None) -> QuantizedPlan:
    """The plan called `name`; by default the smallest one that holds. Raises: PlanError(slug="no-such-plan")."""
    plans = {plan.name: plan for plan in audit.quantized_plans}
    if name in plans:
        return plans[name]
    if not plans:
        raise PlanError("the audit has no plan of quantization schemes: audit with --formats int8", slug="no-such-plan")
    holding = [plan for plan in audit.quantized_plans if plan.holds]
    if name is None and holding:
        return min(holding, key=lambda plan: plan.effective_bits)
    wanted = "no plan of quantization schemes holds" if name is None else f"{name!r} is not among the plans"
    raise PlanError(f"{wanted}; choose one of {', '.join(plans)}.", slug="no-such-plan")


def code_of(audit: Audit, library: Library, plan: QuantizedPlan) -> str:
    """The plan as code for a library, after comments on what the library cannot express."""
    kinds = kinds_of(audit, plan)
    layers, left = _expressible(audit, library, plan, kinds)
    kept = {path: kinds[path] for path in plan.layers if path not in layers}
    head = f"{library.title}: the plan {plan.name!r}, {len(layers)} of {len(plan.layers)} layers quantized."
    if not layers:
        return comment(f"{library.title}: cannot express the plan {plan.name!r}.", _left_out(library, left))
    error = max(plan.calibration_error, plan.held_out_error or 0.0)
    verdict = "Verified" if plan.holds else "NOT within the budget"
    used = dict.fromkeys(layers.values())
    rules = dict.fromkeys(SCHEMES[scheme].weight.rule for scheme in used)
    notes = [library.notes[rule] for rule in rules if rule in library.notes]
    said = f"{verdict}: measured error {error:.2g}, budget {audit.max_error:.2g}, run by {plan.verified_by}."
    return comment(f"{head} {said}", _left_out(library, left), *notes) + library.render(plan, layers, kept)


def kinds_of(audit: Audit, plan: QuantizedPlan) -> dict[str, str]:
    """{layer of the plan: its kind}, see KINDS; "parameter" if the layer's module has another weight too."""
    ops = {layer.owner: layer.op.split(".")[1] for layer in audit.quantization}
    others = "other convolution"
    return {path: KINDS.get(ops[path], others) if path in ops else "parameter" for path in plan.layers}


def _expressible(
    audit: Audit, library: Library, plan: QuantizedPlan, kinds: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """{layer: scheme} of what the library quantizes, and {layer: reason} of what it leaves in 16 bits. Layers that must
    have one scheme, or are one weight, stay together."""
    left = {
        path: f"{kinds[path]}, {scheme}"
        for path, scheme in plan.layers.items()
        if scheme and kinds[path] not in library.kinds(SCHEMES[scheme])
    }
    tied = [tuple(name.removesuffix(".weight") for name in group) for group in audit.tied_parameters]
    for group in (*plan.groups, *tied):
        if first := next((path for path in group if path in left), None):
            left |= {path: f"with {first}" for path in group if plan.layers.get(path) and path not in left}
    return {path: scheme for path, scheme in plan.layers.items() if scheme and path not in left}, left


def _left_out(library: Library, left: Mapping[str, str], shown: int = 6) -> str:
    if not left:
        return ""
    listed = [f"{path} ({why})" for path, why in left.items()]
    more = [f"and {len(listed) - shown} more"] if len(listed) > shown else []
    return f"{library.title} cannot quantize, so these stay in 16 bits: {', '.join([*listed[:shown], *more])}."


def _literal(name: str, value: Any) -> str:
    """An assignment in Python, one entry per line if it is long."""
    return f"{name} = {pformat(value, width=WIDTH, sort_dicts=False)}\n"


_QUANTIZE = """

def cast_inputs(dtype, module, *inputs):
    return tree_map_only(torch.Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, inputs)


def quantize(model, {batches}dtype=torch.bfloat16):
    \"\"\"Quantize the layers in place. dtype: of everything else, and of inputs; None leaves them as they are.{about}\"\"\"
    if dtype is not None:
        model.to(dtype).register_forward_pre_hook(partial(cast_inputs, dtype), with_kwargs=True)
    configs = {{path: CONFIGS[scheme] for path, scheme in LAYERS.items()}}
    for path, scheme in LAYERS.items():
        sizes = tuple(model.get_submodule(path).weight.shape[:2])
        if any(size % multiple for size, multiple in zip(sizes, MULTIPLES[scheme])):
            warnings.warn(f"{{path}} stays in 16 bits: torchao has no {{scheme}} for a weight of {{sizes}}")
            del configs[path]
{static}    quantize_(model, FqnToConfig(configs), filter_fn=None)
    return model
"""

_STATIC = """    for path, scale in input_scales(model, [path for path in configs if LAYERS[path] == "int8_static"], batches):
        configs[path] = replace(configs[path], act_quant_scale=scale)
"""

_SCALES = """

def input_scales(model, paths, batches):
    \"\"\"Yield (path, scale of the layer's inputs); batches: tuples of the model's arguments.\"\"\"
    largest = {}

    def look(path, module, args):
        if args[0].is_floating_point():
            largest[path] = torch.maximum(largest.get(path, args[0].new_zeros(())), args[0].abs().max())

    hooks = [model.get_submodule(path).register_forward_pre_hook(partial(look, path)) for path in paths]
    with torch.no_grad():
        for batch in batches:
            model(*batch)
    for hook in hooks:
        hook.remove()
    missing = [path for path in paths if path not in largest]
    if missing:
        raise ValueError(f"int8_static needs batches that reach these layers: {', '.join(missing)}")
    return [(path, (value / 127.5).view(1, 1)) for path, value in largest.items()]
"""

_EMULATED = """if not torch.cuda.is_available():  # the kernels for MX need a GPU
    for config in CONFIGS.values():
        if hasattr(config, "kernel_preference"):
            config.kernel_preference = KernelPreference.EMULATED
"""


def _torchao(plan: QuantizedPlan, layers: Mapping[str, str], kept: Mapping[str, str]) -> str:
    """A function `quantize(model)`."""
    static = "int8_static" in layers.values()
    imports, configs = _configs(layers, "FqnToConfig", "quantize_")
    quantize = _QUANTIZE.format(
        batches="batches, " if static else "",
        about=" batches: for the scales of inputs." if static else "",
        static=_STATIC if static else "",
    )
    sizes = _literal("MULTIPLES", {scheme: _multiples(SCHEMES[scheme]) for scheme in dict.fromkeys(layers.values())})
    standard = "import warnings\n" + (
        "from dataclasses import replace\nfrom functools import partial\n" if static else ""
    )
    return f"{standard}\nimport torch\n{imports}\n{configs}{sizes}{_SCALES if static else ''}{quantize}"


def _multiples(scheme: Scheme) -> tuple[int, int]:
    """Rows and columns of a weight must be multiples of these in torchao."""
    rows, columns = (size or 1 for size in scheme.weight.block)
    return (max(rows, 16), max(columns, 16)) if scheme.name.startswith(("fp8", "nvfp4")) else (rows, columns)


def _configs(layers: Mapping[str, str], *names: str) -> tuple[str, str]:
    """Imports of torchao's configurations, and of `names`; assignments of LAYERS and CONFIGS."""
    used = {scheme: SCHEMES[scheme].config or "" for scheme in dict.fromkeys(layers.values())}
    emulates = any(config.startswith("MX") for config in used.values())
    text = " ".join([*used.values(), *names, "KernelPreference" if emulates else ""])
    imports = "".join(
        f"from {module} import {', '.join(listed)}\n"
        for module, known in _IMPORTS.items()
        if (listed := [name for name in known if name in text])
    )
    entries = "".join(f"    {scheme!r}: {config},\n" for scheme, config in used.items())
    return imports, f"{_literal('LAYERS', dict(layers))}CONFIGS = {{\n{entries}}}\n{_EMULATED if emulates else ''}"


_METHODS = {
    "fp8": "FbgemmFp8Config(modules_to_not_convert=KEPT)",
    "fp8_block": "FineGrainedFP8Config(weight_block_size=(128, 128), modules_to_not_convert=KEPT)",
    "int8": "BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0, llm_int8_skip_modules=KEPT)",
}
"""{scheme: the quantization method of transformers with the same scales, besides torchao}."""


def _transformers(plan: QuantizedPlan, layers: Mapping[str, str], kept: Mapping[str, str]) -> str:
    """QUANTIZATION_CONFIG for `from_pretrained`, and the same by another method if there is one."""
    imports, configs = _configs(layers, "FqnToConfig")
    schemes = set(layers.values())
    other = _METHODS.get(*schemes) if len(schemes) == 1 else None
    names = ["TorchAoConfig", *([other.partition("(")[0]] if other else [])]
    skipped = [_only(path, layers) for path, kind in kept.items() if kind in ("linear", "parameter")]
    lines = [
        f"import torch\n{imports}from transformers import {', '.join(sorted(names))}\n\n",
        configs,
        _literal("KEPT", skipped),
        "QUANTIZATION_CONFIG = TorchAoConfig(\n    FqnToConfig({path: CONFIGS[scheme] for path, scheme in LAYERS.items()}), "
        "modules_to_not_convert=KEPT\n)\n",
        *([f"# Another method, whose scales may differ slightly:\nOTHER_CONFIG = {other}\n"] if other else []),
    ]
    return "".join(lines)


def _only(path: str, layers: Mapping[str, str]) -> str:
    """The path, which transformers searches as a pattern, at the start and the end of names; anchored if that would
    match a quantized layer."""
    matches = (re.match(rf"(?:{path})(?:(?<=\.)|(?=\.|$))", layer) or layer.endswith(path) for layer in layers)
    return rf"^{re.escape(path)}(\.weight)?$" if any(matches) else path


def compressed_config(layers: Mapping[str, str], kept: Mapping[str, str]) -> dict[str, Any]:
    """`quantization_config` of a model's config.json, as vLLM and transformers read it, for compressed-tensors."""
    schemes = list(dict.fromkeys(layers.values()))
    groups = {
        f"group_{i}": {
            "targets": [path for path, scheme in layers.items() if scheme == name],
            "weights": _compressed(SCHEMES[name].weight, is_weight=True),
            "input_activations": by and _compressed(by, is_weight=False),
            "format": _format(SCHEMES[name]),
        }
        for i, name in enumerate(schemes)
        for by in [SCHEMES[name].activation]
    }
    formats = {group["format"] for group in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "config_groups": groups,
        "ignore": [path for path, kind in kept.items() if kind in ("linear", "parameter")],
    }


def _format(scheme: Scheme) -> str:
    """How compressed-tensors stores the weights."""
    packed = {"int4": "pack", "int4_asymmetric": "pack", "int8_weights": "pack", "mxfp8": "mxfp8"}
    family = scheme.name.split("_")[0]
    if family in ("mxfp4", "nvfp4"):
        return f"{family}-pack-quantized"
    return f"{packed.get(scheme.name, 'float' if scheme.weight.element.row else 'int')}-quantized"


def _compressed(by: Quantizer, *, is_weight: bool) -> dict[str, Any]:
    """A tensor's QuantizationArgs, without defaults."""
    whole = {(0, 0): "tensor", (1, 0): "channel" if is_weight else "token", (128, 128): "block"}
    nested = by.rule.startswith("e4m3")
    args: dict[str, Any] = {
        "num_bits": by.element.bits,
        "type": "float" if by.element.row else "int",
        "symmetric": by.rule != "asymmetric",
        "strategy": whole.get(by.block, "tensor_group" if nested else "group"),
        "dynamic": False if is_weight or by.calibrated else "local" if nested else True,
    }
    if by.block == (128, 128):
        args["block_structure"] = list(by.block)
    elif by.block not in whole:
        args["group_size"] = by.block[1]
    if by.rule.startswith("e"):
        args |= dict.fromkeys(("scale_dtype", "zp_dtype"), "torch.float8_e4m3fn" if nested else "torch.uint8")
    return args


_LLM_COMPRESSOR = '''

def modifier():
    """For `llmcompressor.oneshot(model=..., recipe=modifier())`, which writes the checkpoint with this configuration."""
    from llmcompressor.modifiers.quantization import QuantizationModifier

    groups, ignore = QUANTIZATION_CONFIG["config_groups"], QUANTIZATION_CONFIG["ignore"]
    return QuantizationModifier(config_groups=groups, ignore=ignore)
'''


def _for_compressed(plan: QuantizedPlan, layers: Mapping[str, str], kept: Mapping[str, str]) -> str:
    """QUANTIZATION_CONFIG, and llm-compressor's modifier."""
    return _literal("QUANTIZATION_CONFIG", compressed_config(layers, kept)) + _LLM_COMPRESSOR


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


def _modelopt(plan: QuantizedPlan, layers: Mapping[str, str], kept: Mapping[str, str]) -> str:
    """QUANT_CFG for `modelopt.torch.quantization.quantize`."""
    formats = {}
    for name in dict.fromkeys(layers.values()):
        parts = {"weight": SCHEMES[name].weight, "input": SCHEMES[name].activation}
        formats[name] = {part: _attributes(by, is_weight=part == "weight") for part, by in parts.items() if by}
    return f"{_literal('LAYERS', dict(layers))}{_literal('FORMATS', formats)}{_MODELOPT}"


def _attributes(by: Quantizer, *, is_weight: bool) -> dict[str, Any]:
    """A tensor's QuantizerAttributeConfig, without defaults."""
    row, bits = by.element.row, by.element.bits
    dynamic = {} if is_weight or by.calibrated else {"type": "dynamic"}
    blocks: dict[Any, Any] = {-axis - 1: size or None for axis, size in enumerate(reversed(by.block)) if size != 1}
    if by.rule.startswith("e"):
        blocks, dynamic = {**blocks, "type": "dynamic", "scale_bits": (4, 3) if "e4m3" in by.rule else (8, 0)}, {}
    per_axis = not any(by.block) or (is_weight and by.block == (1, 0))
    scales = {"axis": 0 if any(by.block) else None} if per_axis else {"block_sizes": blocks}
    return {"num_bits": (bits - 1 - row.mantissa, row.mantissa) if row else bits, **dynamic, **scales}


def _linear_unless(*lacks: str) -> Callable[[Scheme], tuple[str, ...]]:
    """Kinds of a library for linear layers, which lacks the schemes whose names contain one of the words."""
    return lambda scheme: () if any(word in scheme.name for word in lacks) else ("linear",)


def _torchao_kinds(scheme: Scheme) -> tuple[str, ...]:
    if scheme.config is None:
        return ()
    more = {"int8": ("embedding",), "int4": ("embedding", "convolution")}
    return ("linear", *more.get(scheme.name.split("_")[0], ()))


_INTEGERS = "ModelOpt divides integers' largest magnitude by 127 or 7, torchao by 127.5 or 7.5, so errors differ."
_POWERS = "{} has its own rule for the scales of MX formats, so errors differ."
_MX_RULES = tuple(f"e8m0_{rounding}" for rounding in ("floor", "ceil", "even", "rceil"))
_KERNELS = "NVFP4 runs on Blackwell GPUs, with the package MSLK, or without it if use_triton_kernel=False is given."

LIBRARIES = {
    "torchao": Library("torchao", "torchao_config.py", _torchao_kinds, _torchao, {"e4m3_two_levels": _KERNELS}),
    "hf-quantization": Library(
        "transformers",
        "transformers_config.py",
        lambda scheme: ("linear",) if scheme.config and not scheme.is_calibrated else (),
        _transformers,
        {},
    ),
    "compressed-tensors": Library(
        "compressed-tensors",
        "quantization_config.json",
        _linear_unless("e5m2", "one_level"),
        _for_compressed,
        dict.fromkeys(_MX_RULES, _POWERS.format("compressed-tensors"))
        | {"e4m3_two_levels": "compressed-tensors calibrates the tensor scale of inputs."},
    ),
    "modelopt": Library(
        "ModelOpt",
        "modelopt_config.py",
        _linear_unless("e5m2", "one_level", "asymmetric"),
        _modelopt,
        dict.fromkeys(_MX_RULES, _POWERS.format("ModelOpt")) | {"symmetric": _INTEGERS},
    ),
}
"""{name in `--for`: library}: what each can express was tested with torchao 0.18, compressed-tensors 0.20, ModelOpt 0.47
and transformers 5.23."""
