"""A recording of each path that batches take, and one graph of all: what they share, and what tells them apart."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from auditor.capture.paths import path_of, usable
from auditor.capture.several import MOST_PATHS, RecordedPaths, join_paths, record_paths
from auditor.records import Subject
from tests.support.replaying import Model, replayed
from tests.support.subjects import normal, seeded, subject_of


class TwoWays(nn.Module):
    """A branch of its own between two layers; the loop takes as many turns as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, more: Tensor | None = None, turns: int = 1) -> Tensor:
        x = self.first(x)
        if more is not None:
            x = torch.cat([x, more])
        for _ in range(turns):
            x = torch.relu(x)
        return self.last(x)


X, MORE = normal(2, 4), normal(3, 4, seed=1)


def subject(*batches: tuple[Any, ...]) -> Subject:
    return replace(subject_of(seeded(TwoWays), X), batches=tuple((batch, {}) for batch in batches))


def paths_of(*batches: tuple[Any, ...]) -> RecordedPaths:
    return record_paths(subject(*batches))


def test_batches_of_one_path_are_recorded_once() -> None:
    found = paths_of((X,), (normal(2, 4, seed=2),))
    assert len(found.each) == 1 and not found.unjudged
    assert join_paths(found.each) is found.first.capture
    assert found.operations == 3


def test_lengths_of_one_path_share_its_graph() -> None:
    found = paths_of((X,), (normal(5, 4),))
    joined = join_paths(found.each)
    assert len(found.each) == len(joined.paths) == 2
    assert joined.graph_module is found.first.capture.graph_module
    assert joined.nodes == found.first.capture.nodes and not joined.twins


def test_another_branch_lies_beside_the_first_and_shares_its_weights() -> None:
    found = paths_of((X,), (X, MORE))
    joined = join_paths(found.each)
    own = [name for name, node in joined.nodes.items() if node.batch == 2 and name not in joined.twins]
    assert own == ["cat"]
    assert {name for name in joined.twins if name in joined.nodes} == {
        "linear_batch2",
        "relu_batch2",
        "linear_1_batch2",
    }
    assert joined.twins["linear_1_batch2"] == "linear_1"
    assert [p.fqn for p in joined.placeholders if p.kind == "parameter"] == [
        "first.weight",
        "first.bias",
        "last.weight",
        "last.bias",
    ]
    assert joined.nodes["cat"].inputs == ("linear_batch2", "more")
    assert [node.name for node in joined.graph_module.graph.nodes if node.op != "output"] == [
        *(place.name for place in joined.placeholders),
        *joined.nodes,
    ]
    assert joined.outputs == ("linear_1", "linear_1_batch2") and joined.first is found.first.capture


def test_a_length_of_the_second_branch_takes_its_names() -> None:
    joined = join_paths(paths_of((X,), (X, MORE), (X, normal(7, 4))).each)
    first, second, third = (path.capture for path in joined.paths)
    assert second.nodes.keys() == third.nodes.keys() != first.nodes.keys()
    assert {node.batch for node in third.nodes.values()} == {2}


def test_what_a_loop_does_more_often_is_of_the_later_path() -> None:
    joined = join_paths(paths_of((X,), (X, None, 3)).each)
    assert [name for name in joined.nodes if name not in joined.twins] == [
        "linear",
        "relu",
        "linear_1",
        "relu_1",
        "relu_2",
    ]


@pytest.mark.parametrize("batch", [(X,), (X, MORE), (normal(2, 4, seed=5), normal(3, 4, seed=6))])
def test_each_path_computes_what_the_model_does(batch: tuple[Any, ...]) -> None:
    given = subject((X,), (X, MORE))
    joined = join_paths(record_paths(given).each)
    path = path_of(joined, given, (batch, {}))
    with torch.no_grad():
        (found,) = path.graph_module(*path.bind(given.model, (batch, {})))
        assert torch.equal(found, given.model(*batch))


def test_a_batch_of_no_recorded_path_is_usable_on_none() -> None:
    given = subject((X,), (X, MORE))
    joined = join_paths(record_paths(given).each)
    other = ((normal(9, 4),), {})
    assert usable(joined, given, (*given.batches, other)) == list(given.batches)


def test_of_many_paths_the_first_are_recorded_and_the_rest_are_named() -> None:
    found = paths_of(*((normal(n, 4),) for n in range(1, MOST_PATHS + 3)))
    assert len(found.each) == MOST_PATHS
    assert [line.split(" takes")[0] for line in found.unjudged] == ["Batch 9", "Batch 10"]


# Every way by which Python gets at values is noticed.

PAIR = normal(2, 4)

READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x.sum()),
    "int": lambda x: int(x.sum()),
    "bool": lambda x: bool(x.sum() > 0),
    "if": lambda x: 1 if x.sum() > 0 else 2,
    "comparison of numbers": lambda x: max(x[0].unbind(), key=lambda v: v * 2),
    "index": lambda x: [1, 2, 3][x.argmax() % 2],
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "asarray": lambda x: np.asarray(x),
    "array": lambda x: np.array(x.detach()),
    "of a view's data": lambda x: x[1].data.tolist(),
    "equal": lambda x: torch.equal(x, x * 2),
    "allclose": lambda x: torch.allclose(x, x * 2),
    "complex": lambda x: complex(x.sum()),
    "print": lambda x: str(x),
    "format": lambda x: f"{x.sum():.3f}",
    "in": lambda x: 0.5 in x,
}


@pytest.mark.parametrize("name", READS)
def test_reads_are_noticed(name: str) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = x * 2
        READS[name](y)
        return y

    found = replayed(Model(forward), PAIR, method="path")
    assert "the path these inputs take" in found.warnings[0]


LOOKS: dict[str, Callable[[Tensor], Any]] = {
    "shape": lambda x: x.shape[0] + len(x) + x.numel() + x.dim(),
    "dtype": lambda x: x.is_floating_point() and x.dtype is torch.float32,
    "iteration": lambda x: list(x),
    "device": lambda x: x.is_cuda or x.device,
    "identity": lambda x: x is not None,
    "contiguity": lambda x: x.is_contiguous(),
    "hash": lambda x: {x: 1},
}


@pytest.mark.parametrize("name", LOOKS)
def test_looks_at_anything_else_are_none(name: str) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        LOOKS[name](x)
        return x * 2

    replayed(Model(forward), PAIR)
