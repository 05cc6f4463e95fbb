"""Tensors that say whose values they hold: rounded to a format that torch does not compute in, worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from auditor.numerics.casting import asked_for, carried_in, format_in, in_format, like, plain
from auditor.numerics.formats import FORMATS

E5M2, E4M3, FP16 = FORMATS["fp8_e5m2"], FORMATS["fp8_e4m3"], FORMATS["fp16"]


def test_values_are_on_the_grid_in_float32() -> None:
    # two fraction bits: 1.125 is a tie between 1 and 1.25 and goes to 1, 1.375 goes to 1.5; beyond 57344 is infinity
    found = in_format(torch.tensor([1.125, 1.375, 1.3, 1e6]), E5M2)
    assert carried_in(found) is E5M2
    assert (found.dtype, format_in(found)) == (torch.float32, E5M2)
    assert found.tolist() == [1.0, 1.5, 1.25, math.inf]
    assert in_format(torch.tensor([1e6, -1e6]), E4M3).tolist() == [448.0, -448.0]  # it has no infinity


def test_what_torch_computes_in_has_its_own_type() -> None:
    found = in_format(torch.tensor([1.0]), FP16)
    assert (carried_in(found), found.dtype, format_in(found)) == (None, torch.float16, FP16)
    again = in_format(in_format(torch.tensor([1.3]), E5M2), FP16)
    assert (carried_in(again), again.item()) == (None, 1.25)


def test_what_is_in_the_format_is_handed_on() -> None:
    x = in_format(torch.tensor([1.3]), E5M2)
    assert in_format(x, E5M2) is x
    other = in_format(x, E4M3)
    assert format_in(other) is E4M3


def test_whatever_torch_does_with_it_is_plain() -> None:
    x = in_format(torch.tensor([1.25]), E5M2)
    assert carried_in(plain(x)) is None
    assert carried_in(x) is E5M2
    assert format_in(plain(x)) is FORMATS["fp32"]
    for result in (x + x, x.clone(), x[0]):
        assert carried_in(result) is None
    own = torch.ones(1)
    assert plain(own) is own


@pytest.mark.parametrize(
    ("given", "expected"), [(torch.float16, FP16), (torch.int64, None), (None, None), (E5M2, E5M2)]
)
def test_what_stands_in_the_place_of_a_dtype(given: object, expected: object) -> None:
    assert asked_for(given) is expected  # type: ignore[arg-type]


def test_like_another() -> None:
    x = torch.tensor([1.3])
    assert like(x, in_format(x, E5M2)).item() == 1.25
    assert like(x, x.half()).dtype is torch.float16
    assert like(x, torch.tensor([1])).tolist() == [1]


SPARSE = {
    "coo": torch.Tensor.to_sparse,
    "csr": torch.Tensor.to_sparse_csr,
    "csc": torch.Tensor.to_sparse_csc,
    "bsr": lambda x: x.to_sparse_bsr((1, 2)),
    "bsc": lambda x: x.to_sparse_bsc((2, 1)),
}


@pytest.mark.parametrize("layout", SPARSE)
def test_of_a_sparse_tensor_the_entries_it_holds_are_rounded(layout: str) -> None:
    x = SPARSE[layout](torch.tensor([[0.0, 1.3], [1.375, 0.0]]))
    found = in_format(x, E5M2)
    assert (carried_in(found), found.layout) == (E5M2, x.layout)
    assert found.to_dense().tolist() == [[0.0, 1.25], [1.5, 0.0]]
    assert carried_in(x) is None


def test_a_nested_tensor_stays_as_it_is() -> None:
    x = torch.nested.nested_tensor([torch.tensor([1.3]), torch.tensor([1.3, 1.4])])
    assert in_format(x, E5M2) is x
