"""What a model consists of, however it is linked and wrapped, whatever its class says, and what it stores low."""

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from auditor.isolation import members
from auditor.isolation.draws import draw_of, drew, in_float32, may_draw
from auditor.isolation.run_model import run_model, stored_in
from tests.support.capturing import Function
from tests.support.subjects import normal, seeded


class Says(nn.Module):
    """Claims to hold nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        return iter(())

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        return iter(())

    parameters = buffers = modules = children = named_parameters


def test_a_link_to_the_parent_ends_there_and_every_other_name_counts() -> None:
    model = nn.Module()
    model.child = model.again = nn.Linear(2, 3)
    model.child.parent = model
    model.norm = nn.BatchNorm1d(3)
    assert [path for path, _ in members.named_modules(model)] == ["", "child", "again", "norm"]
    assert members.modules_of(model) == [model, model.child, model.norm]
    names = ["child.weight", "child.bias", "again.weight", "again.bias", "norm.weight", "norm.bias"]
    assert [name for name, _ in members.named_parameters(model)] == names
    assert [name for name, _ in members.named_tensors(model)][6:] == [f"norm.{name}" for name in model.norm._buffers]
    assert members.size_of(model) == 2 * 3 + 3 + 3 + 3


def test_what_the_class_says_of_itself_does_not_count() -> None:
    model = Says()
    assert [id(p) for p in members.parameters_of(model)] == [id(model.layer.weight), id(model.layer.bias)]
    assert members.modules_of(model) == [model, model.layer]


class Holds(nn.Module):
    """A weight used twice, buffers of several dtypes, and tensors that it did not register."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3).bfloat16(), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.ones(2).half())
        self.register_buffer("coded", torch.ones(2).to(torch.float8_e4m3fn))
        self.register_buffer("wide", torch.ones(2).double())
        self.register_buffer("none", None)
        self.tables = {"cos": [torch.ones(2).half(), torch.ones(2)]}


def test_low_tensors_are_found_once() -> None:
    model = Holds()
    found = members.stored_low(model)
    assert [id(x) for x in found] == [id(x) for x in (model.first.weight, model.first.bias, model.scale)]
    further = members.stored_low(model, attributes=True)
    assert [id(x) for x in further[3:]] == [id(model.tables["cos"][0])]


def test_raised_tensors_are_the_same_objects_with_the_same_values() -> None:
    model = Holds()
    before = [(x, x.detach().clone()) for x in members.stored_low(model)]
    members.raise_in_place([x for x, _ in before])
    assert members.stored_low(model) == []
    assert model.second.weight is model.first.weight is before[0][0]
    for x, value in before:
        assert x.dtype is torch.float32
        assert torch.equal(x, value.float())
    assert model.wide.dtype is torch.float64


def test_what_shared_a_storage_shares_one_again() -> None:
    flat = normal(12).bfloat16()
    expected = flat.float()
    head, tail, turned = flat[:6], flat[6:], flat.reshape(3, 4).t()
    members.raise_in_place([head, tail, turned, flat])
    assert torch.equal(torch.cat((head, tail)), expected)
    assert torch.equal(turned, expected.reshape(3, 4).t())
    head[1] = 7
    assert turned[1, 0] == flat[1] == 7


def test_wrappers_of_wrappers_are_taken_off() -> None:
    inner = nn.Linear(2, 2)
    assert members.unwrap_model(torch.compile(inner)) is inner
    assert members.unwrap_model(nn.DataParallel(torch.compile(inner))) is inner
    assert members.unwrap_model(torch.compile(nn.DataParallel(inner))) is inner


def test_scopes_follow_what_is_wrapped_inside() -> None:
    assert members.without_wrappers("a._orig_mod.b.module.c") == "a.b.c"
    assert members.without_wrappers("_orig_mod") == ""
    assert members.rename_scopes({"": 0, "a": 1, "a.b": 2}, {"", "a", "a._orig_mod", "a._orig_mod.b"}) == {
        "": 0,
        "a": 1,
        "a._orig_mod.b": 2,
    }
    assert members.rename_scopes({"a": 1, "a.module.b": 2}, {"", "a", "a.b"}) == {"a": 1, "a.b": 2}
    assert members.rename_scopes({"a.module": 1}, {"", "a", "a.module"}) == {"a.module": 1}
    assert members.rename_scopes({"gone": 1}, {"", "a"}) == {"gone": 1}


# Runs of the user's own model leave it as it was, whatever they convert.


class Kept(torch.autograd.Function):
    """A product that notes what autograd has saved of it while the model runs on."""

    saved: list[bool]

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


def taken_inside(x: Tensor) -> Tensor:
    x = x.requires_grad_()
    with torch.enable_grad():
        return torch.autograd.grad(Kept.apply(x).sum(), x)[0]


def swallowed(x: Tensor) -> Tensor:
    try:
        return taken_inside(x)
    except RuntimeError:
        return torch.zeros_like(x)


GRADIENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "autograd": taken_inside,
    "caught by the model": swallowed,
    "torch.func": torch.func.grad(lambda x: (x * x).sum()),
    "jacobian": lambda x: torch.func.jacrev(lambda y: y * y)(x).sum(1),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_a_model_that_takes_gradients_of_its_own_finds_what_it_saved(name: str) -> None:
    found = run_model(Function(GRADIENTS[name]), ((torch.tensor([1.0, 3.0]),), {}), gradients=True)
    assert found[0].tolist() == [2.0, 6.0]


def test_an_answer_with_gradients_keeps_nothing_for_a_backward_pass() -> None:
    """Each product's result is freed as soon as the next is there, but the one that was asked for."""
    alive: list[int] = []
    seen: list[weakref.ref[Tensor]] = []

    def chain(x: Tensor) -> Tensor:
        for _ in range(5):
            x = Kept.apply(x)
            seen.append(weakref.ref(x))
            alive.append(sum(other() is not None for other in seen))
        return x

    weight = torch.ones(3, requires_grad=True)
    run_model(Function(chain), ((weight,), {}), gradients=True)
    assert max(alive) <= 2


def test_a_model_stored_low_comes_back_with_its_gradients() -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    model(normal(4, 3)).sum().backward()
    tensors = [x for p in model.parameters() for x in (p.data, p.grad)] + list(model.buffers())
    before = [x.clone() for x in tensors]
    with stored_in(model, torch.float16):
        assert {p.dtype for p in model.parameters()} == {torch.float16}
    after = [x for p in model.parameters() for x in (p.data, p.grad)] + list(model.buffers())
    assert [x.data_ptr() for x in after] == [x.data_ptr() for x in tensors]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


# The numbers that an operation draws are the same in every dtype, whenever it is run again.

aten = torch.ops.aten
LOW = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
X = torch.linspace(0.05, 0.95, 64).reshape(4, 16)


def again(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> Tensor:
    """The result in a dtype, from the same place in the generator."""
    torch.manual_seed(5)
    draw = draw_of(args, kwargs)
    low = [x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in args]
    options = {key: dtype if isinstance(value, torch.dtype) else value for key, value in kwargs.items()}
    result = draw.repeat(op, tuple(low), options)
    return result[0] if isinstance(result, tuple) else result


DRAWING: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "rand": (aten.rand.default, ([64],), {"dtype": torch.float32}),
    "randn": (aten.randn.default, ([64],), {"dtype": torch.float32}),
    "rand_like": (aten.rand_like.default, (X,), {}),
    "randn_like": (aten.randn_like.default, (X,), {}),
    "dropout": (aten.dropout.default, (torch.ones(64), 0.5, True), {}),
    "bernoulli": (aten.bernoulli.default, (X.round(decimals=1),), {}),
    "bernoulli.p": (aten.bernoulli.p, (X, 0.3), {}),
    "normal_functional": (aten.normal_functional.default, (X, 0.0, 1.0), {}),
    "uniform": (aten.uniform.default, (X, 0.0, 1.0), {}),
    "exponential": (aten.exponential.default, (X,), {}),
}


@LOW
@pytest.mark.parametrize("name", DRAWING)
def test_draws_in_half_are_those_in_fp32_rounded(name: str, dtype: torch.dtype) -> None:
    op, args, kwargs = DRAWING[name]
    if name == "bernoulli":
        args = (torch.full((64,), 0.5),)  # which every format has
    wide, low = again(op, args, kwargs, torch.float32), again(op, args, kwargs, dtype)
    assert low.dtype is dtype
    assert torch.equal(low, wide.to(dtype))
    assert wide.unique().numel() > 1


@LOW
def test_writes_in_place_go_to_the_tensor_itself(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    wide = torch.empty(64).normal_()
    torch.manual_seed(1)
    x = torch.empty(64, dtype=dtype)
    assert in_float32(aten.normal_.default, (x,), {}) is x
    assert torch.equal(x, wide.to(dtype))


def test_running_again_leaves_the_generators_where_they_are() -> None:
    draw = draw_of((X,), {})
    state = torch.get_rng_state()
    first, second = (draw.repeat(aten.rand_like.default, (X,), {}) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), state)
    assert not drew(draw, {})
    torch.rand(1)
    assert drew(draw, {})


@pytest.mark.parametrize("call", [lambda: aten.dropout.default, lambda: aten.lstm.input, lambda: aten.rand.default])
def test_what_may_draw(call: Callable[[], Any]) -> None:
    assert may_draw(call())
    assert not may_draw(aten.add.Tensor)
