"""Why operations are not low in modules that are: each clause on a model in which it is true."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from auditor.execution.policy import choice_keeping
from auditor.paths import function_in
from auditor.plan.modules import evaluate
from auditor.plan.reasons import explain_budget, explain_gain, operation_reasons
from auditor.plan.search import Candidate
from auditor.records import Reason
from tests.support.problems import problem_of
from tests.support.replaying import Model
from tests.support.subjects import capture_of, normal


def every(m: Any, x: Tensor) -> Tensor:
    low = m.layer(x)
    with torch.autocast("cuda", enabled=False):
        off = low.float() @ torch.eye(8)
    single = low.softmax(-1)
    negated = -single
    ramp = torch.arange(8).sin()
    scaled = m.scale.neg()
    double = x.double().cos()
    return off + negated + ramp + scaled + double.float()


def why(strategy: str = "autocast") -> dict[str, Reason]:
    capture = capture_of(Model(every, layer=nn.Linear(8, 8), scale=nn.Parameter(torch.ones(8))), normal(4, 8))
    problem = problem_of(capture, strategy)
    found = operation_reasons(problem, evaluate(problem, ()))
    ops = {name: node.op.removeprefix("aten.").partition(".")[0] for name, node in capture.nodes.items()}
    return {f"{ops[name]} {name}": reason for reason in found for name in reason.operations}


@pytest.mark.parametrize(
    ("op", "kind", "words"),
    [
        ("softmax softmax", "strategy", "autocast always runs softmax in FP32"),
        ("neg neg", "inherited", "reads FP32 from softmax: autocast always runs softmax in FP32"),
        ("matmul matmul", "author", "the model's code switches autocast off there"),
        ("arange arange", "not-floating", "not a floating-point operation"),
        ("sin sin", "author", "the model's code creates values in FP32"),
        ("neg neg_1", "inherited", "reads FP32 from the parameter scale"),
        ("cos cos", "author", "the model's code computes in float64, which no plan lowers"),
    ],
)
def test_each_reason(op: str, kind: str, words: str) -> None:
    found = why()
    assert op in found, found.keys()
    assert (found[op].kind, found[op].words) == (kind, words)


def test_what_runs_low_has_none() -> None:
    assert not [name for name in why() if name.startswith("linear")]
    assert not [name for name in why("cast") if name.startswith(("linear", "softmax"))]


def norm(m: Any, x: Tensor) -> Tensor:
    """By hand, as repeated blocks have it."""
    variance = x.float().pow(2).mean(-1, keepdim=True)
    return m.weight * (x * torch.rsqrt(variance + 1e-6)).to(x.dtype)


def of_blocks(count: int, strategy: str) -> tuple[Reason, ...]:
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), Model(norm, weight=nn.Parameter(torch.ones(8))))

    capture = capture_of(nn.Sequential(*(block() for _ in range(count))), normal(4, 8))
    problem = problem_of(capture, strategy)
    return operation_reasons(problem, evaluate(problem, ()))


@pytest.mark.parametrize("strategy", ["autocast", "cast"])
def test_what_blocks_have_in_common_is_one_reason(strategy: str) -> None:
    two, five = of_blocks(2, strategy), of_blocks(5, strategy)
    assert [reason.words for reason in two] == [reason.words for reason in five]
    assert [len(reason.operations) * 5 for reason in two] == [len(reason.operations) * 2 for reason in five]


def test_fp32_is_followed_to_where_it_begins() -> None:
    assert [(reason.words, reason.operations) for reason in of_blocks(1, "cast")] == [
        ("the model's code requests FP32", ("to",)),
        ("reads FP32 from to: the model's code requests FP32", ("pow_1", "mean", "add", "rsqrt", "mul")),
    ]


def branching(m: Any, x: Tensor, first: bool) -> Tensor:
    """Called twice, its own product and that of a layer in it the other way round."""
    if first:
        return nn.functional.linear(m.layer(x), m.weight)
    return m.layer(nn.functional.linear(x, m.weight))


def test_what_a_module_around_keeps_says_so() -> None:
    """And is what the run itself computes in FP32, beside the module's own call."""
    block = Model(branching, layer=nn.Linear(8, 8), weight=nn.Parameter(torch.ones(8, 8)))
    capture = capture_of(Model(lambda m, x: m.block(m.block(x, True), False), block=block), normal(4, 8))
    problem = problem_of(capture, "autocast")
    high = frozenset({function_in("block", "linear")})
    problem.__dict__["exceptions"] = {"block": frozenset({"linear"})}
    chosen = Candidate(high, 0.0, 0.0)
    found = [reason for reason in operation_reasons(problem, chosen) if reason.kind == "inherited"]
    assert [(reason.words, reason.by) for reason in found] == [("block keeps every call of linear in FP32", "block")]
    assert [capture.nodes[name].owner for name in found[0].operations] == ["block.layer"] * 2
    computed = problem.resolve(choice_keeping(high, "fp16")).computed_format
    assert all(computed(name) == "fp32" for name in found[0].operations)


def test_the_numbers_stand_in_the_clause() -> None:
    said = (
        "the error from 0.0079 to 0.0131 (plans may use 80% of the budget of 0.01), and saves at most 1.3% of the time"
    )
    assert explain_budget(0.0079, 0.0131, 0.01, 0.013, "time", True) == f"low precision there raises {said}"
    assert (
        explain_budget(0.0079, 0.0131, 0.01, 0.013, "time", False)
        == f"low precision there is predicted to raise {said}"
    )
    assert "inf" not in explain_budget(0.001, math.inf, 0.01, 0.07, "time", ran=True).split()
    assert explain_gain(-0.2, "time") == "saves no time"
    assert explain_gain(0.0004, "flops") == "saves at most 0.1% of the FP32 FLOPs"
