"""Weights under two names and modules called in two places: one of either, and FP32 wins."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from auditor.api import audit
from auditor.artefact.applying import apply_plan, is_wrapped
from auditor.artefact.runtime import DTYPES
from auditor.document.live import apply
from tests.support.patching import plan, scope
from tests.support.subjects import normal, seeded

both = pytest.mark.parametrize("strategy", ["autocast", "cast"])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens))


@pytest.mark.parametrize("island", ["embed", "head"])
def test_tied_weights_stay_tied_and_fp32_wins(island: str) -> None:
    model = apply_plan(seeded(Tied), plan("cast", {"": scope("bf16"), island: scope("fp32", "keep")}))
    assert model.head.weight is model.embed.weight
    assert model.embed.weight.dtype is torch.float32
    low = apply_plan(seeded(Tied), plan("cast", {"": scope("bf16")}))
    assert low.head.weight is low.embed.weight
    assert low.head.weight.dtype is torch.bfloat16
    low(torch.tensor([1, 2]))


class TiedDeep(Tied):
    """A low norm reads what the embedding looks up in a table that the FP32 head shares."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.embed(tokens)))


@pytest.mark.parametrize("fmt", ["fp16", "bf16"])
def test_a_low_layer_whose_weight_is_tied_to_an_island_hands_on_low_values(fmt: str) -> None:
    scopes = {"": scope(fmt), "head": scope("fp32", "keep")}
    model = apply_plan(seeded(TiedDeep), plan("cast", scopes, fmt))
    assert model.norm.weight.dtype is DTYPES[fmt]
    assert inside(model, "norm", torch.tensor([1, 2])) == [DTYPES[fmt]]
    assert inside(model, "head", torch.tensor([1, 2])) == [torch.float32]


def test_tied_weights_under_autocast_stay_tied_through_a_training_step() -> None:
    model = apply_plan(seeded(Tied), plan("autocast", {"": scope("bf16"), "head": scope("fp32")})).train()
    before = model.embed.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.tensor([1, 2])).square().sum().backward()
    optimizer.step()
    assert len(list(model.parameters())) == 1
    assert model.head.weight is model.embed.weight
    assert model.embed.weight.dtype is torch.float32
    assert not torch.equal(model.embed.weight, before)


class Twice(nn.Module):
    """One layer under two names of one parent, one norm in two parents, and a layer after it in each."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4)
        self.two = self.one
        self.left = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))
        self.right = nn.Sequential(self.left[0], nn.Linear(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.right(self.left(self.two(self.one(x))))


def inside(model: nn.Module, path: str, x: Tensor) -> list[torch.dtype]:
    """Dtypes that the class's own forward of a module receives, call by call."""
    module, seen = model.get_submodule(path), []
    kind = type(module)

    class Spy(kind):  # type: ignore[valid-type, misc]
        def forward(self, given: Tensor) -> Tensor:
            seen.append(given.dtype)
            return kind.forward(self, given)

    module.__class__ = Spy
    with torch.no_grad():
        model(x)
    module.__class__ = kind
    return seen


@both
def test_a_module_under_two_names_is_one_scope(strategy: str) -> None:
    model = apply_plan(seeded(Twice), plan(strategy, {"": scope("bf16"), "one": scope("fp32")}))
    assert inside(model, "one", normal(2, 4)) == [torch.float32, torch.float32]
    assert model.one.forward.args[1] is None  # wrapped once


def test_another_plan_takes_the_wrapper_of_a_shared_module_off() -> None:
    model = apply_plan(seeded(Twice), plan("autocast", {"": scope("bf16"), "one": scope("fp32"), "two": scope("fp32")}))
    assert is_wrapped(model.two)
    apply_plan(model, plan("autocast", {"": scope("fp32")}))
    assert not is_wrapped(model.two)


@both
def test_two_names_with_a_scope_each_wrap_it_once_and_fp32_wins(strategy: str) -> None:
    names = {"": scope("bf16"), "one": scope("bf16"), "two": scope("fp32")}
    model = apply_plan(seeded(Twice), plan(strategy, names))
    assert inside(model, "one", normal(2, 4)) == [torch.float32, torch.float32]
    assert model.one.forward.args[1] is None
    assert model.one.weight.dtype is torch.float32


@both
@pytest.mark.parametrize("island", ["left", "right"])
def test_a_module_of_two_parents_at_odds_is_fp32_and_hands_on_what_it_was_given(strategy: str, island: str) -> None:
    model = apply_plan(seeded(Twice), plan(strategy, {"": scope("bf16"), island: scope("fp32")}))
    x = normal(2, 4)
    assert inside(model, "left.0", x) == [torch.float32, torch.float32]
    with torch.no_grad():
        assert model(x).shape == (2, 3)
        linear = model.get_submodule(f"{island}.1")
        assert linear.weight.dtype is torch.float32
    if strategy == "cast":
        other = {"left": "right", "right": "left"}[island]
        assert model.get_submodule(f"{other}.1").weight.dtype is torch.bfloat16


@both
def test_an_audited_model_that_shares_modules_follows_its_plan(strategy: str) -> None:
    found = audit(seeded(Twice), normal(16, 4), max_error=2e-3, strategies=(strategy,), formats=("bf16",), device="cpu")
    (chosen,) = found.plans.values()
    assert chosen.verified
    model = apply(seeded(Twice), found, chosen.name)
    assert model.two is model.one
    assert model.right[0] is model.left[0]
    with torch.no_grad():
        error = (model(normal(16, 4)) - seeded(Twice)(normal(16, 4))).norm() / seeded(Twice)(normal(16, 4)).norm()
    assert error <= 2e-3
