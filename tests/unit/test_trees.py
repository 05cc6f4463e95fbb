"""Tensors among arguments: found in order, replaced in place, whatever they are nested in."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch

from auditor.trees import over_tensors, tensors_in

Pair = namedtuple("Pair", "a b")
A, B, C = (torch.tensor([float(i)]) for i in range(3))


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        (A, [A]),
        ((A, [B, 3], {"x": C}), [A, B, C]),
        (Pair(B, OrderedDict(y=A)), [B, A]),
        ((None, 1, 2.0, "text", torch.float16, True), []),
        ([A, A], [A, A]),  # as often as it stands there
    ],
)
def test_tensors_in_order(tree: Any, expected: list[torch.Tensor]) -> None:
    assert [id(x) for x in tensors_in(tree)] == [id(x) for x in expected]


def test_the_rest_stays_as_it_is() -> None:
    tree = (A, [B, "text"], {"x": C, "n": None}, Pair(A, torch.float16))
    found = over_tensors(lambda x: x + 10, tree)
    assert isinstance(found[3], Pair)
    assert [x.item() for x in tensors_in(found)] == [10.0, 11.0, 12.0, 10.0]
    assert (found[1][1], found[2]["n"], found[3].b) == ("text", None, torch.float16)
    assert A.item() == 0.0
