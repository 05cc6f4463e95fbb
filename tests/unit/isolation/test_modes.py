"""`isolated` works with whatever else is switched on in torch, inside its body or around it."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import grad, vmap
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from auditor.isolation import isolated, tensors
from tests.support.portrait import portrait
from tests.support.writers import X, writer

NAMES = "batch norm", "adam foreach", "buffers", "containers"


@pytest.fixture(autouse=True, params=["at once", "before a write"])
def copied(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of small models is copied at once; without a budget every model is treated as a large one."""
    if request.param == "before a write":
        monkeypatch.setattr(tensors, "AT_ONCE", 0)


class Seen(TorchDispatchMode):
    """Counts what is dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Called(TorchFunctionMode):
    """Counts what is called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


@contextmanager
def default_device() -> Iterator[None]:
    with torch.device("cpu"):
        yield


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "dispatch": Seen,
    "function": Called,
    "flops": lambda: FlopCounterMode(display=False),
    "device": default_device,
    "no grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "deterministic": lambda: torch.random.fork_rng(devices=[]),
    "profiler": lambda: torch.autograd.profiler.profile(),
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
    "saved tensors": lambda: torch.autograd.graph.save_on_cpu(),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("where", ["inside", "around"])
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_modes(name: str, mode: str, where: str) -> None:
    if (mode, name) == ("no grad", "adam foreach"):
        pytest.skip("nothing to optimise without gradients")
    model = writer(name)
    before = portrait(model)
    inside, around = (MODES[mode], nullcontext) if where == "inside" else (nullcontext, MODES[mode])
    with around(), isolated(model), inside():
        model(X)
    assert portrait(model) == before


@pytest.mark.parametrize("name", ["batch norm", "max norm", "buffers", "one storage", "instance norm"])
@pytest.mark.parametrize("where", ["inside", "around"])
def test_inference_mode(name: str, where: str) -> None:
    """Here torch shows composite operations whole: what they call in turn is not seen."""
    model = writer(name)
    before = portrait(model)
    if where == "inside":
        with isolated(model), torch.inference_mode():
            model(X)
    else:
        with torch.inference_mode(), isolated(model):
            model(X)
    assert portrait(model) == before


def test_other_modes_see_the_model_s_operations_alone() -> None:
    model = nn.BatchNorm1d(3)
    with Seen() as seen_alone, Called() as called_alone:
        model(X)
    with Seen() as seen, Called() as called, isolated(model, X):
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
    with isolated(model, X):
        vmap(grad(loss))(X)
        vmap(lambda x: x.mul_(2))(X)
    assert portrait(model) == before
    assert X[0, 0] == -1


def test_higher_order_operations_inside() -> None:
    model = nn.Linear(3, 3)
    with isolated(model):
        out = torch.cond(torch.tensor(True), lambda x: x + 1, lambda x: x - 1, (X,))
    assert torch.equal(out, X + 1)
