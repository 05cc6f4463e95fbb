"""docs/command-line.md and docs/api.md against the parsers and the code: nothing missing, nothing stale."""

from __future__ import annotations

import dataclasses
import inspect
import re

import pytest

import auditor
from auditor.cli.parsers import VERBS, parsers
from tests.docs.options import DOCS, HEADS, STUB, stub, written


@pytest.fixture(scope="module")
def command_line(root):
    return (root / "docs" / "command-line.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def api(root):
    return (root / "docs" / "api.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("document", HEADS)
def test_the_tables_of_options_are_those_of_the_settings(document):
    assert written(document) == (DOCS / document).read_text(encoding="utf-8"), "run `make docs`"


def test_editors_see_the_arguments_of_the_settings():
    assert stub() == STUB.read_text(encoding="utf-8"), "run `make docs`"


def test_every_option_of_every_verb_is_described(command_line):
    options = {name for part in parsers()[1].values() for action in part._actions for name in action.option_strings}
    options -= {name for name in options if name.startswith("--no-")}
    named = set(re.findall(r"`(--?[a-z][a-z-]*)", command_line)) - {"--no-quick", "--no-measure-time"}
    assert options - {"-h", "--help"} == named


def test_every_verb_is_described(command_line):
    for verb in set(VERBS) - {"audit"}:
        assert re.search(rf"^\| `{verb}\b", command_line, re.MULTILINE), verb


def test_every_public_name_argument_and_field_is_described(api):
    for name in set(auditor.__all__) - {"__version__"}:
        assert f"`{name}`" in api
        assert f"auditor.{name}(" in api or f"## `{name}`" in api
    parameters = [p for p in inspect.signature(auditor.audit).parameters if p != "self"]
    fields = [field.name for field in dataclasses.fields(auditor.Audit)]
    for name in (*parameters, *fields):
        assert f"`{name}`" in api, name
