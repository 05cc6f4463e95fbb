"""Fake quantization against torchao, ml_dtypes and torch's casts, value by value, and against arithmetic by hand.

The comparison with torchao is skipped where torchao is not installed: `pip install -e .[test]` brings it.
"""

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from auditor.numerics.formats import FORMATS
from auditor.numerics.quantize import fake_quantize
from auditor.numerics.schemes import SCHEMES, Quantizer, Scheme

ml_dtypes = pytest.importorskip("ml_dtypes")
Numbers = np.ndarray[Any, np.dtype[np.float32]]
STATIC = (-2.5, 3.0)
"""Range of the calibration inputs of a static scheme: some of the drawn values are beyond it."""


@cache
def drawn() -> tuple[torch.Tensor, ...]:
    """More than 10^6 values, in tensors of [256, 512]."""
    generator = torch.Generator().manual_seed(0)

    def normal(rows: int = 256, columns: int = 512) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator)

    decades = torch.logspace(-3, 2, 256)[:, None]
    outliers = normal()
    outliers[::7, ::61] *= 1e4
    blocks = normal()
    blocks[::3, 128:256] = 0.0  # blocks of zeros, also with a sign, and rows of zeros
    blocks[5:9] = -0.0
    blocks[128:, 256:] = 0.375  # blocks whose entries are all equal
    blocks[:128, :128] = 0.0  # a block of 128x128 zeros
    ties = torch.randint(-512, 512, (256, 512), generator=generator) / 2.0  # halves, quarters: midpoints of many grids
    ties[:, ::16] = 255.0
    narrow = torch.randint(-14, 15, (256, 512), generator=generator) / 2.0
    narrow[:, ::16] = 6.0  # a scale of exactly 1 for FP4: entries 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5 are ties
    tops = normal().clamp(-1, 1)
    tops[:, ::32] = 1.999  # right below a power of two: floor scales saturate
    return (
        normal(),
        normal() * decades,
        normal() * 1e-39,  # subnormal in FP32
        normal() * torch.logspace(-36, 30, 256)[:, None],
        outliers,
        blocks,
        ties,
        narrow / 4,
        narrow,
        tops,
    )


def differing(ours: torch.Tensor, theirs: torch.Tensor | Numbers) -> int:
    """Entries that differ in value; NaN equals NaN."""
    other = torch.as_tensor(np.asarray(theirs)) if isinstance(theirs, np.ndarray) else theirs
    return int((~((ours == other) | (ours.isnan() & other.isnan()))).sum())


def torchao_of(name: str, part: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """What torchao makes of a tensor under a scheme."""
    ao = pytest.importorskip("torchao.quantization", reason="torchao is not installed", exc_type=ImportError)
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
    from torchao.quantization.granularity import PerBlock, PerGroup
    from torchao.quantization.quant_primitives import MappingType
    from torchao.quantization.utils import get_block_size

    weight, kind = part == "weight", name.split("_")[0]
    if kind == "fp8":
        dtype = torch.float8_e5m2 if "e5m2" in name else torch.float8_e4m3fn
        by = "tensor" if weight and name.endswith("_token") else name.rsplit("_", 1)[-1]
        block = PerBlock([128, 128] if weight else [1, 128])
        granularity = {"tensor": ao.PerTensor(), "block": block}.get(by, ao.PerRow())
        return lambda x: ao.Float8Tensor.from_hp(x, dtype, granularity).dequantize(torch.float32)
    if kind == "int8":
        mapping = MappingType.ASYMMETRIC if name == "int8_asymmetric" and not weight else MappingType.SYMMETRIC
        if name == "int8_static" and not weight:
            scale = torch.full((1, 1), 3.0 / 127.5)
            return lambda x: ao.Int8Tensor.from_hp(x, ao.PerTensor(), scale=scale).dequantize()
        granularity = ao.PerTensor() if name == "int8_tensor" else ao.PerRow()
        return lambda x: ao.Int8Tensor.from_hp(x, granularity, mapping).dequantize()
    if kind == "int4":
        mapping = MappingType.ASYMMETRIC if name == "int4_asymmetric" else MappingType.SYMMETRIC
        return lambda x: ao.IntxUnpackedToInt8Tensor.from_hp(
            x, get_block_size(x.shape, PerGroup(128)), torch.int4, mapping_type=mapping
        ).dequantize()
    if kind == "nvfp4":
        levels = (lambda x: None) if name == "nvfp4_one_level" else (lambda x: per_tensor_amax_to_scale(x.abs().max()))
        return lambda x: NVFP4Tensor.to_nvfp4(x, per_tensor_scale=levels(x)).dequantize(torch.float32)
    if kind == "mxfp6":
        of = "fp6_e3m2" if name == "mxfp6_e3m2" else "fp6_e2m3"
        rceil = ScaleCalculationMode.RCEIL
        return lambda x: MXTensor.to_mx(x, of, 32, scaling_mode=rceil).dequantize(torch.float32)
    element = torch.float8_e4m3fn if kind == "mxfp8" else torch.float4_e2m1fn_x2
    mode = ScaleCalculationMode(name.split("_")[1] if "_" in name else "rceil")
    return lambda x: MXTensor.to_mx(x, element, 32, scaling_mode=mode).dequantize(torch.float32)


PARTS = [(name, part) for name, row in SCHEMES.items() for part in ("weight", "activation") if getattr(row, part)]


@pytest.mark.parametrize(("name", "part"), PARTS)
def test_every_value_is_torchaos(name: str, part: str) -> None:
    quantizer, theirs = getattr(SCHEMES[name], part), torchao_of(name, part)
    spans = [STATIC if quantizer.calibrated else None for _ in drawn()]
    assert sum(x.numel() for x in drawn()) > 10**6
    pairs = zip(drawn(), spans, strict=True)
    assert [differing(fake_quantize(x, quantizer, span).values, theirs(x)) for x, span in pairs] == [0] * len(drawn())


def by_numpy(x: torch.Tensor, dtype: Any, size: int, exponent: int) -> tuple[Numbers, int]:
    """MX in the rule of the standard, with ml_dtypes' casts: the values, and how many saturate."""
    blocks = x.numpy().reshape(-1, size)
    largest = np.abs(blocks).max(1, keepdims=True)
    scale = np.ldexp(np.float32(1), np.clip(np.frexp(largest)[1] - 1 - exponent, -126, 127))
    scale[largest == 0] = 1
    limit = np.float32(ml_dtypes.finfo(dtype).max)
    units = (blocks / scale).astype(np.float32)
    beyond = np.isnan(units.astype(dtype).astype(np.float32)) if limit == 448 else np.abs(units) >= 7
    return (np.clip(units, -limit, limit).astype(dtype).astype(np.float32) * scale).reshape(x.shape), int(beyond.sum())


NORMAL = [0, 1, 4, 5, 6, 7, 8, 9]
"""The draws without scales below 2^-126, where torchao divides by another scale than it multiplies by."""


@pytest.mark.parametrize(("name", "dtype", "exponent"), [("mxfp8", "float8_e4m3fn", 8), ("mxfp4", "float4_e2m1fn", 2)])
def test_mx_is_the_standards_rule_with_casts_of_ml_dtypes(name: str, dtype: str, exponent: int) -> None:
    saturated = 0
    for x in (drawn()[i] for i in NORMAL):
        ours = fake_quantize(x, SCHEMES[f"{name}_floor"].weight)
        values, beyond = by_numpy(x, getattr(ml_dtypes, dtype), 32, exponent)
        assert (differing(ours.values, values), int(ours.beyond.sum())) == (0, beyond)
        saturated += beyond
    assert saturated > 1000


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
def test_saturations_are_where_ml_dtypes_leaves_the_range(name: str) -> None:
    scheme, dtype = SCHEMES["fp8_tensor" if name == "fp8_e4m3" else "fp8_e5m2_tensor"], FORMATS[name].storage
    for x in (drawn()[i] for i in NORMAL):
        ours = fake_quantize(x, scheme.weight, (-1.0, 1.0))  # a range that many values leave
        units = x.numpy() / np.float32(1 / FORMATS[name].largest)
        outside = ~np.isfinite(units.astype(getattr(ml_dtypes, str(dtype))).astype(np.float32))
        assert ours.beyond.sum() == outside.sum() > 0


def test_int8_by_hand() -> None:
    # scale 127.5 / 127.5 = 1: 127.5 is a tie and goes to the even 128, which saturates at 127; -127.5 -> -128; 0.3 -> 0
    ours = fake_quantize(torch.tensor([[127.5, -127.5, 0.3, 0.0]]), SCHEMES["int8"].weight)
    assert ours.values.tolist() == [[127.0, -128.0, 0.0, 0.0]]
    assert (ours.beyond.sum(), ours.vanished.sum()) == (1, 1)


def test_a_zero_point_uses_the_whole_range_of_positive_activations() -> None:
    x = torch.linspace(0, 1, 256)[None]  # 255 steps of 1 / 255: exact with a zero point of -128
    assert torch.allclose(fake_quantize(x, _activation("int8_asymmetric")).values, x, atol=1e-6)
    assert (fake_quantize(x, _activation("int8")).values - x).abs().max() > 1e-3


def _activation(name: str) -> Quantizer:
    result = SCHEMES[name].activation
    assert result is not None
    return result


def test_one_level_zeroes_rows_over_five_decades_and_two_levels_do_not() -> None:
    # Block scales of one level are at least 2^-6, so magnitudes below 2^-6 / 4 are zero.
    x = torch.linspace(0.5, 1, 16)[None] * torch.logspace(-5, 0, 64)[:, None]
    zeros = {name: int((fake_quantize(x, SCHEMES[name].weight).values == 0).all(1).sum()) for name in SCHEMES}
    assert zeros["nvfp4_one_level"] == int((x.amax(1) <= 2**-8).sum()) > 20
    assert zeros["nvfp4"] == zeros["mxfp4"] == 0


def test_blocks_may_be_cut_off() -> None:
    x = torch.randn(3, 200, generator=torch.Generator().manual_seed(1))
    for scheme in SCHEMES.values():
        padded = torch.nn.functional.pad(x, (0, 56, 0, 125))
        span = STATIC if scheme.weight.calibrated else None
        whole = fake_quantize(padded, scheme.weight, span).values[:3, :200]
        assert differing(fake_quantize(x, scheme.weight, span).values, whole) == 0


@pytest.mark.parametrize("shape", [(), (7,), (0, 4), (2, 3, 40)])
def test_shapes_stay(shape: tuple[int, ...]) -> None:
    for scheme in SCHEMES.values():
        assert fake_quantize(torch.ones(shape), scheme.weight).values.shape == shape


def test_bits_with_the_scales() -> None:
    bits = {name: row.weight.bits for name, row in SCHEMES.items()}
    assert (bits["mxfp8"], bits["mxfp4"], bits["nvfp4"]) == (
        8.25,
        4.25,
        4.5,
    )  # 8 / 32, 8 / 32, 8 / 16 beside an element
    assert (bits["int4"], bits["fp8"]) == (4 + 32 / 128, 8)


def test_a_block_with_nan_is_nan() -> None:
    for scheme in SCHEMES.values():
        assert math.isnan(fake_quantize(torch.tensor([[1.0, math.nan]]), scheme.weight).values[0, 1])


def row_of_page(scheme: Scheme) -> str:
    """The scheme's row in docs/quantization.md."""

    def size(quantizer: Quantizer | None) -> str:
        if quantizer is None:
            return "not quantized"
        named = {(0, 0): "tensor", (1, 0): "row"}
        shown = named.get(quantizer.block, "x".join(map(str, quantizer.block)))
        return f"{shown}, calibrated" if quantizer.calibrated else shown

    bits = f"{scheme.weight.bits:g}"
    return f"| `{scheme.name}` | {bits} | {size(scheme.weight)} | {size(scheme.activation)} | {scheme.source} |"


def test_the_page_lists_every_scheme() -> None:
    page = (Path(__file__).parents[3] / "docs" / "quantization.md").read_text(encoding="utf-8").splitlines()
    assert [line for line in page if line.startswith("| `")] == [row_of_page(one) for one in SCHEMES.values()]


@pytest.mark.parametrize(("name", "dtype"), [("mxfp6", "float6_e2m3fn"), ("mxfp6_e3m2", "float6_e3m2fn")])
def test_elements_of_mxfp6_are_those_of_ml_dtypes(name: str, dtype: str) -> None:
    element = getattr(ml_dtypes, dtype)
    largest = float(ml_dtypes.finfo(element).max)
    x = torch.linspace(-largest, largest, 32 * 64).view(64, 32)
    x[:, 0] = largest  # a scale of exactly 1
    expected = x.numpy().astype(element).astype(np.float32)
    assert differing(fake_quantize(x, SCHEMES[name].weight).values, expected) == 0
    assert SCHEMES[name].weight.bits == 6.25
