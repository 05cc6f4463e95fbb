"""The graph of a run: it binds, computes what the model computes, and names its outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from auditor.capture.capture import REPEATS, _check_repeats
from auditor.errors import CaptureError
from auditor.isolation.outputs import tensor_outputs
from auditor.loading import from_object
from auditor.records import Batch, Capture
from tests.support.capturing import Function
from tests.support.subjects import capture_of, normal, only, seeded


def taken(model: nn.Module, batch: Batch) -> Capture:
    args, kwargs = batch
    return capture_of(model, *args, **kwargs)


def assert_computes(found: Capture, model: nn.Module, batch: Batch) -> None:
    with torch.no_grad():
        actual = tensor_outputs(fx.Interpreter(found.graph_module).run(*found.bind(model, batch)))
        expected = tensor_outputs(model(*batch[0], **batch[1]))
    assert len(actual) == len(expected) == len(found.outputs)
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)


class Keywords(nn.Module):
    """Asymmetric in everything it takes, so that a swap of two inputs shows."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(2, 2)
        self.register_buffer("shift", torch.tensor([1.0, 2.0]))
        self.register_buffer("unsaved", torch.tensor(3.0), persistent=False)
        self.table = torch.tensor([5.0, 7.0])

    def forward(self, x: Tensor, y: Tensor, *, low: Tensor, high: Tensor) -> dict[str, Any]:
        z = self.lin(x) - y / self.shift * self.unsaved + self.table
        return {"z": z, "rest": [low - 2 * high, (z.argmax(-1), None)]}


def keywords_batch(seed: int, *, swapped: bool = False) -> Batch:
    kwargs = {"high": normal(2, seed=seed + 1), "low": normal(2, seed=seed + 2)}
    if swapped:
        kwargs = dict(reversed(kwargs.items()))
    return (normal(3, 2, seed=seed + 3), normal(3, 2, seed=seed + 4)), kwargs


def test_bound_inputs_reach_their_own_places() -> None:
    model = seeded(Keywords)
    found = taken(model, keywords_batch(0))
    assert_computes(found, model, keywords_batch(0))
    assert_computes(found, model, keywords_batch(10))
    assert_computes(found, model, keywords_batch(10, swapped=True))  # the order of keywords means nothing


def test_placeholders_know_what_they_are() -> None:
    found = taken(seeded(Keywords), keywords_batch(0))
    kinds = {p.fqn: p.kind for p in found.placeholders if p.kind != "constant" and p.fqn}
    assert kinds == {"lin.weight": "parameter", "lin.bias": "parameter", "shift": "buffer", "unsaved": "buffer"}
    assert sum(p.kind == "input" for p in found.placeholders) == 4


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.lin(x)
        y += 1
        y.relu_().mul_(2)
        y[:, 0] = 0
        return y + x


def test_in_place_operations_compute_the_same_twice() -> None:
    model, x = seeded(InPlace), normal(2, 3)
    found = taken(model, ((x,), {}))
    kept = x.clone()
    assert_computes(found, model, ((x,), {}))
    assert_computes(found, model, ((x,), {}))
    assert torch.equal(x, kept)


class Counting(nn.Module):
    """Writes to a buffer in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


def test_what_the_forward_writes_to_a_buffer_is_no_output() -> None:
    model = Counting()
    found = taken(model, ((torch.ones(2),), {}))
    assert model.calls == 0
    with torch.no_grad():
        results = tensor_outputs(fx.Interpreter(found.graph_module).run(*found.bind(model, ((torch.ones(2),), {}))))
    assert [found.nodes[name].op for name in found.outputs] == ["aten.mul.Tensor"]
    assert [result.tolist() for result in results] == [[1.0, 1.0]]  # 1 * (0 + 1)


class Branching(nn.Module):
    """Takes `up` or `down` by the sign of a value."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor, scale: float = 2.0) -> Tensor:
        y = x * scale
        if float(y.sum()) > 0:
            return self.up(y).exp()
        return self.down(y).tanh()


@pytest.mark.parametrize(
    ("x", "owner", "operation"), [(torch.ones(1, 2), "up", "exp"), (-torch.ones(1, 2), "down", "tanh")]
)
def test_the_path_is_the_one_taken(x: Tensor, owner: str, operation: str) -> None:
    model = seeded(Branching)
    found = capture_of(model, x, scale=3.0)
    assert found.method == "path"
    assert [node.op.split(".")[1] for node in found.nodes.values()] == ["mul", "linear", operation]
    assert only(found, "linear").owner == owner
    assert only(found, operation).source is not None
    assert "the path these inputs take" in found.warnings[0]
    assert_computes(found, model, ((x,), {"scale": 3.0}))


def test_a_model_that_cannot_run_is_refused_with_its_own_reason() -> None:
    def broken(x: Tensor) -> Tensor:
        raise ValueError("no such luck")

    with pytest.raises(CaptureError, match="no such luck") as caught:
        capture_of(Function(broken), torch.ones(2))
    assert caught.value.slug == "capture-failed"


def test_capture_leaves_the_model_alone() -> None:
    model = seeded(Keywords)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    hooks = [len(module._forward_hooks) for module in model.modules()]
    args, kwargs = keywords_batch(0)
    capture_of(model, *args, **kwargs)
    assert [len(module._forward_hooks) for module in model.modules()] == hooks
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_an_answer_that_rounding_does_not_explain_is_refused() -> None:
    model, batch = seeded(lambda: nn.Linear(8, 8)), ((normal(4, 8),), {})
    found, subject, answer = taken(model, batch), from_object(model, batch[0]), [model(*batch[0]).detach()]
    _check_repeats(found, subject, batch, answer)
    for other in ([answer[0] * (1 + 2 * REPEATS)], []):
        with pytest.raises(CaptureError, match="answers differently"):
            _check_repeats(found, subject, batch, other)
