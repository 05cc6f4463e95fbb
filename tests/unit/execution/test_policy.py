"""What a strategy means for weights, scopes and values on their way, and what the author runs low whatever the plan."""

import pytest
import torch
from torch import Tensor

from auditor.artefact.strategies import SHIPPED, strategy_of
from auditor.execution.policy import Boundary, Layout, Policy
from auditor.execution.resolve import kept_low
from auditor.records import Placeholder
from tests.support.capturing import Function
from tests.support.problems import captured
from tests.support.replaying import Model
from tests.support.subjects import capture_of, normal


def test_only_what_differs_from_above_is_wrapped_and_an_island_that_nothing_low_reads_keeps_its_result() -> None:
    capture = capture_of(Model(lambda m, x: m.inner(x).tanh(), inner=Function(torch.sin)), torch.ones(2))

    def wrapped(**precisions: str) -> dict[str, Boundary]:
        return Policy(capture, "cast", lambda path: precisions[path or "root"], "fp16").wrapped

    assert wrapped(root="fp16", inner="fp16") == {"": Boundary("fp16", False, "fp16", None)}
    # what comes out of the island is lowered again: `tanh` reads it low
    assert wrapped(root="fp16", inner="fp32")["inner"] == Boundary("fp32", False, "fp32", "fp16")
    assert wrapped(root="fp32", inner="fp16")[""].keeps


def stored(strategy: str, labels: dict[str, str]) -> dict[str | None, str]:
    capture = captured("tied")
    how = Policy(capture, strategy, lambda owner: labels.get(owner, "fp32"), "fp16")
    names = {placeholder.name: placeholder.fqn or "input" for placeholder in capture.placeholders}
    return {names[name]: precision for name, precision in how.stored.items()}


def test_cast_stores_each_weight_in_the_precision_of_its_readers() -> None:
    assert stored("autocast", {"": "fp16", "first": "fp16"}) == {}
    found = stored("cast", {"": "fp16", "first": "fp16", "middle": "fp32", "last": "fp16"})
    assert found["input"] == "fp16"
    assert (found["middle.weight"], found["middle.bias"]) == ("fp32", "fp32")
    assert (found["first.bias"], found["last.bias"]) == ("fp16", "fp16")


@pytest.mark.parametrize(("holders", "expected"), [((), False), (("a",), False), (("a", "b"), True)])
def test_a_weight_that_several_modules_hold_is_tied(holders: tuple[str, ...], expected: bool) -> None:
    assert Placeholder("p_w", "parameter", "a.w", holders=holders).is_shared is expected


def test_a_tied_weight_is_stored_low_where_all_that_hold_it_are() -> None:
    capture = captured("held")
    (weight,) = (place.name for place in capture.placeholders if place.is_shared)
    assert Layout(capture, strategy_of("cast")).owners == ("", "body.0", "body.1", "last", "shared")
    assert Layout(capture, strategy_of("autocast")).owners == ("", "body.0", "body.1", "last")
    for labels, stored in (({}, "fp16"), ({"shared": "fp32"}, "fp32"), ({"body.0": "fp32"}, "fp32")):
        how = Policy(capture, "cast", lambda owner, labels=labels: labels.get(owner, "fp16"), "fp16")
        assert how.stored[weight] == stored


# What the author runs low whatever the plan: regions of his own, and casts that he wrote.


def region(x: Tensor, w: Tensor) -> Tensor:
    """A product in BF16, and one outside."""
    with torch.autocast("cuda", dtype=torch.bfloat16):
        y = x @ w
    return y.float() @ w


def found(function, format: str, *strategies: str) -> dict[str, str]:
    captured = capture_of(Function(function), normal(4, 4), normal(4, 4, seed=1))
    ops = {name: node.op.split(".")[1] for name, node in captured.nodes.items()}
    return {ops[name]: fmt for name, fmt in kept_low(captured, strategies or SHIPPED, format).items()}


def test_a_region_keeps_its_format_under_a_plan_in_another() -> None:
    assert found(region, "fp16") == {"matmul": "bf16", "to": "bf16"}
    assert found(region, "bf16") == {"matmul": "bf16", "to": "bf16"}


def test_so_does_a_cast_that_is_written() -> None:
    assert found(lambda x, w: x.bfloat16().relu().float() @ w, "fp16") == {"to": "bf16", "relu": "bf16"}


def test_what_a_plan_runs_otherwise_is_not_kept() -> None:
    """The sum reads BF16 and FP32; with all in FP16, it reads two low formats."""
    assert found(lambda x, w: x.bfloat16() + w, "fp16", "cast") == {"to": "bf16"}


def test_where_nothing_is_low_nothing_is_kept() -> None:
    assert found(lambda x, w: x @ w, "fp16") == {}


def test_a_region_that_is_switched_off_keeps_nothing_low() -> None:
    def off(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cuda", enabled=False):
            return x @ w

    assert found(off, "fp16") == {}
