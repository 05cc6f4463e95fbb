"""The lowest choice there is without conflicts, on models that make FP32 values of their own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor.artefact.applying import apply_plan
from auditor.plan.costs import Cost
from auditor.plan.exceptions import lowest
from auditor.plan.problem import Problem
from auditor.records import Contribution, Verdict
from tests.support.problems import captured
from tests.support.subjects import capture_of, normal, seeded
from tests.support.unet import UNet

COST = Cost(10**9, 10**4, False)


class Late(nn.Module):
    """The root makes an FP32 value, and two layers meet it one behind the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x) + torch.arange(4).float().sin()))


def problem_of(model: nn.Module | None, *inputs: Tensor, strategy: str = "cast") -> Problem:
    capture = captured("chain") if model is None else capture_of(model, *inputs)
    contributions = dict.fromkeys(capture.nodes, Contribution(1e-3, 1e-3, 1e-3))
    verdicts = dict.fromkeys(capture.nodes, Verdict("safe", ""))
    return Problem(capture, dict.fromkeys(capture.nodes, COST), contributions, verdicts, strategy, "fp16", "A100")


def test_where_nothing_conflicts_everything_is_low() -> None:
    found = lowest(problem_of(None))
    assert not found.raised
    assert all(found.resolution.low(name) for name in captured("chain").nodes)


def test_the_maker_of_an_fp32_value_is_raised_and_what_lies_behind_is_low() -> None:
    found = lowest(problem_of(UNet(), normal(1, 3, 8, 8), torch.tensor([3])))
    assert sorted(found.raised) == ["time"]
    assert not found.resolution.conflicts
    low = {name for name in found.resolution.dtypes if found.resolution.low(name)}
    assert {"conv2d", "cat_1", "cat_2", "linear_1"} <= low


def test_its_readers_are_raised_where_that_leaves_less_time() -> None:
    # with the root in FP32 the sine, the sum and the three layers' casts are all that is not low
    found = lowest(problem_of(Late(), normal(2, 4)))
    assert not found.resolution.conflicts
    assert len(found.raised) == 1


class Turned(nn.Module):
    """Attention by hand that turns its queries and keys by angles of its own making, in FP32."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        angles = torch.arange(x.shape[1])[:, None] * (1.5 ** -torch.arange(x.shape[2]))
        scores = (q * angles.cos()) @ (k * angles.sin()).transpose(1, 2)
        return x + self.out(torch.softmax(scores / 4, -1) @ v)


def test_a_function_that_gives_fp32_anyhow_is_kept_where_that_leaves_its_products_low() -> None:
    found = lowest(problem_of(nn.Sequential(Turned(), Turned()), normal(2, 6, 16)))
    assert not found.resolution.conflicts
    assert sorted(path.partition("..")[0] for path in found.raised) == ["0", "1"]
    assert all(".." in path for path in found.raised)
    products = [name for name in found.resolution.dtypes if name.startswith(("linear", "matmul"))]
    assert len(products) == 8
    assert all(found.resolution.low(name) for name in products)


class Given(nn.Module):
    """Reads angles that it is given, and raises what it multiplies with them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        return self.last(self.first(x).float() * angles)


class Giving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Given()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, torch.arange(8) * 0.5)


def test_it_is_one_of_the_innermost_module_that_calls_some_and_no_cast_of_the_authors() -> None:
    found = lowest(problem_of(Giving(), normal(2, 8)))
    assert not found.resolution.conflicts
    assert sorted(found.raised) == ["inner..mul"]


def test_what_a_plan_says_of_such_a_function_is_so() -> None:
    model, x = seeded(lambda: nn.Sequential(Turned(), Turned())), normal(2, 6, 16)
    audit = auditor.audit(model, (x,), formats=("bf16",), strategies=("cast",))
    plan = audit.plans["cast_bf16"]
    assert plan.verified
    assert plan.low_precision_flops == 1.0
    kept = {path: choice for path, choice in plan.scopes.items() if choice.keep}
    assert list(kept) == ["0", "1"]
    for path, choice in kept.items():
        (reason,) = choice.because
        assert reason.startswith(f"{choice.keep[0]}: it gives FP32 anyhow; with no function kept linear_")
        assert reason.endswith(f" in {path}.out would be handed tensors of two dtypes, which raises an error")
    assert len([reason for reason in plan.reasons if reason.kind == "conflict"]) == 2
    scopes = {"": {"precision": "bf16"}, **{path: {"precision": "bf16"} for path in kept}}
    without = apply_plan(nn.Sequential(Turned(), Turned()), {"strategy": "cast", "scopes": scopes})
    with pytest.raises(RuntimeError, match="dtype"):
        without(x.bfloat16())
