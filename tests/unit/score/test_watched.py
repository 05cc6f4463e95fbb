"""A function that changes the model says nothing of the plan; what the model's own calls change is its own affair."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from auditor.score import Scoring, Unscored, given_by

X = torch.ones(1, 2)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)).eval()


def halved(net: nn.Module) -> float:
    return float(net.half()(X.half()))


def loaded(net: nn.Module) -> float:
    net.load_state_dict({name: torch.zeros_like(x) for name, x in net.state_dict().items()})
    return float(net(X))


def replaced(net: Any) -> float:
    net[0] = nn.Identity()
    return float(net(X))


@pytest.mark.parametrize("function", [halved, loaded, replaced])
def test_a_function_that_changes_the_model_is_found(function: Callable[[nn.Module], float]) -> None:
    net = model()
    before = {name: x.clone() for name, x in net.state_dict().items()}
    with pytest.raises(Unscored, match=r"^the function changed the model \((parameter|module) '"):
        given_by(Scoring(function, "score"), net)
    if function is halved:
        return
    for name, x in net.state_dict().items():
        torch.testing.assert_close(x, before[name], rtol=0, atol=0)
