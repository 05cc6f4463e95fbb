"""The five audits, and each reporter's page of them as text."""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path

from auditor.records import Audit
from auditor.report.reporters import github, html, markdown, sarif, text
from tests.unit.report.factory import make_audit

FOLDER = Path(__file__).parent / "files"


def audits() -> dict[str, Audit]:
    """Made by hand, without a run: the same on every machine."""
    return {
        "usual": make_audit(40),
        "hostile": make_audit(4, hostile=True, synthetic=True),
        "empty": make_audit(empty=True),
        "no-plan": make_audit(12, recommended=None),
        "one-format": make_audit(12, formats=("bf16",), recommended="autocast_bf16"),
    }


def pages(audit: Audit) -> dict[str, str]:
    """{name of the file: what a reader sees}; of SARIF, which repeats itself, what there is of a small audit."""
    small = {"findings.sarif": sarif(audit)} if len(audit.nodes) < 10 else {}
    return small | {
        "terminal.txt": text(audit, width=100, color=False),
        "markdown.txt": markdown(audit),
        "github.txt": github(audit),
        "notebook.txt": audit._repr_html_(),
        "report.txt": visible(html(audit)),
    }


class _Visible(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._hidden = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self._hidden += tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in ("script", "style")

    def handle_data(self, data: str) -> None:
        if not self._hidden and (line := " ".join(data.split())):
            self.lines.append(line)


def visible(document: str) -> str:
    """The texts of an HTML document, a line each, without scripts and style sheets."""
    parser = _Visible()
    parser.feed(document)
    return "\n".join(parser.lines) + "\n"


def write() -> None:
    """All files, in place of those that are there."""
    for name, audit in audits().items():
        for file, page in pages(audit).items():
            target = FOLDER / name / file
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(write())
