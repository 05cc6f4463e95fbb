from html.parser import HTMLParser

from tests.unit.report.factory import HOSTILE, make_audit


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)

    def handle_data(self, data):
        self.text += data


def test_a_notebook_shows_verdict_plans_and_findings_without_script():
    audit = make_audit()
    found = Tags(audit._repr_html_())
    assert found.tags <= {
        "div",
        "p",
        "strong",
        "code",
        "pre",
        "ul",
        "li",
        "br",
        "table",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
    }
    assert "Run it in FP16 under autocast" in found.text
    assert "* FP16 under autocast" in found.text
    assert "RNG001" in found.text


def test_it_stays_small_and_escapes_names():
    assert len(make_audit(3000)._repr_html_()) < 20_000
    found = Tags(make_audit(60, hostile=True)._repr_html_())
    assert not found.tags & {"script", "img"}
    assert HOSTILE.split("\n")[0] in found.text


def test_an_empty_audit_has_no_tables():
    assert "table" not in Tags(make_audit(empty=True)._repr_html_()).tags
