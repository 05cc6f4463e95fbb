"""What Python and notebooks show of an audit: a few lines, true ones, without script."""

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


def test_it_stays_small_and_escapes_names():
    assert len(make_audit(3000)._repr_html_()) < 20_000
    found = Tags(make_audit(60, hostile=True)._repr_html_())
    assert not found.tags & {"script", "img"}
    assert HOSTILE.split("\n")[0] in found.text


def test_python_shows_the_verdict_in_a_few_lines():
    audit = make_audit(120)
    lines = repr(audit).splitlines()
    assert lines[0] == f"Audit of TinyGPT, {len(audit.nodes)} operations"
    assert len(lines) == 6  # one of them on the runs that turn Inf or NaN
    assert f"error {audit.plans['autocast_fp16'].measured_error:.1e}".replace("e-0", "e-") in lines[2]
    for other in (make_audit(empty=True), make_audit(30, recommended=None), make_audit(30, hostile=True)):
        assert repr(other)
        assert "\x1b" not in repr(other)
