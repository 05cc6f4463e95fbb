"""Modules of every make: that refuse attributes, copies and modes, or are nested as deep as Python goes."""

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import auditor
from auditor.errors import AuditorError, LoadError
from tests.any_model.holding import Call, Net, around, drawn, held
from tests.support.refusing import refused
from tests.support.replaying import Model, linear
from tests.support.subjects import normal
from tests.support.thinned import thinned


class Sealed(Net):
    """Takes no attribute once it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["sealed"] = True

    def __setattr__(self, name: str, value: Any) -> None:
        if self.__dict__.get("sealed"):
            raise AttributeError("sealed")
        super().__setattr__(name, value)


class AnswersAll(Net):
    """Has every attribute that it is asked for."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__"):
                raise
            return None


class Uncopied(Net):
    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("no copies")

    def __getstate__(self) -> Any:
        raise TypeError("no pickles")


class Moody(Net):
    """Refuses to change its mode, its dtype and its place."""

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("stays as it is")

    train = eval = to = half = float = bfloat16 = _apply = _refuse


class Trainable(Net):
    """Says that only its head has parameters, as fine-tuning code likes to."""

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return self.last.parameters(recurse)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return self.last.named_parameters(*args, **kwargs)

    def modules(self) -> Iterator[nn.Module]:
        yield self


class Called(Net):
    def __call__(self, x: Tensor) -> Any:
        return 2 * super().__call__(x)


class Empty(Net):
    """Counts as nothing, and cannot be shown."""

    def __len__(self) -> int:
        return 0

    def __bool__(self) -> bool:
        raise RuntimeError("neither true nor false")

    def __repr__(self) -> str:
        raise RuntimeError("cannot be shown")


class Slotted:
    __slots__ = ("layer", "scale")

    def __init__(self) -> None:
        self.layer, self.scale = nn.Linear(16, 8), torch.ones(8)


class Unregistered(nn.Module):
    """Layers in a list, in a dict and in slots; one is called by another method, one's weight is used by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = [nn.Linear(16, 16) for _ in range(2)]
        self.slotted = Slotted()
        self.net = Net()

    def forward(self, x: Tensor) -> Any:
        for layer in self.listed:
            x = layer(x).relu()
        self.slotted.scale = self.slotted.scale + 1
        x = x + self.net.forward(x) @ self.net.last.weight @ self.net.first.weight
        return F.linear(x, self.slotted.layer.weight) * self.slotted.scale


def replaced_forward() -> nn.Module:
    model = Net()
    model.forward = types.MethodType(lambda self, x: self.last(torch.relu(self.first(x))), model)  # type: ignore[method-assign]
    return model


def hooked() -> nn.Module:
    model = Net()
    model.first.register_forward_pre_hook(lambda module, args, kwargs: ((2 * args[0],), kwargs), with_kwargs=True)
    model.norm.register_forward_hook(lambda module, args, output: output * 2)
    model.last.register_full_backward_hook(lambda *args: None)
    model._register_state_dict_hook(lambda module, state, prefix, local: state.clear())
    return model


def under_inference_mode() -> nn.Module:
    with torch.inference_mode():
        return Net()


def local() -> nn.Module:
    class Local(Net):
        pass

    Local.__module__ = "__main__"
    return Local()


ODD: list[Callable[[], nn.Module]] = [
    *(Sealed, AnswersAll, Uncopied, Moody, Trainable, Called),
    *(Empty, replaced_forward, hooked, under_inference_mode, local),
]


@pytest.mark.parametrize("make", thinned(ODD, 2), ids=lambda make: make.__name__)
def test_odd_modules_are_audited(make: Callable[[], nn.Module]) -> None:
    audit = held(drawn(lambda: around(make()), 4, 16), formats="fp16")
    assert audit.plans["autocast_fp16"].low_precision_flops == 1


def test_weights_come_back_whatever_the_model_says_of_them() -> None:
    """`held` asks the model for its parameters, which names the head's alone."""
    model, (args, _) = drawn(Trainable, 4, 16)()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    auditor.audit(model, args, device="cpu")
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def test_layers_that_nobody_registered() -> None:
    audit = held(drawn(Unregistered, 4, 16))
    assert audit.plans["autocast_bf16"].low_precision_flops == 1


def test_a_forward_that_cannot_be_replaced_is_named() -> None:
    class Fixed(Net):
        @property
        def forward(self) -> Any:
            return lambda x: self.last(torch.relu(self.first(x)))

    audit = held(drawn(Fixed, 4, 16), some_plan_verified=False)
    for plan in audit.plans.values():
        assert "defines forward as a property" in str(plan.verification.failure)


def test_without_a_hash_there_is_one_line() -> None:
    class Unhashable(Net):
        def __eq__(self, other: object) -> bool:
            return self is other

    model, (args, _) = drawn(Unhashable, 4, 16)()
    with refused(LoadError, "unhashable-module", match="also needs __hash__"):
        auditor.audit(model, args, device="cpu")


# Modules nested so deep that a model's own forward takes nearly all the calls that Python allows, or more than that.

X = normal(4, 8)


class Nesting(nn.Module):
    """Calls what it holds."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def nested(kind: type[nn.Module], levels: int) -> tuple[nn.Module, Call]:
    model: nn.Module = linear(8, 8)
    for _ in range(levels):
        model = kind(model)
    return model.eval(), ((X.clone(),), {})


@contextmanager
def limited(calls: int) -> Iterator[None]:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(calls)
    try:
        yield
        assert sys.getrecursionlimit() == calls
    finally:
        sys.setrecursionlimit(before)


@pytest.mark.parametrize("kind", [Nesting, nn.Sequential])
def test_modules_two_hundred_and_fifty_deep_in_each_other(kind: type[nn.Module]) -> None:
    with limited(1_200):  # four calls of Python a level where the test itself emulates a GPU, and what pytest has open
        held(lambda: nested(kind, 250), formats="fp16")


def test_it_is_audited_where_only_the_audit_would_run_it() -> None:
    """Its owner's own call would end in a RecursionError: the audit's does not."""
    model, (args, _) = nested(Nesting, 250)
    with limited(600):
        with pytest.raises(RecursionError):
            model(*args)
        assert auditor.audit(model, args, device="cpu", formats=("bf16",)).plans["autocast_bf16"].is_verified


def test_endless_recursion_is_one_clear_line() -> None:
    with pytest.raises(AuditorError, match="RecursionError"):
        auditor.audit(Model(lambda m, x: m(x)), (X,), device="cpu")
