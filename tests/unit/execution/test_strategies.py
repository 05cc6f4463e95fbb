"""What a strategy means for weights, inputs and scopes."""

from __future__ import annotations

from auditor.artefact.strategies import strategy_of
from auditor.execution.policy import Layout, Policy, scoped
from auditor.records import ScopeChoice
from tests.support.problems import captured

SCOPES = {"": ScopeChoice("fp16"), "a.b": ScopeChoice("fp32"), "a.b.c.d": ScopeChoice("fp16")}


def test_precision_of_a_path_is_that_of_the_nearest_scope_above() -> None:
    precision = scoped(SCOPES)
    paths = ["", "a", "a.b", "a.bc", "a.b.c", "a.b.c.d", "a.b.c.d.e", "b"]
    assert [precision(path) for path in paths] == ["fp16", "fp16", "fp32", "fp16", "fp32", "fp16", "fp16", "fp16"]
    assert scoped({})("a") == "fp32"


def stored(strategy: str, labels: dict[str, str]) -> dict[str | None, str]:
    capture = captured("tied")
    how = Policy(capture, strategy, lambda owner: labels.get(owner, "fp32"), "fp16")
    names = {placeholder.name: placeholder.fqn or "input" for placeholder in capture.placeholders}
    return {names[name]: precision for name, precision in how.stored.items()}


def test_cast_stores_each_weight_in_the_precision_of_its_readers() -> None:
    assert stored("autocast", {"": "fp16", "first": "fp16"}) == {}
    found = stored("cast", {"": "fp16", "first": "fp16", "middle": "fp32", "last": "fp16"})
    assert found["input"] == "fp16"
    assert (found["middle.weight"], found["middle.bias"]) == ("fp32", "fp32")
    assert (found["first.bias"], found["last.bias"]) == ("fp16", "fp16")


def test_a_shared_weight_is_fp32_as_soon_as_one_reader_is() -> None:
    shared = [name for name in stored("cast", {}) if name in ("first.weight", "last.weight")]
    read = {"first.weight", "last.weight"} & set(shared)
    low = stored("cast", {"": "fp16", "first": "fp16", "middle": "fp16", "last": "fp16"})
    mixed = stored("cast", {"": "fp16", "first": "fp16", "middle": "fp16", "last": "fp32"})
    assert {low[name] for name in read} >= {"fp16"}
    assert {mixed[name] for name in read} == {"fp32"}


def test_a_tied_weight_is_stored_low_where_all_that_hold_it_are() -> None:
    capture = captured("held")
    (weight,) = (place.name for place in capture.placeholders if place.tied)
    assert Layout(capture, strategy_of("cast")).owners == ("", "body.0", "body.1", "last", "shared")
    assert Layout(capture, strategy_of("autocast")).owners == ("", "body.0", "body.1", "last")
    for labels, stored in (({}, "fp16"), ({"shared": "fp32"}, "fp32"), ({"body.0": "fp32"}, "fp32")):
        how = Policy(capture, "cast", lambda owner, labels=labels: labels.get(owner, "fp16"), "fp16")
        assert how.stored[weight] == stored
