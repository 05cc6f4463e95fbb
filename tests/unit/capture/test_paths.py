"""Which other batches a recorded path is good for: their own run decides."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from auditor.capture.capture import capture
from auditor.capture.paths import usable
from auditor.records import Subject
from tests.support.capturing import Function


def branching(x: Tensor) -> Tensor:
    return x.exp() if float(x.sum()) > 0 else x.tanh()


def scaled(x: Tensor) -> Tensor:
    return x * x.abs().max().item()


def listed(x: Tensor) -> Tensor:
    return x + torch.tensor([float(len(row)) for row in x.tolist()])


def chosen(x: Tensor) -> Tensor:
    return x[x > 0] * 2


def held(x: Tensor) -> Tensor:
    return torch.zeros_like(x).index_add_(0, torch.where(x[:, 0] > 0)[0], x[x[:, 0] > 0])


UP, HIGHER, DOWN = torch.ones(2, 2), torch.full((2, 2), 3.0), -torch.ones(2, 2)


@pytest.mark.parametrize(
    ("function", "fitting"),
    [
        (branching, [UP, HIGHER]),
        (scaled, [UP, DOWN]),  # 3 would be another factor
        (listed, [UP, HIGHER, DOWN]),
        (chosen, [UP, HIGHER]),
        (held, [UP, HIGHER]),
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
