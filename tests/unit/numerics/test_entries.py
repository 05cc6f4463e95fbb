"""The numbers that tensors of every layout hold."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from auditor.numerics.entries import dense, entries, extent, is_number, is_plain, places

EYE = torch.tensor([[1.0, 0.0], [0.0, -2.0]])
RAGGED = [torch.ones(1, 2), torch.full((2, 2), 3.0)]


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_of_a_sparse_tensor_those_that_it_holds(layout: torch.layout) -> None:
    x = EYE.to_sparse(layout=layout)
    assert entries(x).tolist() == [1.0, -2.0]
    assert torch.equal(dense(x), EYE)
    assert [p.shape[-1] for p in places(x)] == ([2] if layout is torch.sparse_coo else [3, 2])
    assert not is_plain(x)
    assert extent(x) == ((2, 2), (2,))


def test_entries_of_one_place_are_one() -> None:
    twice = torch.sparse_coo_tensor(torch.tensor([[0, 0], [1, 1]]), torch.tensor([1.0, 2.0]), (2, 2))
    assert entries(twice).tolist() == [3.0]


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_of_a_nested_tensor_its_parts_one_after_the_other(layout: torch.layout) -> None:
    x = torch.nested.nested_tensor(RAGGED, layout=layout)
    assert entries(x).tolist() == [1.0, 1.0, 3.0, 3.0, 3.0, 3.0]
    assert extent(x) == ((1, 2), (2, 2))
    assert not is_plain(x)
    assert places(x) == []


def test_complex_numbers_are_pairs_as_their_views_say() -> None:
    z = torch.tensor([3 + 4j])
    assert entries(z).tolist() == [[3.0, 4.0]]
    assert entries(z.conj()).tolist() == [[3.0, -4.0]]
    assert entries(z.conj().imag).tolist() == [-4.0]
    assert not entries(z.conj().imag).is_neg()


def test_what_is_plain_already_is_no_copy() -> None:
    assert entries(EYE) is EYE
    assert dense(EYE) is EYE
    assert extent(EYE) == ((2, 2),)


def test_8_bit_numbers_can_be_computed_with() -> None:
    assert entries(torch.ones(1).to(torch.float8_e5m2)).dtype is torch.float32


@pytest.mark.parametrize(
    ("x", "expected"),
    [(EYE, True), (torch.tensor([1j]), True), (torch.tensor([1]), False), (torch.ones(1, device="meta"), False)],
)
def test_what_has_numbers(x: Tensor, expected: bool) -> None:
    assert is_number(x) is expected
