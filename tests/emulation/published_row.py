"""One result that a CUDA GPU printed and somebody published, and what the calls of these rows build their tensors with."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

FP16 = torch.float16
BF16 = torch.bfloat16
FP32 = torch.float32
FP64 = torch.float64
NAN = math.nan
INF = math.inf

RAISES = "raises"
RUNS = "runs"


@dataclass(frozen=True)
class Setup:
    """How a row's call runs.

    dtype: the format of the row. device: where its tensors are. autocast_device: the device type of its autocast regions,
    which is "cuda" on a CPU that emulates CUDA.
    """

    dtype: torch.dtype
    device: str
    autocast_device: str

    def tensor(self, values: float | Sequence[object] | Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The values on the device, rounded to the row's format unless a dtype is given."""
        wide = values if isinstance(values, Tensor) else torch.tensor(values, dtype=FP32)
        return wide.to(dtype or self.dtype).to(self.device)

    def ones(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Ones on the device, in the row's format unless a dtype is given."""
        return torch.ones(shape, dtype=dtype or self.dtype, device=self.device)

    def zeros(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Zeros on the device, in the row's format unless a dtype is given."""
        return torch.zeros(shape, dtype=dtype or self.dtype, device=self.device)

    def autocast(self) -> torch.autocast:
        """An autocast region in the row's format."""
        return torch.autocast(self.autocast_device, self.dtype)


@dataclass(frozen=True)
class PublishedResult:
    """A call and what CUDA gave.

    id: ORGANIZATION/REPOSITORY#NUMBER of a GitHub thread, a test of pytorch/pytorch that GPU CI runs, or another source;
    followed by a word if the source has several results. format: "fp16", "bf16" or "fp32". call: `run` in a few words.
    printed: numbers, a dtype, RAISES, or RUNS. decimals: how many of them were printed; None compares exactly.
    factors: the result is the size of an error of random inputs, and matches if divided by CUDA's it is within these.
    versions: torch, CUDA, GPU, date, as far as the source names them. note: what the row decides.
    """

    id: str
    kind: str
    format: str
    call: str
    run: Callable[[Setup], object]
    printed: tuple[float, ...] | torch.dtype | str
    versions: str
    note: str = ""
    decimals: int | None = None
    factors: tuple[float, float] | None = None


DEFAULT_TOLERANCES = {FP16: (1e-5, 1e-3), BF16: (1e-5, 1.6e-2)}
"""atol and rtol of torch.testing.assert_close by dtype."""


def half_of_bits(patterns: list[int]) -> Tensor:
    """FP16 numbers with these bit patterns."""
    return torch.from_numpy(np.array(patterns, dtype=np.uint16).view(np.float16))


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Uniform FP32 numbers between 0 and 1, drawn on the CPU."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def drawn_normal(*shape: int, seed: int = 0) -> Tensor:
    """Normal FP32 numbers, drawn on the CPU."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def old_cpu_randn(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> Tensor:
    """`torch.manual_seed(seed); torch.randn(shape, dtype=dtype)` on a CPU, as torch drew FP16 and BF16 numbers before it drew them in FP32.

    The CPU results that pytorch#156173, #180150 and #180155 printed with 2.8 to 2.11 come out digit for digit.
    """
    count = math.prod(shape)
    complete = count - count % 16
    tail = 16 if count % 16 else 0
    random_bits = 11 if dtype is FP16 else 8
    words = np.random.RandomState(seed).randint(0, 2**32, size=count + tail, dtype=np.uint32)
    masked = words & ((1 << random_bits) - 1)
    uniform = torch.from_numpy(masked.astype(np.float32) * 2.0**-random_bits)
    normal = uniform[:count].clone()
    normal[:complete] = _box_muller(uniform[:complete].view(-1, 16), dtype).flatten()
    if tail:  # torch draws the last 16 numbers again
        normal[count - 16 :] = _box_muller(uniform[count:].view(1, 16), dtype).flatten()
    return normal.to(dtype).view(shape)


def _box_muller(uniform: Tensor, dtype: torch.dtype) -> Tensor:
    """Normal numbers of uniform ones, [n, 16] -> [n, 16]; each step is rounded to the dtype."""

    def rounded(x: Tensor) -> Tensor:
        return x.to(dtype).float()

    logarithm = rounded(torch.log(rounded(1 - uniform[:, :8])))
    radius = rounded(torch.sqrt(rounded(-2 * logarithm)))
    angle = rounded((2 * np.pi * uniform[:, 8:].double()).float())
    cosines = rounded(radius * rounded(torch.cos(angle)))
    sines = rounded(radius * rounded(torch.sin(angle)))
    return torch.cat([cosines, sines], 1)


def leaf(x: Tensor) -> Tensor:
    """A copy that collects a gradient."""
    return x.detach().clone().requires_grad_()


def gradients(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Gradients of a scalar function by all inputs, flattened into one tensor."""
    leaves = [leaf(x) for x in inputs]
    function(*leaves).backward()
    found = [x.grad.flatten() for x in leaves if x.grad is not None]
    return torch.cat(found)


def count_beyond(result: Tensor, expected: Tensor, atol: float = 0.0, rtol: float = 0.0) -> int:
    """How many entries are further apart than atol + rtol * |expected|; two NaN are equal."""
    ours = result.detach().cpu().double()
    theirs = expected.detach().cpu().double()
    is_near = (ours - theirs).abs() <= atol + rtol * theirs.abs()
    is_equal = (ours == theirs) | (ours.isnan() & theirs.isnan())
    return int((~(is_near | is_equal)).sum())


def count_not_finite(*results: Tensor) -> int:
    """How many entries are inf or NaN."""
    return sum(int((~x.isfinite()).sum()) for x in results)
