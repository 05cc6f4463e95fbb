"""Where gradients end: noted on the nodes of a graph that is written by hand."""

from __future__ import annotations

import torch
from torch import fx, nn

from auditor.capture.builder import Builder, Mark, Recording, ends


def node_of(made: Builder, value: torch.Tensor, *sources: fx.Node) -> fx.Node:
    return made.emit(torch.ops.aten.add.Tensor, sources, {}, value) if sources else made.constant(value)


def test_a_replay_hands_gradients_from_parameters_on() -> None:
    made, weight, x = Builder(Recording(), Mark((), None, None, 0), None), nn.Parameter(torch.ones(2)), torch.ones(2)
    w, data = node_of(made, weight), node_of(made, x)
    product = node_of(made, weight * x, w, data)
    assert not ends(product, weight * x)  # the run handed them on as well
    assert ends(product, (weight * x).detach())  # the run did not: `detach`, or `no_grad`
    assert not ends(data, x)  # an input has none to hand on


def test_frozen_parameters_and_whole_numbers_have_none() -> None:
    made, weight = Builder(Recording(), Mark((), None, None, 0), None), nn.Parameter(torch.ones(2))
    frozen = node_of(made, nn.Parameter(torch.ones(2), requires_grad=False))
    assert not ends(frozen, torch.ones(2))
    w = node_of(made, weight)
    index = node_of(made, weight.detach().argmax(), w)
    assert not ends(index, weight.detach().argmax())
    after = node_of(made, torch.ones(2), index)  # nothing comes through whole numbers
    assert not ends(after, torch.ones(2))


def test_inside_no_grad_nothing_is_said() -> None:
    made, weight = Builder(Recording(), Mark((), None, None, 0), None), nn.Parameter(torch.ones(2))
    product = node_of(made, weight * 2, node_of(made, weight))
    with torch.no_grad():
        assert not ends(product, (weight * 2).detach())
