"""A table read key by key: what it holds, and where the error points at when it does not hold it."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from auditor.errors import RuleError
from auditor.rulebook.reader import Reader

TEXT = """name = "x"
on = true

[outer]
items = [{ name = "a" }, { name = "" }]
list = ["p", "q"]

[outer.inner]
name = 3
"""


@pytest.fixture
def reader() -> Reader:
    return Reader(Path("rule.toml"), TEXT, tomllib.loads(TEXT))


def test_what_is_there_is_read(reader: Reader) -> None:
    assert (reader.text("name"), reader.flag("on")) == ("x", True)
    outer = reader.reader("outer")
    assert outer.texts("list", ("p", "q", "r")) == ("p", "q")
    assert [item.key for item in outer.readers("items")] == ["outer.items[0]", "outer.items[1]"]
    assert outer.readers("items")[0].text("name", pattern="[a-c]") == "a"


def problem(caught: pytest.ExceptionInfo[RuleError]) -> tuple[str, str]:
    return str(caught.value), caught.value.slug


def test_an_error_names_the_whole_key_and_the_line_of_its_own_table(reader: Reader) -> None:
    with pytest.raises(RuleError) as caught:
        reader.reader("outer").reader("inner").text("name")  # lines 1 and 5 hold a `name` too
    assert problem(caught) == ("rule.toml:9: outer.inner.name: must be a string, not int", "rule-bad-type")


def test_an_error_in_a_list_names_the_item(reader: Reader) -> None:
    with pytest.raises(RuleError) as caught:
        reader.reader("outer").readers("items")[1].text("name")
    assert problem(caught) == ("rule.toml:5: outer.items[1].name: must not be empty", "rule-bad-value")


def test_a_missing_key_is_looked_for_at_its_table(reader: Reader) -> None:
    with pytest.raises(RuleError) as caught:
        reader.reader("outer").flag("off")
    assert problem(caught) == ("rule.toml:4: outer.off: is missing", "rule-missing-key")


def test_unknown_keys_are_refused_with_the_known_ones(reader: Reader) -> None:
    reader.allow(("name", "on", "outer"))
    with pytest.raises(RuleError) as caught:
        reader.allow(("on", "name"))
    assert problem(caught) == ("rule.toml:4: outer: unknown key; known here: name, on", "rule-unknown-key")


@pytest.mark.parametrize(
    ("choices", "pattern", "words"),
    [(("y", "z"), "", "name: 'x' is not one of y, z"), ((), "[a-c]", r"name: 'x' does not have the form [a-c]")],
)
def test_a_value_outside_of_what_is_allowed(reader: Reader, choices: tuple[str, ...], pattern: str, words: str) -> None:
    with pytest.raises(RuleError) as caught:
        reader.text("name", choices, pattern)
    assert problem(caught) == (f"rule.toml:1: {words}", "rule-bad-value")


def test_a_list_of_tables_is_no_list_of_texts_and_the_other_way_round(reader: Reader) -> None:
    outer = reader.reader("outer")
    with pytest.raises(RuleError, match=r"rule.toml:6: outer.list: must be a list of tables"):
        outer.readers("list")
    with pytest.raises(RuleError, match=r"rule.toml:5: outer.items: must be a non-empty list of strings"):
        outer.texts("items")
