"""Masks whose value follows a dtype, where the model that is stored low computes in FP32 what autocast computes low."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.any_model.holding import Call, held


class Rotated(nn.Module):
    """Attention with rotary tables in FP32, which raise what they turn; masked by the least number of its own dtype.

    back: the weights of attention return to the dtype of the values.
    """

    def __init__(self, back: bool) -> None:
        super().__init__()
        self.qkv, self.out, self.back = nn.Linear(16, 48), nn.Linear(16, 16), back

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        angle = torch.arange(x.shape[1], dtype=torch.float32)[:, None] * torch.linspace(0.1, 1, 16)
        q, k = (y * angle.cos() + y.flip(-1) * angle.sin() for y in (q, k))
        similar = torch.einsum("bid,bjd->bij", q, k)
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        weights = similar.masked_fill(later, -torch.finfo(similar.dtype).max).softmax(-1)
        return self.out((weights.to(v.dtype) if self.back else weights) @ v)


@pytest.mark.parametrize("back", [True, False], ids=["cast back", "left in FP32"])
def test_the_mask_is_that_of_the_run_in_which_it_is_low(back: bool) -> None:
    def build() -> tuple[nn.Module, Call]:
        torch.manual_seed(0)
        return Rotated(back), ((torch.randn(2, 8, 16),), {})

    audit = held(build, objective="flops")  # in time, a model as small as this saves next to nothing
    assert not any(v.verdict == "unsafe" for report in audit.nodes for v in report.verdicts.values())
    for name, plan in audit.plans.items():
        assert plan.verified
        kept = (
            0.0 if plan.strategy == "autocast" else 0.1 if back else 0.2
        )  # what the tables raise, each product a tenth
        assert plan.low_precision_flops == pytest.approx(1 - kept, abs=0.01), name
