"""What a patched model computes in: weights, what enters and leaves a scope, and what training moves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from auditor.artefact.applying import apply_plan
from auditor.artefact.runtime import convert
from tests.support.patching import AUTOCAST, CAST, Net, patched, plan, scope
from tests.support.subjects import normal, seeded


def dtypes_of(model: nn.Module, x: Tensor) -> dict[str, tuple[torch.dtype, torch.dtype]]:
    """{module: (dtype of its input, dtype of its result)}, seen inside its wrapper by the class's own forward."""
    seen: dict[str, tuple[torch.dtype, torch.dtype]] = {}
    handles = []
    for path, module in model.named_modules():
        if not list(module.children()):
            handles.append(module.register_forward_hook(note(seen, path)))
    with torch.no_grad():
        model(x)
    for handle in handles:
        handle.remove()
    return seen


def note(seen: dict[str, tuple[torch.dtype, torch.dtype]], path: str) -> Any:
    def hook(module: nn.Module, args: tuple[Tensor, ...], result: Tensor) -> None:
        seen[path] = (args[0].dtype, result.dtype)

    return hook


def test_autocast_runs_low_but_for_the_islands() -> None:
    seen = dtypes_of(patched("autocast"), normal(2, 4))
    low, full = torch.bfloat16, torch.float32
    assert seen["first"] == (full, low)
    assert seen["norm"] == (low, full)  # the hook sits outside the wrapper: it hears what the caller handed over
    assert seen["head.0"] == (full, low)
    assert seen["head.1"] == (low, low)
    assert seen["head.2"] == (low, full)


def test_an_island_computes_in_fp32_on_raised_inputs() -> None:
    model = patched("autocast")
    x = normal(2, 8).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = model.head[2](x)
    with torch.no_grad():
        assert torch.equal(result, nn.functional.linear(x.float(), model.head[2].weight, model.head[2].bias))


def test_cast_stores_weights_by_scope() -> None:
    state = patched("cast").state_dict()
    dtypes = {key: value.dtype for key, value in state.items()}
    assert dtypes == {
        "shift": torch.bfloat16,
        "steps": torch.int64,
        "first.weight": torch.bfloat16,
        "first.bias": torch.bfloat16,
        "norm.weight": torch.float32,
        "norm.bias": torch.float32,
        "head.0.weight": torch.bfloat16,
        "head.0.bias": torch.bfloat16,
        "head.2.weight": torch.float32,
        "head.2.bias": torch.float32,
    }


def test_cast_raises_what_enters_an_island_and_lowers_or_keeps_what_leaves_it() -> None:
    seen = dtypes_of(patched("cast"), normal(2, 4))
    low, full = torch.bfloat16, torch.float32
    assert seen["first"] == (low, low)
    assert seen["norm"] == (low, low)  # FP32 inside, lowered on the way out
    assert seen["head.2"] == (low, full)  # kept
    inside: list[torch.dtype] = []
    model = seeded(Net)
    forward = model.norm.forward

    def spy(x: Tensor) -> Tensor:
        inside.append(x.dtype)
        return forward(x)

    model.norm.forward = spy
    with torch.no_grad():
        apply_plan(model, CAST)(normal(2, 4))
    assert inside == [torch.float32]


def test_inputs_of_any_nesting_are_converted_and_other_types_left() -> None:
    tree = {"a": [torch.ones(1), (torch.ones(1).double(), torch.tensor([1]))], "b": "text", "c": None}
    found = convert(tree, torch.float16)
    assert [leaf.dtype for leaf in (found["a"][0], *found["a"][1])] == [torch.float16, torch.float64, torch.int64]
    assert (found["b"], found["c"]) == ("text", None)


def test_a_low_scope_in_an_fp32_root_hands_back_fp32() -> None:
    for strategy in ("autocast", "cast"):
        model = apply_plan(seeded(Net), plan(strategy, {"": scope("fp32"), "first": scope("bf16")}))
        assert dtypes_of(model, normal(2, 4))["first"][1] is torch.float32
        with torch.no_grad():
            assert model(normal(2, 4)).dtype is torch.float32


@pytest.mark.parametrize("later", [AUTOCAST, plan("cast", {"": scope("fp32")})])
def test_weights_that_were_stored_low_are_not_passed_off_as_fp32(later: dict[str, Any]) -> None:
    model = patched("cast")  # what rounding took from the weights is gone: no later plan can bring it back
    with pytest.raises(ValueError, match=r"bf16|bfloat16"):
        apply_plan(model, later)


def test_a_training_step_under_autocast_moves_fp32_weights() -> None:
    model = patched("autocast").train()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(normal(8, 4)).square().sum().backward()
    assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in model.parameters())
    optimizer.step()
    for name, parameter in model.named_parameters():
        assert parameter.dtype is torch.float32
        assert bool(torch.isfinite(parameter).all())
        assert not torch.equal(parameter, before[name]), name
