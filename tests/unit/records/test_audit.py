"""An audit knows how to be written: five files in a folder, one document, one page in a notebook."""

from __future__ import annotations

import json
from pathlib import Path

from auditor.records.audit import FORMAT_VERSION
from tests.unit.report.factory import make_audit


def test_a_folder_of_files(tmp_path: Path) -> None:
    audit = make_audit()
    paths = audit.save(tmp_path / "new" / "folder")
    assert {path.name for path in paths} >= {
        "plan.json",
        "measurements.json",
        "patched_model.py",
        "report.html",
        "findings.sarif",
    }
    assert {path.name for path in (tmp_path / "new" / "folder").iterdir()} == {path.name for path in paths}
    written = json.loads((tmp_path / "new" / "folder" / "plan.json").read_text(encoding="utf-8"))
    assert written == json.loads(json.dumps(audit.to_dict()))
    assert written["format_version"] == FORMAT_VERSION


def test_a_notebook_shows_it() -> None:
    audit = make_audit()
    assert audit.recommended is not None
    assert "Run it in FP16 under autocast" in audit._repr_html_()
