"""Names that are made to drive a terminal, a browser or a log: shown as text, wherever an audit shows them."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import auditor
from auditor import cli
from auditor.records import Audit
from auditor.reporters import REPORTERS

FORMATS = ("text", "json", "github", "sarif", "md", "html")
NAMES = (
    "</script><script>alert(1)</script>",
    "\x1b]0;evil\x07\x1b[2J",
    "a\nb\r::error::x",
    "\u2028\u202e{{7*7}}",
    "'\"\\",
    "[red]x[/red]",
    "\ud800",
)
MODEL = """
import torch
class Net(torch.nn.Linear): pass
Net.__name__ = Net.__qualname__ = {name!a}
def audit_spec(): return {{"model": Net(2, 2), "inputs": torch.ones(1, 2), "name": Net.__name__}}
"""


class Net(nn.Sequential):
    pass


Net.__name__ = Net.__qualname__ = "<img src=x onerror=alert(1)>\x1b[31m\r\n::error::x"


@pytest.fixture(scope="module")
def audit() -> Audit:
    model = Net()
    for name in NAMES:
        model.add_module(name, nn.Linear(4, 4))
    return auditor.audit(model, torch.ones(2, 4), formats=("fp16",), strategies=("cast",), max_error=1e-9, device="cpu")


def shown(audit: Audit, tmp_path: Path) -> dict[str, str]:
    return {**{name: REPORTERS[name](audit) for name in FORMATS}, **audit.texts(tmp_path)}


def test_nothing_drives_a_terminal_or_begins_a_line(audit: Audit, tmp_path: Path) -> None:
    assert "alert(1)" in audit.texts(tmp_path)["plan.json"]
    for where, text in shown(audit, tmp_path).items():
        assert re.findall("[\x00-\x08\x0b-\x1f\x7f-\x9f]", text) == [], where
        assert re.findall("(?m)^::error::", text) == [], where


def test_nothing_is_markup_in_a_page(audit: Audit, tmp_path: Path) -> None:
    pages = [text for text in shown(audit, tmp_path).values() if text.lstrip().lower().startswith("<!doctype")]
    assert len(pages) == 2
    for page in pages:
        assert "alert(1)" in page
        assert "<script>alert" not in page
        assert "<img src=x" not in page
        assert "49" not in re.findall(r"\{\{7\*7\}\}|u202e(49)", page)


@pytest.mark.parametrize("words", [("-q",), ()], ids=["quiet", "with progress"])
def test_dry_run_and_progress_show_text(words: tuple[str, ...], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("model.py").write_text(MODEL.format(name=Net.__name__))
    assert cli.main(["model.py", "--dry-run", *words]) == 0
    shown = capsys.readouterr()
    assert "onerror" in shown.out
    assert not {"\x1b", "\r"} & set(shown.out + shown.err)
    assert "\n::error::" not in shown.out + shown.err


def test_progress_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    from auditor.progress.shown import Lines

    Lines()("capture", Net.__name__, 0, 0)
    assert capsys.readouterr().err == "capture: <img src=x onerror=alert(1)>\\x1b[31m\\r\\n::error::x\n"
