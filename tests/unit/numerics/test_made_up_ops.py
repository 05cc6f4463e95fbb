"""An operation that nobody has heard of: with one row it is a product, or a view, wherever that matters."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from auditor.measure.alone import Alone
from auditor.numerics.kernels import run_op
from auditor.numerics.nodes import source, viewed
from auditor.numerics.operations import rows_added
from auditor.numerics.products import is_product, is_tensor_core
from auditor.plan.costs import costs_of
from tests.capturing import Captured, captured
from tests.subjects import normal

ROWS = {
    "made_up.scores": {"product": True, "flops": "product", "gemm": "product"},
    "made_up.turned": {"entries": "turned", "view": "always"},
}


@pytest.fixture(scope="module", autouse=True)
def library() -> Iterator[None]:
    """made_up.scores(x, y) = x @ y, and made_up.turned(x) = x transposed."""
    made_up = torch.library.Library("made_up", "DEF")
    made_up.define("scores(Tensor self, Tensor other) -> Tensor")
    made_up.define("turned(Tensor(a) self) -> Tensor(a)")
    made_up.impl("scores", lambda x, y: x @ y, "CompositeImplicitAutograd")
    made_up.impl("turned", lambda x: x.t(), "CompositeImplicitAutograd")
    yield
    made_up._destroy()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(normal(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        made_up = torch.ops.made_up
        return made_up.turned(made_up.scores(x.exp(), self.weight)).relu()


def model() -> Captured:
    return captured(Model(), normal(16, 8, seed=1))


def test_without_rows_they_are_nothing_in_particular() -> None:
    toy = model()
    assert not is_tensor_core(torch.ops.made_up.scores.default)
    cost = costs_of(toy.capture)
    assert (cost["scores"].flops, cost["turned"].free) == (0, False)
    assert (toy.facts["scores"].gemm_k, toy.facts["scores"].is_first_layer) == (None, False)


def test_a_product_costs_what_it_multiplies() -> None:
    with rows_added(ROWS):
        assert costs_of(model().capture)["scores"].flops == 2 * 16 * 4 * 8


def test_a_product_sums_in_float32() -> None:
    # 2048 + 1 = 2048 in fp16, a hundred times over; in float32 the sum is 2148
    long = torch.cat([torch.tensor([2048.0]), torch.ones(100)]).half()
    target, args = torch.ops.made_up.scores.default, (long[None], torch.ones(101, 1).half())
    with rows_added(ROWS):
        assert is_product(target)
        result = run_op(target, args, {})
    assert (float(result), result.dtype) == (2148.0, torch.float16)


def test_a_product_refuses_mixed_dtypes() -> None:
    target = torch.ops.made_up.scores.default
    with rows_added(ROWS), pytest.raises(RuntimeError, match="scores got float16 and float32 together"):
        run_op(target, (torch.ones(2, 2).half(), torch.ones(2, 2)), {})


def test_a_product_is_a_layer_with_dimensions() -> None:
    with rows_added(ROWS):
        fact = model().facts["scores"]
    assert (fact.gemm_m, fact.gemm_n, fact.gemm_k) == (16, 4, 8)
    assert fact.is_first_layer
    assert fact.is_last_layer


def test_a_view_is_free_and_transparent() -> None:
    with rows_added(ROWS):
        toy = model()
        nodes = {node.name: node for node in toy.capture.graph_module.graph.nodes}
        assert costs_of(toy.capture)["turned"].free
        assert viewed(nodes["turned"]) is nodes["scores"]
        assert source(nodes["turned"]) is nodes["scores"]
        assert toy.facts["scores"].consumers == ("aten.relu.default",)


def test_a_view_adds_no_error() -> None:
    with rows_added(ROWS):
        capture = model().capture
        nodes = {node.name: node for node in capture.graph_module.graph.nodes}
        ran = Alone(capture, "fp16", {}).run(nodes["turned"], ((normal(3, 4).half(),), {}))
    assert (ran.exact, ran.unsupported) == (None, None)
