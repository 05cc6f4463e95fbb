"""One node at a time under a policy: what autocast hands to it, what a scope's boundary hands to it, and refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from auditor.execution.execute import Executor, low_literals, with_literals
from auditor.execution.policy import Policy, plain
from auditor.numerics.kernels import UnsupportedInFormat
from auditor.records import Capture, Literals
from tests.support.capturing import Function
from tests.support.subjects import capture_of, normal, only, seeded

HALF, FLOAT = torch.ones(2).half(), torch.ones(2)


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


class TwoScopes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).relu()


@pytest.mark.parametrize(
    ("strategy", "labels", "expected"),
    [
        ("cast", {"": "fp16", "first": "fp16", "second": "fp16"}, ["float16", "float16", "float16"]),
        ("cast", {"": "fp16", "first": "fp16", "second": "fp32"}, ["float16", "float32", "float16"]),
        ("cast", {"": "fp16", "first": "fp32", "second": "fp16"}, ["float32", "float16", "float16"]),
        ("autocast", {"": "fp16", "first": "fp16", "second": "fp16"}, ["float16", "float32", "float32"]),
        ("autocast", {"": "fp16", "first": "fp32", "second": "fp16"}, ["float32", "float32", "float32"]),
        ("autocast", {"": "fp32", "first": "fp32", "second": "fp32"}, ["float32", "float32", "float32"]),
    ],
)
def test_scopes_by_hand(strategy: str, labels: dict[str, str], expected: list[str]) -> None:
    model, x = seeded(TwoScopes), normal(2, 4)
    capture = capture_of(model, x)
    how = Policy(capture, strategy, labels.__getitem__, "fp16")
    seen = run(capture, how, model, x)
    assert [str(seen[op].dtype) for op in ("linear", "layer_norm", "relu")] == [f"torch.{name}" for name in expected]


def test_the_numbers_are_those_of_the_format() -> None:
    model, x = seeded(TwoScopes), normal(2, 4)
    capture = capture_of(model, x)
    seen = run(capture, Policy(capture, "autocast", plain("bf16"), "bf16"), model, x)
    linear = model.first
    expected = (x.bfloat16().float() @ linear.weight.bfloat16().float().t() + linear.bias.bfloat16().float()).bfloat16()
    assert torch.equal(seen["linear"], expected)


def test_the_authors_region_wins() -> None:
    def protected(x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return x.float() @ x.float()

    capture = capture_of(Function(protected), normal(4, 4))
    seen = run(capture, Policy(capture, "autocast", plain("fp16"), "fp16"), nn.Module(), normal(4, 4))
    assert seen["matmul"].dtype is torch.float32


def test_a_refusal_names_the_place() -> None:
    model = nn.Sequential(Function(lambda x: torch.linalg.cholesky(x * 1.0)))
    capture = capture_of(model, torch.eye(3))
    how = Policy(capture, "cast", lambda owner: "fp16", "fp16")
    with pytest.raises(UnsupportedInFormat) as caught:
        run(capture, how, model, torch.eye(3))
    node = only(capture, "linalg_cholesky")
    assert caught.value.owner == "0"
    assert str(caught.value).splitlines()[0] == f"linalg_cholesky has no float16 kernel on CUDA in 0 ({node.source})"
