"""Digests: equal for what is equal, other for anything that differs, and refused for what nobody can compare."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from auditor.cache.content import Contents, Uncomparable
from auditor.records import Literals

DIFFERENT: list[Any] = [
    None, True, 1, 1.0, "1", b"1", -0.0, 0.0, 0, float("nan"), float("inf"), 1 + 0j, ..., [], (), {}, [[]], [1, 2], [[1], 2],
    ["ab", "c"], ["a", "bc"], {"a": 1}, {1: "a"}, slice(1), range(1), torch.float16, torch.bfloat16, torch.device("cpu"),
    torch.strided, torch.ones(2), torch.ones(2, 1), torch.ones(2).half(), torch.ones(2, dtype=torch.int32), torch.zeros(2),
    torch.zeros(2).neg(), torch.ones(2, requires_grad=True)[None], torch.ops.aten.add.Tensor, torch.ops.aten.sub.Tensor,
    Literals(), Literals({0: 1.0}), Literals({"0": 1.0}), numpy.float32(1), numpy.float64(1), len, sum,
    torch.ones(2, 3), torch.ones(3, 2).t(), torch.ones(2, 2).to_sparse(), torch.eye(2).to_sparse(), torch.tensor(1j),
]  # fmt: skip


def test_no_two_different_values_are_alike() -> None:
    found = [Contents().digest(value) for value in DIFFERENT]
    same = [
        (DIFFERENT[i], DIFFERENT[j]) for i, j in itertools.combinations(range(len(found)), 2) if found[i] == found[j]
    ]
    assert same == []
    assert [Contents().digest(value) for value in DIFFERENT] == found


def test_several_values_are_told_apart_from_one() -> None:
    contents = Contents()
    found = {
        contents.digest(),
        contents.digest([]),
        contents.digest(1, 2),
        contents.digest([1, 2]),
        contents.digest([1], 2),
    }
    assert len(found) == 5


@dataclass
class Held:
    value: Any


class Other:
    pass


@pytest.mark.parametrize(
    "value", [Other(), object(), lambda: 1, Held(Other()), {1}, nn.Linear(1, 1), torch.Generator()]
)
def test_what_nobody_can_compare_is_refused(value: Any) -> None:
    with pytest.raises(Uncomparable):
        Contents().digest(value)
    with pytest.raises(Uncomparable):
        Contents().digest([{"deep": (value,)}])


def test_what_holds_itself_is_refused() -> None:
    around: list[Any] = []
    around.append(around)
    with pytest.raises(Uncomparable):
        Contents().digest(around)


def test_tensors_that_share_memory_are_told_from_copies() -> None:
    x = torch.ones(4)
    shared, apart, shifted = [x[:2], x[2:]], [torch.ones(2), torch.ones(2)], [x[:2], x[1:3]]
    found = {Contents().tensors(each) for each in (shared, apart, shifted)}
    assert len(found) == 3
    assert Contents().tensors([torch.ones(4)[:2]]) == Contents().tensors([torch.ones(4)[:2]])
    assert Contents().tensors([x, x]) != Contents().tensors([x, x.clone()])


def test_a_tensor_is_read_once() -> None:
    contents, x = Contents(), torch.ones(2)
    before = contents.digest(x)
    x.fill_(3)
    assert contents.digest(x) == before != Contents().digest(x)
