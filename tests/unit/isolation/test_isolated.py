"""Whatever a model does to itself when it runs, it comes back: values to the bit, and the very same objects."""

import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import grad, vmap
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _len_torch_dispatch_stack
from torch.utils.flop_counter import FlopCounterMode

from auditor.errors import AuditorError
from auditor.isolation import isolate, tensors
from tests.support.capturing import Seen
from tests.support.portrait import portrait
from tests.support.refusing import refused
from tests.support.writers import NAMES, Writer, X, attributes, nothing, writer


@pytest.fixture(autouse=True, params=["at once", "before a write"])
def copied(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of small models is copied at once; without a budget every model is treated as a large one."""
    if request.param == "before a write":
        monkeypatch.setattr(tensors, "AT_ONCE", 0)


def run(model: Any) -> None:
    model(X)


def run_and_raise(model: Any, error: BaseException) -> None:
    run(model)
    raise error


@pytest.mark.parametrize("name", NAMES)
def test_a_run_leaves_no_trace(name: str) -> None:
    model = writer(name)
    before = portrait(model)
    with isolate(model):
        run(model)
        assert portrait(model) != before
    assert portrait(model) == before


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, GeneratorExit])
def test_it_comes_back_after_an_error(error: type[BaseException]) -> None:
    model = writer("buffers")
    before = portrait(model)
    with pytest.raises(error, match="inside"), isolate(model):
        run_and_raise(model, error("inside"))
    assert portrait(model) == before


@dataclass(frozen=True)
class Frozen:
    tensor: torch.Tensor
    rest: dict[str, Any]


def test_inputs_come_back() -> None:
    whole = torch.arange(6.0)
    batch = ((whole[:3], [torch.ones(2)]), {"mask": Frozen(whole[2:], {"more": torch.zeros(2)})})
    before = portrait(batch)
    with isolate(batch):
        batch[0][0].add_(1)
        batch[0][1].append(batch[0][1][0].mul_(2))
        batch[1]["mask"].rest["more"] = batch[1]["mask"].tensor.zero_()
        batch[1].clear()
    assert portrait(batch) == before


def test_bodies_nest() -> None:
    model = writer("batch norm")
    start = portrait(model)
    with isolate(model):
        run(model)
        middle = portrait(model)
        with isolate(model):
            run(model)
            model.linear.weight.data.zero_()
            assert portrait(model) != middle
        assert portrait(model) == middle
    assert portrait(model) == start


def test_views_stay_views() -> None:
    """After a first run that made the view a result, writes into it must still reach the gradient of its base."""
    model = writer("hidden state")
    with isolate(model):
        run(model)
    model.view.mul_(model.linear(X)[0, :2])
    assert model.base.requires_grad


def test_the_standard_library_s_objects_are_left_alone() -> None:
    def use(m: Any, x: torch.Tensor) -> None:
        m.lock.acquire()
        m.log.setLevel(7)

    model = Writer(
        attributes(lock=threading.Lock, log=lambda: logging.getLogger("writer"), function=lambda: nothing), use
    )
    with isolate(model):
        run(model)
    assert model.lock.locked()
    assert model.log.level == 7


def test_what_cannot_come_back_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "AT_ONCE", 0)  # nothing is copied that no operation writes
    model = Writer(nothing, lambda m, x: m.linear.bias.untyped_storage().resize_(0))
    with refused(AuditorError, "state-not-restored", match="12 bytes"), isolate(model):
        run(model)


def test_one_that_cannot_come_back_does_not_keep_the_others() -> None:
    def close(m: Any, x: torch.Tensor) -> None:
        m.numbers.flags.writeable = False
        m.seen.add_(1)
        m.late = 1

    model = Writer(lambda m: setattr(m, "numbers", np.arange(3.0)), close)
    with pytest.raises(AuditorError, match="read-only"), isolate(model):
        run(model)
    assert not hasattr(model, "late")
    assert model.seen.tolist() == [0, 0, 0]


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.linear(x)


def test_parameters_and_buffers_of_scripts_come_back() -> None:
    model = torch.jit.script(Scripted())
    weight = model.linear.weight.detach().clone()
    with isolate(model):
        model(torch.ones(2))
        model.linear.weight.data.zero_()
        model.half()
        assert model.seen.dtype is model.linear.weight.dtype is torch.float16
    assert model.seen.tolist() == [0, 0]
    assert torch.equal(model.linear.weight, weight)


# `isolated` works with whatever else is switched on in torch, inside its body or around it.

SOME = "batch norm", "adam foreach", "buffers", "containers"


class Called(TorchFunctionMode):
    """Counts what is called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "dispatch": Seen,
    "function": Called,
    "flops": lambda: FlopCounterMode(display=False),
    "device": lambda: torch.device("cpu"),
    "no grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "deterministic": lambda: torch.random.fork_rng(devices=[]),
    "profiler": lambda: torch.autograd.profiler.profile(),
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
    "saved tensors": lambda: torch.autograd.graph.save_on_cpu(),
    "inference": torch.inference_mode,  # where torch shows composite operations whole: what they call is not seen
}
NAMED = {**dict.fromkeys(MODES, SOME), "inference": ("batch norm", "max norm", "buffers", "one storage")}


@pytest.mark.parametrize(("mode", "name"), [(mode, name) for mode, names in NAMED.items() for name in names])
@pytest.mark.parametrize("where", ["inside", "around"])
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_modes(mode: str, name: str, where: str) -> None:
    if (mode, name) == ("no grad", "adam foreach"):
        pytest.skip("nothing to optimize without gradients")
    model = writer(name)
    before = portrait(model)
    inside, around = (MODES[mode], nullcontext) if where == "inside" else (nullcontext, MODES[mode])
    with around(), isolate(model), inside():
        model(X)
    assert portrait(model) == before


def test_other_modes_see_the_model_s_operations_alone() -> None:
    model = nn.BatchNorm1d(3)
    with Seen() as seen_alone, Called() as called_alone:
        model(X)
    with Seen() as seen, Called() as called, isolate(model, X):
        model(X)
    assert seen.names == seen_alone.names
    assert called.names == called_alone.names


def test_transforms_inside() -> None:
    model = nn.Linear(3, 1)
    model.register_buffer("seen", torch.zeros(3))

    def loss(x: torch.Tensor) -> torch.Tensor:
        model.calls = 1
        return model(x).sum()

    before = portrait(model)
    with isolate(model, X):
        vmap(grad(loss))(X)
        vmap(lambda x: x.mul_(2))(X)
    assert portrait(model) == before
    assert X[0, 0] == -1


def test_higher_order_operations_inside() -> None:
    model = nn.Linear(3, 3)
    with isolate(model):
        out = torch.cond(torch.tensor(True), lambda x: x + 1, lambda x: x - 1, (X,))
    assert torch.equal(out, X + 1)


class Growing(nn.Module):
    """A cache that forward makes as long as its input, by the storage alone: no operation of torch does it."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = nn.Parameter(torch.arange(2.0), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(self.cache) < len(x):
            storage = self.cache.untyped_storage()
            storage.resize_(4 * len(x))
            self.cache.set_(storage, 0, (len(x),))
            self.cache[2:].zero_()
        return x + self.cache[: len(x)]


def test_a_storage_that_grew_is_as_long_as_before_and_the_model_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "AT_ONCE", 0)
    model = Growing()
    with isolate(model):
        model(torch.ones(5))
    assert model.cache.tolist() == [0, 1]
    assert model.cache.untyped_storage().nbytes() == 8
    assert model(torch.ones(3)).tolist() == [1, 2, 1]


class SparseTable(nn.Module):
    """A compressed sparse buffer that forward gives as many rows as its input has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.eye(2, 3).to_sparse_csr())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table.shape[0] < len(x):
            self.table.resize_((len(x), 3))
        return x + self.table.to_dense()[: len(x)]


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
def test_a_sparse_buffer_that_the_model_resized_is_as_before_and_the_model_runs() -> None:
    model = SparseTable()
    with isolate(model):
        model(torch.ones(4, 3))
    assert model.table.to_dense().tolist() == [[1, 0, 0], [0, 1, 0]]
    assert model(torch.ones(3, 3)).tolist() == [[2, 1, 1], [1, 2, 1], [1, 1, 1]]


def test_nested_isolation_slows_operations_down_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "AT_ONCE", 0)  # a tensor is copied before its first write
    model = nn.Linear(2, 2)
    before = model.weight.detach().clone()
    with isolate(model), torch.no_grad():
        model.weight.add_(1)
        with isolate(model):
            model.weight.add_(1)
            model.bias.add_(1)  # the outer isolation has not seen this tensor yet
            assert _len_torch_dispatch_stack() == 1
        assert torch.equal(model.weight, before + 1)
        model.weight.add_(1)
        assert _len_torch_dispatch_stack() == 1
    assert torch.equal(model.weight, before)
    assert _len_torch_dispatch_stack() == 0
