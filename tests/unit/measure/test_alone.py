"""One operation alone, one format node after node, and the FP32 run that both are held against."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from auditor.execution.execute import Executor
from auditor.measure.alone import InFormat, Trace, rounder
from auditor.measure.measure import Measurement
from auditor.measure.reference import Back, Reference
from auditor.numerics.entries import entries, is_number
from auditor.numerics.histogram import Profile
from auditor.records import Capture, NodeError
from tests.support.capturing import Function
from tests.support.replaying import Model
from tests.support.subjects import capture_of, measurement_of, only, seeded


def masked(x: Tensor) -> Tensor:
    return x.masked_fill(x > 0, torch.finfo(x.dtype).min).softmax(-1)


def test_what_marks_a_mask_becomes_what_the_model_would_write_in_the_format() -> None:
    lowest = torch.finfo(torch.float32).min
    rounds = rounder(capture_of(Function(masked), torch.tensor([[1.0, -1.0]])), "fp16")
    # FP32's lowest number rounds to -inf in FP16, but Python would have written FP16's own lowest
    assert rounds(torch.tensor([lowest, 0.5])).tolist() == [-65504.0, 0.5]
    # a number next to it is no mark
    beside = math.nextafter(lowest, 0) * (1 - 2**-23)
    assert rounds(torch.tensor([beside])).tolist() == [-math.inf]


U = 2.0**-7
"""Spacing of BF16 above 1."""


def trace(function: object, *inputs: Tensor, packet: str, fmt: str = "bf16") -> Trace:
    return trace_in(measurement_of(Function(function), *inputs), packet, fmt)


def trace_in(measured: Measurement, packet: str, fmt: str = "bf16") -> Trace:
    return measured.traces[only(measured.capture, packet).name][fmt]


def errors(measured: Measurement, packet: str) -> dict[str, list[float]]:
    """In BF16, of the first tensor of a node, those that a run tells."""
    node = measured.nodes[only(measured.capture, packet).name]
    found = measured.alone["bf16"].errors(node, trace_in(measured, packet), 0)
    return {kind: error.reshape(-1).tolist() for kind, error in found}


def test_a_view_adds_nothing_and_carries_the_rounding_of_what_it_views() -> None:
    found = trace(lambda x: (x * 1.0).view(2, 1), torch.tensor([1.0, 1 + U / 4]), packet="view")
    assert (found.isolated, found.own) == ("rounding", "none")


@pytest.mark.parametrize(
    ("packet", "move"),
    [
        ("cat", lambda x: torch.cat([x, x])),
        ("flip", lambda x: x.flip(0)),
        ("roll", lambda x: x.roll(1, 0)),
        ("gather", lambda x: x.gather(0, torch.tensor([1, 1]))),
    ],
)
def test_what_moves_entries_is_rounded_and_no_more(packet: str, move: object) -> None:
    found = trace(lambda x: move(x * 1.0), torch.tensor([1 + U / 4, 3.0]), packet=packet)
    assert (found.isolated, found.own) == ("rounding", "none")


def test_an_operation_that_rounds_its_result_once() -> None:
    # 1.5 (1 + U) = 1.5 + 1.5 U lies between 1.5 + U and 1.5 + 2 U, a tie that goes to the even 1.5 + 2 U: off by U / 2
    measured = measurement_of(Function(lambda x: x * 1.5), torch.tensor([1 + U]))
    assert trace_in(measured, "mul").own == "rounding"
    assert errors(measured, "mul") == {"isolated": [U / 2]}


def test_an_exact_operation_on_rounded_inputs() -> None:
    # x = 1 + U / 4 is rounded to 1, and twice that is exact: all of the error comes in from outside;
    # 2 + U / 2 rounds to 2 as well: rounding the result is all that happens
    assert trace(lambda x: x + x, torch.tensor([1 + U / 4]), packet="add") == Trace("rounding", "none")
    # 1 + 0.75 U goes to 1 + U: of the difference 0.75 U is right and U is left, which BF16 holds
    measured = measurement_of(Function(lambda x: x - 1.0), torch.tensor([1 + 0.75 * U]))
    assert trace_in(measured, "sub").own == "none"
    assert errors(measured, "sub") == {"isolated": [0.25 * U]}


def test_what_rounds_more_than_once_is_held_against_the_exact_result() -> None:
    x = torch.cat([torch.ones(1), torch.full((64,), U / 4)])  # each sum rounds back to 1
    measured = measurement_of(Function(lambda x: x.cumsum(0)), x)
    found = errors(measured, "cumsum")
    assert trace_in(measured, "cumsum") == Trace("run", "run")
    assert found["own"][-1] == pytest.approx(found["isolated"][-1])
    assert found["own"][-1] < -U


# One format, node after node: errors alone and in the low run, where they are born, and what attribution is handed.

Found = tuple[dict[str, NodeError], dict[str, Trace]]


def measured(function: Any, x: Tensor, fmt: str) -> Found:
    """Every node of a function, right after the reference has run it."""
    captured = capture_of(Function(function), x)
    values: dict[str, Any] = {}
    profiles: dict[Any, Profile] = {}
    told: dict[str, tuple[NodeError, Trace]] = {}
    found = InFormat(captured, fmt, values, profiles, ())

    def observe(n: Any, value: Any) -> None:
        values[n.name] = value
        if isinstance(value, Tensor) and is_number(value):
            profiles[n] = Profile(entries(value))
        if n.op == "call_function":
            told[n.name] = found.measure(n)

    Executor(captured.graph_module, observer=observe).run(x)
    return {name: error for name, (error, _) in told.items()}, {name: trace for name, (_, trace) in told.items()}


def test_alone_on_rounded_inputs_and_in_the_run_that_is_low_from_the_start() -> None:
    x = torch.tensor([1 + 3 * 2.0**-9])  # see X
    errors, _ = measured(lambda x: (x * 3).neg(), x, "bf16")
    exact = 3 * x.item()
    assert errors["mul"].local_error == pytest.approx((3 + 2.0**-5 - exact) / exact)
    assert errors["neg"].local_error == pytest.approx((exact - 3 - 2.0**-6) / exact)
    assert errors["neg"].propagated_error == errors["mul"].propagated_error == errors["mul"].local_error


def test_an_overflow_is_born_once() -> None:
    errors, traces = measured(lambda x: (x * x) - 1, torch.tensor([300.0, 2.0]), "fp16")
    assert (errors["mul"].overflow, errors["mul"].cause, errors["mul"].born) == (1, "overflow", True)
    assert traces["mul"].broken
    assert (errors["sub"].overflow, errors["sub"].born) == (1, False)  # 90000 is beyond FP16 on its way in


def test_a_comparison_that_turns_is_told_by_its_share() -> None:
    x = torch.tensor([1 + 2.0**-12, 1.0])
    errors, traces = measured(lambda x: x * 1 > 1, x, "fp16")
    assert errors["gt"] == NodeError(disagreement=0.5, cause="discrete", born=True)
    assert traces["gt"].broken


def test_where_something_decides_by_a_result_is_told() -> None:
    x = torch.tensor([1.1])
    _, plain = measured(lambda x: (x * 3).exp(), x, "fp16")
    _, near = measured(lambda x: (x * 3) > 1, x, "fp16")
    assert (plain["mul"].near, near["mul"].near) == (False, True)
    assert not near["mul"].broken


def test_what_cannot_run_says_why_and_where_it_begins() -> None:
    errors, _ = measured(lambda x: torch.linalg.cholesky(x).exp(), 4 * torch.eye(2), "fp16")
    name = next(iter(errors))
    assert errors[name].cause == "unsupported"
    assert errors[name].born
    assert "CUDA" in str(errors[name].unsupported)
    assert errors["exp"].unsupported is None


X = torch.tensor([1 + 3 * 2.0**-9])
"""In BF16 1 + 2^-7. Three times that is 3 + 1.5 * 2^-6, rounded to even 3 + 2^-5; of X itself, it is nearest 3 + 2^-6."""


def low_run(captured: Capture, fmt: str, x: Tensor) -> tuple[InFormat, dict[str, fx.Node]]:
    """What runs a graph low from the start, all of its reference being known, and the nodes."""
    values: dict[str, Any] = {}
    Executor(captured.graph_module, observer=lambda n, value: values.update({n.name: value})).run(x)
    nodes = {node.name: node for node in captured.graph_module.graph.nodes}
    return InFormat(captured, fmt, values, {}, ()), nodes


def test_reference_values_are_rounded_and_low_values_go_on() -> None:
    low, nodes = low_run(capture_of(Function(lambda x: (x * 3).neg()), X), "bf16", X)
    x = low.value_of(nodes["mul"].all_input_nodes[0])
    assert (x.item(), x.dtype) == (1 + 2.0**-7, torch.bfloat16)
    low.advance(nodes["mul"])
    low.advance(nodes["neg"])
    assert low.low_value(nodes["mul"]).item() == 3 + 2.0**-6  # what enters the other
    assert low.env[nodes["mul"]].item() == -low.env[nodes["neg"]].item() == 3 + 2.0**-5
    assert low.pure


def test_where_an_operation_cannot_run_the_low_run_goes_on_from_the_reference() -> None:
    matrix = torch.tensor([[4.0, 0.0], [0.0, 9.0]])
    captured = capture_of(Function(torch.linalg.cholesky), matrix)
    low, nodes = low_run(captured, "fp16", matrix)
    name = next(iter(captured.nodes))
    low.advance(nodes[name])
    assert torch.equal(low.env[nodes[name]], torch.tensor([[2.0, 0.0], [0.0, 3.0]]).half())
    assert not low.pure


# The FP32 run under autograd: the model's own answer, and a gradient at every value, each worked out by hand.


@dataclass
class ReferenceFound:
    """The run, and every value in it."""

    run: Reference
    kept: dict[str, Any]


def run(model: nn.Module, *inputs: Tensor, back: Back = "trusted") -> ReferenceFound:
    captured, found = capture_of(model, *inputs), ReferenceFound(Reference(back), {})
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in captured.bind(model, (inputs, {}))]
    for n, value in Executor(captured.graph_module, found.run).steps(*leaves):
        found.kept[n.name] = value
        if isinstance(value, Tensor) and value.requires_grad:
            value.retain_grad()
    return found


def test_every_value_has_the_gradient_of_its_readers() -> None:
    found = run(Function(lambda x: (x * 3.0).square()), torch.tensor([2.0]))
    found.kept["square"].sum().backward()
    assert found.kept["square"].item() == 36.0
    assert found.kept["mul"].grad.item() == 12.0  # d y^2 / dy at 6
    assert found.kept["square"].grad.item() == 1.0


def test_a_value_that_depends_on_no_input_has_a_gradient_too() -> None:
    found = run(Function(lambda x: x * torch.arange(2.0)), torch.tensor([5.0, 7.0]))
    assert len(found.run.anchors) == 1
    found.kept["mul"].sum().backward()
    assert found.kept["arange"].grad.tolist() == [5.0, 7.0]


def test_detached_values_are_followed() -> None:
    # The gradient ends at `detach`, the error does not.
    found = run(Function(lambda x: (x * 2.0).detach() * 3.0), torch.tensor([1.0]))
    found.kept["mul_1"].sum().backward()
    assert found.kept["mul"].grad.item() == 3.0


def test_an_operation_that_returns_its_input_gets_a_gradient_of_its_own() -> None:
    # The cast changes nothing; what it hands on is 5 of the 5 + 7 that the product gets.
    found = run(Function(lambda x: (y := x * 1.0, y.float() * 5.0 + y * 7.0)[1]), torch.tensor([1.0]))
    (cast,) = (name for name in found.kept if name.startswith("to"))
    found.kept["add"].sum().backward()
    assert found.kept[cast].grad.item() == 5.0
    assert found.kept["mul"].grad.item() == 12.0


def test_products_read_shared_values_under_names_of_their_own() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = x.tanh()
        return m.a(y) + m.b(y)

    model = seeded(lambda: Model(forward, a=nn.Linear(2, 2, bias=False), b=nn.Linear(2, 2, bias=False)))
    found = run(model, torch.ones(1, 2))
    first, second = found.run.readings["linear"]["tanh"], found.run.readings["linear_1"]["tanh"]
    first.retain_grad()
    second.retain_grad()
    found.kept["add"].sum().backward()
    # the gradient at each reading is that through its own weight: its column sums
    assert torch.equal(first.grad, model.a.weight.detach().sum(0, keepdim=True))
    assert torch.equal(second.grad, model.b.weight.detach().sum(0, keepdim=True))
    assert torch.equal(found.kept["tanh"].grad, first.grad + second.grad)


def test_what_is_read_by_one_product_alone_needs_no_other_name() -> None:
    found = run(nn.Linear(2, 2), torch.ones(1, 2))
    assert set(found.run.readings["linear"].values()) == {None}
    both = run(Function(lambda x: x @ x.t()), torch.ones(2, 2))
    assert both.run.readings == {}  # two views of one value err together
