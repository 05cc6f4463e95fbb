"""Where gradients end: noted on the nodes of a graph that is written by hand."""

from __future__ import annotations

import torch
from torch import fx, nn

from auditor.capture.cuts import carry, ends


def node_of(graph: fx.Graph, value: torch.Tensor, *sources: fx.Node) -> fx.Node:
    node = graph.call_function(torch.add, sources) if sources else graph.placeholder(f"x{len(graph.nodes)}")
    carry(node, value)
    return node


def test_a_replay_hands_gradients_from_parameters_on() -> None:
    graph, weight, x = fx.Graph(), nn.Parameter(torch.ones(2)), torch.ones(2)
    w, data = node_of(graph, weight), node_of(graph, x)
    product = node_of(graph, weight * x, w, data)
    assert not ends(product, weight * x)  # the run handed them on as well
    assert ends(product, (weight * x).detach())  # the run did not: `detach`, or `no_grad`
    assert not ends(data, x)  # an input has none to hand on


def test_frozen_parameters_and_whole_numbers_have_none() -> None:
    graph, weight = fx.Graph(), nn.Parameter(torch.ones(2))
    frozen = node_of(graph, nn.Parameter(torch.ones(2), requires_grad=False))
    assert not ends(frozen, torch.ones(2))
    w = node_of(graph, weight)
    index = node_of(graph, weight.detach().argmax(), w)
    assert not ends(index, weight.detach().argmax())
    after = node_of(graph, torch.ones(2), index)  # nothing comes through whole numbers
    assert not ends(after, torch.ones(2))


def test_inside_no_grad_nothing_is_said() -> None:
    graph, weight = fx.Graph(), nn.Parameter(torch.ones(2))
    product = node_of(graph, weight * 2, node_of(graph, weight))
    with torch.no_grad():
        assert not ends(product, (weight * 2).detach())
