"""Results that real CUDA GPUs printed and others published, with inputs that can be rebuilt exactly.

Sources named `test_FILE.test_NAME` are tests of pytorch/pytorch that run on CUDA: test_binary_ufuncs.py (commit 2c6c86ba),
test_reductions.py (20d26dec), test_type_promotion.py (56dd61ba), test_matmul_cuda.py (0040fe0d), test_linalg.py (fcca03a1),
nn/test_pooling.py and test_cuda.py; test_nn.py and test_torch.py were read in the port of intel/torch-xpu-ops (ab84f925),
which keeps the conditions on CUDA. Where such a test draws random numbers on the GPU and asserts a fact of every draw, the
numbers are drawn on the CPU.
"""

import math
import warnings
from dataclasses import dataclass

import torch

import auditor
from auditor.errors import AuditorError
from tests.emulation import (
    published_autocast,
    published_elementwise,
    published_mixed,
    published_overflow,
    published_products,
    published_reductions,
)
from tests.emulation.published_row import BF16, FP16, FP32, RAISES, RUNS, PublishedResult, Setup

ROWS: tuple[PublishedResult, ...] = (
    *published_elementwise.ROWS,
    *published_overflow.ROWS,
    *published_reductions.ROWS,
    *published_products.ROWS,
    *published_autocast.ROWS,
    *published_mixed.ROWS,
)

UNKNOWABLE = {
    "pytorch/pytorch#137817": "a tie within the FP32 error of digamma: the mathematics library decides",
}
"""{id: reason} of rows that no emulation can be expected to match."""


DTYPES = {"fp16": FP16, "bf16": BF16, "fp32": FP32}


@dataclass(frozen=True)
class Raised:
    """The call raised; message: class and first line of the error."""

    message: str


Result = tuple[float, ...] | torch.dtype | str | Raised
"""Numbers, a dtype, RUNS, or Raised."""


def emulated_result(row: PublishedResult) -> Result:
    """What the CPU gives if it emulates CUDA."""
    with auditor.emulate("cuda"):
        return _result(row, "cpu", "cuda")


def native_result(row: PublishedResult, device: str = "cpu") -> Result:
    """What the kernels of a device give."""
    return _result(row, device, torch.device(device).type)


def _result(row: PublishedResult, device: str, autocast_device: str) -> Result:
    setup = Setup(DTYPES[row.format], device, autocast_device)
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        torch.default_generator.manual_seed(0)
        try:
            result = row.run(setup)
            if isinstance(result, torch.dtype):
                return result
            if row.printed in (RAISES, RUNS):
                return RUNS
            numbers = torch.as_tensor(result).detach().cpu().double()
        except (RuntimeError, AuditorError) as error:
            first_line = str(error).partition("\n")[0]
            return Raised(f"{type(error).__name__}: {first_line}")
    return tuple(numbers.flatten().tolist())


def matches(row: PublishedResult, result: Result) -> bool:
    """Whether a result is what CUDA printed, to the printed precision."""
    if row.printed == RAISES:
        return isinstance(result, Raised)
    if not isinstance(row.printed, tuple) or not isinstance(result, tuple):
        return result == row.printed
    if row.factors is not None:
        return _is_within_factors(row, result, row.printed)
    allowed = 0.0 if row.decimals is None else 0.5000001 * 10.0**-row.decimals
    return _are_near(result, row.printed, allowed)


def agree(row: PublishedResult, result: Result, other: Result) -> bool:
    """Whether two results of a row are equal bit for bit, both raise, or have sizes within the row's factors."""
    if isinstance(result, Raised) or isinstance(other, Raised):
        return isinstance(result, Raised) and isinstance(other, Raised)
    if not isinstance(result, tuple) or not isinstance(other, tuple):
        return result == other
    if row.factors is not None:
        return _is_within_factors(row, result, other)
    return _are_near(result, other, 0.0)


def _is_within_factors(row: PublishedResult, result: tuple[float, ...], expected: tuple[float, ...]) -> bool:
    assert row.factors is not None
    smallest, largest = row.factors
    return smallest * expected[0] <= result[0] <= largest * expected[0]


def _are_near(result: tuple[float, ...], expected: tuple[float, ...], allowed: float) -> bool:
    return len(result) == len(expected) and all(
        _is_near(ours, theirs, allowed) for ours, theirs in zip(result, expected, strict=True)
    )


def _is_near(ours: float, theirs: float, allowed: float) -> bool:
    if math.isnan(theirs):
        return math.isnan(ours)
    return ours == theirs or abs(ours - theirs) <= allowed


SHOWN = 4


def short(result: Result) -> str:
    """A result in a few words: at most four numbers, in the digits that distinguish FP16 numbers."""
    if isinstance(result, Raised):
        return RAISES
    if isinstance(result, torch.dtype):
        return str(result).removeprefix("torch.")
    if isinstance(result, str):
        return result
    numbers = [f"{number:.6g}" for number in result]
    if len(numbers) <= SHOWN:
        return ", ".join(numbers)
    if len(set(numbers)) == 1:
        return f"{numbers[0]} ({len(numbers)} times)"
    return ", ".join([*numbers[:SHOWN], "..."])
