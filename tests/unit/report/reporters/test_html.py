import json
from html.parser import HTMLParser

import pytest

from auditor.report.reporters import html
from tests.unit.report.factory import make_audit


class Page(HTMLParser):
    """Tags with their attributes, and the text outside scripts and styles."""

    def __init__(self, source):
        super().__init__()
        self.tags, self.text, self.table = [], "", None
        self._raw = None
        self.feed(source)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self._raw = dict(attrs).get("id", tag)

    def handle_endtag(self, tag):
        if tag in ("script", "style"):
            self._raw = None

    def handle_data(self, data):
        if self._raw == "layer-data":
            self.table = json.loads(data)
        elif self._raw is None:
            self.text += data


@pytest.fixture(scope="module")
def hostile():
    return Page(html(make_audit(60, hostile=True, synthetic=True)))


def test_names_from_the_model_add_no_markup(hostile):
    tags = [tag for tag, _ in hostile.tags]
    assert "img" not in tags
    assert tags.count("script") == 8  # theme, data, findings, table, measures, graph, its view, page
    assert not [name for _, attrs in hostile.tags for name in attrs if name.startswith("on")]
    assert "<script>alert(1)</script>" in hostile.text


def test_nothing_is_fetched(hostile):
    for _, attrs in hostile.tags:
        for name in ("src", "href", "action", "data", "poster", "srcset"):
            assert (attrs.get(name) or "#").startswith(("#", "data:")), attrs
    policy = next(attrs["content"] for _, attrs in hostile.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")


def test_links_inside_the_page_lead_somewhere():
    page = Page(html(make_audit()))
    names = {attrs["id"] for _, attrs in page.tags if "id" in attrs}
    links = [attrs["href"][1:] for tag, attrs in page.tags if tag == "a"]
    assert {link for link in links if not link.startswith("op=")} <= names
    assert len(names) == sum("id" in attrs for _, attrs in page.tags), "an id is used twice"


def test_three_thousand_nodes_fit_in_a_megabyte():
    assert len(html(make_audit(3000)).encode()) <= 1_000_000


def test_no_asset_closes_its_element(root):
    for file in (*(root / "reports").glob("*.js"), *(root / "reports").glob("*.css")):
        assert "</s" not in file.read_text(encoding="utf-8").lower(), file
