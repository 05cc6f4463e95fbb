"""What rules claim about the range of a format: what overflows, vanishes or turns NaN in it; and how a claim is read."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from auditor.numerics.kernels import UnsupportedInFormat
from auditor.numerics.nodes import overload_named
from tests.rules.recorded import LOW, largest, recorded, tensors
from tests.rules.sentences import Seen

Inputs = tuple[Tensor, ...]
Claim = Callable[[Seen, nn.Module, Inputs], None]
HALF, BF16 = torch.float16, torch.bfloat16


def half(value: float) -> Tensor:
    return torch.tensor(value, dtype=HALF)


def formats(seen: Seen) -> list[str]:
    return [fmt for fmt in seen.finding.formats if fmt in LOW]


def says(seen: Seen, value: float) -> None:
    """The number stands in the sentence."""
    written = [float(found) for found in re.findall(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?", seen.finding.message)]
    assert any(math.isclose(found, value, rel_tol=6e-3) for found in written), (value, seen.finding.message)


def overflows(seen: Seen, model: nn.Module, inputs: Inputs) -> None:
    """Finite in FP32, infinite in FP16."""
    says(seen, largest(seen.call.out))
    assert bool(seen.call.out.isfinite().all())
    assert bool(tensors(seen.call.low("fp16"))[0].isinf().any())


def fits(seen: Seen, model: nn.Module, inputs: Inputs) -> None:
    assert bool(tensors(seen.call.low("fp16"))[0].isfinite().all())


def again(seen: Seen, args: list[object]) -> object:
    return overload_named(seen.call.op)(*args, **seen.call.kwargs)


def exponentials_overflow(seen: Seen, model: nn.Module, inputs: Inputs) -> None:
    """exp overflows above 11.09 in FP16, and vanishes below -17.3."""
    assert half(11.08).exp().isfinite()
    assert half(11.1).exp().isinf()
    assert half(-17.3).exp() > 0
    assert half(-17.4).exp() == 0


def squares_overflow(seen: Seen, model: nn.Module, inputs: Inputs) -> None:
    """From 256 on; 255.875 is the number before it in FP16. What is squared is as large as the sentence says."""
    says(seen, largest(seen.call.args[0]))
    assert half(256).square().isinf()
    assert torch.nextafter(torch.tensor(256.0, dtype=HALF), half(0)).square().isfinite()


def variance_overflows(seen: Seen, model: nn.Module, inputs: Inputs) -> None:
    assert half(256).square().isinf()
    overflows(seen, model, inputs)


def factors_fit(seen: Seen, model: nn.Module, inputs: Inputs) -> None:
    assert all(largest(x) < 65504 / 16 for x in seen.call.activations)


def cube_is_harmless(seen: Seen, model: nn.Module, inputs: Inputs) -> None:
    assert half(40).pow(3).isfinite()
    assert half(41).pow(3).isinf()
    assert torch.tanh(half(41).pow(3)) == 1


def doublings(seen: Seen, model: nn.Module, inputs: Inputs) -> None:
    left = math.log2(65504 / largest(seen.call.out))
    says(seen, largest(seen.call.out))
    top = seen.call.out.abs().max()
    assert (top * 2 ** math.floor(left)).half().isfinite()
    assert (top * 2 ** math.ceil(left)).half().isinf()


def divisor_vanishes(seen: Seen, model: nn.Module, inputs: Inputs) -> None:
    says(seen, float(seen.call.args[-1].abs().min()))
    assert half(float(seen.call.args[-1].abs().min())) == 0
    assert not tensors(seen.call.low("fp16"))[0].isfinite().all()


def few_bits(seen: Seen, model: nn.Module, inputs: Inputs) -> None:
    """Five significant bits: fewer than 32 units of FP16's smallest number."""
    least = float(seen.call.args[-1].abs().min())
    says(seen, least)
    assert 1 <= float(half(least)) * 2**24 < 32


def scores_are_nan(seen: Seen, model: nn.Module, inputs: Inputs) -> None:
    low = tensors(seen.call.low("fp16"))[0]
    says(seen, largest(seen.call.out))
    positive = (low == math.inf).any(-1)
    assert positive.any()
    assert low.softmax(-1)[positive].isnan().any(-1).all()


def literal_is_lost(seen: Seen, model: nn.Module, inputs: Inputs) -> None:
    """The literal is infinite in FP16, and masked_fill refuses it."""
    assert half(-1e9).isinf()
    says(seen, seen.call.args[-1])
    with pytest.raises(UnsupportedInFormat, match="does not fit"):
        seen.call.low("fp16")


def guard_is_zero(seen: Seen, model: nn.Module, inputs: Inputs) -> None:
    says(seen, seen.argument("other"))
    guarded = tensors(seen.call.low("fp16", torch.zeros_like(seen.call.args[0])))[0]
    assert not guarded.any()


def buffer_is_infinite(seen: Seen, model: nn.Module, inputs: Inputs) -> None:
    assert any(x.half().isinf().any() for x in model.buffers() if x.is_floating_point())


def grows(seen: Seen, model: nn.Module, inputs: Inputs) -> None:
    assert recorded(model, inputs, "cast", "fp16").calls[seen.call.op][-1].out.isinf().any()


def probability_vanishes(seen: Seen, model: nn.Module, inputs: Inputs) -> None:
    assert half(2.9e-8) == 0
    assert half(3.1e-8) > 0
    assert half(2.9e-8).log() == -math.inf


def average_is_subnormal(seen: Seen, model: nn.Module, inputs: Inputs) -> None:
    assert 1 / seen.call.out.shape[-1] < torch.finfo(HALF).smallest_normal == pytest.approx(6.1e-5, rel=1e-2)
