"""Tensors put back: place in memory, flag, leaf, hooks, gradient; memory is copied only where it is about to be written."""

import itertools
import mmap
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, MixtureSameFamily, Normal
from torch.nn.utils.rnn import pack_sequence
from torch.testing._internal.two_tensor import TwoTensor

from auditor.isolation import isolate, tensors
from auditor.isolation.outputs import tensor_outputs
from auditor.isolation.tensors import written_by

aten = torch.ops.aten
MB = 1 << 20


def weight() -> nn.Parameter:
    return nn.Parameter(torch.arange(6.0).reshape(2, 3))


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
    "sparse by columns": (lambda: torch.eye(2).to_sparse_csc(), lambda t: t.values().mul_(2)),
    "eight bits": (lambda: torch.ones(3).to(torch.float8_e4m3fn), lambda t: t.copy_(torch.zeros(3))),
}


class Named(torch.Tensor):
    pass


def entries(t: torch.Tensor) -> Any:
    if isinstance(t, TwoTensor):
        return t.a.tolist(), t.b.tolist()
    if t.is_quantized:
        return t.int_repr().tolist()
    return (t if t.layout is torch.strided else t.to_dense()).tolist()


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
        (aten.batch_norm_update_stats.default, ["running_mean", "running_var"]),
        (aten.embedding_renorm_.default, ["self"]),
        (aten.set_.source_Tensor, ["self"]),
        (aten._fused_adam_.default, ["self", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"]),
    ],
)
def test_what_an_operation_writes(operation: Any, names: list[str]) -> None:
    assert [name for _, name in written_by(operation)] == names


# Whatever a forward returns, its tensors are found, in an order that is the same every time.


A, B, C = torch.ones(1), torch.ones(2), torch.ones(3)
Pair = namedtuple("Pair", "first second")


@dataclass
class Fields:
    first: Any
    second: Any
    note: str = "text"


@dataclass(frozen=True, slots=True)
class Slotted:
    first: Any
    second: Any


@dataclass
class Late:
    """A field that is not set, and an attribute that is no field."""

    missing: Any = field(init=False)
    first: Any = None


class Table(OrderedDict[str, Any]):
    """As the libraries' output classes are."""


class Several(list[Any]):
    """A list of the user's own."""


class Triple(Pair):
    """A class of the user's own above a named tuple."""


class Plain:
    def __init__(self, **members: Any) -> None:
        vars(self).update(members)


class WithSlots:
    __slots__ = ("_first", "never", "second")

    def __init__(self) -> None:
        self._first, self.second = A, B


class Kind(Enum):
    ONE = A


def late() -> Late:
    made = Late(first=A)
    made.more = B
    return made


def set_in_another_order() -> Fields:
    made = Fields.__new__(Fields)
    made.second, made.first = B, A
    return made


def cycle() -> Plain:
    made = Plain(first=A)
    made.itself, made.second = made, [made, B, {"again": made}]
    return made


def list_cycle() -> list[Any]:
    made: list[Any] = [A]
    made += [made, B]
    return made


FOUND: dict[str, tuple[Callable[[], Any], list[Tensor]]] = {
    "tensor": (lambda: A, [A]),
    "nothing": (lambda: None, []),
    "tuple": (lambda: (A, [B, {"x": C}], 1, "text"), [A, B, C]),
    "twice": (lambda: (A, A, {"x": A}), [A, A, A]),
    "named tuple": (lambda: Pair(A, B), [A, B]),
    "above a named tuple": (lambda: Triple(A, B), [A, B]),
    "dataclass": (lambda: Fields(B, [A, None]), [B, A]),
    "dataclass set in another order": (set_in_another_order, [A, B]),
    "dataclass with slots": (lambda: Slotted(B, {"x": A}), [B, A]),
    "dataclass with more": (late, [A, B]),
    "namespace": (lambda: SimpleNamespace(z=A, a=Fields(B, C)), [A, B, C]),
    "ordered dict": (lambda: OrderedDict(z=A, a=B), [A, B]),
    "above an ordered dict": (lambda: Table(z=A, a=(B, C)), [A, B, C]),
    "mapping": (lambda: UserDict(z=A, a=B), [A, B]),
    "above a list": (lambda: Several([A, Fields(B, C)]), [A, B, C]),
    "object": (lambda: Plain(second=B, _first=A, name="text"), [B, A]),
    "object with slots": (WithSlots, [A, B]),
    "object with a cycle": (cycle, [A, B]),
    "list with a cycle": (list_cycle, [A, B]),
    "generator": (lambda: (x for x in (A, B)), [A, B]),
    "parameter": (lambda: [nn.Parameter(A)], [A]),
    "packed sequence": (lambda: pack_sequence([B, A]), [torch.ones(3), torch.tensor([2, 1])]),
    "normal": (lambda: Normal(B, 2 * B), [B, 2 * B]),
    "categorical": (lambda: Categorical(logits=C.log_softmax(-1)), [C.log_softmax(-1)]),
    "mixture": (
        lambda: MixtureSameFamily(Categorical(logits=B.log_softmax(-1)), Normal(B, 2 * B)),
        [B.log_softmax(-1), B, 2 * B],
    ),
    "module": (lambda: [nn.Linear(2, 2), Plain(model=nn.Linear(2, 2), x=A)], [A]),
    "what holds none": (
        lambda: [
            *("text", b"text", Path("x"), 1.5, 2j, range(10**12), torch.float32, torch.Size([1]), torch.device("cpu")),
            *(Plain, Plain.__init__, torch, Kind, open, itertools.count(), {1, 2}, slice(0, 1), object()),
        ],
        [],
    ),
}


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


@pytest.mark.parametrize(("make", "expected"), FOUND.values(), ids=FOUND)
def test_tensors_are_found_in_order(make: Callable[[], Any], expected: list[Tensor]) -> None:
    assert same(tensor_outputs(make()), expected)
    assert same(tensor_outputs([make()]), expected)


def test_a_key_value_cache_is_memory_for_the_next_call() -> None:
    cache_utils = pytest.importorskip("transformers.cache_utils")
    cache = cache_utils.DynamicCache()
    cache.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), 0)
    logits = torch.zeros(1, 3)
    assert [x is logits for x in tensor_outputs({"logits": logits, "past_key_values": cache})] == [True]


@pytest.mark.parametrize(
    ("output", "names"),
    [
        (A, ("output",)),
        ((A, B), ("0", "1")),
        ({"boxes": A, "masks": {"low": B, 3: C}}, ("boxes", "masks.low", "masks.3")),
        ([{"boxes": A}, {"boxes": B}], ("0.boxes", "1.boxes")),
        (Pair(A, [B]), ("first", "second.0")),
        (Fields(A, {"x": B}), ("first", "second.x")),
        (SimpleNamespace(z=A, a=B), ("z", "a")),
        (Table(logits=A, hidden=(B, C)), ("logits", "hidden.0", "hidden.1")),
        (UserDict(x=A), ("x",)),
        ((None, A), ("1",)),
        ((A, A), ("0", "1")),
        (torch.max(torch.ones(2, 2), 0), ("0", "1")),
    ],
)
def test_every_output_goes_by_its_name_in_the_return(output: Any, names: tuple[str, ...]) -> None:
    assert tensor_outputs(output).names == names
