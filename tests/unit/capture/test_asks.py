"""Every way by which Python gets to know the dtype of a tensor is noticed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from auditor.capture import literals
from auditor.capture.capture import capture
from auditor.capture.functional import shape_from
from auditor.capture.literals import translate
from auditor.capture.paths import usable
from auditor.records import Capture, Literals, Subject
from tests.support.capturing import Function
from tests.support.formats import ieee_format
from tests.support.subjects import capture_of, nodes_by_op, only

X = torch.tensor([[1.0, -1.0]])


class Asking(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + torch.finfo(x.dtype).resolution


ASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "dtype": lambda x: x + torch.finfo(x.dtype).resolution,
    "of a part": lambda x: x + torch.finfo(x[0].exp().dtype).resolution,
    "type": lambda x: x + (1e-3 if x.type() == "torch.HalfTensor" else 1e-6),
    "itemsize": lambda x: x + (1e-3 if x.itemsize == 2 else 1e-6),
    "element_size": lambda x: x + (1e-3 if x.element_size() == 2 else 1e-6),
    "in a function of autograd": lambda x: Asking.apply(x),
    "what it is with another": lambda x: x + torch.finfo(torch.result_type(x, 1.0)).resolution,
}


@pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS)
def test_a_number_that_follows_a_dtype_is_found(ask: Any) -> None:
    found = only(capture_of(Function(lambda x: ask(x).exp()), X), "add")
    assert found.literals["fp16"].arguments == {1: 1e-3}


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x.new_tensor([0.1, 0.2]) + x + 1e-6).exp(),
        lambda x: x + torch.tensor([0.1, 0.2], dtype=x.dtype),  # a dtype that no operation of the recording is given
    ],
)
def test_a_constant_in_the_dtype_of_another_tensor_is_found(function: Callable[[Tensor], Tensor]) -> None:
    found = capture_of(Function(function), X)
    assert any(place.made_in.get("fp16") is torch.float16 for place in found.placeholders)


# Which other batches a recorded path is good for: their own run decides.


def chosen(x: Tensor) -> Tensor:
    return x[x > 0] * 2


UP, HIGHER, DOWN = torch.ones(2, 2), torch.full((2, 2), 3.0), -torch.ones(2, 2)


@pytest.mark.parametrize(
    ("function", "fitting"),
    [
        (lambda x: x.exp() if float(x.sum()) > 0 else x.tanh(), [UP, HIGHER]),
        (lambda x: x * x.abs().max().item(), [UP, DOWN]),  # 3 would be another factor
        (lambda x: x + torch.tensor([float(len(row)) for row in x.tolist()]), [UP, HIGHER, DOWN]),
        (chosen, [UP, HIGHER]),
        (lambda x: torch.zeros_like(x).index_add_(0, torch.where(x[:, 0] > 0)[0], x[x[:, 0] > 0]), [UP, HIGHER]),
        (torch.exp, [UP, HIGHER, DOWN]),
    ],
)
def test_batches_on_the_path(function: object, fitting: list[Tensor]) -> None:
    model: nn.Module = Function(function).eval()
    batches = tuple(((x,), {}) for x in (UP, HIGHER, DOWN, torch.ones(3, 2)))
    subject = Subject(model, batches[:2], "toy", "toy.py", "toy", "toy", held_out=batches[2:])
    found = capture(subject)
    kept = usable(found, subject, batches)
    assert [batch[0][0] is x for batch, x in zip(kept, fitting, strict=True)] == [True] * len(fitting)
    assert found.method == ("run" if function is torch.exp else "path")


def test_a_branch_that_fails_is_another_path() -> None:
    def forward(x: Tensor) -> Tensor:
        if float(x.sum()) < 0:
            raise ValueError("not for these")
        return x.exp()

    batches = tuple(((x,), {}) for x in (UP, DOWN))
    subject = Subject(Function(forward).eval(), batches, "toy", "toy.py", "toy", "toy")
    assert usable(capture(subject), subject, batches) == [batches[0]]


# Literals that Python derived from a dtype, in the dtype of the run.


def arguments(found: Capture, fmt: str) -> dict[str, Any]:
    """{node: {argument: literal}} of those that change with the format."""
    return {name: node.literals[fmt].arguments for name, node in found.nodes.items() if fmt in node.literals}


def test_the_smallest_number_of_the_dtype() -> None:
    found = capture_of(Function(lambda x: x.masked_fill(x > 0, torch.finfo(x.dtype).min).softmax(-1)), X)
    name = only(found, "masked_fill").name
    assert arguments(found, "fp16") == {name: {2: -65504.0}}
    assert arguments(found, "bf16") == {name: {2: torch.finfo(torch.bfloat16).min}}


def test_epsilon_and_tiny() -> None:
    found = capture_of(
        Function(lambda x: x / (x.abs() + torch.finfo(x.dtype).eps).clamp(min=torch.finfo(x.dtype).tiny)), X
    )
    assert arguments(found, "fp16") == {
        only(found, "add").name: {1: 2.0**-10},
        only(found, "clamp").name: {1: 2.0**-14},
    }


def test_a_cast_back_to_the_dtype_of_the_input() -> None:
    found = capture_of(Function(lambda x: x.float().exp().to(x.dtype)), X)
    up, down = nodes_by_op(found, "to")
    assert arguments(found, "fp16") == {down.name: {1: torch.float16}}
    assert arguments(found, "bf16") == {down.name: {1: torch.bfloat16}}
    assert not up.literals


EPS = {torch.float32: 1e-8, torch.float16: 1e-4, torch.bfloat16: 1e-3}


@pytest.mark.parametrize(
    ("chosen", "fp16", "bf16"),
    [
        (lambda x: x.abs() + EPS[x.dtype], 1e-4, 1e-3),
        (lambda x: x.abs() + (1e-4 if x.dtype == torch.float16 else 1e-8), 1e-4, None),
        (lambda x: x.abs() + (1e-8 if x.itemsize > 2 else 1e-4), 1e-4, 1e-4),
        (lambda x: x - 1e9 if x.dtype != torch.float16 else x - 1e4, 1e4, None),
        (lambda x: x.abs() + (1e-3 if x.dtype != torch.float16 else 1e-2), 1e-2, None),
        (lambda x: x.clamp(max=88.0 if x.dtype != torch.float16 else 11.0).exp(), 11.0, None),
    ],
    ids=["table", "comparison", "size", "large", "less small", "limit of exp"],
)
def test_numbers_chosen_by_the_dtype(chosen: Callable[[Tensor], Tensor], fp16: float, bf16: float | None) -> None:
    found = capture_of(Function(chosen), X)
    assert found.compared
    for name, number in (("fp16", fp16), ("bf16", bf16)):
        assert [list(each.values()) for each in arguments(found, name).values()] == ([[number]] if number else [])


def test_ordinary_numbers_are_not_looked_up(monkeypatch: Any) -> None:
    def refused(*_: Any) -> None:
        raise AssertionError("recorded again")

    monkeypatch.setattr(literals, "record", refused)
    asked = Function(lambda x: torch.pow(x * 0.044715, 3) / 8.0 if x.dtype.is_floating_point else x)
    assert not capture_of(asked, X).compared


E6M9 = ieee_format("e6m9", 6, 9)
LARGEST = (2 - 2.0**-9) * 2.0**31


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (65504.0, LARGEST),
        (-65504.0, -LARGEST),
        (2.0**-14, 2.0**-30),  # the smallest normal numbers: 1 less the bias, 15 and 31
        (2.0**-10, 2.0**-9),  # epsilon
        (1e-3, 1e-2),  # decimal digits: 10 and 9 bits are 3.01 and 2.7 of them
        (1 - 2.0**-10, 1 - 2.0**-9),
    ],
)
def test_limits_of_fp16_become_those_of_the_format(ours: float, theirs: float) -> None:
    assert translate(Literals({1: ours}), E6M9).arguments == {1: theirs}


def test_other_values_stay_as_the_fp32_model_has_them() -> None:
    assert translate(Literals({"value": 0.125}), E6M9).arguments == {}


def test_its_dtype_becomes_the_format() -> None:
    found = translate(Literals({"dtype": torch.float16}, torch.float16), E6M9)
    assert (found.arguments, found.result) == ({"dtype": E6M9}, E6M9)
    assert translate(Literals({}, torch.float32), E6M9).result is torch.float32


# Casts the author wrote stay in the graph, and take nobody else's readers.


@pytest.mark.parametrize(
    "cast",
    [
        lambda x, y: x.to(torch.float32),
        lambda x, y: x.to(dtype=torch.float32),
        lambda x, y: x.to("cpu", torch.float32),
        lambda x, y: x.to(y),
        lambda x, y: x.type_as(y),
        lambda x, y: x.type(torch.float32),
    ],
    ids=["dtype", "keyword", "device", "other", "type_as", "type"],
)
def test_every_way_to_write_a_cast(cast: Any) -> None:
    found = capture_of(Function(lambda x, y: cast(x, y).exp() + y), torch.ones(2), torch.ones(2))
    assert only(found, "exp").inputs == (only(found, "to").name,)


def test_a_cast_down_stays_and_computes_low() -> None:
    found = capture_of(Function(lambda x: x.half().exp().float()), torch.ones(2))
    assert [node.dtype for node in nodes_by_op(found, "to")] == ["float16", "float32"]
    assert only(found, "exp").dtype == "float16"


def residual(x: Tensor) -> Tensor:
    """An RMSNorm that raises its input, and a residual that does not."""
    y = x * 2
    raised = y.float()
    normed = raised * raised.pow(2).mean(-1, keepdim=True).rsqrt()
    return y + normed.to(y.dtype)


def test_the_residual_still_reads_the_value_and_not_its_cast() -> None:
    found = capture_of(Function(residual), torch.ones(2, 3))
    product, casts = nodes_by_op(found, "mul")[0].name, [node.name for node in nodes_by_op(found, "to")]
    add = only(found, "add")
    assert product in add.inputs
    assert casts[0] not in add.inputs
    assert only(found, "pow").inputs == (casts[0],)


@pytest.mark.parametrize("move", [lambda x: x.to(x.device), lambda x: x.to("cpu"), lambda x: x.cpu()])
def test_a_move_to_where_a_value_is_already_is_no_cast(move: Any) -> None:
    """Nobody wrote the dtype that torch hands on, so nothing has to be looked up in low runs."""
    found = capture_of(Function(lambda x: move(x).exp() + 1.0), torch.ones(2))
    assert not nodes_by_op(found, "to")
    assert not found.compared


def test_a_copy_in_place_is_no_move() -> None:
    def copied(x: Tensor) -> Tensor:
        y = (x + 1).to("cpu", copy=True)
        y += 1
        return y * x

    assert len(nodes_by_op(capture_of(Function(copied), torch.ones(2)), "to")) == 1


# Operations whose results take their shape from values: which argument's, if any.

aten = torch.ops.aten
ONES, MASK, COUNTS = torch.ones(2, 2), torch.tensor([True, False]), torch.tensor([1, 2])


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.add.Tensor, (ONES, ONES)),
        (aten.where.self, (MASK, ONES, ONES)),
        (aten.index.Tensor, (ONES, [COUNTS])),  # as many entries as there are indices
        (aten.index_put_.default, (ONES, [MASK], torch.tensor(3.0))),  # one number fits any choice
        (aten.one_hot.default, (COUNTS, 5)),
        (aten.repeat_interleave.self_int, (ONES, 2)),
        (aten.masked_fill.Scalar, (ONES, MASK, 0.0)),
    ],
)
def test_shapes_that_are_given(op: Any, args: tuple[Any, ...]) -> None:
    assert shape_from(op, args) == []
