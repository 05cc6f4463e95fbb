"""Models in hand, the first FP32 forward, and what it must leave alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from auditor.errors import LoadError
from auditor.loading import from_object, in_eval


class Counter(nn.Module):
    """Has everything a careless forward can disturb: dropout, running statistics, a buffer it writes and replaces."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.drop = nn.Dropout(0.5)
        self.frozen = nn.Linear(3, 3).eval()
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("cache", torch.zeros(1))

    def forward(self, x, bias=0.0):
        self.calls += 1
        self.cache = x.detach().clone()
        torch.rand(1)
        return self.frozen(self.drop(self.norm(x))) + bias


def test_in_eval_restores_after_an_error():
    class Fails(Counter):
        def forward(self, x):
            assert not self.training
            raise KeyError

    model = Fails().train()
    with pytest.raises(KeyError), in_eval(model):
        model(torch.ones(1))
    assert model.training
    assert model.norm.training


def test_name_of_a_model_in_hand():
    assert from_object(nn.Linear(3, 4), torch.ones(2, 3)).name == "Linear"
    assert from_object(nn.Linear(3, 4), torch.ones(2, 3), name="mine").name == "mine"


class Nan(nn.Module):
    def forward(self, x):
        return {"y": x.log()}


@pytest.mark.parametrize(
    ("model", "value", "slug", "words"),
    [
        (Nan(), -torch.ones(2), "nan-output", "returns NaN in FP32"),
        (nn.Linear(3, 4), torch.ones(2, 5), "forward-raises", "on inputs float32[2,5] from example_inputs"),
        (nn.Linear(3, 4), torch.ones(2, 3, dtype=torch.float64), "forward-raises", "float64[2,3]"),
        (nn.Linear(3, 4, device="meta"), torch.ones(2, 3), "meta-weights", "meta device"),
        (nn.Sequential(nn.LazyLinear(4)), torch.ones(2, 3), "lazy-weights", "0.weight"),
        (nn.Sequential(nn.LazyBatchNorm1d()), torch.ones(2, 3), "lazy-weights", "call the model once"),
        (torch.ones(2), torch.ones(2), "not-a-model", "got a Tensor"),
    ],
)
def test_models_that_cannot_be_audited(model, value, slug, words):
    with pytest.raises(LoadError) as caught:
        from_object(model, value)
    assert caught.value.slug == slug
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
