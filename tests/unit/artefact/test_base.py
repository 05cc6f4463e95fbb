"""What a strategy says where it says nothing, and how strategies become known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from auditor.artefact.base import Strategy
from auditor.artefact.runtime import Runtime
from auditor.artefact.strategies import SHIPPED, names, register, registered, strategy_of
from auditor.errors import AuditorError
from auditor.records import Plan
from tests.support.structure import PACKAGE


class Mine(Strategy):
    name = "mine"
    title = "as I like it"
    purpose = "a test"
    runtime = Runtime


def test_by_default_nothing_is_converted_stored_or_wrapped() -> None:
    mine = Mine()
    assert (mine.computes_in("fp16"), mine.boundary("fp16", "fp32", False)) == ("fp16", (None, None))
    assert (mine.stores, mine.regional, mine.seconds_per_byte) == (frozenset(), False, 0.0)


@pytest.mark.parametrize(("share", "expected"), [(0.0, False), (0.1, True)])
def test_a_plan_gains_where_some_of_it_is_low(share: float, expected: bool) -> None:
    plan = Plan("mine_fp16", "mine", "fp16", {}, 0.0, 1.0, 0.0)
    assert Mine().gains(replace(plan, low_precision_flops=share)) is expected


def test_it_is_known_for_the_body_alone() -> None:
    mine = Mine()
    with registered(mine):
        assert strategy_of("mine") is mine
        assert names() == (*SHIPPED, "mine")
        with pytest.raises(AuditorError, match="there is one of that name already"):
            register(Mine())
    assert names() == SHIPPED
    with pytest.raises(KeyError):
        strategy_of("mine")


@pytest.mark.parametrize("name", ["Mine", "my strategy", "", "cast"])
def test_names_that_are_refused(name: str) -> None:
    other = type("Other", (Mine,), {"name": name})()
    with pytest.raises(AuditorError) as caught:
        register(other)
    assert caught.value.slug == "bad-strategy"


@pytest.mark.parametrize("lacking", ["name", "title", "runtime"])
def test_what_a_strategy_lacks_is_said_before_an_audit_needs_it(lacking: str) -> None:
    other = type("Other", (Mine,), {"name": "other", lacking: None})()
    with pytest.raises(AuditorError, match=f"it has no {lacking}") as caught:
        register(other)
    assert caught.value.slug == "bad-strategy"
    assert "other" not in names()


def test_a_runtime_without_a_source_is_refused() -> None:
    found: dict[str, Any] = {}
    exec("from auditor.artefact.runtime import Runtime\nclass Typed(Runtime): pass", found)
    other = type("Other", (Mine,), {"name": "other", "runtime": found["Typed"]})()
    with pytest.raises(AuditorError, match="define that class in a file"):
        register(other)
    assert "other" not in names()


def test_the_command_line_page_says_what_each_is_for() -> None:
    page = (PACKAGE.parent / "docs" / "command-line.md").read_text(encoding="utf-8")
    for name in SHIPPED:
        assert f"`{name}` ({strategy_of(name).purpose})" in page
