"""What torch.compile and the data-parallel classes wrap is found; modules that only look so are left alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from auditor.runs.wrapped import renamed, unwrapped, without_wrappers, wrapper_of


class OfOnesOwn(nn.Module):
    """A module that holds another under a wrapper's name."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self._orig_mod = nn.Linear(2, 2)


class DataParallel(OfOnesOwn):
    """By its name alone."""


def test_wrappers_of_wrappers_are_taken_off() -> None:
    inner = nn.Linear(2, 2)
    assert unwrapped(torch.compile(inner)) is inner
    assert unwrapped(nn.DataParallel(torch.compile(inner))) is inner
    assert unwrapped(torch.compile(nn.DataParallel(inner))) is inner


@pytest.mark.parametrize("model", [nn.Linear(2, 2), OfOnesOwn(), DataParallel()], ids=lambda m: type(m).__name__)
def test_what_is_no_wrapper_stays(model: nn.Module) -> None:
    assert wrapper_of(model) is None
    assert unwrapped(model) is model


def test_a_class_built_on_a_wrapper_is_one() -> None:
    class Mine(nn.DataParallel):
        pass

    assert wrapper_of(Mine(nn.Linear(2, 2))) == "module"


def test_scopes_follow_what_is_wrapped_inside() -> None:
    assert without_wrappers("a._orig_mod.b.module.c") == "a.b.c"
    assert without_wrappers("_orig_mod") == ""
    assert renamed({"": 0, "a": 1, "a.b": 2}, {"", "a", "a._orig_mod", "a._orig_mod.b"}) == {
        "": 0,
        "a": 1,
        "a._orig_mod.b": 2,
    }
    assert renamed({"a": 1, "a.module.b": 2}, {"", "a", "a.b"}) == {"a": 1, "a.b": 2}
    assert renamed({"a.module": 1}, {"", "a", "a.module"}) == {"a.module": 1}
    assert renamed({"gone": 1}, {"", "a"}) == {"gone": 1}
