"""What is said of weights that were stored low: every number in it is counted here by another way."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import auditor

X = torch.ones(2, 8)


def said(model: nn.Module, x: torch.Tensor = X) -> list[str]:
    found = auditor.audit(model, x, formats=("fp16", "bf16"))
    return [words for words in found.warnings if words.startswith("The weights came in")]


def linear(*values: float) -> nn.Linear:
    """64 weights and 8 biases, the first weights as given."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.sign() * parameter.abs().clamp(min=0.01))
        model.weight.view(-1)[: len(values)] = torch.tensor(values)
    return model


def test_nothing_is_said_of_a_model_in_fp32() -> None:
    assert said(linear()) == []


def test_bf16_within_the_range_of_fp16() -> None:
    model = linear().bfloat16()
    assert said(model) == [
        "The weights came in BF16, and all lie in FP16's range, which has as many bits: it takes them as they are too.",
        "The weights came in BF16, all of them: it takes these as they are, so no error under BF16 comes from rounding them.",
    ]
    for parameter in model.parameters():
        assert torch.equal(parameter.half().float(), parameter.float())


def test_bf16_beyond_the_range_of_fp16() -> None:
    model = linear(1e5, -2e5, 1e-6, 1e-9, 0.0, 2.0**-14).bfloat16()
    (first, _) = said(model, X * 1e-6)
    values = torch.cat([p.detach().float().reshape(-1) for p in model.parameters()]).abs()
    large, small = int((values >= 65536).sum()), int(((values < 2.0**-14) & (values > 0)).sum())
    assert (large, small) == (2, 2)
    assert first == (
        "The weights came in BF16, whose range FP16 does not have: of 72, 2 are 65,536 or more and become infinite, and 2 lie "
        "below 6.1e-05, where FP16 may lose bits, or all of them."
    )


def test_fp16_has_bits_that_bf16_has_not() -> None:
    first, second = said(linear().half())
    assert first.startswith("The weights came in FP16, all of them: it takes these as they are")
    assert second == "The weights came in FP16; all lie in BF16's range, and rounding them to it is part of its errors."


def test_a_part() -> None:
    model = nn.Sequential(linear().bfloat16(), nn.LayerNorm(8))
    model.forward = lambda x: model[1](model[0](x.to(model[0].weight.dtype)).float())  # type: ignore[method-assign]
    first, second = said(model)
    assert first == "The weights came in BF16; all lie in FP16's range, and rounding them to it is part of its errors."
    assert "BF16, 72 of 88 of them" in second


@pytest.mark.parametrize(("dtype", "fmt"), [(torch.bfloat16, "bf16"), (torch.float16, "fp16")])
def test_a_table_stored_in_the_format_adds_no_error_in_it(dtype: torch.dtype, fmt: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 4)).to(dtype)
    found = auditor.audit(model, torch.arange(6)[None], formats=("fp16", "bf16"))
    table = next(node for node in found.nodes if "embedding" in node.node.op)
    other = next(name for name in ("fp16", "bf16") if name != fmt)
    exact = table.contributions[fmt]
    assert (exact.isolated, exact.own, exact.cast) == (0, 0, 0)
    assert (table.contributions[other].isolated > 0) == (other == "bf16")  # whose bits are fewer than FP16's
