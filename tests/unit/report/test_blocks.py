"""Each kind of block is in `Block`, so that the type checker asks for its cases, and has a macro for HTML."""

from dataclasses import is_dataclass
from typing import get_args

import pytest

from auditor.report import blocks
from auditor.report.blocks import Block

KINDS = [kind for kind in vars(blocks).values() if is_dataclass(kind)]


def test_every_kind_is_a_block() -> None:
    assert {kind.__name__ for kind in KINDS} == {kind.__name__ for kind in get_args(Block)}, "name it in `Block`"


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_a_macro(kind: type) -> None:
    macros = blocks.environment().get_template("blocks.html.jinja").module
    assert hasattr(macros, kind.__name__), f"reports/blocks.html.jinja lacks a macro {kind.__name__}(block)"
