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
from tests.support.subjects import capture_of, normal, seeded


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


def test_an_answer_that_rounding_does_not_explain_is_refused() -> None:
    model, batch = seeded(lambda: nn.Linear(8, 8)), ((normal(4, 8),), {})
    found, subject, answer = taken(model, batch), from_object(model, batch[0]), [model(*batch[0]).detach()]
    _check_repeats(found, subject, batch, answer)
    for other in ([answer[0] * (1 + 2 * REPEATS)], []):
        with pytest.raises(CaptureError, match="answers differently"):
            _check_repeats(found, subject, batch, other)
