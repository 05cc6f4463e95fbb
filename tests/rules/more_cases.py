"""More cases of rules: positions, activations, attention, constants, losses, and systems."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch import Tensor, nn

from tests.rules.cases import case, module, raised, ramp


def turned(x: Tensor, phase: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * phase.cos() - b * phase.sin(), a * phase.sin() + b * phase.cos()], -1)


FREQUENCIES = torch.tensor([1.0, 0.1])


def rotary(x: Tensor, position: Tensor) -> Tensor:
    return turned(x, position.to(x.dtype)[:, None] * FREQUENCIES.to(x.dtype))


def rotary_joined(x: Tensor, position: Tensor) -> Tensor:
    phase = position.to(x.dtype)[:, None] * FREQUENCIES.to(x.dtype)
    angle = torch.cat([phase, phase], -1)
    return x * (angle.cos() * 1.5) + x.flip(-1) * (angle.sin() * 1.5)


def rotary_of_integers(x: Tensor) -> Tensor:
    """Arithmetic on integers gives torch's default dtype, in a low model too."""
    return turned(x, torch.arange(1000, 1000 + x.shape[0])[:, None] * 100.0 ** (-torch.arange(0, 4, 2) / 4))


def fourier_features(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    phase = x @ w + b
    return torch.stack([phase.cos(), phase.sin()])


def counted(x: Tensor) -> Tensor:
    return x * torch.arange(x.shape[-1], dtype=x.dtype)


def cast_ids(x: Tensor, ids: Tensor) -> Tensor:
    return x * ids.to(x.dtype)


def decoded(offset: Tensor, cell: Tensor) -> Tensor:
    return (offset + cell.to(offset.dtype)) * 8.0


def apart_by_subtraction(boxes: Tensor, label: Tensor) -> Tensor:
    return boxes - label.to(boxes.dtype)[:, None] * boxes.amax()


NEAR, FAR = torch.arange(4), torch.tensor([0, 300, 600, 900])
X, LABELS = ramp(4, 4), torch.tensor([1, 2, 3, 4])
IDS = torch.tensor([0, 100, 200, 256])

POSITIONS = (
    case("rotary, joined and scaled", rotary_joined, ramp(4, 4), FAR, POS001="mul", silent="POS007"),
    case("rotary, near", rotary, X, NEAR, silent="POS001 POS002"),
    case("rotary of integers", rotary_of_integers, X, silent="POS001 POS002 POS003"),
    # 60 * (1 + 1) = 120
    case("fourier features", fourier_features, ramp(4, 2) * 60, torch.ones(2, 3), torch.ones(3), POS004="matmul"),
    case("fourier features, near", fourier_features, ramp(4, 2), torch.ones(2, 3), torch.ones(3), silent="POS004"),
    # 256 is the last whole number before BF16 leaves one out
    case("counted to 257", counted, ramp(1, 258), POS002="arange", silent="POS003"),
    case("ids to 256", cast_ids, ramp(4), IDS, silent="POS002 POS003"),
    case("counted to 2049", counted, ramp(1, 2050), POS002="arange", POS003="arange"),
    case("ids in float32", raised(cast_ids), ramp(4), FAR * 10, silent="POS002 POS003"),
    case("grid", decoded, ramp(4), IDS, POS005="add", silent="POS006"),
    case("grid below", lambda x, cell: x - cell.to(x.dtype), ramp(4), IDS, POS005="sub"),
    case("small grid", decoded, ramp(4), NEAR, silent="POS005"),
    case("apart by subtraction", apart_by_subtraction, X * 300, LABELS, POS006="sub"),
    case("an additive mask", lambda x, keep: x + (1 - keep.to(x.dtype)) * -1e4, X, LABELS, silent="POS005 POS006"),
)


def weighted(layer: nn.Module, weight: float) -> Callable[[], nn.Module]:
    nn.init.constant_(layer.weight, weight)  # type: ignore[arg-type]
    return lambda: layer


ONES = torch.ones(2, 4)

ACTIVATIONS = (
    case("sinh of 10", torch.sinh, ONES * 10, ACT001="sinh"),
    case("exponential of 8", torch.exp, ONES * 8, silent="ACT001"),
    case("exponential, clamped", lambda x: x.clamp(max=9.5).exp(), ONES * 12, silent="ACT001"),
    # a row of four ones times 20000: 80000 > 65504
    module("large layer", weighted(nn.Linear(4, 4, False), 20000.0), ONES, ACT002="linear", silent="ACT005"),
    # 300 * 301 = 90300 > 65504, and a gated product by its form
    case("large product", lambda x, y: x * y, ONES * 300, ONES * 301, ACT002="mul", silent="ACT003"),
    case("gate, large", lambda x, y: F.silu(x) * y, ONES * 300, ONES * 301, ACT003="mul", silent="ACT002"),
    # 4 * 5000 = 20000 and 30000: 1.7 and 1.1 doublings left
    module("near layer", weighted(nn.Linear(4, 4, False), 5000.0), ONES, ACT005="linear", silent="ACT002"),
    module("near convolution", weighted(nn.Conv1d(1, 1, 1, bias=False), 30000.0), torch.ones(1, 1, 4), ACT005="conv1d"),
    case("divided by tiny", lambda x, y: x / y, ONES, ONES * 1e-9, ACT006="div", silent="ACT007"),
    case("logarithm of tiny", torch.log, ONES * 1e-9, ACT006="log"),
    # exp(-8) squared is 1.1e-7
    case("density", lambda x, y: x / (y.exp() * y.exp()), ONES, ONES * -8, ACT007="div", silent="ACT006"),
    case("root of small", torch.rsqrt, ONES * 2e-7, ACT007="rsqrt"),
)

MASK = torch.tensor([[True, False, False, False]])


def scaled_after(q: Tensor) -> Tensor:
    return torch.softmax(q @ q.transpose(-1, -2) / 8.0, -1) @ q


def large_mask(x: Tensor, m: Tensor) -> Tensor:
    return x + (1.0 - m.to(x.dtype)) * -1e9


def mask_by_dtype(x: Tensor, m: Tensor) -> Tensor:
    return x.maximum((1.0 - m.to(x.dtype)) * torch.finfo(x.dtype).min)


def entropy_protected(x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return F.binary_cross_entropy(x.float().sigmoid(), y.float())


OTHERS = (
    # q.q sums eight squares of up to 300: 8 * 90000 > 65504
    case("scaled after, large", scaled_after, ramp(1, 4, 8) * 300, ATT001="matmul", silent="ATT002 ACT002"),
    case("additive mask", large_mask, ramp(2, 4), MASK, CON005="mul", silent="CON001 ACT002"),
    # torch takes the literal of a product in FP32: 1e-3 * 1e6 is 1000 in half precision too
    case("small times large", lambda x: x * 1e6, ramp(2, 4) * 0.001, silent="CON001 CON005 ACT002"),
    case("a large literal added", lambda x: (1e5 + x).log(), ramp(2, 4), CON005="add", silent="CON001 ACT002"),
    case("where", lambda x: torch.where(MASK, x, -1e9), ramp(2, 4), CON001="where", silent="CON005"),
    case("mask by dtype, multiplied", mask_by_dtype, ramp(2, 4), MASK, silent="ACT002 CON001 CON005"),
    case("mask by dtype", lambda x: x.masked_fill(MASK, torch.finfo(x.dtype).min), ramp(2, 4), silent="CON001"),
    case("eps of normalize", lambda x: F.normalize(x, dim=-1), ramp(2, 4), CON002="clamp_min"),  # to 1e-12
    case("eps 1e-6", lambda x: x / (x.abs() + 1e-06), ramp(2, 4), silent="CON002"),
    # FP16 has 1 - 2**-11 = 0.99951 below 1, BF16 1 - 2**-8 = 0.9961
    case("1 - 1e-6", lambda x: torch.log1p(-x.clamp(max=1 - 1e-6)), ramp(2, 4), CON003="clamp", silent="CON004"),
    case("factor 0.9985", lambda x: x * 0.9985, ramp(2, 4), CON004="mul", silent="CON003"),
    case("0.99", lambda x: torch.log1p(-x.clamp(max=0.99)), ramp(2, 4), silent="CON003 CON004"),
    case("entropy out of reach of autocast", entropy_protected, ramp(2, 8), torch.ones(2, 8), silent="LOS001"),
    case(
        "with logits",
        F.binary_cross_entropy_with_logits,
        ramp(2, 8),
        torch.ones(2, 8),
        LOS002="binary_cross_entropy_with_logits",
        silent="LOS001",
    ),
)


def log_complement(top: float) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.log1p(-x.sigmoid().clamp(max=top))


def gathered(x: Tensor) -> Any:
    return functional.all_gather_tensor(x.exp(), 0, dist.group.WORLD)


def untied() -> nn.Module:
    return nn.Sequential(nn.Embedding(8, 8), nn.Tanh(), nn.Linear(8, 8, bias=False))


SYSTEMS = (
    case(
        "reduce scatter",
        lambda x: functional.reduce_scatter_tensor(x.exp(), "avg", 0, dist.group.WORLD),
        ramp(2, 4),
        COL001="reduce_scatter_tensor",
    ),
    case("maximum", lambda x: functional.all_reduce(x, "max", dist.group.WORLD), ramp(2, 4), silent="COL001"),
    case("all gather", gathered, ramp(2, 4), silent="COL001"),
    case("log of complement", log_complement(1 - 1e-06), ramp(2, 4), TRN001="clamp"),
    case("log of complement, 1e-3", log_complement(1 - 0.001), ramp(2, 4), TRN004="clamp", silent="TRN001"),
    case("log of complement, wide", log_complement(0.98), ramp(2, 4), silent="TRN001 TRN004"),
    case("root per element", lambda x: torch.sqrt((x * x).clamp_min(1e-12)), ramp(2, 4), TRN002="clamp_min"),
    # FP16 takes 1e-7 for 1.2e-7, and the gradient at zero, 1 / (2 * 3.5e-4), is finite
    case("subnormal eps", lambda x: (x.pow(2).sum(-1) + 1e-7).sqrt(), ramp(2, 4), silent="TRN002"),
    module("not tied", untied, torch.tensor([[1, 2, 3, 0]]), silent="TRN003"),
    module("three channels", lambda: nn.Conv2d(3, 16, 3), ramp(1, 3, 8, 8), HWR001="conv2d", HWR002="conv2d"),
    module("20 rows", lambda: nn.Linear(16, 8), ramp(20, 16), HWR003="linear"),
    module("six rows", lambda: nn.Linear(16, 24), ramp(6, 16), silent="HWR003"),
    module("few numbers", lambda: nn.Linear(3, 5), ramp(2, 3), silent="HWR001"),
)

CASES = (*POSITIONS, *ACTIVATIONS, *OTHERS, *SYSTEMS)
