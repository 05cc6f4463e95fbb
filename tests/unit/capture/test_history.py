"""Models whose second answer is another one are told from those that only remember what is true for ever."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from auditor.capture.capture import AGREEMENT
from tests.support.replaying import Model, linear, replayed
from tests.support.subjects import normal

X = normal(3, 4)


def grows(m: Any, x: Tensor) -> Tensor:
    m.past = x if m.past is None else torch.cat([m.past, x])
    return m.first(m.past)


def carries(m: Any, x: Tensor) -> Tensor:
    m.past = m.first(x) + (0 if m.past is None else m.past)
    result: Tensor = m.past
    return result


def attends(m: Any, x: Tensor) -> Tensor:
    """Over the same keys twice it is what it is over them once."""
    m.past = m.first(x) if m.past is None else torch.cat([m.past, m.first(x)])
    return torch.nn.functional.scaled_dot_product_attention(x, m.past, m.past)


def refuses_a_second_call(m: Any, x: Tensor) -> Tensor:
    if m.past is not None:
        raise ValueError("reset me first")
    m.past = x
    result: Tensor = m.first(x)
    return result


def counts(m: Any, x: Tensor) -> Tensor:
    m.seen.add_(1)
    result: Tensor = m.first(x) / m.seen
    return result


def remembers_a_table(m: Any, x: Tensor) -> Tensor:
    if m.past is None:
        m.past = torch.arange(4.0).cos()
    result: Tensor = m.first(x) * m.past
    return result


def only_counts(m: Any, x: Tensor) -> Tensor:
    m.seen.add_(1)
    result: Tensor = m.first(x)
    return result


def draws(m: Any, x: Tensor) -> Tensor:
    result: Tensor = m.first(x) + torch.randn(4)
    return result


def writes_into_its_input(m: Any, x: Tensor) -> Tensor:
    result: Tensor = m.first(x.mul_(2))
    return result


def drifts(m: Any, x: Tensor) -> Tensor:
    """Scales by 1 + d in the third call, which is the one compared."""
    m.seen.add_(1)
    result: Tensor = m.first(x) * (1 + m.drift * (m.seen - 1) / 2)
    return result


def warnings_of(function: Any, drift: float = 0.0) -> tuple[str, ...]:
    model = Model(function, first=linear(4, 4), seen=torch.zeros(()), past=None, drift=drift)
    found = replayed(model, X.clone()).warnings
    assert model.past is None and model.seen == 0
    return found


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (grows, "calls: a later one on the same inputs answers in other shapes"),
        (carries, "calls: a later one on the same inputs differs by"),
        (counts, "differs by 0.67 (relative L2;"),  # the third call: |a / 3 - a| / |a|
        (attends, "differs by"),
        (refuses_a_second_call, "inputs fails (ValueError: reset me first)"),
    ],
)
def test_what_depends_on_the_calls_before_is_said(function: Any, words: str) -> None:
    (warning,) = warnings_of(function)
    assert words in warning


@pytest.mark.parametrize("function", [remembers_a_table, only_counts, draws, writes_into_its_input])
def test_what_answers_the_same_is_not(function: Any) -> None:
    assert warnings_of(function) == ()


@pytest.mark.parametrize(("drift", "said"), [(2 * AGREEMENT, True), (AGREEMENT / 4, False)])
def test_rounding_is_no_history(drift: float, said: bool) -> None:
    assert bool(warnings_of(drifts, drift)) is said


class Cache:
    """What a caller hands over to be filled."""

    def __init__(self) -> None:
        self.past: list[Tensor] = []


def test_a_cache_of_the_caller_s_is_no_state_of_the_model() -> None:
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = linear(4, 4)

        def forward(self, x: Tensor, cache: Cache) -> Tensor:
            cache.past.append(self.first(x))
            return torch.cat(cache.past)

    cache = Cache()
    assert replayed(Decoder(), X, cache).warnings == ()
    assert cache.past == []
