"""What functions keep comes back: closures, defaults, attributes, globals and what the user's modules hold."""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from auditor.state import unchanged
from tests.replaying import Model
from tests.subjects import normal

X = normal(2, 3)
COUNT = 0
TABLE: torch.Tensor | None = None
BY_DTYPE: dict[torch.dtype, torch.Tensor] = {}
BUFFER = torch.zeros(3)
SETTINGS = types.ModuleType("users_settings")
SETTINGS.scale = 1.0  # type: ignore[attr-defined]


class Shelf:
    """A class that nothing holds an object of."""

    kept: torch.Tensor | None = None


def counts(m: Any, x: torch.Tensor) -> torch.Tensor:
    global COUNT
    COUNT += 1
    return x * COUNT


def makes_a_table(m: Any, x: torch.Tensor) -> torch.Tensor:
    global TABLE
    if TABLE is None:
        TABLE = x.cos()
    return x + TABLE


def makes_one_for_each_dtype(m: Any, x: torch.Tensor) -> torch.Tensor:
    return x + BY_DTYPE.setdefault(x.dtype, x.cos())


def writes(m: Any, x: torch.Tensor) -> torch.Tensor:
    return x + BUFFER.add_(1)


def writes_in_a_helper(m: Any, x: torch.Tensor) -> torch.Tensor:
    return (lambda: writes(m, x))()


def sets_in_another_module(m: Any, x: torch.Tensor) -> torch.Tensor:
    SETTINGS.scale *= 2  # type: ignore[attr-defined]
    return x * SETTINGS.scale  # type: ignore[attr-defined]


def keeps_on_a_class(m: Any, x: torch.Tensor) -> torch.Tensor:
    Shelf.kept = x if Shelf.kept is None else Shelf.kept + x
    return Shelf.kept


def keeps_in_a_default(m: Any, x: torch.Tensor, seen: list[torch.Tensor] = []) -> torch.Tensor:  # noqa: B006
    seen.append(x)
    return x * len(seen)


def keeps_in_an_attribute(m: Any, x: torch.Tensor) -> torch.Tensor:
    own = vars(keeps_in_an_attribute)
    own["calls"] = own.get("calls", 0) + 1
    return x * own["calls"]


def keeps_in_a_closure() -> Callable[..., torch.Tensor]:
    sums, last = torch.zeros(3), []

    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        nonlocal sums
        sums = sums + x.sum(0)
        last.append(x)
        return x * sums * len(last)

    return run


def memoised() -> Callable[..., torch.Tensor]:
    """A cache that was not made by functools."""
    known: dict[int, torch.Tensor] = {}
    return lambda m, x: x * known.setdefault(len(known), torch.tensor(len(known) + 1.0))


KEEPING: dict[str, Callable[..., Any]] = {
    "global number": counts,
    "global tensor": makes_a_table,
    "global dict": makes_one_for_each_dtype,
    "write into a global": writes,
    "global of a helper": writes_in_a_helper,
    "another module": sets_in_another_module,
    "a class": keeps_on_a_class,
    "default": keeps_in_a_default,
    "function's attribute": keeps_in_an_attribute,
    "closure": keeps_in_a_closure(),
    "memo": memoised(),
    "partial": functools.partial(keeps_in_a_closure(), x=X),
}


@pytest.mark.parametrize("name", KEEPING)
def test_two_runs_start_from_the_same_state(name: str) -> None:
    model = Model(KEEPING[name])
    given = () if name == "partial" else (X,)
    answers = []
    for _ in range(2):
        with unchanged(model):
            model(*given)
            answers.append(model(*given).clone())
    assert torch.equal(*answers)
    assert (COUNT, TABLE, BY_DTYPE, BUFFER.tolist(), Shelf.kept) == (0, None, {}, [0.0, 0.0, 0.0], None)
    assert SETTINGS.scale == 1.0
    assert vars(keeps_in_an_attribute) == {}


def test_who_counts_and_logs_in_a_closure_keeps_that() -> None:
    calls, seen = 0, []

    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        seen.append(x.dtype)
        return x

    model = Model(run)
    with unchanged(model):
        model(X)
    assert (calls, seen) == (1, [torch.float32])


def test_so_do_runs_with_hooks_that_count() -> None:
    model, calls, seen = nn.Linear(3, 3), [0], dict[str, Any]()

    def divide(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return out / calls[0]

    model.register_forward_hook(divide)
    model.register_forward_hook(lambda module, args, out: seen.update(last=out))
    with unchanged(model):
        model(X)
    assert (calls, seen) == ([0], {})


@functools.lru_cache(maxsize=4)
def table(size: int, dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor]]:
    return torch.arange(size).cos().to(dtype), [torch.ones(size)]


@functools.cache
def number(size: int) -> float:
    return math.sqrt(size)


class Rotary(nn.Module):
    @functools.lru_cache(maxsize=2)  # noqa: B019
    def table(self, size: int) -> torch.Tensor:
        return torch.arange(size).cos()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * table(x.shape[1], x.dtype)[0] * number(x.shape[1]) * self.table(x.shape[1])


def test_caches_forget_tensors_and_nothing_else() -> None:
    number.cache_clear()
    with unchanged(Rotary()) as _, torch.no_grad():
        Rotary()(X)
        assert table.cache_info().currsize == 1
    model = Rotary()
    with unchanged(model):
        model(X)
    assert table.cache_info().currsize == Rotary.table.cache_info().currsize == 0
    assert number.cache_info().currsize == 1


def test_a_cache_that_no_run_added_to_keeps_what_it_has() -> None:
    kept, model = table(3, torch.float32), Rotary()
    model.table(3)
    with unchanged(model):
        model(X)
    assert table(3, torch.float32) is kept


def test_a_global_is_the_same_object_again() -> None:
    before, model = BUFFER, Model(writes)
    with unchanged(model):
        model(X)
        globals()["BUFFER"] = torch.ones(3)
    assert BUFFER is before
