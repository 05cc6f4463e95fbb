"""A recording of each path that batches take, and one graph of all: what they share, and what tells them apart."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from auditor.capture.paths import path_of, usable
from auditor.capture.several import MOST_PATHS, RecordedPaths, join_paths, record_paths
from auditor.records import Batch, Capture, Subject
from tests.corpus.catalogue import INFERENCE
from tests.support.replaying import Model, replayed
from tests.support.resisting import MODELS as RESISTING
from tests.support.small_models import MODELS as SMALL
from tests.support.subjects import FORMATS, capture_of, normal, seeded, subject_of
from tests.support.thinned import thinned
from tests.support.two_ways import Labels, difference, drawn, emulated_answer, everything, replayed_answer


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

    found = replayed(Model(forward), X, method="path")
    assert "only operations that these inputs run" in found.warnings[0]


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

    replayed(Model(forward), X)


# The patched model under the emulation answers what the recording answers under the plan's policy.


CLOSE = 1e-6
CORPUS = {case.name: case for case in INFERENCE}


def follows_another() -> nn.Module:
    """Positions in the dtype of what a layer norm returns: FP32 on CUDA, under autocast too."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.norm(m.lin(x))
        return m.lin(x + m.positions.to(dtype=x.dtype))

    return Model(forward, norm=nn.LayerNorm(8), lin=nn.Linear(8, 8), positions=normal(4, 8, seed=1))


def follows_a_product() -> nn.Module:
    """A factor in the dtype of what a linear layer returns: low under autocast."""
    return Model(lambda m, x: (y := m.lin(x)) * torch.sqrt(torch.tensor(24.0)).to(dtype=y.dtype), lin=nn.Linear(8, 8))


def mapped(m: Any, x: Tensor) -> Tensor:
    return torch.vmap(lambda v: m.second(torch.softmax(3 * m.first(v), -1)))(x)


def transforms(function: Callable[[Any, Tensor], Tensor] = mapped) -> nn.Module:
    return Model(function, first=nn.Linear(8, 8), second=nn.Linear(8, 8))


def differentiates() -> nn.Module:
    """In a plan with scopes the gradient's products are low where the layer is; in the recording they are the model's own."""
    return transforms(lambda m, x: mapped(m, x) + torch.func.jacrev(lambda y: torch.tanh(m.first(y)))(x[0])[:4])


def leaves_statistics(m: Any, x: Tensor) -> Tensor:
    """Returns one value, and leaves others in attributes: no plan that wraps it converts those."""
    m.mean, m.size = x.mean(-1, keepdim=True), 3 * x.abs()
    return x - m.mean


def reads_attributes() -> nn.Module:
    def forward(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y = m.after(m.statistics(m.before(x)))
        return y / 7 + m.statistics.mean, m.statistics.size

    return Model(forward, before=nn.Linear(8, 8), statistics=Model(leaves_statistics), after=nn.Linear(8, 8))


_KINDS = (reads_attributes, follows_another, follows_a_product, transforms, differentiates)
OWN: dict[str, type[nn.Module]] = {kind.__name__: kind for kind in _KINDS}


def built(name: str) -> tuple[nn.Module, Batch]:
    if name in OWN:
        return seeded(OWN[name]), ((normal(4, 8),), {})
    if name in SMALL:
        return seeded(SMALL[name][0]), (SMALL[name][1], {})
    if name in CORPUS:
        model, inputs = CORPUS[name].build()
        return model.eval(), (tuple(inputs), {})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, batch = RESISTING[name]()
    return model.eval(), batch


@cache
def known(name: str) -> tuple[nn.Module, Batch, Capture]:
    model, batch = built(name)
    return model, batch, capture_of(model, *batch[0], **batch[1])


def assert_alike(name: str, strategy: str, fmt: str, labels: Labels) -> None:
    model, batch, capture = known(name)
    run = emulated_answer(model, capture, batch, strategy, fmt, labels)
    replay = replayed_answer(model, capture, batch, strategy, fmt, labels)
    assert difference(run, replay) <= CLOSE, (run if isinstance(run, str) else "", replay, labels)


@pytest.mark.parametrize("strategy", ["autocast", "cast"])
@pytest.mark.parametrize("name", [*OWN, *SMALL, *RESISTING, *thinned(CORPUS)])
def test_everything_low_and_any_scopes(name: str, strategy: str) -> None:
    rnd = random.Random(f"{name} {strategy}")
    for fmt in FORMATS:
        assert_alike(name, strategy, fmt, everything(known(name)[2], fmt))
        if name != "differentiates":
            assert_alike(name, strategy, fmt, drawn(known(name)[2], strategy, fmt, rnd))
