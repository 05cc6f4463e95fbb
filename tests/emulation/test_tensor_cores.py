"""Emulated products against mmasim, a bit-accurate model of NVIDIA's tensor cores (github.com/microsoft/MMA-Sim).

A tensor core aligns a block of products and the accumulator to the largest of them, truncates, and sums. The emulation
sums in FP32 on the CPU. After the rounding to 16 bits few entries show the difference.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor

import auditor
from auditor.numerics.accumulators import truncated_sum

M, N = 48, 48
FP16, BF16 = torch.float16, torch.bfloat16
NAMES = {FP16: "f16", BF16: "bf16", torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}

SHARES = {
    (FP16, 16): 0.002,
    (FP16, 64): 0.003,
    (FP16, 256): 0.01,
    (FP16, 1024): 0.04,
    (BF16, 16): 0.002,
    (BF16, 64): 0.002,
    (BF16, 256): 0.002,
    (BF16, 1024): 0.002,
}
"""{(format, terms per sum): largest share of entries that differ}. Measured are 0.0004, 0.0013, 0.0043 and 0.028 in FP16,
at most 0.0004 in BF16. Every block is truncated towards zero, so the share grows with their number; the unit of FP16 is
an eighth of that of BF16."""


CASES = [
    (gpu, dtype, k)
    for gpu in ("V100", "A100", "H100")
    for dtype, k in SHARES
    if not (gpu == "V100" and dtype is BF16)  # a V100 has no BF16
]


@pytest.fixture(scope="module")
def tensor_cores() -> Any:
    """The module of mmasim with NVIDIA's instructions. A stub replaces its C++ extension, which only FP64 needs."""
    pytest.importorskip("mmasim")
    extension = "mmasim.arithmetic.fma"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, extension, types.ModuleType(extension))
        return pytest.importorskip("mmasim.nv_ptx")


def factors(k: int, dtype: torch.dtype, *, positive: bool) -> tuple[Tensor, Tensor]:
    """Random [M, k] and [k, N] in a dtype, scaled so that FP16 does not overflow."""
    generator = torch.Generator().manual_seed(k)
    a = torch.randn(M, k, generator=generator)
    b = torch.randn(k, N, generator=generator)
    if positive:
        a, b = a.abs(), b.abs()
    return a.to(dtype), b.to(dtype)


def instruction(tensor_cores: Any, gpu: str, dtype: torch.dtype) -> Any:
    """The matrix instruction that accumulates in FP32."""
    name = NAMES[dtype]
    if gpu == "V100":
        return tensor_cores.MMA("Volta", f"m8n8k4.f32.{name}.{name}.f32")
    if gpu == "A100":
        return tensor_cores.MMA("Ampere", f"m16n8k16.f32.{name}.{name}.f32")
    k = 16 if dtype in (FP16, BF16) else 32
    return tensor_cores.WGMMA("Hopper", f"m64n64k{k}.f32.{name}.{name}")


def multiply(operation: Any, a: Tensor, b: Tensor) -> Tensor:
    """[M, k] @ [k, N] on a tensor core; the accumulator passes from one instruction to the next."""
    result: Tensor = operation(a, b, torch.zeros(M, N))
    return result


def units_apart(x: Tensor, y: Tensor) -> Tensor:
    """Number of units in the last place between 16-bit numbers of one sign."""
    assert torch.equal(x.signbit(), y.signbit())
    return (x.view(torch.int16).int() - y.view(torch.int16).int()).abs()


def root_mean_square(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())


@pytest.mark.parametrize("positive", [False, True], ids=["terms of both signs", "positive terms"])
@pytest.mark.parametrize(("gpu", "dtype", "k"), CASES, ids=[f"{gpu} {NAMES[dtype]} k={k}" for gpu, dtype, k in CASES])
def test_a_product_is_that_of_a_tensor_core_but_for_few_entries(
    tensor_cores: Any, gpu: str, dtype: torch.dtype, k: int, positive: bool
) -> None:
    a, b = factors(k, dtype, positive=positive)
    with auditor.emulate("cuda"):
        emulated = a @ b
    expected = multiply(instruction(tensor_cores, gpu, dtype), a, b).to(dtype)
    share = (emulated != expected).double().mean()
    assert share <= SHARES[dtype, k]

    # Where terms cancel, a unit of the entry is less than the errors of both sums: 2^-20 of the sum of absolute terms.
    apart = units_apart(emulated, expected)
    difference = (emulated.double() - expected.double()).abs()
    absolute_sum = a.double().abs() @ b.double().abs()
    assert bool(((apart <= 1) | (difference <= 2.0**-20 * absolute_sum)).all())
    is_large = emulated.double().abs() > 0.1 * root_mean_square(emulated)
    assert int(apart[is_large].max()) <= 1


@pytest.mark.parametrize(("gpu", "block", "bits"), [("V100", 4, 23), ("A100", 8, 24), ("H100", 16, 25)])
def test_the_model_has_the_blocks_and_bits_of_each_gpu(tensor_cores: Any, gpu: str, block: int, bits: int) -> None:
    """Beside 1, terms of 2^-bits count, of which the rest of a block is 3 units of FP32 or more; smaller ones vanish."""
    operation = instruction(tensor_cores, gpu, FP16)
    for exponent, expected in ((bits, 1 + 3 * 2.0**-23), (bits + 1, 1.0)):
        a = torch.full((M, block), 2.0**-12, dtype=FP16)
        b = torch.full((block, N), 2.0 ** (12 - exponent), dtype=FP16)
        a[:, 0] = 1.0
        b[0] = 1.0
        assert float(multiply(operation, a, b)[0, 0]) == expected


@pytest.mark.parametrize("positive", [False, True], ids=["terms of both signs", "positive terms"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("k", [128, 512, 1024])
def test_fp8_sums_in_14_bits_err_as_much_as_hoppers(
    tensor_cores: Any, k: int, dtype: torch.dtype, positive: bool
) -> None:
    """Within 10 %. Hopper also truncates the last sum to 14 bits, which counts if there is only one block of 32."""
    a, b = factors(k, dtype, positive=positive)
    terms = a.double().T.unsqueeze(2) * b.double().unsqueeze(1)  # [k, M, 1] * [k, 1, N] -> [k, M, N]
    exact = terms.sum(0)
    emulated = truncated_sum(terms, bits=14, step=32) - exact
    expected = multiply(instruction(tensor_cores, "H100", dtype), a, b).double() - exact
    assert root_mean_square(emulated) / root_mean_square(expected) == pytest.approx(1, abs=0.1)
    correlation = torch.corrcoef(torch.stack([emulated.flatten(), expected.flatten()]))[0, 1]
    assert float(correlation) > 0.9


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=["e4m3", "e5m2"])
def test_fp8_sums_that_are_promoted_err_as_much_as_hoppers(tensor_cores: Any, dtype: torch.dtype) -> None:
    """An accumulator that is added to an FP32 register after every 128 terms."""
    a, b = factors(1024, dtype, positive=False)
    terms = a.double().T.unsqueeze(2) * b.double().unsqueeze(1)
    exact = terms.sum(0)
    emulated = truncated_sum(terms, bits=14, step=32, promoted=128) - exact
    operation = instruction(tensor_cores, "H100", dtype)
    blocks = zip(a.split(128, dim=1), b.split(128, dim=0), strict=True)
    register = torch.zeros(M, N)
    for some, others in blocks:
        register = register + multiply(operation, some, others)
    expected = register.double() - exact
    assert root_mean_square(emulated) / root_mean_square(expected) == pytest.approx(1, abs=0.1)
