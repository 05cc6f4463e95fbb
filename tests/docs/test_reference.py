"""docs/command-line.md and docs/api.md against the parsers and the code: nothing missing, nothing stale."""

from __future__ import annotations

import dataclasses
import inspect
import re

import pytest

import auditor
from auditor.cli import options, program


@pytest.fixture(scope="module")
def command_line(root):
    return (root / "docs" / "command-line.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def api(root):
    return (root / "docs" / "api.md").read_text(encoding="utf-8")


def test_every_option_of_every_verb_is_described(command_line):
    parsers = [make() for make, _ in program.VERBS.values()]
    options = {name for made in parsers for action in made._actions for name in action.option_strings}
    written = set(re.findall(r"`(--?[a-z][a-z-]*)", command_line))
    assert options - {"-h", "--help"} == written


def test_every_verb_is_described_and_shown_in_the_help(command_line):
    for verb in set(program.VERBS) - {"audit"}:
        assert re.search(rf"^\| `{verb}\b", command_line, re.MULTILINE), verb
        assert verb in options.EPILOG


def test_every_public_name_argument_and_field_is_described(api):
    for name in set(auditor.__all__) - {"__version__"}:
        assert f"`{name}`" in api
        assert f"auditor.{name}(" in api or f"## `{name}`" in api
    parameters = [p for p in inspect.signature(auditor.audit).parameters if p != "self"]
    fields = [field.name for field in dataclasses.fields(auditor.Audit)]
    for name in (*parameters, *fields):
        assert f"`{name}`" in api, name


def test_choices_are_those_of_the_parser(command_line):
    made = program.VERBS["audit"][0]()
    for action in made._actions:
        for choice in action.choices or ():
            assert f"`{choice}`" in command_line, choice
