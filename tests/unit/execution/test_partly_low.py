"""Some operations low, or one value another, and all else in FP32: sums worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from auditor.execution.execute import Executor, Run, SomeLow, apart
from auditor.numerics.casting import lowered
from auditor.numerics.formats import FORMATS
from tests.support.capturing import Function
from tests.support.subjects import capture_of

U = 2.0**-9
X = torch.tensor([1 + U])
"""In BF16, whose spacing at 1 is 2^-7, it is 1."""


def tripled(x: Tensor) -> Tensor:
    return x * 3 + x


def rounded(value: Any) -> Any:
    return lowered(value, FORMATS["bf16"])


@pytest.mark.parametrize(
    ("inside", "product", "result"),
    [((), 3 + 3 * U, 4 + 4 * U), (("mul",), 3.0, 4 + U), (("add",), 3 + 3 * U, 4.0), (("mul", "add"), 3.0, 4.0)],
)
def test_what_enters_is_rounded_and_what_leaves_is_raised(inside: Any, product: float, result: float) -> None:
    captured = capture_of(Function(tripled), X)
    seen: dict[str, Any] = {}
    policy = SomeLow(captured, inside, "bf16", rounded)
    run = Executor(captured.graph_module, policy, lambda n, value: seen.update({n.name: value}))
    (found,) = run.run(X)
    assert (found.item(), found.dtype) == (result, torch.float32)
    assert seen["mul"].item() == product
    assert {name for name in ("mul", "add") if seen[name].dtype is torch.bfloat16} == set(inside)


def test_a_value_is_raised_once_so_that_gradients_add_up_in_fp32() -> None:
    """y = 3 x is low and read twice: the sum of its gradients reaches BF16 as one number."""

    def shared(x: Tensor) -> Tensor:
        y = x * 3
        return y * (1 + 2.0**-8) + y * 2.0**-8

    captured = capture_of(Function(shared), X)
    x = torch.ones(1, requires_grad=True)
    (found,) = Executor(captured.graph_module, SomeLow(captured, ("mul",), "bf16", rounded)).run(x)
    (gradient,) = torch.autograd.grad(found.sum(), [x])
    # 1 + 2^-8 and 2^-8 make 1 + 2^-7, which BF16 holds; rounded apart, 1 + 2^-8 would be 1
    assert gradient.item() == lowered(torch.tensor(3 * (1 + 2.0**-7)), FORMATS["bf16"]).item()


def test_only_what_depends_on_the_changed_value_is_run_again() -> None:
    captured = capture_of(Function(lambda x: (x * 3 + x, x.exp())), X)
    values: dict[str, Any] = {}
    Executor(captured.graph_module, observer=lambda n, value: values.update({n.name: value})).run(X)
    values |= {"exp": torch.tensor([7.0]), "mul": torch.tensor([5.0])}  # both are taken as they are
    before = Run(values, stale=frozenset({"add"}))
    found = Executor(captured.graph_module, before=before).run(X)
    assert [x.item() for x in found] == [6 + U, 7.0]


def test_a_run_forgets_what_no_other_node_reads() -> None:
    captured = capture_of(Function(tripled), X)
    run, known = Executor(captured.graph_module), dict[str, set[str]]()
    for n, _ in run.steps(X):
        known[n.name] = {other.name for other in run.env}
    (x,) = (place.name for place in captured.placeholders)
    assert known == {x: {x}, "mul": {x, "mul"}, "add": {x, "mul", "add"}, "output": {"add", "output"}}


def test_a_result_that_is_its_own_input_is_told_apart() -> None:
    x, y = torch.ones(2), torch.zeros(2)
    first, second = apart((x, y), [x])
    assert first is not x
    assert torch.equal(first, x)
    assert second is y


def test_what_is_read_inside_and_outside_leaves_raised() -> None:
    def shared(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 3
        return y.neg(), y + U

    captured = capture_of(Function(shared), X)
    negated, added = Executor(captured.graph_module, SomeLow(captured, ("mul", "neg"), "bf16", rounded)).run(X)
    # x is rounded to 1 and 3 x is 3; BF16 is spaced by 2^-6 from 2 on, so that 3 + 2^-9 needs FP32
    assert (negated.item(), added.item()) == (-3.0, 3 + U)
    assert {negated.dtype, added.dtype} == {torch.float32}
