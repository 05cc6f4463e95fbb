"""The verb `diff`, in words, as JSON and as a page."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from auditor import cli
from tests.unit.report.factory import HOSTILE, make_audit


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two audits; the second has lost one finding, gained another and broken one operation."""
    base = tmp_path_factory.mktemp("audits")
    before = make_audit(60)
    extra = replace(before.findings[0], rule="NEW001", name="a-new-thing", severity="error", message="something new")
    after = replace(before, findings=(*before.findings[1:], extra), max_error=0.5)
    hostile = make_audit(60, hostile=True)
    for name, audit in {"before": before, "after": after, "hostile": hostile}.items():
        (base / name).mkdir()
        (base / name / "plan.json").write_text(json.dumps(audit.to_dict()), encoding="utf-8")
    return base


@pytest.fixture
def run(folders, monkeypatch, capsys):
    monkeypatch.chdir(folders)
    monkeypatch.setenv("NO_COLOR", "1")

    def call(*words):
        code = cli.main(["diff", *words])
        return code, capsys.readouterr()

    return call


def test_text_fits_and_says_what_changed(run):
    code, out = run("before", "after")
    assert code == 0
    assert "1 new finding, 1 gone" in out.out
    assert "autocast_fp16 is recommended in both" in out.out
    assert "NEW001" in out.out
    assert "Budget: 0.01 relative L2" in " ".join(out.out.split())
    assert [line for line in out.out.splitlines() if len(line) > 100 and not line.startswith("model.py:")] == []
    assert "\x1b" not in out.out
    assert out.err == ""
    assert "Nothing changed" in run("before", "before")[1].out


@pytest.mark.parametrize(("level", "code"), [("never", 0), ("error", 1), ("warning", 1)])
def test_exit_code_counts_new_findings_only(run, level, code):
    assert run("before", "after", "--fail-on", level)[0] == code
    assert run("after", "after", "--fail-on", level)[0] == 0


def test_json(run):
    found = json.loads(run("before", "after", "--format", "json")[1].out)
    assert [f["rule"] for f in found["new"]] == ["NEW001"]
    assert len(found["gone"]) == 1
    assert found["kept"] == len(make_audit(60).findings) - 1
    assert (found["before"]["name"], found["after"]["file"]) == ("TinyGPT", "after")


def test_html_holds_the_same_and_escapes_names(run, folders):
    run("before", "after", "--html", "page/diff.html")
    page = (folders / "page" / "diff.html").read_text()
    assert "NEW001" in page
    assert "default-src 'none'" in page
    run("before", "hostile", "--html", "page/hostile.html")
    page = (folders / "page" / "hostile.html").read_text()
    assert HOSTILE.split("\x1b")[0] not in page
    assert "<img" not in page
    assert "<script>alert" not in page


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("before", "absent"), "absent cannot be read"),
        (("before", "after", "--html", "before"), "(Is a directory)"),
        (("before", "after", "--html", "before/plan.json/x.html"), "(Not a directory)"),
    ],
)
def test_bad_input_is_one_line(run, words, text):
    code, out = run(*words)
    assert code == 2
    (line,) = [line for line in out.err.splitlines() if line.startswith("error: ")]
    assert text in line
    assert out.out == ""
