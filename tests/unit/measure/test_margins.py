"""A model that answers with choices alone: what decides them, and which errors change none of them."""

from __future__ import annotations

import torch
from torch import Tensor

from auditor.measure.margins import REACH, Held, answered, deciders, held, only_choices, through
from auditor.measure.rerun import PLAIN, Reruns
from tests.capturing import Function
from tests.subjects import capture_of, measurement_of, normal

CLASSES = Function(lambda x: ((x * 3.0) + 0.1).argmax(-1))


def test_what_decides_a_class() -> None:
    captured = capture_of(CLASSES, normal(4, 3))
    assert only_choices(captured)
    assert deciders(captured) == ["add"]
    assert through(captured) >= {"mul", "add"}
    assert not only_choices(capture_of(Function(lambda x: (x.argmax(-1), x * 2.0)), normal(4, 3)))


def test_what_decides_is_found_behind_other_choices_and_what_an_earlier_one_reads_is_left_out() -> None:
    def routed(x: Tensor) -> Tensor:
        chosen = (x * 3.0).argmax(-1, keepdim=True)
        return ((x * 0.5).gather(-1, chosen) + 0.1 > 0) & (x[:, :1] < 9.0)

    captured = capture_of(Function(routed), normal(4, 3))
    assert set(deciders(captured)) == {
        "add",
        *(name for name in captured.nodes if name.startswith(("slice", "narrow"))),
    }
    found = through(captured)
    assert {"mul_1", "gather", "add"} <= found  # of the way by the choice, nothing
    assert "mul" not in found


def test_the_numbers_that_decide_stand_for_the_outputs() -> None:
    measured = measurement_of(CLASSES, normal(4, 3))
    (numbers,) = answered(measured)
    assert torch.equal(numbers.detach(), normal(4, 3) * 3.0 + 0.1)
    floating = measurement_of(Function(lambda x: x * 2.0), normal(4, 3))
    assert answered(floating) == list(floating.outputs)


def test_errors_are_held_up_to_the_margin() -> None:
    # Two entries, 1 and 1.02: errors of 3 * level * sqrt((1 + 1.02^2) / 2) normal deviates, eight pairs of them.
    measured = measurement_of(Function(lambda x: (x * 1.0).argmax(-1)), torch.tensor([[1.0, 1.02]]))
    levels = {"a": 1e-5, "b": 1e-4, "c": 1e-3, "d": 0.02, "e": 0.1}
    found = held(Reruns(measured, "fp16", PLAIN), levels)
    assert {"a", "b", "c"} <= found.names
    assert not found.names & {"d", "e"}
    assert (found.error, found.share(0.1)) == (0.0, 0.0)
    assert held(Reruns(measured, "fp16", PLAIN), {}) == Held()


def test_of_many_choices_some_may_change() -> None:
    """A thousand differences, evenly spread: errors change as large a share of their signs as they are large."""
    measured = measurement_of(Function(lambda x: (x * 1.0) > 0), torch.linspace(-1.0, 1.0, 1000))
    levels = {str(i): 1e-4 * 2**i for i in range(10)}
    none, some = (held(Reruns(measured, "fp16", PLAIN), levels, allowed) for allowed in (0.0, 0.02))
    assert none.names < some.names
    assert 0.005 < some.error <= 0.02
    assert some.level == REACH * max(levels[name] for name in some.names)
    assert some.share(some.level) == some.error
    for name in some.names:
        off = measured.values["mul"] + levels[name] * 0.58 * torch.randn(
            1000, generator=torch.Generator().manual_seed(7)
        )
        changed = float(((off > 0) != (measured.values["mul"] > 0)).float().mean())
        assert changed <= some.error
