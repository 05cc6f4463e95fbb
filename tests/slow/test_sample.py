"""The figures of the README are those that the audit it names states today, to the two digits it gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser.sample import audited, rows_of, with_rows

pytestmark = pytest.mark.slow


def test_the_readmes_figures_are_those_of_a_run() -> None:
    readme = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
    assert with_rows(readme, rows_of(audited())) == readme, "run `make samples`"
