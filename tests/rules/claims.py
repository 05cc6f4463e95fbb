"""What each rule claims of the operation that it names, confirmed by running that low; a table with a line for each rule."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import auditor
from tests.rules.claims_of_range import (
    BF16,
    Claim,
    Inputs,
    again,
    average_is_subnormal,
    buffer_is_infinite,
    cube_is_harmless,
    divisor_vanishes,
    doublings,
    exponentials_overflow,
    factors_fit,
    few_bits,
    formats,
    grows,
    guard_is_zero,
    half,
    literal_is_lost,
    overflows,
    probability_vanishes,
    says,
    scores_are_nan,
    squares_overflow,
    variance_overflows,
)
from tests.rules.recorded import LOW, largest, recorded, refused, tensors
from tests.rules.sentences import Seen


def raises(seen: Seen, model: nn.Module, inputs: Inputs) -> None:
    assert all(refused(seen.call, fmt) for fmt in formats(seen))


def rounds_once(seen: Seen, model: nn.Module, inputs: Inputs) -> None:
    """What comes out is the FP32 result on rounded inputs, rounded: all that is added up inside is FP32."""
    for fmt in formats(seen):
        low = tensors(seen.call.low(fmt))[0]
        rounded = [
            x.to(LOW[fmt]).float() if isinstance(x, Tensor) and x.is_floating_point() else x for x in seen.call.args
        ]
        wide = tensors(again(seen, rounded))[0].to(LOW[fmt])
        gap = (low.double() - wide.double()).abs()
        assert bool((gap <= torch.finfo(LOW[fmt]).eps * wide.double().abs() + 1e-7).all())


def is_rounded(seen: Seen, model: nn.Module, inputs: Inputs) -> None:
    """The low result differs from FP32's by roundings."""
    for fmt in formats(seen):
        low = tensors(seen.call.low(fmt))[0]
        assert low.dtype is LOW[fmt]
        assert not torch.equal(low.float(), seen.call.out)


def neighbours_tie(seen: Seen, model: nn.Module, inputs: Inputs) -> None:
    low, wide = tensors(seen.call.low("bf16"))[0], seen.call.out
    assert all(len(a.unique()) < len(b.unique()) for a, b in zip(low, wide, strict=True))
    assert not torch.equal(low.argmax(-1), wide.argmax(-1))


def cast_back(seen: Seen, model: nn.Module, inputs: Inputs) -> None:
    """It reads FP32, and under autocast gives low numbers."""
    call = seen.lowered["autocast"]
    assert call is not None
    assert seen.call.args[0].dtype is torch.float32
    assert call.out.dtype is BF16


def hops_round(seen: Seen, model: nn.Module, inputs: Inputs) -> None:
    share, total = torch.tensor(1.0, dtype=BF16), torch.tensor(0.0, dtype=BF16)
    for _ in range(300):
        total = total + share
    assert total == 256
    assert (half(65504) + half(65504)).isinf()


def moved(seen: Seen, model: nn.Module, inputs: Inputs) -> None:
    for fmt in formats(seen):
        given = tensors(seen.call.args)[0].to(LOW[fmt])
        assert torch.equal(tensors(seen.call.low(fmt))[0], given)


def literal_is_one(seen: Seen, model: nn.Module, inputs: Inputs) -> None:
    top = max(item for item in seen.call.args[1:] if isinstance(item, float))
    says(seen, 1 - top)
    for fmt in formats(seen):
        assert torch.tensor(top, dtype=LOW[fmt]) == 1
        assert seen.call.low(fmt, torch.ones(2)).max() == 1
    if seen.finding.formats == ("bf16",):
        assert half(top) != 1


def takes_tf32(seen: Seen, model: nn.Module, inputs: Inputs) -> None:
    assert torch.backends.cudnn.allow_tf32
    assert seen.call.out.dtype is torch.float32


def last_tile_is_part_empty(seen: Seen, model: nn.Module, inputs: Inputs) -> None:
    assert seen.call.out.flatten(0, -2).shape[0] % 8


def widths_are_odd(seen: Seen, model: nn.Module, inputs: Inputs) -> None:
    assert any(width % 8 for width in seen.call.args[1].shape)


def distance_cancels(seen: Seen, model: nn.Module, inputs: Inputs) -> None:
    raises(seen, model, inputs)
    under_autocast = seen.lowered["autocast"]
    assert under_autocast is not None
    assert under_autocast.out.dtype is torch.float32


def not_to_be_trusted(seen: Seen, model: nn.Module, inputs: Inputs) -> None:
    """Torch's own arithmetic in half, where it is not refused, is off by more than anything of use."""
    for fmt in formats(seen):
        low = torch.linalg.matrix_exp(seen.call.args[0].to(LOW[fmt])).float()
        assert not float((low - seen.call.out).norm() / seen.call.out.norm()) < 0.1


def no_kernel_on_a_cpu(seen: Seen, model: nn.Module, inputs: Inputs) -> None:
    for fmt in formats(seen):
        with pytest.raises(RuntimeError):
            model(*(x.to(LOW[fmt]) for x in inputs))
    distance = seen.lowered["autocast"]
    assert distance is not None
    assert distance.out.dtype is torch.float32


def refuses_autocast(seen: Seen, model: nn.Module, inputs: Inputs) -> None:
    with auditor.imitated("cuda"), torch.autocast("cuda", dtype=BF16), pytest.raises(RuntimeError, match="refuses"):
        model(*inputs)


def low_in_a_cast_model_alone(seen: Seen, model: nn.Module, inputs: Inputs) -> None:
    under, cast = (seen.lowered[use] for use in ("autocast", "cast"))
    assert under is not None
    assert cast is not None
    assert (under.out.dtype, cast.out.dtype) == (torch.float32, BF16)


def statistics_stay_wide(seen: Seen, model: nn.Module, inputs: Inputs) -> None:
    """Deviations whose squares FP16 cannot hold are normalised all the same."""
    x = 1000 * seen.call.args[0]
    low = tensors(seen.call.low("fp16", x))[0]
    assert torch.allclose(low.float(), F.layer_norm(x, x.shape[-1:]), atol=5e-3)


def apart(seen: Seen, model: nn.Module, inputs: Inputs) -> None:
    """A cast model forms it low, and around its largest numbers that format has none closer than the spacing."""
    for fmt in formats(seen):
        assert all(call.out.dtype is LOW[fmt] for call in recorded(model, inputs, "cast", fmt).calls[seen.call.op])
        size = torch.tensor(largest(seen.call.out), dtype=LOW[fmt])
        gap = torch.finfo(LOW[fmt]).eps * 2.0 ** math.floor(math.log2(largest(seen.call.out)))
        says(seen, gap)
        assert float(size) % gap == 0
        assert size + 0.25 * gap == size


def phases_apart(seen: Seen, model: nn.Module, inputs: Inputs) -> None:
    says(seen, largest(seen.call.out))
    apart(seen, model, inputs)


def not_exact(bound: float) -> Claim:
    def claim(seen: Seen, model: nn.Module, inputs: Inputs) -> None:
        says(seen, largest(seen.call.out))
        says(seen, bound)
        (fmt,) = seen.finding.formats
        assert float(torch.tensor(bound, dtype=LOW[fmt])) == bound
        assert float(torch.tensor(bound + 1, dtype=LOW[fmt])) != bound + 1
        assert not torch.equal(seen.call.out.to(LOW[fmt]).float(), seen.call.out)

    return claim


def buffer_stays_rounded(seen: Seen, model: nn.Module, inputs: Inputs) -> None:
    call = seen.lowered["cast"]
    assert call is not None
    assert call.out.dtype is torch.float32
    assert not torch.equal(call.out, seen.call.out)


def increments_are_lost(seen: Seen, model: nn.Module, inputs: Inputs) -> None:
    for fmt in formats(seen):
        low = tensors(seen.call.low(fmt))[0]
        gap = torch.finfo(LOW[fmt]).eps * 2.0 ** math.floor(math.log2(largest(low)))
        assert low.max() + 0.25 * gap == low.max()
    apart(seen, model, inputs)


def goes_negative(seen: Seen, model: nn.Module, inputs: Inputs) -> None:
    """For some inputs of this kind a rounded difference of a mean square and a squared mean is negative."""
    for fmt in formats(seen):
        x = (40 + torch.arange(4096.0).reshape(256, 16) * 7 % 31 / 64).to(LOW[fmt])
        assert bool(((x * x).mean(-1) - x.mean(-1) ** 2 < 0).any())


def updates_are_lost(seen: Seen, model: nn.Module, inputs: Inputs) -> None:
    """Where the value is largest, an update of the run leaves it as it was in BF16."""
    update, value = sorted(tensors(seen.call.args), key=largest)
    top = value.flatten().argmax()
    low = value.flatten()[top].bfloat16()
    assert low + update.flatten()[top].bfloat16() == low


def bits_are_gone(seen: Seen, model: nn.Module, inputs: Inputs) -> None:
    """What is left of the difference is a multiple of the operands' spacing."""
    says(seen, largest(seen.call.activations))
    says(seen, largest(seen.call.out))
    for fmt in formats(seen):
        low = tensors(seen.call.low(fmt))[0].double()
        gap = torch.finfo(LOW[fmt]).eps * 2.0 ** math.floor(math.log2(largest(seen.call.activations) / 2))
        assert bool((low.abs() % gap == 0).all())


def state_is_low(seen: Seen, model: nn.Module, inputs: Inputs) -> None:
    calls = recorded(model, inputs, "cast").calls[seen.call.op]
    assert all(x.dtype is BF16 for call in calls for x in tensors(call.result))


def chooses_otherwise(seen: Seen, model: nn.Module, inputs: Inputs) -> None:
    calls = recorded(model, inputs, "cast").calls[seen.call.op]
    assert not all(torch.equal(a, b) for a, b in zip(tensors(seen.call.result), tensors(calls[0].result), strict=True))


def distances_are_noise(seen: Seen, model: nn.Module, inputs: Inputs) -> None:
    for fmt in formats(seen):
        low = recorded(model, inputs, "cast", fmt).calls[seen.call.op][-1].out.double()
        assert float((low - seen.call.out).norm() / seen.call.out.norm()) > 0.5


def gradient_is_infinite(seen: Seen, model: nn.Module, inputs: Inputs) -> None:
    literal_is_one(seen, model, inputs)
    for fmt in formats(seen):
        logit = torch.tensor([30.0], dtype=LOW[fmt], requires_grad=True)
        loss = model(logit)
        assert loss.isinf().all()
        p = torch.ones(1, dtype=LOW[fmt], requires_grad=True)
        torch.log(1 - p).sum().backward()
        assert p.grad is not None
        assert p.grad.isinf().all()


def root_has_no_gradient(seen: Seen, model: nn.Module, inputs: Inputs) -> None:
    guard_is_zero(seen, model, inputs)
    guarded = half(0).requires_grad_()
    (guarded + 1e-12).sqrt().backward()
    assert guarded.grad is not None
    assert guarded.grad.isinf()


def gradients_add_up(seen: Seen, model: nn.Module, inputs: Inputs) -> None:
    """The table's gradient is the sum of what a copy for each reader gets."""
    model(*inputs).square().sum().backward()
    whole = model.embed.weight.grad.clone()
    apart = nn.ModuleDict({"embed": nn.Embedding(8, 8), "head": nn.Linear(8, 8, bias=False)})
    with torch.no_grad():
        apart["embed"].weight.copy_(model.embed.weight)
        apart["head"].weight.copy_(model.embed.weight)
    apart["head"](apart["embed"](*inputs).tanh()).square().sum().backward()
    parts = [apart[name].weight.grad for name in ("embed", "head")]
    assert torch.allclose(whole, parts[0] + parts[1], rtol=1e-4, atol=1e-5)
    assert seen.finding.evidence["weight_uses"] == len(parts)


CLAIMS: Mapping[str, Claim] = {
    "ACT001": exponentials_overflow,
    "ACT002": overflows,
    "ACT003": factors_fit,
    "ACT004": cube_is_harmless,
    "ACT005": doublings,
    "ACT006": divisor_vanishes,
    "ACT007": few_bits,
    "ATT001": overflows,
    "ATT002": scores_are_nan,
    "ATT003": rounds_once,
    "ATT004": rounds_once,
    "BND001": is_rounded,
    "BND002": rounds_once,
    "BND003": low_in_a_cast_model_alone,
    "BND004": neighbours_tie,
    "BND005": cast_back,
    "COL001": hops_round,
    "COL002": moved,
    "CON001": literal_is_lost,
    "CON002": guard_is_zero,
    "CON003": literal_is_one,
    "CON004": literal_is_one,
    "CON005": overflows,
    "HWR001": widths_are_odd,
    "HWR002": takes_tf32,
    "HWR003": last_tile_is_part_empty,
    "LIN001": raises,
    "LIN002": raises,
    "LIN003": distance_cancels,
    "LIN004": not_to_be_trusted,
    "LIN005": no_kernel_on_a_cpu,
    "LOS001": refuses_autocast,
    "LOS002": low_in_a_cast_model_alone,
    "LOS003": raises,
    "NRM001": squares_overflow,
    "NRM002": squares_overflow,
    "NRM003": overflows,
    "NRM004": statistics_stay_wide,
    "NRM005": buffer_is_infinite,
    "NRM006": variance_overflows,
    "POS001": phases_apart,
    "POS002": not_exact(256),
    "POS003": not_exact(2048),
    "POS004": phases_apart,
    "POS005": phases_apart,
    "POS006": phases_apart,
    "POS007": buffer_stays_rounded,
    "RED001": overflows,
    "RED002": overflows,
    "RED003": increments_are_lost,
    "RED004": goes_negative,
    "RED005": exponentials_overflow,
    "RED006": squares_overflow,
    "RED007": rounds_once,
    "RED008": updates_are_lost,
    "RED009": bits_are_gone,
    "RNN001": state_is_low,
    "RNN002": grows,
    "RNN003": state_is_low,
    "RNN004": state_is_low,
    "RTE001": chooses_otherwise,
    "RTE002": chooses_otherwise,
    "RTE003": distances_are_noise,
    "RTE004": chooses_otherwise,
    "SFT001": rounds_once,
    "SFT002": exponentials_overflow,
    "SFT003": is_rounded,
    "SFT004": overflows,
    "SFT005": probability_vanishes,
    "SFT006": average_is_subnormal,
    "SFT007": is_rounded,
    "TRN001": gradient_is_infinite,
    "TRN002": root_has_no_gradient,
    "TRN003": gradients_add_up,
    "TRN004": gradient_is_infinite,
}
"""{code: what its sentence claims}."""
