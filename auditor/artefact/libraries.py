"""Plans of quantization schemes as code for torchao, compressed-tensors, transformers and ModelOpt."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ..errors import PlanError
from ..numerics.schemes import SCHEMES, Quantizer, Rounding, Scheme
from ..records import Audit
from ..records.audit import Groups
from ..records.quantization import QuantizedLayer, QuantizedPlan
from .configs import (
    FLOORED,
    compressed_code,
    compressed_config,
    modelopt_code,
    torchao_code,
    transformers_code,
    with_lower_bound,
)
from .text import comment

KINDS = {
    "linear": "linear",
    "addmm": "transposed linear",
    "embedding": "embedding",
    "conv1d": "1D convolution",
    "conv2d": "convolution",
    "conv3d": "3D convolution",
}
"""{operation: kind of its layer}; other convolutions are transposed."""


EXPERT = re.compile(r"\.experts\.\d+(?=\.|$)")
"""The part of a path that numbers the experts of a layer."""


@dataclass(frozen=True)
class Library:
    """A quantization library. is_nan_on_zeros: whether a row or block of zeros becomes NaN in it, in schemes with a scale
    of zero. kinds: function from a scheme to the kinds of layers that the library quantizes under it.
    render: code for layers {path: scheme}, and for linear layers kept in 16 bits. notes: {start of a scheme's name:
    what differs in the library}. joined: names of layers of one module that the library joins into one layer, and so
    quantizes in one scheme. needs_gpu: whether its kernels of a scheme need a GPU. rounding: the library's own quantizer of
    a weight (True) or an input, where it differs from the scheme's. stored: function from a weight's quantizer and the bits
    of other numbers to the bits of an element and of a scale, as the code stores them. unusable: function from a scheme to
    the reason why the code cannot be used under it, or "". unties: whether it stores a tied
    weight once for every layer. where: what stores the weights."""

    title: str
    kinds: Callable[[Scheme], tuple[str, ...]]
    render: Callable[[Mapping[str, str], list[str]], str]
    notes: Mapping[str, str]
    is_nan_on_zeros: bool = False
    joined: tuple[tuple[str, ...], ...] = ()
    needs_gpu: Callable[[Scheme], bool] = lambda scheme: False
    rounding: Rounding | None = None
    stored: Callable[[Quantizer, int], tuple[float, float]] = lambda by, other: (by.element.bits, other)
    unties: bool = False
    unusable: Callable[[Scheme], str] = lambda scheme: ""
    where: str = ""

    @property
    def file(self) -> str:
        """Name of the file with this library's code for a plan."""
        return f"{self.title.lower().replace('-', '_')}_config.py"


def quantized_plan(audit: Audit, name: str | None = None) -> QuantizedPlan:
    """The plan called `name`; by default the best one: the fewest bits, then the least time, then the smallest
    error. Raises: PlanError(slug="no-such-plan")."""
    plans = {plan.name: plan for plan in audit.quantized_plans}
    if not plans:
        raise PlanError("the audit has no plan of quantization schemes: audit with --formats int8", slug="no-such-plan")
    if name is None:
        return min(audit.quantized_plans, key=lambda plan: plan.rank)
    if name not in plans:
        raise PlanError(f"{name!r} is not among the plans; choose one of {', '.join(plans)}.", slug="no-such-plan")
    return plans[name]


def code_of(audit: Audit, library: Library, plan: QuantizedPlan) -> str:
    """The plan as code for a library, after comments that name layers the library cannot quantize."""
    layers, kept, left = expressible(audit, library, plan)
    if not layers:
        why = _left_out(library, left) or "It quantizes no layer."
        return comment(f"{library.title}: there is no code for the plan {plan.name!r}.", why)
    notes = [note for start, note in library.notes.items() if any(map(re.compile(start).match, layers.values()))]
    head = f"{library.title}: the plan {plan.name!r}, {len(layers)} of {len(plan.layers)} layers quantized."
    text = library.render(layers, kept)
    if library.is_nan_on_zeros and any(path in layers for path in _zero_blocks(audit, plan)):
        text = with_lower_bound(text)
        notes.append("activation_value_lb bounds the scales of inputs, since torchao turns a row of zeros into NaN.")
    if library.title == "torchao" and exceeds_in_bf16(audit, plan):
        text = text.replace("dtype=torch.bfloat16", "dtype=None")
    errors = _errors_of(audit, library, plan, layers)
    exceeds = _exceeds(audit, library, plan) or exceeds_in_bf16(audit, plan)
    first = f"{errors} {head}" if exceeds else f"{head} {errors}"
    refused = dict.fromkeys(filter(None, (library.unusable(SCHEMES[scheme]) for scheme in layers.values())))
    return comment(*refused, first, _left_out(library, left), *dict.fromkeys(notes)) + text


def layers_without_code(audit: Audit, plan: QuantizedPlan) -> list[str]:
    """The quantized layers of a plan that every library's code leaves in 16 bits."""
    left = [expressible(audit, library, plan)[2] for library in LIBRARIES.values()]
    return [path for path in _quantized_in(plan) if all(path in one for one in left)]


class MeasuredLayers(Protocol):
    """What the code for a library depends on, besides the plan: every Audit has it."""

    @property
    def quantization(self) -> tuple[QuantizedLayer, ...]:
        """The measured layers, by scheme."""

    @property
    def shared_modules(self) -> Groups:
        """Groups of paths that are one module."""

    @property
    def tied_parameters(self) -> Groups:
        """Groups of names that are one parameter."""

    @property
    def criteria(self) -> tuple[str, ...]:
        """The user's criteria; errors are shares of their limits."""

    @property
    def max_error(self) -> float:
        """The error budget."""


def limit_of(measured: MeasuredLayers) -> float:
    """The largest error of a plan: the budget, or 1 for the largest share of a criterion."""
    return 1.0 if measured.criteria else measured.max_error


def exceeds_in_bf16(measured: MeasuredLayers, plan: QuantizedPlan) -> bool:
    """Whether the plan exceeds the limit with all other layers in BF16."""
    return plan.pasted_error is not None and not plan.pasted_error <= limit_of(measured)


def _exceeds(audit: Audit, library: Library, plan: QuantizedPlan) -> bool:
    """Whether the library's layers and rounding exceed the limit."""
    ran = plan.as_pasted.get(library.title)
    return ran is not None and not ran.error <= limit_of(audit)


def _errors_of(audit: Audit, library: Library, plan: QuantizedPlan, layers: Mapping[str, str]) -> str:
    """A sentence on the errors of a library's code, with all other layers in FP32 and in BF16, and on its size."""
    limit = f"budget {limit_of(audit):.2g}"
    ran = plan.as_pasted.get(library.title)
    error = plan.error if ran is None else ran.error
    by = plan.verified_by if ran is None else ran.verified_by
    if by == "emulation":
        by = f"emulation of {library.title}'s rounding"
    wide = f"Verified by {by} with all other layers in FP32: error {error:.2g}, {limit}."
    if _exceeds(audit, library, plan):
        wide = f"This code EXCEEDS the limit: error {error:.2g}, {limit}, by {by} with all other layers in FP32."
    if any(library.needs_gpu(SCHEMES[scheme]) for scheme in layers.values()):
        wide += " This code needs a GPU, and was not run."
    size = "" if ran is None else f"Weights {library.where}: {_in_bytes(ran.weights_bytes)}."
    if plan.pasted_error is None or (library.title != "torchao" and not exceeds_in_bf16(audit, plan)):
        return f"{wide} {size}"
    if exceeds_in_bf16(audit, plan):
        remedy = "dtype=None leaves them in FP32" if library.title == "torchao" else "load the model in FP32"
        beyond = f"With all other layers in BF16 the error is {plan.pasted_error:.2g}, {limit}: {remedy}."
        first = (wide, beyond) if _exceeds(audit, library, plan) else (beyond, wide)
        return " ".join((*first, size))
    return f"{wide} As it stands, with all other layers in BF16: error {plan.pasted_error:.2g}. {size}"


def _in_bytes(number: float) -> str:
    """A size in decimal units with three digits: `473 kB`."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= factor:
            return f"{number / factor:.3g} {unit}"
    return f"{number:.0f} bytes"


def stored_bits(library: Library, scheme: str, sizes: Sequence[int], other: int) -> float:
    """Bits in which a library stores a weight of these sizes, output channels first, with its scales. other: bits of
    numbers that are not quantized."""
    by = SCHEMES[scheme].weight
    rows, columns = sizes[0], math.prod(sizes[1:])
    height, width = by.block[0] or rows, by.block[1] or columns
    scales = math.ceil(rows / height) * math.ceil(columns / width)
    element, scale = library.stored(by, other)
    return rows * columns * element + scales * scale


def files_of(audit: Audit, plan: QuantizedPlan) -> dict[str, str]:
    """{path in an audit's directory: text} of the plan in every library, and as JSON for a model's config.json."""
    folder = f"quantized/{plan.name}"
    result = {f"{folder}/{one.file}": code_of(audit, one, plan) for one in LIBRARIES.values()}
    layers, kept, _ = expressible(audit, LIBRARIES["compressed-tensors"], plan)
    if layers:
        result[f"{folder}/quantization_config.json"] = json.dumps(compressed_config(layers, kept), indent=2) + "\n"
    return result


def applicable(audit: Audit) -> dict[str, str]:
    """{plan: its file for torchao} of the plans that torchao can apply to a model without calibration inputs."""
    layers = {plan.name: expressible(audit, LIBRARIES["torchao"], plan)[0] for plan in audit.quantized_plans}
    return {
        name: f"quantized/{name}/{LIBRARIES['torchao'].file}"
        for name, chosen in layers.items()
        if chosen and not any(SCHEMES[scheme].is_calibrated for scheme in chosen.values())
    }


def expressible(
    measured: MeasuredLayers, library: Library, plan: QuantizedPlan
) -> tuple[dict[str, str], list[str], dict[str, str]]:
    """Layers with schemes that the library quantizes; linear layers that stay in 16 bits; and layers that the library
    leaves out, with the reason. Layers with a common scheme or weight are all quantized or all left out."""
    kinds = _kinds_of_layers(measured)
    left = dict[str, str]()  # {layer: why the library leaves it out}
    for path, scheme in _quantized_in(plan).items():
        kind = kinds.get(path, "parameter without a module")
        if kind not in library.kinds(SCHEMES[scheme]):
            left[path] = f"{kind}, {scheme}"
    if library.is_nan_on_zeros:
        _leave_out_zero_blocks(measured, plan, left)
    for group in _joined_groups(kinds, library):
        _leave_out_mixed_group(group, plan, left)
    _leave_out_with_others(measured, plan, left)

    layers = {path: scheme for path, scheme in _quantized_in(plan).items() if path not in left}
    kept = {path for path, kind in kinds.items() if kind == "linear" and path not in layers}
    for name in (*plan.left_out, *left):
        is_parameter = name not in kinds
        if is_parameter and "." in name:
            kept.add(name.rpartition(".")[0])
    return layers, sorted(kept), left


def _quantized_in(plan: QuantizedPlan) -> dict[str, str]:
    """{layer: scheme} of the layers that a plan quantizes."""
    return {path: scheme for path, scheme in plan.layers.items() if scheme}


def _kinds_of_layers(measured: MeasuredLayers) -> dict[str, str]:
    """{path: kind of its layer}, with all paths of shared modules."""
    kinds = dict[str, str]()
    for layer in measured.quantization:
        kind = _kind_of(layer.op)
        if kind:
            kinds[layer.owner] = kind
    for group in measured.shared_modules:
        known = [path for path in group if path in kinds]
        if known:
            kinds |= dict.fromkeys(group, kinds[known[-1]])
    return kinds


def _leave_out_zero_blocks(measured: MeasuredLayers, plan: QuantizedPlan, left: dict[str, str]) -> None:
    """Add the layers with a row or block of zeros to `left`, unless a lower bound of the scale helps."""
    zeros = _zero_blocks(measured, plan)
    for path, scheme in plan.layers.items():
        is_bounded = scheme in FLOORED and zeros.get(path) == "activation"
        if path in zeros and path not in left and not is_bounded:
            left[path] = f"{scheme}, a row or block of zeros becomes NaN"


def _leave_out_mixed_group(group: tuple[str, ...], plan: QuantizedPlan, left: dict[str, str]) -> None:
    """Add a group of layers that the library joins to `left` if its layers would differ in their schemes."""
    schemes = {None if path in left else plan.layers.get(path) for path in group}
    if len(schemes) == 1:
        return
    names = " and ".join(path.rpartition(".")[2] for path in group)
    for path in group:
        if plan.layers.get(path):
            left[path] = f"one layer of {names}, which the plan treats differently"


def _leave_out_with_others(measured: MeasuredLayers, plan: QuantizedPlan, left: dict[str, str]) -> None:
    """Add the layers that must share the scheme or the weight of a layer in `left`."""
    tied = [tuple(name.removesuffix(".weight") for name in group) for group in measured.tied_parameters]
    for group in (*plan.groups, *tied):
        first = next((path for path in group if path in left), None)
        if first is None:
            continue
        for path in group:
            if plan.layers.get(path) and path not in left:
                left[path] = f"with {first}"


def _kind_of(op: str) -> str:
    """The kind of a module's layer; "" for a product, such as one with all experts' weights in one parameter."""
    name = op.split(".")[1]
    return KINDS.get(name, "transposed convolution" if "conv" in name else "")


def _joined_groups(paths: Iterable[str], library: Library) -> list[tuple[str, ...]]:
    """Groups of layers that the library joins: by name within one module, and all experts of one module."""
    known, groups = set(paths), dict[tuple[str, ...], list[str]]()
    for path in sorted(known):
        parent, _, name = path.rpartition(".")
        for names in library.joined:
            if name in names:
                groups.setdefault((EXPERT.sub(".experts", parent), *names), []).append(path)
        if library.joined and EXPERT.search(path):
            groups.setdefault((EXPERT.split(path)[0],), []).append(path)
    return [tuple(group) for group in groups.values() if len(group) > 1]


def _zero_blocks(measured: MeasuredLayers, plan: QuantizedPlan) -> dict[str, str]:
    """{layer of the plan: its part with a row or block of zeros}."""
    parts = {(layer.key, layer.scheme): layer.zero_blocks for layer in measured.quantization}
    parts |= {(layer.owner, layer.scheme): layer.zero_blocks for layer in measured.quantization}
    of_plan = {path: parts.get((path, scheme), "") for path, scheme in plan.layers.items() if scheme}
    return {path: part for path, part in of_plan.items() if part}


def _left_out(library: Library, left: Mapping[str, str], shown: int = 6) -> str:
    if not left:
        return ""
    listed = [f"{path} ({why})" for path, why in left.items()]
    more = [f"and {len(listed) - shown} more"] if len(listed) > shown else []
    return f"{library.title} cannot quantize these layers, which therefore stay in 16 bits: {', '.join([*listed[:shown], *more])}."


def _torchao_kinds(scheme: Scheme) -> tuple[str, ...]:
    if scheme.config is None:
        return ()
    more = {
        "int8": () if scheme.is_calibrated or scheme.name == "int8_tensor" else ("embedding",),
        "int4": ("embedding", "convolution"),
    }
    return ("linear", *more.get(scheme.name.split("_")[0], ()))


def _compressed_kinds(scheme: Scheme) -> tuple[str, ...]:
    return () if any(word in scheme.name for word in ("e5m2", "one_level", "mxfp6")) else ("linear",)


def _compressed_unusable(scheme: Scheme) -> str:
    """Weights with zero points: the checkpoint that llm-compressor writes does not load."""
    if scheme.weight.rule != "asymmetric":
        return ""
    return (
        f"This code CANNOT be used with {scheme.name}: the checkpoint that llm-compressor 0.14 writes for weights with zero "
        "points does not load. Use int4, or torchao's code for this plan."
    )


def _modelopt_kinds(scheme: Scheme) -> tuple[str, ...]:
    if any(word in scheme.name for word in ("e5m2", "one_level", "asymmetric", "mxfp6")):
        return ()
    convolutions = ("1D convolution", "convolution", "3D convolution")
    return (
        "linear",
        *(convolutions if scheme.name in ("fp8_tensor", "int8_static", "int8_tensor", "int8_weights") else ()),
    )


def _torchao_needs_gpu(scheme: Scheme) -> bool:
    return not scheme.on_cpu and not scheme.is_calibrated and not scheme.name.startswith("mx")


def _torchao_stored(by: Quantizer, other: int) -> tuple[float, float]:
    """torchao stores INT4 in one byte each, and an INT8 zero point beside every scale of integers."""
    if by.element.row is not None:
        return by.element.bits, by.scale_bits
    scale = 32 if by.element.bits == 8 else other
    return 8, scale + 8


def _compressed_stored(by: Quantizer, other: int) -> tuple[float, float]:
    """compressed-tensors stores scales in the weight's dtype, and zero points in as many bits as an element."""
    if by.rule.startswith("e"):
        return by.element.bits, by.scale_bits
    zero_point = by.element.bits if by.rule == "asymmetric" else 0
    return by.element.bits, other + zero_point


def _compressed_rounding(by: Quantizer, is_weight: bool) -> Quantizer:
    """compressed-tensors has one rule for scales of MX formats, `rceil` of 8 bits and `even` of 4; and it divides by scales
    of integers, which have no lower bound but for rows of zeros."""
    if by.rule in ("symmetric", "asymmetric"):
        return replace(by, rule=f"{by.rule}_by_division", least_scale=2.0**-126)
    if not by.rule.startswith("e8m0"):
        return by
    return replace(by, rule="e8m0_rceil" if by.element.bits == 8 else "e8m0_even")


def _modelopt_rounding(by: Quantizer, is_weight: bool) -> Quantizer:
    """ModelOpt divides the largest magnitude of integers by 127 or 7."""
    return replace(by, rule="narrow") if by.rule == "symmetric" else by


def _modelopt_needs_gpu(scheme: Scheme) -> bool:
    return scheme.weight.rule.startswith("e")


_TORCHAO_NOTES = {
    "fp8": "torchao leaves a layer in 16 bits if its number of inputs or outputs is not a multiple of 16.",
    "nvfp4": "NVFP4 needs a Blackwell GPU, and the package MSLK or the argument use_triton_kernel=False.",
}
_COMPRESSED_NOTES = {
    "mx": "compressed-tensors computes scales of MX formats as the schemes mxfp8 and mxfp4_even do.",
    "nvfp4": "compressed-tensors calibrates the tensor scale of inputs.",
}
_KERNELS = "ModelOpt computes this format on GPUs, in kernels that were not compared with the scheme."
_MODELOPT_NOTES = {
    "int": "ModelOpt divides the largest magnitude of integers by 127 or 7, torchao by 127.5 or 7.5.",
    "mx": _KERNELS,
    "nvfp4": _KERNELS,
}

LIBRARIES = {
    "torchao": Library(
        "torchao",
        _torchao_kinds,
        torchao_code,
        _TORCHAO_NOTES,
        True,
        needs_gpu=_torchao_needs_gpu,
        stored=_torchao_stored,
        unties=True,
        where="in memory",
    ),
    "hf-quantization": Library(
        "transformers",
        lambda scheme: ("linear",) if scheme.config and not scheme.is_calibrated else (),
        transformers_code,
        {"": "Only for a model that from_pretrained of transformers loads.", **_TORCHAO_NOTES},
        True,
        needs_gpu=_torchao_needs_gpu,
        stored=_torchao_stored,
        unties=True,
        where="in memory",
    ),
    "compressed-tensors": Library(
        "compressed-tensors",
        _compressed_kinds,
        compressed_code,
        _COMPRESSED_NOTES,
        rounding=_compressed_rounding,
        stored=_compressed_stored,
        unusable=_compressed_unusable,
        where="in the checkpoint",
    ),
    "modelopt": Library(
        "ModelOpt",
        _modelopt_kinds,
        modelopt_code,
        _MODELOPT_NOTES,
        needs_gpu=_modelopt_needs_gpu,
        rounding=_modelopt_rounding,
        # Elements stay in the model's dtype; a block has its largest magnitude in FP32.
        stored=lambda by, other: (other, 32),
        where="in memory, since ModelOpt simulates the scheme until it exports the model",
    ),
}
"""{name in `--for`: library}. Their supported layers were tested with torchao 0.18, compressed-tensors 0.20,
ModelOpt 0.47 and transformers 5.23."""
