"""The generated parts of the documents: a schema that says what is written, and tables put where a page wants them."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema

from auditor.document.reference import json_schema, main, objects, with_tables
from tests.unit.report.factory import make_audit


def test_the_schema_takes_what_is_written_and_nothing_beside_it() -> None:
    schema = json.loads(json_schema())
    written = json.loads(json.dumps(make_audit().to_dict()))
    validator = jsonschema.Draft202012Validator(schema)
    assert list(validator.iter_errors(written)) == []
    assert not validator.is_valid({**written, "format_version": 0})
    del written["plans"]
    assert not validator.is_valid(written)


def page(*names: str) -> str:
    return "\n".join(f"# {name}\n<!-- fields: {name} -->\nstale\n<!-- end of fields -->\nkept" for name in names)


def test_tables_are_written_afresh_and_the_rest_is_kept() -> None:
    names = list(objects())
    found = with_tables(page(*names))
    assert "stale" not in found
    assert found.count("\nkept") == len(names)
    assert "| `note` (measurements.json) | " in found
    assert with_tables(found) == found


def test_both_documents_are_written_where_they_are_told(root: Path, tmp_path: Path) -> None:
    text = (root / "docs" / "plan-json.md").read_text(encoding="utf-8")
    (tmp_path / "plan-json.md").write_text(text.replace("| `seed` | of every random choice |\n", ""), encoding="utf-8")
    main(tmp_path)
    assert (tmp_path / "plan-json.md").read_text(encoding="utf-8") == text
    for file, schema in (("plan.json", "plan.schema.json"), ("measurements.json", "measurements.schema.json")):
        assert (tmp_path / schema).read_text(encoding="utf-8") == json_schema(file)
