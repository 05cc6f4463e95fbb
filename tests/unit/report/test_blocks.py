"""Each kind of block is rendered in every form of a page: without a case, a terminal or Markdown would leave it out silently."""

import inspect
from dataclasses import is_dataclass
from typing import Any, get_args

import pytest

from auditor.report import blocks
from auditor.report.blocks import Block, Chart, Columns, Fold

KINDS = [kind for kind in vars(blocks).values() if is_dataclass(kind)]
IN_TEXT = [kind for kind in KINDS if kind not in (Fold, Chart, Columns)]


def test_every_kind_is_a_block() -> None:
    assert {kind.__name__ for kind in KINDS} == {kind.__name__ for kind in get_args(Block)}, "name it in `Block`"


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_a_macro(kind: type) -> None:
    macros = blocks.environment().get_template("blocks.html.jinja").module
    assert hasattr(macros, kind.__name__), f"reports/blocks.html.jinja lacks a macro {kind.__name__}(block)"


@pytest.mark.parametrize("kind", IN_TEXT)
@pytest.mark.parametrize("render", [blocks._parts, blocks._markdown])
def test_every_kind_but_those_of_html_has_a_case(render: Any, kind: type) -> None:
    lacks = f"{render.__name__} in auditor/report/blocks.py lacks a case for {kind.__name__}"
    assert f"case {kind.__name__}(" in inspect.getsource(render), lacks
