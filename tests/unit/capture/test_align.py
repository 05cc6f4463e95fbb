"""Which operation of one run is which of another: by module, operation and line, in order."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import auditor
from auditor.capture.builder import named_inputs
from auditor.capture.paths import align, same_operations
from auditor.capture.record import record
from tests.support.capturing import Function
from tests.support.replaying import Model, kinds, replayed
from tests.support.subjects import capture_of, nodes_by_op, only, seeded


def net(turns: int = 2) -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        for _ in range(turns):
            x = m.layer(x).tanh()
        return m.norm(x) + x.tanh()

    return Model(forward, layer=nn.Linear(2, 2), norm=nn.BatchNorm1d(2))


def test_turns_of_one_line_are_counted() -> None:
    ours, theirs = (capture_of(seeded(partial(net, turns)), torch.ones(3, 2)) for turns in (2, 3))
    same = same_operations(ours, theirs)
    assert same.keys() == ours.nodes.keys()
    assert same["tanh_2"] == "tanh_3"  # on another line
    assert {same["tanh"], same["tanh_1"]} < {"tanh", "tanh_1", "tanh_2"}


def test_a_batch_norm_is_the_same_in_training_and_out_of_it() -> None:
    model, x = seeded(net), torch.randn(3, 2, generator=torch.Generator().manual_seed(0))
    evaluated = capture_of(model, x)
    model.norm.train()
    model.eval = lambda: model
    trained = capture_of(model, x)
    same = same_operations(evaluated, trained)
    assert same.keys() == evaluated.nodes.keys()
    assert "batch_norm" in trained.nodes[same["batch_norm"]].op


def test_what_one_run_does_beside_is_left_out() -> None:
    ours = [("a", "exp", 1), ("a", "add", 2), ("b", "exp", 3), ("c", "exp", 4)]
    theirs = [("b", "exp", 30), ("a", "exp", 10), ("a", "to", 11), ("a", "add", 20)]
    assert dict(align(ours, theirs)) == {1: 10, 2: 20, 3: 30}


# What a recording is run on, and what it calls each of its inputs.


def test_one_tensor_in_two_places_is_one_input() -> None:
    x, y = torch.ones(2), torch.zeros(2)
    function = Function(lambda first, second, third: (first + second[0]) * third)
    assert kinds(replayed(function, x, [x], y)) == ["input", "input"]


def test_names_where_the_call_does_not_fit() -> None:
    x, y = torch.ones(1), torch.ones(2)
    assert named_inputs(nn.Tanh(), ((x, y), {})) == {id(x): "input_0", id(y): "input_1"}


# One run written down: what it answers, who runs its operations, what is marked beside them.


def test_a_run_of_modules_asks_for_no_dtype_by_itself() -> None:
    recording, _ = record(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), ((torch.ones(1, 2),), {}))
    assert not recording.asked
    assert recording.returned == {"linear": ["0#1"], "relu": ["1#2"]}


# Operations on none of autocast's lists, whose kernels call products that are on them.

X = torch.randn(3, 3, generator=torch.Generator().manual_seed(0))
PLACES = torch.randn(2, 2, 3, generator=torch.Generator().manual_seed(1))

CALLS: dict[str, Callable[[], Tensor]] = {
    "affine_grid": lambda: F.affine_grid(PLACES, [2, 1, 4, 5], align_corners=False),
    "affine_grid of volumes": lambda: F.affine_grid(torch.eye(3, 4)[None], [1, 1, 2, 4, 5], align_corners=True),
    "cov": lambda: torch.cov(X),
    "corrcoef": lambda: torch.corrcoef(X),
    "matrix_power": lambda: torch.matrix_power(X, 3),
    "linalg.matrix_power": lambda: torch.linalg.matrix_power(X, 5),
    "linalg.pinv": lambda: torch.linalg.pinv(X),
}


@pytest.mark.parametrize("name", CALLS)
def test_autocast_lowers_the_products_inside(name: str) -> None:
    """The CPU's own autocast does: these products are on its list, too."""
    call = CALLS[name]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        natively = call()
    with auditor.emulate(), torch.autocast("cpu", dtype=torch.bfloat16):
        emulated = call()
    assert emulated.dtype is natively.dtype is torch.bfloat16
    scale = float(natively.float().abs().max())
    assert torch.allclose(emulated.float(), natively.float(), rtol=1e-2, atol=1e-2 * scale)


# Owners and source lines of toy models whose structure is written beside them.


def inner() -> nn.Module:
    return Model(lambda m, x: m.lin(x).sigmoid(), lin=nn.Linear(3, 3))


def test_owners_through_containers_and_shared_modules() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.first(x) + m.again(x)
        for block in m.blocks:
            x = block(x)
        return m.heads["a"](x).exp()

    first, blocks = inner(), nn.ModuleList([inner(), nn.Sequential(inner(), nn.Tanh())])
    model = Model(forward, first=first, again=first, blocks=blocks, heads=nn.ModuleDict({"a": nn.Linear(3, 2)}))
    found = capture_of(model, torch.ones(2, 3))
    owners = [(node.op.split(".")[1], node.owner, node.owner_type) for node in found.nodes.values()]
    assert owners == [
        ("linear", "first.lin", "Linear"),
        ("sigmoid", "first", "Model"),
        ("linear", "first.lin", "Linear"),  # `again` is `first`: one module, one name
        ("sigmoid", "first", "Model"),
        ("add", "", "Model"),
        ("linear", "blocks.0.lin", "Linear"),
        ("sigmoid", "blocks.0", "Model"),
        ("linear", "blocks.1.0.lin", "Linear"),
        ("sigmoid", "blocks.1.0", "Model"),
        ("tanh", "blocks.1.1", "Tanh"),
        ("linear", "heads.a", "Linear"),
        ("exp", "", "Model"),
    ]


def test_inputs_are_named_once_and_in_order() -> None:
    found = capture_of(Function(lambda x, y: (x - y) * (x - y).exp()), torch.ones(2), torch.ones(2))
    assert only(found, "mul").inputs == ("sub", "exp")
    assert nodes_by_op(found, "sub")[0].inputs == ("inputs_0", "inputs_1")
    assert only(capture_of(Function(lambda x: x * x), torch.ones(2)), "mul").inputs == ("inputs_0",)
