"""Views on a recording: each is read from its source, and written back to it, by operations that are run here and compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from auditor.capture.views import (
    ALIAS,
    Geometry,
    Taken,
    View,
    found,
    geometry_of,
    put,
    read,
    scattered,
    shares_memory,
)

aten = torch.ops.aten


class Written:
    """A graph that is written by hand and run on given values."""

    def __init__(self, *given: Tensor) -> None:
        self.graph, self.constants = fx.Graph(), []
        self.given = given
        self.inputs = [self._placeholder(f"x{i}", x) for i, x in enumerate(given)]

    def _placeholder(self, name: str, x: Tensor) -> fx.Node:
        with self.graph.inserting_before(next(iter(self.graph.nodes), None)):
            node = self.graph.placeholder(name)
        node.meta["val"] = torch.empty_like(x, device="meta")
        return node

    def emit(self, target: Any, args: Any, kwargs: Any, value: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = value
        return node

    def constant(self, x: Tensor) -> fx.Node:
        self.constants.append(x)
        return self._placeholder(f"c{len(self.constants)}", x)

    def run(self, output: fx.Node) -> Tensor:
        self.graph.output(output)
        values = {f"x{i}": x for i, x in enumerate(self.given)} | {f"c{i + 1}": x for i, x in enumerate(self.constants)}
        order = [node.target for node in self.graph.nodes if node.op == "placeholder"]
        module = fx.GraphModule({}, self.graph)
        result: Tensor = fx.Interpreter(module).run(*(values[name] for name in order))
        return result

    def targets(self) -> list[str]:
        return [str(node.target) for node in self.graph.nodes if node.op == "call_function"]


CASES: dict[str, tuple[tuple[int, ...], View]] = {
    "alias": ((2, 3), ALIAS),
    "select": ((2, 3), View(aten.select.int, (0, 1))),
    "slice": ((4, 3), View(aten.slice.Tensor, (0, 1, 3))),
    "steps": ((6, 2), View(aten.slice.Tensor, (0, 1, 6, 2))),
    "diagonal": ((3, 3), View(aten.diagonal.default)),
    "t": ((2, 3), View(aten.t.default)),
    "transpose": ((2, 3, 4), View(aten.transpose.int, (0, 2))),
    "permute": ((2, 3, 4), View(aten.permute.default, ([2, 0, 1],))),
    "view": ((2, 6), View(aten.view.default, ([3, 4],))),
    "unsqueeze": ((2, 3), View(aten.unsqueeze.default, (1,))),
    "squeeze": ((2, 1, 3), View(aten.squeeze.default)),
    "one of a split": ((6, 2), View(aten.split.Tensor, (2,), index=1)),
    "one of chunks along columns": ((2, 6), View(aten.chunk.default, (3, 1), index=2)),
    "one of unbind": ((3, 2), View(aten.unbind.int, (1,), index=1)),
    "strided": ((4, 4), View(aten.as_strided.default, ([2, 2], [8, 2], 1))),
    "taken": ((2, 3), View(Taken(torch.tensor([5, 0]), (2,)))),
}


def made(base: Tensor, view: View) -> Tensor:
    """The view itself, by torch; what is taken out of sight is a copy."""
    if isinstance(view.op, Taken):
        return base.reshape(-1)[view.op.places].reshape(view.op.shape)
    result = view.op(base, *view.args, **view.kwargs)
    return result if view.index is None else result[view.index]


def numbered(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


@pytest.mark.parametrize("name", CASES)
def test_a_view_is_read_from_its_source(name: str) -> None:
    shape, view = CASES[name]
    base = numbered(shape)
    expected = made(base, view)
    recording = Written(base)
    node = read(recording.emit, recording.constant, view, geometry_of(expected), geometry_of(base), recording.inputs[0])
    assert torch.equal(recording.run(node), expected)


@pytest.mark.parametrize("name", CASES)
def test_a_write_to_a_view_is_one_to_its_source(name: str) -> None:
    shape, view = CASES[name]
    base = numbered(shape)
    part = -1 - numbered(tuple(made(base, view).shape))
    expected = base.clone()
    if isinstance(view.op, Taken):
        expected.reshape(-1)[view.op.places] = part.reshape(-1)
    else:
        made(expected, view).copy_(part)
    recording, own = Written(base, part), geometry_of(made(base, view))
    node = scattered(recording.emit, recording.constant, view, own, geometry_of(base), *recording.inputs)
    assert torch.equal(recording.run(node), expected)


def test_complex_numbers_in_two_parts() -> None:
    base = torch.tensor([1 + 2j, 3 + 4j])
    for op, part, expected in (
        (aten.real.default, [5.0, 6.0], [5 + 2j, 6 + 4j]),
        (aten.imag.default, [5.0, 6.0], [1 + 5j, 3 + 6j]),
        (aten.view_as_real.default, [[5.0, 6.0], [7.0, 8.0]], [5 + 6j, 7 + 8j]),
    ):
        new = torch.tensor(part)
        recording, own = Written(base, new), geometry_of(op(base))
        node = scattered(recording.emit, recording.constant, View(op), own, geometry_of(base), *recording.inputs)
        assert recording.run(node).tolist() == expected


@pytest.mark.parametrize(
    ("view", "targets"),
    [
        (lambda x: x, []),
        (lambda x: x.permute(2, 0, 1), ["aten.permute.default"]),
        (lambda x: x[:, 1:3], ["aten.slice.Tensor"]),
        (lambda x: x[1, ::2, 1], ["aten.reshape.default", "aten.index_select.default", "aten.reshape.default"]),
    ],
)
def test_a_view_that_nobody_saw_is_found_by_where_it_lies(view: Callable[[Tensor], Tensor], targets: list[str]) -> None:
    base = numbered((2, 4, 3))
    own, source = geometry_of(view(base)), geometry_of(base)
    there = found(own, source)
    assert there is not None
    recording = Written(base)
    node = read(recording.emit, recording.constant, there, own, source, recording.inputs[0])
    if targets:
        assert torch.equal(recording.run(node), view(base))
    assert recording.targets() == targets


def test_what_lies_elsewhere_or_is_read_otherwise_is_not_found() -> None:
    base = numbered((4,))
    assert found(geometry_of(base), geometry_of(base[1:])) is None  # more than its source
    assert found(geometry_of(base.view(torch.int32)), geometry_of(base)) is None
    assert found(geometry_of(torch.eye(2).to_sparse()), geometry_of(base)) is None


def test_places_in_the_storage() -> None:
    # [2, 3] by columns from 1 on: entry (i, j) lies at 1 + i + 2 j
    own = Geometry((2, 3), (1, 2), 1, torch.float32)
    assert own.places().tolist() == [1, 3, 5, 2, 4, 6]
    assert own.outline().stride() == (1, 2)
    assert own.outline().is_meta


def test_entries_put_at_places() -> None:
    base, part = numbered((2, 2)), torch.tensor([7.0, 8.0])
    recording = Written(base, part)
    node = put(recording.emit, recording.constant, recording.inputs[0], torch.tensor([3, 0]), recording.inputs[1], base)
    assert recording.run(node).tolist() == [[8, 1], [2, 7]]


def test_who_shares_memory() -> None:
    x = torch.ones(4)
    assert shares_memory(x, x[2:])
    assert not shares_memory(x, x.clone())
    assert not shares_memory(torch.eye(2).to_sparse(), torch.eye(2))


@pytest.mark.parametrize(
    ("op", "shape", "expected"),
    [(aten.view.default, (3, 2), True), (aten.t.default, (3, 2), False), (aten.flatten.using_ints, (5,), False)],
)
def test_what_only_reshapes(op: Any, shape: tuple[int, ...], expected: bool) -> None:
    own = Geometry(shape, None, 0, torch.float32)
    assert View(op).reshapes(own, geometry_of(numbered((2, 3)))) is expected
