"""Tensors put back: place in memory, flag, leaf, hooks, gradient; memory is copied only where it is about to be written."""

import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from auditor.isolation import isolate, tensors
from auditor.isolation.tensors import TensorState, written_by

aten = torch.ops.aten
MB = 1 << 20


def weight() -> nn.Parameter:
    return nn.Parameter(torch.arange(6.0).reshape(2, 3))


def put_back(state: TensorState) -> None:
    state.restore()
    state.restore_gradient()


def data_replaced(x: nn.Parameter) -> None:
    x.data = torch.zeros(5)


def transposed(x: nn.Parameter) -> None:
    x.data = x.data.t()


def resized(x: nn.Parameter) -> None:
    x.data.resize_(12)


@pytest.mark.parametrize("change", [data_replaced, transposed, resized])
def test_the_place_comes_back(change: Callable[[nn.Parameter], None]) -> None:
    x = weight()
    state, storage = TensorState(x), x.untyped_storage()._cdata
    change(x)
    put_back(state)
    assert (x.shape, x.stride(), x.untyped_storage()._cdata) == ((2, 3), (3, 1), storage)
    assert x.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_leaf_is_a_leaf_again() -> None:
    buffer = torch.ones(2)
    state = TensorState(buffer)
    buffer.mul_(torch.ones(2, requires_grad=True))
    assert not buffer.is_leaf
    put_back(state)
    assert buffer.is_leaf


def test_hooks_added_go_and_hooks_removed_come_back() -> None:
    x, other = weight(), weight()
    calls: list[str] = []
    handle = x.register_hook(lambda gradient: calls.append("old"))
    with isolate(x, other):
        handle.remove()
        x.register_hook(lambda gradient: calls.append("new"))
        other.register_hook(lambda gradient: calls.append("new"))
        other.register_post_accumulate_grad_hook(lambda parameter: calls.append("new"))
    (x + other).sum().backward()
    assert calls == ["old"]


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


def test_a_parameter_that_is_only_read_is_never_copied(cloned: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Large models must not take a second copy of their parameters."""
    monkeypatch.setattr(tensors, "AT_ONCE", MB)
    model = nn.Sequential(nn.Linear(1024, 1024), nn.BatchNorm1d(1024))
    model[0].weight.grad = torch.zeros(1024, 1024)
    with isolate(model, torch.ones(MB)):
        model(torch.ones(2, 1024)).sum()
    assert sorted(cloned) == [8, 4096, 4096]  # running statistics and the count of batches


def test_a_parameter_that_is_written_is_copied_once(cloned: list[int]) -> None:
    model = nn.Linear(1024, 1024, bias=False)
    before = model.weight.detach().clone()
    with isolate(model):
        for _ in range(3):
            model.weight.data.add_(1)
            model.weight.data[0].mul_(2)
    assert cloned == [4 * MB]
    assert torch.equal(model.weight, before)


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_memory_that_nobody_wrote_is_not_written_back(tmp_path: Path) -> None:
    """Mapped without leave to write: a single byte stored there would end the process."""
    (tmp_path / "weights").write_bytes(bytes(range(64)))
    with (tmp_path / "weights").open("rb") as file:
        model = nn.Module()
        mapped = torch.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), dtype=torch.uint8)
        model.register_buffer("mapped", mapped)
        with isolate(model):
            assert int(model.mapped.sum()) == 2016


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


KINDS: dict[str, tuple[Callable[[], torch.Tensor], Callable[[Any], object]]] = {
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
        lambda t: t.copy_(torch.zeros(3)),
    ),
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
    if t.is_quantized:
        return t.int_repr().tolist()
    return t.tolist()


@pytest.mark.filterwarnings("ignore:torch.quantize_per")
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_tensors(kind: str) -> None:
    make, write = KINDS[kind]
    model = nn.Module()
    model.tensor = tensor = make()
    before = entries(tensor)
    with isolate(model):
        write(tensor)
        assert entries(tensor) != before
    assert model.tensor is tensor
    assert entries(tensor) == before


@pytest.mark.parametrize(
    ("operation", "names"),
    [
        (aten.add.Tensor, []),
        (aten.add_.Tensor, ["self"]),
        (aten.add.out, ["out"]),
        (aten._foreach_add_.Scalar, ["self"]),
        (aten.native_batch_norm.default, ["running_mean", "running_var"]),
        (aten.batch_norm.default, ["running_mean", "running_var"]),
        (aten.cudnn_batch_norm.default, ["running_mean", "running_var"]),
        (aten.batch_norm_update_stats.default, ["running_mean", "running_var"]),
        (aten.embedding_renorm_.default, ["self"]),
        (aten.set_.source_Tensor, ["self"]),
        (aten.resize_.default, ["self"]),
        (aten._fused_adam_.default, ["self", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"]),
    ],
)
def test_what_an_operation_writes(operation: Any, names: list[str]) -> None:
    assert [name for _, name in written_by(operation)] == names
