"""What holds of every page: the same each time, whole, and no name of a model adds markup, a command or a request."""

import json
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.text import Text

from auditor.records import CriterionValue
from auditor.report.blocks import code, escape
from auditor.reporters import REPORTERS, github, html, markdown, text
from tests.unit.report.factory import make_audit

COMMAND = re.compile(r"^::(error|warning|notice) file=[^:,]+,line=\d+,col=\d+,title=[^:,]+::.+$")


def test_json_is_what_both_files_hold() -> None:
    audit = make_audit()
    printed, plan, measured = json.loads(REPORTERS["json"](audit)), audit.to_dict(), audit.to_measurements()
    assert printed.keys() == (plan.keys() | measured.keys()) - {"plan"}
    assert (printed["nodes"], printed["max_error"]) == (measured["nodes"], plan["max_error"])


def test_hostile_names_add_no_command() -> None:
    lines = github(make_audit(60, hostile=True)).splitlines()
    commands = [line for line in lines if line.startswith("::")]
    assert commands
    assert all(COMMAND.match(line) for line in commands)
    assert not [line for line in lines if "::" in line and not line.startswith("::")]
    assert "pwned%25" in commands[0]


def test_github_gets_at_most_ten_of_each_level() -> None:
    audit = make_audit(200)
    spread = tuple(replace(f, source=f"model.py:{i + 1}") for i, f in enumerate(audit.findings))
    said = github(replace(audit, findings=spread))
    counts = Counter(line.split(" ")[0] for line in said.splitlines() if line.startswith("::"))
    assert (counts["::warning"], counts["::error"]) == (10, 1)
    assert re.search(r"\d+ more problems in the report", said)


def test_markdown_adds_no_markup_and_every_row_has_its_cells() -> None:
    assert [code(name) for name in ("a.b", "a`b``c", "`")] == ["`a.b`", "```a`b``c```", "`` ` ``"]
    assert escape("<b> *x* [y](z) a|b") == r"\<b\> \*x\* \[y\](z) a\|b"
    rows = [line for line in markdown(make_audit(60, hostile=True)).splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", row)) - 1 for row in rows} == {6}  # plans


class Page(HTMLParser):
    """Tags with their attributes, and the text outside scripts and styles."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._raw = False
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._raw |= tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._raw &= tag not in ("script", "style")

    def handle_data(self, data: str) -> None:
        self.text += "" if self._raw else data


@pytest.fixture(scope="module")
def hostile() -> Page:
    return Page(html(make_audit(60, hostile=True, synthetic=True)))


def test_names_from_the_model_add_no_markup(hostile: Page) -> None:
    tags = [tag for tag, _ in hostile.tags]
    assert "img" not in tags
    assert tags.count("script") == 9  # theme, data, page, findings, table, measures, graph, its view, report
    assert not [name for _, attrs in hostile.tags for name in attrs if name.startswith("on")]
    assert "<script>alert(1)</script>" in hostile.text


def test_nothing_is_fetched(hostile: Page) -> None:
    for _, attrs in hostile.tags:
        for name in ("src", "href", "action", "data", "poster", "srcset"):
            assert (attrs.get(name) or "#").startswith(("#", "data:")), attrs
    policy = next(attrs["content"] for _, attrs in hostile.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    assert (policy or "").startswith("default-src 'none'")


def test_links_inside_the_page_lead_somewhere() -> None:
    page = Page(html(make_audit()))
    names = {attrs["id"] for _, attrs in page.tags if "id" in attrs}
    links = [(attrs["href"] or "")[1:] for tag, attrs in page.tags if tag == "a"]
    assert {link for link in links if not link.startswith("op=")} <= names
    assert len(names) == sum("id" in attrs for _, attrs in page.tags), "an id is used twice"


def test_three_thousand_nodes_fit_in_a_megabyte() -> None:
    audit = make_audit(3000)
    assert len(html(audit).encode()) <= 1_000_000
    assert len(audit._repr_html_()) < 20_000


def test_no_asset_closes_its_element(root: Path) -> None:
    for file in (*(root / "reports").glob("*.js"), *(root / "reports").glob("*.css")):
        assert "</s" not in file.read_text(encoding="utf-8").lower(), file


def test_python_shows_the_verdict_in_a_few_lines() -> None:
    audit = make_audit(120)
    lines = repr(audit).splitlines()
    assert lines[0] == f"Audit of TinyGPT, {len(audit.nodes)} operations"
    assert len(lines) == 6  # one of them on the runs that turn Inf or NaN
    assert "error 8.3e-4" in lines[2]
    for other in (make_audit(empty=True), make_audit(30, recommended=None), make_audit(30, hostile=True)):
        assert repr(other) and "\x1b" not in repr(other)


def folded(shown: str) -> list[str]:
    """Lines but those that begin a finding, which stand whole."""
    return [line for line in shown.splitlines() if not re.match(r"\S+:\d+ [A-Z]{3}\d{3} ", line)]


@pytest.mark.parametrize("width", [40, 80, 120])
def test_no_line_is_wider_than_asked(width: int) -> None:
    audit = make_audit(20)
    wide = replace(audit, findings=tuple(replace(f, owner="層." * 40, message="長" * 200) for f in audit.findings))
    for shown in (wide, make_audit(60, synthetic=True), make_audit(60, hostile=True)):
        assert max(map(cell_len, folded(text(shown, width=width)))) <= width


def test_color_changes_nothing_but_codes() -> None:
    colored = text(make_audit(), color=True)
    assert "\x1b[" in colored
    assert Text.from_ansi(colored).plain.rstrip() == text(make_audit()).rstrip()


def test_a_terminal_shows_forty_lines_however_many_criteria_there_are_and_however_long_names_are() -> None:
    name = "_".join(["a_projection_of_the_second_pyramid_branch"] * 8)
    audit = make_audit(60)
    audit = replace(audit, findings=tuple(replace(f, owner=f"{name}.{f.owner}") for f in audit.findings))
    plan = audit.plans[audit.recommended or ""]
    assert plan.verification
    values = tuple(CriterionValue(f"y{i}", "max_abs", "<=", 0.5, i / 200, i / 100, True) for i in range(60))
    plan = replace(plan, verification=replace(plan.verification, criteria=values))
    audit = replace(
        audit, plans={**audit.plans, plan.name: plan}, criteria=tuple(f"y{i}: max_abs <= 0.5" for i in range(60))
    )
    shown = text(audit, width=100, color=False)
    assert len(shown.splitlines()) <= 40
    assert "Nearest to its limit: max_abs of y59 is 0.295, at most 0.5 is allowed" in " ".join(shown.split())
    assert re.search(r"\d+ more results?, in report.html", shown)
    assert name not in shown and name[:40] in shown
    assert "max_abs of y0 is 0, at most 0.5 is allowed" in markdown(audit).replace("\\_", "_")


def test_the_report_and_the_terminal_name_one_place_for_each_cause() -> None:
    audit = make_audit(60)
    heads = [
        line.split(" ")[0]
        for line in text(audit, width=100).splitlines()
        if re.match(r"\S+:\d+:\d+ [A-Z]{3}\d{3} ", line)
    ]
    assert heads
    todo = html(audit).partition('<ol class="todo">')[2].partition("</ol>")[0]
    assert re.findall(r'<code class="line">(.*?)</code>', todo)[: len(heads)] == heads


@pytest.mark.parametrize("kind", [{}, {"hostile": True}, {"recommended": None}])
def test_a_terminal_shows_forty_lines_and_names_what_is_left_out(kind: dict[str, bool | None]) -> None:
    audit = replace(make_audit(300, **kind), warnings=("a caution",))
    shown = text(audit, width=100, color=False)
    assert len(shown.splitlines()) <= 40
    assert len(text(audit, width=100, color=False, most=32).splitlines()) <= 32  # files and the next step go below
    assert "A caution." in shown
    assert "RNG001" in shown
    assert "In FP32  " in shown or "what stays in FP32" in shown.splitlines()[-1] or kind.get("recommended", "") is None
