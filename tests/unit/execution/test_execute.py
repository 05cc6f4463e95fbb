"""One node at a time under a policy; some operations low and all else in FP32; what was written in place."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from auditor.execution.execute import Executor, SubsetLowPrecision, low_literals, with_literals
from auditor.execution.policy import Policy, plain
from auditor.execution.resolve import resolve
from auditor.numerics.casting import round_tree
from auditor.numerics.formats import FORMATS
from auditor.numerics.kernels import UnsupportedInFormat
from auditor.numerics.nodes import tensors_in
from auditor.records import Capture, Literals
from tests.support.capturing import Function
from tests.support.replaying import Model
from tests.support.subjects import capture_of, normal, only, seeded

FLOAT = torch.ones(2)


def test_literals_are_replaced_by_place_and_by_name() -> None:
    assert with_literals((1, 2.0), {"dtype": torch.float32}, Literals({1: 3.0, "dtype": torch.float16})) == (
        (1, 3.0),
        {"dtype": torch.float16},
    )
    assert with_literals((1,), {}, None) == ((1,), {})


def test_a_number_is_that_of_the_run_in_which_the_operation_is_low() -> None:
    node = next(iter(capture_of(Function(torch.sin), FLOAT).nodes.values()))
    stored, regional = Literals({1: -1.0, 2: torch.float16}), Literals({1: -2.0, 2: torch.float16, "value": -3.0})
    assert low_literals(node, "fp16") is None
    assert low_literals(replace(node, literals={"fp16": stored}), "fp16") is stored
    assert low_literals(replace(node, autocast_literals={"fp16": regional}), "bf16") is None
    under_autocast = replace(node, autocast_literals={"fp16": regional})
    assert low_literals(under_autocast, "fp16") == Literals({1: -2.0, "value": -3.0})
    both = replace(under_autocast, literals={"fp16": stored})
    assert low_literals(both, "fp16") == Literals({1: -1.0, 2: torch.float16, "value": -3.0})


def run(capture: Capture, how: Policy, model: nn.Module, *inputs: Tensor) -> dict[str, Any]:
    """Result of every node, by operation."""
    seen: dict[str, Any] = {}

    def note(node: fx.Node, result: Any) -> None:
        if node.name in capture.nodes:
            seen[capture.nodes[node.name].op.split(".")[1]] = result

    with torch.no_grad():
        Executor(capture.graph_module, how, note).run(*capture.bind(model, (inputs, {})))
    return seen


def test_a_refusal_names_the_place() -> None:
    model = nn.Sequential(Function(lambda x: torch.linalg.cholesky(x * 1.0)))
    capture = capture_of(model, torch.eye(3))
    how = Policy(capture, "cast", lambda owner: "fp16", "fp16")
    with pytest.raises(UnsupportedInFormat) as caught:
        run(capture, how, model, torch.eye(3))
    node = only(capture, "linalg_cholesky")
    assert caught.value.owner == "0"
    assert str(caught.value).splitlines()[0] == f"linalg_cholesky has no float16 kernel on CUDA in 0 ({node.source})"


# Some operations low, or one value another, and all else in FP32: sums worked out by hand.

U = 2.0**-9
X = torch.tensor([1 + U])
"""In BF16, whose spacing at 1 is 2^-7, it is 1."""


def tripled(x: Tensor) -> Tensor:
    return x * 3 + x


def rounded(value: Any) -> Any:
    return round_tree(value, FORMATS["bf16"])


@pytest.mark.parametrize(
    ("inside", "product", "result"),
    [((), 3 + 3 * U, 4 + 4 * U), (("mul",), 3.0, 4 + U), (("add",), 3 + 3 * U, 4.0), (("mul", "add"), 3.0, 4.0)],
)
def test_what_enters_is_rounded_and_what_leaves_is_raised(inside: Any, product: float, result: float) -> None:
    captured = capture_of(Function(tripled), X)
    seen: dict[str, Any] = {}
    policy = SubsetLowPrecision(captured, inside, "bf16", rounded)
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
    (found,) = Executor(captured.graph_module, SubsetLowPrecision(captured, ("mul",), "bf16", rounded)).run(x)
    (gradient,) = torch.autograd.grad(found.sum(), [x])
    # 1 + 2^-8 and 2^-8 make 1 + 2^-7, which BF16 holds; rounded apart, 1 + 2^-8 would be 1
    assert gradient.item() == round_tree(torch.tensor(3 * (1 + 2.0**-7)), FORMATS["bf16"]).item()


def test_a_run_forgets_what_no_other_node_reads() -> None:
    captured = capture_of(Function(tripled), X)
    run, known = Executor(captured.graph_module), dict[str, set[str]]()
    for n, _ in run.steps(X):
        known[n.name] = {other.name for other in run.env}
    (x,) = (place.name for place in captured.placeholders)
    assert known == {x: {x}, "mul": {x, "mul"}, "add": {x, "mul", "add"}, "output": {"add", "output"}}


def test_what_is_read_inside_and_outside_leaves_raised() -> None:
    def shared(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 3
        return y.neg(), y + U

    captured = capture_of(Function(shared), X)
    negated, added = Executor(captured.graph_module, SubsetLowPrecision(captured, ("mul", "neg"), "bf16", rounded)).run(
        X
    )
    # x is rounded to 1 and 3 x is 3; BF16 is spaced by 2^-6 from 2 on, so that 3 + 2^-9 needs FP32
    assert (negated.item(), added.item()) == (-3.0, 3 + U)
    assert {negated.dtype, added.dtype} == {torch.float32}


# What the author wrote in place is left alone by autocast, and keeps the dtype of what it writes to.

Binary = Callable[[Tensor, Tensor], Tensor]
INDEX = torch.tensor([0, 1, 1, 2])


def low(function: Binary) -> nn.Module:
    """A function of a product, which autocast makes low, and of the FP32 input."""
    return seeded(lambda: Model(lambda m, x: function(m.product(x), x), product=nn.Linear(4, 4)))


def captured(function: Binary) -> Capture:
    return capture_of(low(function), normal(4, 4))


def dtypes(capture: Capture) -> dict[str, torch.dtype]:
    """Dtype of every floating value when the graph is run under plain autocast in FP16."""
    found: dict[str, torch.dtype] = {}

    def observe(node: fx.Node, value: object) -> None:
        if node.op != "output" and (tensor := tensors_in(value)[0]).is_floating_point():
            found[node.name] = tensor.dtype

    how = Policy(capture, "autocast", plain("fp16"), "fp16")
    interpreter = Executor(capture.graph_module, how, observe)
    with torch.no_grad():
        interpreter.run(*capture.bind(low(lambda y, _: y), ((normal(4, 4),), {})))
    return found


def last(capture: Capture) -> str:
    return capture.outputs[0]


def scattered_in_place(y: Tensor, x: Tensor) -> Tensor:
    sums = torch.zeros(4, 4)
    return sums.scatter_add_(0, INDEX[:, None].expand(-1, 4), y)


def assigned(y: Tensor, x: Tensor) -> Tensor:
    sums = torch.zeros(4, 4)
    sums[INDEX.flip(0)] = y
    return sums


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda y, x: y.exp(), torch.float32),  # on the list of what autocast raises
        (lambda y, x: y.exp_(), torch.float16),
        (lambda y, x: y.pow(2), torch.float32),
        (lambda y, x: y.pow_(2), torch.float16),
        (lambda y, x: y + x, torch.float32),  # promotes
        (lambda y, x: y.add_(x), torch.float16),
        (lambda y, x: x.clone().add_(y), torch.float32),
        (lambda y, x: y.relu_().mul_(x), torch.float16),
        # on the list of what autocast promotes
        (lambda y, x: torch.zeros(4, 4).scatter_add(0, INDEX[:, None].expand(-1, 4), y), torch.float32),
    ],
)
def test_the_dtype_of_a_result(function: Binary, expected: torch.dtype) -> None:
    capture = captured(function)
    assert capture.method == "run"
    found = dtypes(capture)
    assert found[last(capture)] is expected
    how = Policy(capture, "autocast", plain("fp16"), "fp16")
    resolved = resolve(how).dtypes
    names = {"fp16": torch.float16, "fp32": torch.float32}
    assert {name: names[resolved[name]] for name in found if resolved[name]} == found


@pytest.mark.parametrize("function", [scattered_in_place, assigned])
def test_two_dtypes_are_refused_in_place(function: Binary) -> None:
    capture = captured(function)
    assert capture.nodes[last(capture)].in_place
    with pytest.raises(UnsupportedInFormat, match="dtype"):
        dtypes(capture)
