"""Memory is copied only where it is small or about to be written, and comes back whatever kind of tensor it backs."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from auditor.state import storages, unchanged
from tests.writers import X

MB = 1 << 20


@pytest.fixture
def cloned(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The sizes of the copies that were made."""
    sizes: list[int] = []
    clone = torch.UntypedStorage.clone

    def count(storage: torch.UntypedStorage) -> torch.UntypedStorage:
        sizes.append(storage.nbytes())
        return clone(storage)

    monkeypatch.setattr(torch.UntypedStorage, "clone", count)
    return sizes


@pytest.fixture
def none_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storages, "AT_ONCE", dict.fromkeys(storages.Role, 0))


def test_a_large_parameter_that_is_only_read_is_never_copied(cloned: list[int]) -> None:
    model = nn.Sequential(nn.Linear(1024, 1024), nn.BatchNorm1d(1024))
    model[0].weight.grad = torch.zeros(1024, 1024)
    with unchanged(model):
        model(torch.ones(2, 1024)).sum()
    assert 4 * MB not in cloned
    # bias, weight, bias and four bytes times 1024, two running statistics of the same size, one count of 8 bytes
    assert sum(cloned) == 5 * 4096 + 8


def test_a_large_parameter_is_copied_once(cloned: list[int]) -> None:
    model = nn.Linear(1024, 1024, bias=False)
    before = model.weight.detach().clone()
    with unchanged(model):
        for _ in range(3):
            model.weight.data.add_(1)
            model.weight.data[0].mul_(2)
    assert cloned == [4 * MB]
    assert torch.equal(model.weight, before)


def test_large_buffers_are_copied_within_the_budget_small_before_large(cloned: list[int]) -> None:
    model = nn.Module()
    for name, size in {"large": 50 * MB, "small": 10 * MB, "too_much": 10 * MB}.items():
        model.register_buffer(name, torch.zeros(size, dtype=torch.uint8))
    with unchanged(model):
        assert cloned == [10 * MB, 10 * MB]


def test_other_tensors_do_not_use_up_what_is_meant_for_buffers(cloned: list[int]) -> None:
    model = nn.Module()
    model.plain = torch.zeros(10 * MB, dtype=torch.uint8)
    model.register_buffer("large", torch.zeros(60 * MB, dtype=torch.uint8))
    with unchanged(model):
        assert cloned == [60 * MB, 10 * MB]


def test_no_mode_where_all_is_copied() -> None:
    with unchanged(nn.Linear(2, 2)):
        assert _get_current_dispatch_mode() is None
    with unchanged(nn.Linear(1024, 1024)):
        assert _get_current_dispatch_mode() is not None
    assert _get_current_dispatch_mode() is None


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_memory_that_nobody_wrote_is_not_written_back(tmp_path: Path) -> None:
    """Mapped without leave to write: a single byte stored there would end the process."""
    (tmp_path / "weights").write_bytes(bytes(range(64)))
    with (tmp_path / "weights").open("rb") as file:
        model = nn.Module()
        model.mapped = torch.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), dtype=torch.uint8)
        with unchanged(model):
            assert int(model.mapped.sum()) == 2016


def test_two_storages_over_the_same_memory(none_at_once: None) -> None:
    """The second copy is made after the first write: it must not win."""
    numbers = np.arange(8.0)
    model = nn.Module()
    model.whole, model.part = torch.from_numpy(numbers), torch.from_numpy(numbers[4:])
    with unchanged(model):
        model.whole.add_(1)
        model.part.mul_(3)
    assert model.whole.tolist() == list(range(8))


@pytest.mark.parametrize("begin", [0, 2, 5])
def test_a_second_storage_over_watched_memory(begin: int, none_at_once: None) -> None:
    numbers = np.arange(8.0)
    model = nn.Module()
    model.part = torch.from_numpy(numbers[2:6])
    with unchanged(model):
        torch.from_numpy(numbers[begin:]).mul_(3)
    assert model.part.tolist() == [2, 3, 4, 5]


def test_a_bare_empty_tensor_that_grows(none_at_once: None) -> None:
    model = nn.Module()
    model.cache = torch.empty(0)
    with unchanged(model):
        torch.add(X, 1, out=model.cache)
    assert model.cache.shape == (0,)
    assert model.cache.untyped_storage().nbytes() == 0


def coo() -> torch.Tensor:
    return torch.eye(3).to_sparse().coalesce()


def fake() -> torch.Tensor:
    with torch._subclasses.FakeTensorMode():
        return torch.ones(2)


def inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(2)


def double(t: torch.Tensor) -> None:
    t.mul_(2)


def double_in_inference(t: torch.Tensor) -> None:
    with torch.inference_mode():
        t.mul_(2)


def ragged(layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


KINDS: dict[str, tuple[Callable[[], torch.Tensor], Callable[[Any], object]]] = {
    "coo": (coo, double),
    "coo, grown": (coo, lambda t: t.add_(torch.ones(3, 3).to_sparse())),
    "coo, values": (coo, lambda t: t._values().mul_(2)),
    "csr": (lambda: coo().to_sparse_csr(), double),
    "csc": (lambda: coo().to_sparse_csc(), lambda t: t.values().mul_(2)),
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
        lambda t: t.copy_(torch.zeros(3)),
    ),
    "nested": (lambda: ragged(torch.strided), double),
    "jagged": (lambda: ragged(torch.jagged), double),
    "mkldnn": (lambda: torch.ones(2, 2).to_mkldnn(), double),
    "inference": (inference, double_in_inference),
    "complex view": (lambda: torch.ones(2, dtype=torch.complex64).conj(), double),
    "wrapper": (lambda: TwoTensor(torch.ones(2), torch.zeros(2)), lambda t: t.add_(1)),
    "subclass": (lambda: torch.ones(2).as_subclass(Named), double),
    "bits": (lambda: torch.ones(8, dtype=torch.bool), lambda t: t.zero_()),
    "eight bits": (lambda: torch.ones(3).to(torch.float8_e4m3fn), lambda t: t.copy_(torch.zeros(3))),
}


class Named(torch.Tensor):
    pass


def entries(t: torch.Tensor) -> Any:
    if isinstance(t, TwoTensor):
        return t.a.tolist(), t.b.tolist()
    if t.is_nested:
        return [part.tolist() for part in t.unbind()]
    if t.is_quantized:
        return t.int_repr().tolist()
    return (t.to_dense() if t.layout != torch.strided else t).tolist()


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:torch.quantize_per", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget", [0, MB])
def test_kinds_of_tensors(kind: str, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storages, "AT_ONCE", dict.fromkeys(storages.Role, budget))
    make, write = KINDS[kind]
    model = nn.Module()
    model.tensor = tensor = make()
    before = entries(tensor)
    with unchanged(model):
        write(tensor)
        assert entries(tensor) != before
    assert model.tensor is tensor
    assert entries(tensor) == before


@pytest.mark.parametrize("make", [fake, lambda: torch.ones(2, device="meta")], ids=["fake", "meta"])
def test_tensors_without_memory(make: Callable[[], torch.Tensor], none_at_once: None) -> None:
    model = nn.Module()
    model.tensor = tensor = make()
    with unchanged(model):
        tensor.mul_(2)
        model.tensor = None
    assert model.tensor is tensor
