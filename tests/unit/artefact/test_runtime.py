"""The runtime: conversion of trees, precisions by path, what is wrapped, what is computed in, and what is shared."""

from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from auditor.artefact.applying import apply_plan, is_wrapped
from auditor.artefact.runtime import DTYPES, convert, device_type, floating_dtype, in_region
from tests.support.patching import AUTOCAST, Net, patched, plan, scope
from tests.support.replaying import Model
from tests.support.small_models import tied
from tests.support.subjects import normal, seeded

Pair = namedtuple("Pair", "a b")
HALF, WIDE = torch.float16, torch.float32


def test_any_tree_is_converted_and_nothing_else_in_it() -> None:
    x, index = torch.ones(1), torch.tensor([1])
    tree = {"list": [x, index], "tuple": (x.double(), 7), "named": Pair(x, None), "text": "x"}
    found = convert(tree, HALF)
    assert [leaf.dtype for leaf in found["list"]] == [HALF, torch.int64]
    assert (found["tuple"][0].dtype, found["tuple"][1]) == (torch.float64, 7)
    assert isinstance(found["named"], Pair)
    assert (found["named"].a.dtype, found["named"].b, found["text"]) == (HALF, None, "x")
    assert x.dtype is WIDE
    assert convert(x, WIDE) is x


def test_dtype_and_device_of_what_comes_in() -> None:
    x = torch.ones(1)
    assert floating_dtype((([torch.tensor([1]), x.double(), x.half()],), {})) is HALF
    assert floating_dtype(((3,), {})) is None
    assert device_type(nn.Identity(), ((3,), {"x": x})) == "cpu"
    assert device_type(nn.Linear(1, 1, device="meta"), ((), {})) == "cpu"  # autocast has none for meta


def test_what_is_computed_while_it_is_read_is_computed_in_the_region() -> None:
    lazy = in_region(lambda: torch.autocast("cpu"), lambda: (torch.is_autocast_enabled("cpu") for _ in range(2)))
    assert list(lazy) == [True, True]
    assert in_region(lambda: torch.autocast("cpu"), lambda: [1]) == [1]


# What a patched model computes in: weights, what enters and leaves a scope, and what training moves.


def test_an_island_computes_in_fp32_on_raised_inputs() -> None:
    model, x = patched("autocast"), normal(2, 8).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        result = model.head[2](x)
    assert torch.equal(result, nn.functional.linear(x.float(), model.head[2].weight, model.head[2].bias))


@pytest.mark.parametrize("later", [AUTOCAST, plan("cast", {"": scope("fp32")})])
def test_weights_that_were_stored_low_are_not_passed_off_as_fp32(later: dict[str, Any]) -> None:
    model = patched("cast")  # what rounding took from the weights is gone: no later plan can bring it back
    with pytest.raises(ValueError, match=r"bf16|bfloat16"):
        apply_plan(model, later)


# Weights under two names and modules called in two places: one of either, and FP32 wins.

both = pytest.mark.parametrize("strategy", ["autocast", "cast"])


@pytest.mark.parametrize("fmt", ["fp16", "bf16"])
def test_a_low_layer_whose_weight_is_tied_to_an_island_hands_on_low_values(fmt: str) -> None:
    """A low norm reads what the embedding looks up in a table that the FP32 head shares."""
    scopes = {"": scope(fmt), "head": scope("fp32", "keep")}
    model = apply_plan(tied(5, 4, norm=nn.LayerNorm(4)), plan("cast", scopes, fmt))
    assert model.norm.weight.dtype is DTYPES[fmt]
    assert inside(model, "norm", torch.tensor([1, 2])) == [DTYPES[fmt]]
    assert inside(model, "head", torch.tensor([1, 2])) == [torch.float32]


def twice() -> nn.Module:
    """One layer under two names of one parent, one norm in two parents, and a layer after it in each."""
    one, norm = nn.Linear(4, 4), nn.LayerNorm(4)
    left, right = nn.Sequential(norm, nn.Linear(4, 4)), nn.Sequential(norm, nn.Linear(4, 3))
    return Model(lambda m, x: m.right(m.left(m.two(m.one(x)))), one=one, two=one, left=left, right=right)


def inside(model: nn.Module, path: str, x: Tensor) -> list[torch.dtype]:
    """Dtypes that the class's own forward of a module receives, call by call."""
    module, seen = model.get_submodule(path), []
    kind = type(module)

    class Spy(kind):
        def forward(self, given: Tensor) -> Tensor:
            seen.append(given.dtype)
            return kind.forward(self, given)

    module.__class__ = Spy
    with torch.no_grad():
        model(x)
    module.__class__ = kind
    return seen


def test_another_plan_takes_the_wrapper_of_a_shared_module_off() -> None:
    model = apply_plan(seeded(twice), plan("autocast", {"": scope("bf16"), "one": scope("fp32"), "two": scope("fp32")}))
    assert is_wrapped(model.two)
    apply_plan(model, plan("autocast", {"": scope("fp32")}))
    assert not is_wrapped(model.two)


@both
def test_a_low_scope_in_an_fp32_root_hands_back_fp32(strategy: str) -> None:
    model, seen = apply_plan(seeded(Net), plan(strategy, {"": scope("fp32"), "first": scope("bf16")})), []
    model.first.register_forward_hook(lambda module, args, result: seen.append(result.dtype))
    model(normal(2, 4))
    assert seen == [WIDE]


@both
def test_two_names_with_a_scope_each_wrap_it_once_and_fp32_wins(strategy: str) -> None:
    names = {"": scope("bf16"), "one": scope("bf16"), "two": scope("fp32")}
    model = apply_plan(seeded(twice), plan(strategy, names))
    assert inside(model, "one", normal(2, 4)) == [torch.float32, torch.float32]
    assert model.one.forward.args[1] is None
    assert model.one.weight.dtype is torch.float32


@both
@pytest.mark.parametrize("island", ["left", "right"])
def test_a_module_of_two_parents_at_odds_is_fp32_and_hands_on_what_it_was_given(strategy: str, island: str) -> None:
    model = apply_plan(seeded(twice), plan(strategy, {"": scope("bf16"), island: scope("fp32")}))
    x = normal(2, 4)
    assert inside(model, "left.0", x) == [torch.float32, torch.float32]
    with torch.no_grad():
        assert model(x).shape == (2, 3)
        linear = model.get_submodule(f"{island}.1")
        assert linear.weight.dtype is torch.float32
    if strategy == "cast":
        other = {"left": "right", "right": "left"}[island]
        assert model.get_submodule(f"{other}.1").weight.dtype is torch.bfloat16
