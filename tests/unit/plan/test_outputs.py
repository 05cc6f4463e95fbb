"""The third precision of a product, low inputs and FP32 output: where plans use it, what it costs, where it is of no use."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import auditor
from auditor.plan.plans import as_plan
from auditor.plan.problem import Problem
from auditor.records import Audit, Plan
from auditor.records.paths import FP32_OUTPUT, function_in
from tests.support.capturing import Function
from tests.support.planning import planning_of
from tests.support.replaying import Model
from tests.support.subjects import normal, seeded

GATE = function_in("router.gate", f"linear{FP32_OUTPUT}")


def routed_to(m: Any, x: Tensor) -> Tensor:
    """Weights of two of four experts, by logits of about 64: there, BF16 numbers are 0.5 apart, and logits tie."""
    weights, experts = F.softmax(m.gate(x), -1).topk(2)
    return torch.zeros(*x.shape[:-1], 4).scatter(-1, experts, weights)


def mixture() -> nn.Module:
    """Four experts of one layer each. Inputs and weights of the router are BF16 numbers: only its output is rounded."""
    experts = nn.ModuleList(nn.Linear(256, 64) for _ in range(4))
    gate = nn.Linear(256, 4, bias=False)
    gate.weight.data = (0.25 + torch.randn(4, 256) / 64).bfloat16().float()
    return Model(
        lambda m, x: sum(w.unsqueeze(-1) * e(x) for w, e in zip(m.router(x).unbind(-1), m.experts, strict=True)),
        router=Model(routed_to, gate=gate),
        experts=experts,
    )


ROWS = (1 + normal(128, 256) / 8).bfloat16().float()


def fp32_outputs(plan: Plan) -> list[str]:
    return [function_in(path, name) for path, name in plan.exceptions if name.endswith(FP32_OUTPUT)]


@pytest.fixture(scope="module")
def routed() -> Audit:
    return auditor.audit(seeded(mixture), ROWS, formats="bf16", max_error=0.02)


@pytest.mark.parametrize("strategy", ["autocast", "cast"])
def test_a_router_that_needs_an_fp32_output_gets_it_and_no_fp32_inputs(routed: Audit, strategy: str) -> None:
    plan = routed.plans[f"{strategy}_bf16"]
    assert fp32_outputs(plan) == [GATE]
    assert plan.scopes["router.gate"].precision == "bf16"
    assert plan.is_verified
    assert plan.low_precision_flops == pytest.approx(1.0, abs=0.01)
    without = routed.baselines[f"{strategy}_bf16"]
    assert not without.holds
    (reason,) = [reason for reason in plan.reasons if GATE in reason.functions]
    assert reason.operations == ("linear",)


@pytest.mark.parametrize("strategy", ["autocast", "cast"])
def test_a_product_that_only_overflows_in_its_output_runs_in_fp16(strategy: str) -> None:
    """Products of about 3e5 are beyond FP16's 65504; the inputs are not."""
    model = seeded(lambda: Model(lambda m, x: F.log_softmax(m.head(x) / 1e5, -1), head=nn.Linear(64, 32)))
    model.head.weight.data *= 3e5
    plan = auditor.audit(model, normal(16, 64), formats="fp16", strategies=strategy).plans[f"{strategy}_fp16"]
    assert fp32_outputs(plan) == [function_in("head", f"linear{FP32_OUTPUT}")]
    assert plan.is_verified
    assert plan.predicted_error == pytest.approx(plan.measured_error, rel=0.2)
    assert [reason.kind for reason in plan.reasons if reason.functions] == ["unsafe"]


def test_the_recommended_plan_gives_a_wide_last_layer_an_fp32_output_and_saves_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """[128, 256] @ [256, 8192] of BF16 numbers: only the output is rounded, by about 0.0016 of itself. In FP32 the
    2 x 128 x 256 x 8192 FLOPs take 27.5 us of an A100; with BF16 inputs, memory traffic takes 4.2 us."""
    model = seeded(lambda: Model(lambda m, x: m.head(x), head=nn.Linear(256, 8192, bias=False)))
    model.head.weight.data = model.head.weight.data.bfloat16().float()

    def audited() -> Audit:
        return auditor.audit(model, ROWS, formats="bf16", strategies="autocast", max_error=1e-3)

    audit = audited()
    plan = audit.plans["autocast_bf16"]
    assert audit.recommended == plan.name
    assert fp32_outputs(plan) == [function_in("head", f"linear{FP32_OUTPUT}")]
    monkeypatch.setattr(Problem, "products", {})
    without = audited().plans["autocast_bf16"]
    assert without.is_verified
    assert without.kept_modules
    assert plan.predicted_speedup > 4 * without.predicted_speedup


def test_where_the_next_product_rounds_its_inputs_an_fp32_output_is_of_no_use() -> None:
    """In a chain of products without anything between, only the last one's output can be better in FP32."""
    chain = seeded(lambda: nn.Sequential(*(nn.Linear(256, 256) for _ in range(6))))
    audit = auditor.audit(chain, normal(64, 256), formats="bf16", max_error=0.004)
    for plan in audit.plans.values():
        assert plan.kept_modules
        assert set(fp32_outputs(plan)) <= {function_in("5", f"linear{FP32_OUTPUT}")}


def test_it_costs_a_low_product_that_writes_four_bytes() -> None:
    """[64, 256] @ [256, 512] + [512]: 64 x 256 + 256 x 512 + 512 numbers of 2 bytes are read, 64 x 512 of 4 written."""
    model = seeded(lambda: Model(lambda m, x: m.layer(x), layer=nn.Linear(256, 512)))
    problem = planning_of(model, normal(64, 256), formats=("bf16",)).problem("autocast", "bf16")
    (path,) = problem.products
    low, wide, high = (problem.evaluate(some) for some in ((), (path,), ("layer",)))
    read, written, bandwidth = 64 * 256 + 256 * 512 + 512, 64 * 512, 2039e9
    assert problem.device == "A100"
    assert low.seconds == pytest.approx((2 * read + 2 * written) / bandwidth)
    assert wide.seconds == pytest.approx((2 * read + 4 * written) / bandwidth)
    assert low.price < wide.price < high.price
    assert [as_plan(problem, point).low_precision_flops for point in (low, wide, high)] == [1.0, 1.0, 0.0]
    own, *_ = (problem.contribution(name, "bf16").own for name in problem.capture.nodes)
    assert low.predicted_error**2 - wide.predicted_error**2 == pytest.approx(own**2)


def test_functions_whose_products_are_in_several_modules_are_left_out() -> None:
    """A mode around the outer module would give the inner one's product an FP32 output too."""
    inner = Function(lambda x: x @ x.mT)
    model = Model(lambda m, x: m.inner(x @ x) @ m.weight + m.layer(x), inner=inner, layer=nn.Linear(8, 8))
    model.weight = nn.Parameter(normal(8, 8))
    problem = planning_of(model, normal(8, 8), formats=("bf16",)).problem("autocast", "bf16")
    names = {path.removesuffix(FP32_OUTPUT) for path in problem.products}
    assert names == {function_in("inner", "matmul"), function_in("layer", "linear")}
