"""Exceptions are offered where they may pay, chosen where they do, and a plan with them holds on another build of the
model."""

import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import auditor
from auditor.artefact.applying import apply_plan
from auditor.plan.costs import Cost
from auditor.plan.problem import Problem
from auditor.records import Audit, Contribution
from auditor.verify.running import run_patched
from tests.support.capturing import Function
from tests.support.flat_models import LARGE, FlatBlock
from tests.support.patching import plan as planned
from tests.support.planning import planning_of
from tests.support.problems import captured, problem_of
from tests.support.replaying import Model
from tests.support.small_models import MODELS
from tests.support.subjects import capture_of, normal, seeded
from tests.support.unet import UNet


def norm() -> nn.Module:
    """A module of its own for what is unsafe: an island does, and there is no product in it."""
    return Function(lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def unsafe() -> nn.Module:
    """Its only product is what overflows."""
    return Function(lambda x: (x @ x.transpose(-1, -2)).softmax(-1).cumsum(-1))


@pytest.mark.parametrize(
    ("build", "inputs", "strategy", "expected"),
    [
        (FlatBlock, LARGE, "cast", {"": {"pow", "mean", "add", "rsqrt"}}),
        (FlatBlock, LARGE, "autocast", {}),  # which raises them by itself
        (*MODELS["mlp"], "cast", {}),  # nothing is unsafe
        (lambda: nn.Sequential(norm(), nn.Linear(32, 4)), LARGE, "cast", {}),
        (unsafe, (400 * normal(2, 8, 32),), "cast", {}),
    ],
)
def test_unsafe_functions_beside_products_are_offered(
    build: Any, inputs: tuple[Tensor, ...], strategy: str, expected: Mapping[str, set[str]]
) -> None:
    problem = planning_of(seeded(build), *inputs, formats=("fp16",)).problem(strategy, "fp16")
    assert problem.exceptions == expected


def error_by_hand(kind: type[nn.Module], inputs: tuple[Tensor, ...], audit: Audit, plan: str) -> float:
    with torch.no_grad():
        expected = seeded(kind)(*inputs).double()
    ((found,),) = run_patched(auditor.apply(seeded(kind), audit, plan), [(inputs, {})], "cpu")
    return float((found.double() - expected).norm() / expected.norm())


def distances() -> nn.Module:
    """Distances by expansion, whose terms cancel, then layers that are dear in BF16 and no more."""

    def forward(m: Any, x: Tensor) -> Tensor:
        apart = x.pow(2).sum(-1, keepdim=True) + m.book.pow(2).sum(-1) - 2 * (x @ m.book.T)
        near = torch.exp(-apart)
        return F.linear(F.silu(F.linear(3 * near / near.sum(-1, keepdim=True), m.mix)), m.out)

    weights = {
        "book": 8 + torch.randn(16, 32) / 4,
        "mix": 0.25 + torch.randn(32, 16) / 6,
        "out": torch.randn(32, 32) / 6,
    }
    return Model(forward, **{name: nn.Parameter(weight) for name, weight in weights.items()})


def test_products_that_are_dear_run_low_beside_functions_that_are_unsafe() -> None:
    inputs = (8 + normal(12, 32) / 4,)
    audit = auditor.audit(seeded(distances), inputs, formats=("bf16",), strategies=("autocast",))
    verdicts = {report.node.name: report.verdicts["bf16"].verdict for report in audit.nodes if report.node.function}
    products = [report.node for report in audit.nodes if report.node.op == "aten.linear.default"]
    assert "sensitive" in {verdicts[node.name] for node in products}
    assert "safe" not in {verdicts[node.name] for node in products}
    plan = audit.plans["autocast_bf16"]
    assert plan.is_verified
    assert plan.low_precision_flops >= 0.5
    assert plan.exceptions == (("", "matmul"),)  # what follows is handed FP32 by it
    assert error_by_hand(distances, inputs, audit, "autocast_bf16") == pytest.approx(plan.measured_error, rel=1e-6)


def dear() -> nn.Module:
    """Two layers in one forward, dear in BF16 as most are."""
    weights = {name: nn.Parameter(torch.randn(32, 32) / 6) for name in ("mix", "out")}
    return Model(lambda m, x: F.linear(F.silu(x @ m.mix), m.out), **weights)


def test_nothing_is_offered_where_products_are_dear_and_nothing_is_unsafe() -> None:
    problem = planning_of(seeded(dear), normal(8, 32), formats=("bf16",)).problem("autocast", "bf16")
    verdicts = {name: problem.verdicts[name].verdict for name in ("matmul", "linear")}
    assert set(verdicts.values()) == {"sensitive"}
    assert problem.exceptions == {}


@pytest.fixture(scope="module")
def audited() -> Audit:
    return auditor.audit(seeded(FlatBlock), LARGE, formats=("fp16",), strategies=("cast",))


def test_a_flat_block_runs_low_but_for_what_is_unsafe(audited: Audit) -> None:
    plan = audited.plans["cast_fp16"]
    assert plan.is_verified
    assert plan.low_precision_flops == 1
    assert plan.exceptions
    assert set(plan.scopes) == {""}
    assert audited.baselines["cast_fp16"].measured_error is None or audited.baselines["cast_fp16"].measured_error > 0.01
    for report in audited.nodes:  # what is unsafe low computes in FP32 in the run under the plan
        if report.verdicts["fp16"].verdict == "unsafe":
            assert report.planned.computed == "float32", report.node.name


def test_every_exception_changes_what_the_model_says(audited: Audit) -> None:
    names = [name for _, name in audited.plans["cast_fp16"].exceptions]

    def said(keep: list[str]) -> Tensor:
        scopes = {"": {"precision": "fp16", "keep": keep}}
        ((found,),) = run_patched(apply_plan(seeded(FlatBlock), planned("cast", scopes, "fp16")), [(LARGE, {})], "cpu")
        return found

    for name in names:
        assert not torch.equal(said([other for other in names if other != name]), said(names)), name


def test_the_plan_errs_as_stated_on_another_build(audited: Audit) -> None:
    plan = audited.plans["cast_fp16"]
    assert error_by_hand(FlatBlock, LARGE, audited, "cast_fp16") == pytest.approx(plan.measured_error, rel=1e-6)


def test_the_scope_says_why_it_keeps_each_function(audited: Audit) -> None:
    plan = audited.plans["cast_fp16"]
    choice, reasons = plan.scopes[""], plan.reasons_of("")
    assert sorted(path for reason in reasons for path in reason.functions) == [f"..{name}" for name in choice.keep]
    assert all("is unsafe, since " in reason.words for reason in reasons)
    functions = {node.name: node.function and node.function.path for node in (r.node for r in audited.nodes)}
    kept = {name for reason in plan.reasons for name in reason.operations if functions[name] in choice.keep}
    assert kept == {name for name, function in functions.items() if function in choice.keep}


# The lowest choice there is without conflicts, on models that make FP32 values of their own.

COST = Cost(10**9, 10**4, False)


def priced(model: nn.Module | None, *inputs: Tensor, strategy: str = "cast") -> Problem:
    capture = captured("chain") if model is None else capture_of(model, *inputs)
    return problem_of(capture, strategy, each=Contribution(1e-3, 1e-3, 1e-3), cost=COST)


def test_where_nothing_conflicts_everything_is_low() -> None:
    found = priced(None)
    assert not found.forced_fp32
    assert all(found.lowest.low(name) for name in captured("chain").nodes)


def test_the_maker_of_an_fp32_value_is_raised_and_what_lies_behind_is_low() -> None:
    found = priced(UNet(), normal(1, 3, 8, 8), torch.tensor([3]))
    assert sorted(found.forced_fp32) == ["time"]
    assert not found.lowest.conflicts
    low = {name for name in found.lowest.dtypes if found.lowest.low(name)}
    assert {"conv2d", "cat_1", "cat_2", "linear_1"} <= low


def test_its_readers_are_raised_where_that_leaves_less_time() -> None:
    """The root makes an FP32 value, and two layers meet it one behind the other."""
    layers = {name: nn.Linear(4, 4) for name in ("first", "second", "third")}
    late = Model(lambda m, x: m.third(m.second(m.first(x) + torch.arange(4).float().sin())), **layers)
    # with the root in FP32 the sine, the sum and the three layers' casts are all that is not low
    found = priced(late, normal(2, 4))
    assert not found.lowest.conflicts
    assert len(found.forced_fp32) == 1


def turned(m: Any, x: Tensor) -> Tensor:
    """Attention by hand that turns its queries and keys by angles of its own making, in FP32."""
    q, k, v = m.qkv(x).chunk(3, -1)
    angles = torch.arange(x.shape[1])[:, None] * (1.5 ** -torch.arange(x.shape[2]))
    scores = (q * angles.cos()) @ (k * angles.sin()).transpose(1, 2)
    return x + m.out(torch.softmax(scores / 4, -1) @ v)


def both_turned() -> nn.Module:
    return nn.Sequential(*(Model(turned, qkv=nn.Linear(16, 48), out=nn.Linear(16, 16)) for _ in range(2)))


def test_a_function_that_gives_fp32_anyhow_is_kept_where_that_leaves_its_products_low() -> None:
    found = priced(both_turned(), normal(2, 6, 16))
    assert not found.lowest.conflicts
    assert sorted(path.partition("..")[0] for path in found.forced_fp32) == ["0", "1"]
    assert all(".." in path for path in found.forced_fp32)
    products = [name for name in found.lowest.dtypes if name.startswith(("linear", "matmul"))]
    assert len(products) == 8
    assert all(found.lowest.low(name) for name in products)


def given() -> nn.Module:
    """Reads angles that it is given, and raises what it multiplies with them."""
    return Model(lambda m, x, angles: m.last(m.first(x).float() * angles), first=nn.Linear(8, 8), last=nn.Linear(8, 8))


def test_the_module_that_raises_a_value_last_is_raised_where_it_has_no_products_of_its_own() -> None:
    found = priced(Model(lambda m, x: m.inner(x, torch.arange(8) * 0.5), inner=given()), normal(2, 8))
    assert not found.lowest.conflicts
    assert sorted(found.forced_fp32) == ["inner"]


def multiplied(m: Any, x: Tensor, angles: Tensor) -> Tensor:
    return (m.first(x).float() * angles) @ m.weight


def test_it_is_a_function_of_the_innermost_module_that_calls_some_and_no_cast_of_the_authors() -> None:
    inner = Model(multiplied, first=nn.Linear(8, 8), weight=nn.Parameter(torch.eye(8)))
    found = priced(Model(lambda m, x: m.inner(x, torch.arange(8) * 0.5), inner=inner), normal(2, 8))
    assert not found.lowest.conflicts
    assert sorted(found.forced_fp32) == ["inner..mul"]


def test_what_a_plan_says_of_such_a_function_is_so() -> None:
    model, x = seeded(both_turned), normal(2, 6, 16)
    audit = auditor.audit(model, (x,), formats=("bf16",), strategies=("cast",))
    plan = audit.plans["cast_bf16"]
    assert plan.is_verified
    assert plan.low_precision_flops == 1.0
    kept = {path: choice for path, choice in plan.scopes.items() if choice.keep}
    assert list(kept) == ["0", "1"]
    for path, choice in kept.items():
        (reason,) = plan.reasons_of(path)
        assert reason.functions == (f"{path}..{choice.keep[0]}",)
        assert reason.words.startswith("its result is FP32 anyway; otherwise, matmul_")
        assert re.search(
            r" \(.+:\d+\) raises an error in a run of the whole model in BF16: .+; the FP32 values come from .+ \(.+:\d+\)$",
            reason.words,
        )
    assert len([reason for reason in plan.reasons if reason.kind == "conflict"]) == 2
    scopes = {"": {"precision": "bf16"}, **{path: {"precision": "bf16"} for path in kept}}
    without = apply_plan(both_turned(), {"strategy": "cast", "scopes": scopes})
    with pytest.raises(RuntimeError, match="dtype"):
        without(x.bfloat16())
