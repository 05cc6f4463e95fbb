"""Quantization schemes below 16 bits: number formats that share a scale per block. Does not import torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from .formats import FORMATS, Format

FP4 = Format("fp4_e2m1", 1, 0, 6.0, 1, overflows_to="largest")
"""The number format of elements in MXFP4 and NVFP4 (OCP Microscaling Formats 1.0). It is only used with a scale."""

FP6 = Format("fp6_e2m3", 3, 0, 7.5, 1, overflows_to="largest")
FP6_E3M2 = Format("fp6_e3m2", 2, -2, 28.0, 1, overflows_to="largest")
"""The number formats of elements in MXFP6 (same source), each only used with a scale."""


@dataclass(frozen=True)
class Element:
    """The values that a quantized tensor stores. row: their floating-point format; None: two's complement integers."""

    bits: int
    row: Format | None = None

    @property
    def largest(self) -> float:
        """The largest representable value."""
        return self.row.largest if self.row else 2.0 ** (self.bits - 1) - 1

    @property
    def least(self) -> float:
        """The smallest representable value, which is negative."""
        return -self.row.largest if self.row else -(2.0 ** (self.bits - 1))

    @property
    def top_exponent(self) -> int:
        """floor(log2(largest))."""
        return math.frexp(self.largest)[1] - 1


@dataclass(frozen=True)
class Quantizer:
    """How one tensor is quantized. block: numbers of (rows, columns) that share a scale; 0: all rows or columns.

    rule: the scale rule, see `quantize.RULES`. least_scale: lower bound of the scale, for FP8 and integers. scale_bits: bits
    stored per block. calibrated: whether the range comes from calibration inputs, not from the tensor.
    """

    element: Element
    block: tuple[int, int]
    rule: str
    scale_bits: int = 32
    least_scale: float = 0.0
    calibrated: bool = False

    @property
    def bits(self) -> float:
        """Bits of an element with its share of the scale; scales of whole rows and tensors are not counted."""
        bits = float(self.element.bits)
        if all(self.block):
            bits += self.scale_bits / math.prod(self.block)
        return bits


Rounding = Callable[[Quantizer, bool], Quantizer]
"""A library's own quantizer in place of a scheme's, for a weight (True) or an input."""


@dataclass(frozen=True)
class Scheme:
    """Quantizers of a layer's weight and input. activation: None if the input is not quantized. source: torchao's name
    for the scheme, see `config`; finer: the scheme with the same element and finer scales, if there is one."""

    name: str
    weight: Quantizer
    activation: Quantizer | None
    source: str
    finer: str | None = None

    @property
    def config(self) -> str | None:
        """torchao's configuration for `quantize_`, as Python; None if torchao has just tensor classes for a scheme."""
        return self.source if "Config(" in self.source else None

    @property
    def is_calibrated(self) -> bool:
        """Whether calibration inputs determine a scale."""
        return self.activation is not None and self.activation.calibrated

    @property
    def on_cpu(self) -> bool:
        """Whether torchao can run the scheme on a CPU: true for INT8 and INT4 schemes without calibrated scales."""
        return self.weight.element.row is None and not self.is_calibrated

    @property
    def products(self) -> str:
        """Key of the products' speed in plan/devices.toml, such as "int8"; "" if only weights are quantized."""
        if self.activation is None:
            return ""
        element = self.weight.element
        kind = "int" if element.row is None else "fp"
        return f"{kind}{element.bits}"

    @property
    def multiples(self) -> tuple[int, int]:
        """In torchao, a weight's rows and columns must be multiples of these two numbers."""
        least = 16 if self.name.startswith(("fp8", "nvfp4")) else 1
        return max(self.weight.block[0], least), max(self.weight.block[1], least)

    def fits(self, kind: str, rows: int, columns: int) -> bool:
        """Whether kernels exist for a weight [rows, columns]. kind: linear | convolution | embedding.

        A weight in blocks must have `multiples`; embeddings have no input to quantize; no convolution has blocks.
        """
        in_blocks = self.weight.block[1] > 0
        if kind == "embedding" and self.activation is not None:
            return False
        if kind == "convolution" and in_blocks:
            return False
        of_rows, of_columns = self.multiples
        return not in_blocks or (rows % of_rows == 0 and columns % of_columns == 0)


_TENSOR, _ROW, _GROUP, _SQUARE = (0, 0), (1, 0), (1, 128), (128, 128)
_E4M3, _E5M2 = (Quantizer(Element(8, FORMATS[name]), _ROW, "largest") for name in ("fp8_e4m3", "fp8_e5m2"))
_INT8 = Quantizer(Element(8), _ROW, "symmetric", least_scale=2.0**-23)
_INT4 = Quantizer(Element(4), _GROUP, "symmetric", least_scale=2.0**-126)
_INT4_ZERO = replace(_INT4, rule="asymmetric", scale_bits=40)
_MX8, _MX4 = (Quantizer(made, (1, 32), "", 8) for made in (Element(8, FORMATS["fp8_e4m3"]), Element(4, FP4)))
_MX6, _MX6_E3M2 = (Quantizer(Element(6, made), (1, 32), "e8m0_rceil", 8) for made in (FP6, FP6_E3M2))
_NV4 = Quantizer(Element(4, FP4), (1, 16), "e4m3_two_levels", 8)


def _fp8(name: str, base: Quantizer, weight: tuple[int, int], activation: tuple[int, int], finer: str | None) -> Scheme:
    """A scheme of FP8 for weights and activations. weight, activation: the blocks with one scale; finer: the scheme with
    smaller blocks, if any."""
    assert base.element.row is not None
    granularities = {
        _TENSOR: "PerTensor()",
        _ROW: "PerRow()",
        _GROUP: "PerBlock([1, 128])",
        _SQUARE: "PerBlock([128, 128])",
    }
    of_weights = granularities[weight]
    of_activations = granularities[activation]
    source = f"Float8Tensor, torch.{base.element.row.storage}, weights {of_weights}, activations {of_activations}"
    if base is _E4M3 and weight in (activation, _SQUARE):  # no GPU multiplies two matrices in E5M2
        both = of_weights if weight == activation else f"[{of_activations}, {of_weights}]"
        source = f"Float8DynamicActivationFloat8WeightConfig(granularity={both})"
    return Scheme(name, replace(base, block=weight), replace(base, block=activation), source, finer)


def _microscaling(base: Quantizer, mode: str) -> Scheme:
    name = f"mxfp{base.element.bits}" if mode == "rceil" else f"mxfp{base.element.bits}_{mode}"
    both = replace(base, rule=f"e8m0_{mode}")
    dtypes = "".join(f"{part}_dtype=torch.float4_e2m1fn_x2, " for part in ("activation", "weight") if base is _MX4)
    finer = "nvfp4" if base is _MX4 else None
    config = f"MXDynamicActivationMXWeightConfig({dtypes}scaling_mode=ScaleCalculationMode.{mode.upper()})"
    return Scheme(name, both, both, config, finer)


_GROUPS = "IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(128)"
_ROWS = (
    _fp8("fp8", _E4M3, _ROW, _ROW, "mxfp8"),
    _fp8("fp8_tensor", _E4M3, _TENSOR, _TENSOR, "fp8"),
    _fp8("fp8_token", _E4M3, _TENSOR, _ROW, "fp8"),
    _fp8("fp8_block", _E4M3, _SQUARE, _GROUP, "mxfp8"),
    _fp8("fp8_e5m2_row", _E5M2, _ROW, _ROW, None),
    _fp8("fp8_e5m2_tensor", _E5M2, _TENSOR, _TENSOR, "fp8_e5m2_row"),
    _fp8("fp8_e5m2_token", _E5M2, _TENSOR, _ROW, "fp8_e5m2_row"),
    _fp8("fp8_e5m2_block", _E5M2, _SQUARE, _GROUP, None),
    Scheme("int8", _INT8, _INT8, "Int8DynamicActivationInt8WeightConfig()"),
    Scheme(
        "int8_asymmetric",
        _INT8,
        replace(_INT8, rule="asymmetric"),
        "Int8DynamicActivationInt8WeightConfig(act_mapping_type=MappingType.ASYMMETRIC)",
    ),
    Scheme(
        "int8_static",
        _INT8,
        replace(_INT8, block=_TENSOR, calibrated=True),
        "Int8StaticActivationInt8WeightConfig(granularity=[PerTensor(), PerRow()])",
        "int8",
    ),
    Scheme(
        "int8_tensor",
        replace(_INT8, block=_TENSOR),
        replace(_INT8, block=_TENSOR),
        "Int8DynamicActivationInt8WeightConfig(granularity=PerTensor())",
        "int8",
    ),
    Scheme("int8_weights", _INT8, None, "Int8WeightOnlyConfig()"),
    Scheme("int4", _INT4, None, f"{_GROUPS})", "int4_asymmetric"),
    Scheme("int4_asymmetric", _INT4_ZERO, None, f"{_GROUPS}, mapping_type=MappingType.ASYMMETRIC)"),
    *(_microscaling(base, mode) for base in (_MX8, _MX4) for mode in ("rceil", "floor", "ceil", "even")),
    Scheme("mxfp6", _MX6, _MX6, "MXTensor, fp6_e2m3, ScaleCalculationMode.RCEIL", "mxfp8"),
    Scheme("mxfp6_e3m2", _MX6_E3M2, _MX6_E3M2, "MXTensor, fp6_e3m2, ScaleCalculationMode.RCEIL", "mxfp6"),
    Scheme("nvfp4", _NV4, _NV4, "NVFP4DynamicActivationNVFP4WeightConfig()"),
    Scheme(
        "nvfp4_one_level",
        replace(_NV4, rule="e4m3"),
        replace(_NV4, rule="e4m3"),
        "NVFP4DynamicActivationNVFP4WeightConfig(use_dynamic_per_tensor_scale=False)",
        "nvfp4",
    ),
)
SCHEMES: Mapping[str, Scheme] = MappingProxyType({row.name: row for row in _ROWS})
"""{name: Scheme}: all schemes, with torchao's names as sources (version 0.18)."""
