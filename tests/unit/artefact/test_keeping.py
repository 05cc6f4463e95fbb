"""Low scopes that keep functions in FP32: what these compute in, and that the patched model stays what it was."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from auditor.artefact.applying import apply_plan
from auditor.artefact.runtime import KeepFunctions, KeptFunctions
from auditor.numerics.functions import function_name
from tests.support.capturing import Function
from tests.support.flat_models import LARGE, FlatBlock, Stack
from tests.support.patching import plan
from tests.support.subjects import normal, seeded
from tests.support.thinned import thinned

Scopes = dict[str, dict[str, Any]]
KEPT: Scopes = {"": {"precision": "bf16", "keep": ["pow", "mean", "rsqrt", "exp"]}}
DEEP: Scopes = {
    "": {"precision": "bf16", "keep": ["mean"]},
    "blocks.1": {"precision": "bf16", "keep": ["pow", "exp"]},
    "head": {"precision": "fp32"},
}
both = pytest.mark.parametrize("strategy", ["autocast", "cast"])


@pytest.fixture(autouse=True)
def uncompiled() -> None:
    """Models of one test are not among those that torch counts recompilations of in the next."""
    torch._dynamo.reset()


def patched(strategy: str, kind: type[nn.Module] = FlatBlock, scopes: Scopes = KEPT) -> nn.Module:
    return apply_plan(seeded(kind), plan(strategy, scopes))


class Watch(TorchFunctionMode):
    """Notes in which dtypes functions are given their first tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, set[torch.dtype]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.seen.setdefault(function_name(func), set()).add(result.dtype)
        return result


@both
def test_kept_functions_give_fp32_and_products_low_values(strategy: str) -> None:
    model = patched(strategy)
    watch = Watch()
    inner = model.__dict__["forward"].args[1]
    assert inner is None
    with watch, torch.no_grad():
        model(*LARGE)
    for name in KEPT[""]["keep"]:
        assert watch.seen[name] == {torch.float32}, name
    assert watch.seen["linear"] == watch.seen["matmul"] == {torch.bfloat16}


@both
def test_a_kept_product_is_not_lowered_by_autocast(strategy: str) -> None:
    model = patched(strategy, scopes={"": {"precision": "bf16", "keep": ["linear"]}})
    watch = Watch()
    with watch, torch.no_grad():
        model(*LARGE)
    assert watch.seen["linear"] == {torch.float32}
    assert watch.seen["matmul"] == {torch.bfloat16}


def test_what_a_checkpoint_computes_again_keeps_the_same_functions() -> None:
    x, watch = LARGE[0].clone().requires_grad_(), Watch()
    plain, around = (patched("autocast") for _ in range(2))
    expected = plain(x)
    expected.float().sum().backward()
    with watch:
        found = checkpoint(around, x, use_reentrant=False)
        found.float().sum().backward()
    assert torch.equal(found, expected)
    for parameter, reference in zip(around.parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter.grad, reference.grad)
    assert all(watch.seen[name] == {torch.float32} for name in KEPT[""]["keep"])
    assert watch.seen["linear"] == {torch.bfloat16}


@pytest.mark.parametrize("spelled", [lambda x: x**2, lambda x: x.pow(2), lambda x: torch.pow(x, 2)])
def test_a_function_is_kept_however_it_is_called(spelled: Any) -> None:
    scopes: Scopes = {"": {"precision": "fp16", "keep": ["pow"]}}
    found = apply_plan(Function(spelled), plan("cast", scopes, "fp16"))(torch.full((2,), 400.0))
    assert torch.equal(found, torch.full((2,), 160000.0))


def test_calls_that_write_to_what_they_are_given_are_left_alone() -> None:
    def written(x: Tensor) -> Tensor:
        y = x.half()
        F.relu(y, inplace=True)
        y.relu_()
        torch.relu(y)
        return torch.mul(y, y, out=torch.empty_like(y))

    scopes: Scopes = {"": {"precision": "fp16", "keep": ["relu", "mul"]}}
    x = normal(8)
    found = apply_plan(Function(written), plan("autocast", scopes, "fp16"))(x)
    assert found.dtype is torch.float16
    assert torch.equal(found, x.half().relu() * x.half().relu())


@pytest.mark.parametrize(
    ("strategy", "kind", "scopes"),
    thinned((how, *what) for what in ((FlatBlock, KEPT), (Stack, DEEP)) for how in ("autocast", "cast")),
)
def test_the_model_stays_what_it_was(strategy: str, kind: type[nn.Module], scopes: Scopes) -> None:
    model = patched(strategy, kind, scopes)
    assert type(model) is kind
    assert list(model.state_dict()) == list(seeded(kind).state_dict())
    with torch.no_grad():
        expected = model(*LARGE)
        assert torch.equal(torch.compile(model, backend="aot_eager", fullgraph=True)(*LARGE), expected)
        assert torch.equal(torch.export.export(model, LARGE).module()(*LARGE), expected)
        assert torch.equal(copy.deepcopy(model)(*LARGE), expected)
        assert torch.equal(pickle.loads(pickle.dumps(model))(*LARGE), expected)


def test_another_plan_replaces_it() -> None:
    model = patched("autocast")
    apply_plan(model, plan("autocast", {"": {"precision": "fp32"}}))
    with torch.no_grad():
        assert torch.equal(model(*LARGE), seeded(FlatBlock)(*LARGE))


def test_a_function_that_torch_has_not_is_refused() -> None:
    model = seeded(FlatBlock)
    with pytest.raises(ValueError, match="has no function 'no_such', which the plan keeps in FP32: audit again"):
        apply_plan(model, plan("cast", {"": {"precision": "bf16", "keep": ["no_such"]}}))
    assert all(p.dtype is torch.float32 for p in model.parameters())


def test_a_mode_of_the_users_own_goes_on_working() -> None:
    with torch.device("meta"), KeepFunctions(KeptFunctions(("exp",)), "cpu"):
        assert torch.zeros(2).exp().device.type == "meta"
