"""`python -m auditor.document.reference DIR` generates the JSON schemas and tables of the documents in DIR."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from ..records.audit import FORMAT_VERSION
from ..records.written import NOT_FINITE
from ..resources import table
from ..rulebook.explain import pages
from ..rulebook.load import load_rules
from .codec import MEASUREMENTS, PLAN, adapter

_TABLE = re.compile(r"(?P<start><!-- fields: (?P<name>[^\n]+?) -->\n).*?(?P<end><!-- end of fields -->)", re.DOTALL)
_EXCEPTIONS = re.compile(r"(?P<start><!-- exceptions -->\n).*?(?P<end><!-- end of exceptions -->)", re.DOTALL)
_TOP = {"format_version": {"const": FORMAT_VERSION, "type": "integer", "description": str(FORMAT_VERSION)}}
_BESIDE = {
    "plan": {
        "type": "string",
        "description": "SHA-256 of the plan.json written with this file: of its JSON with sorted keys and no spaces",
    }
}


class _Schema(GenerateJsonSchema):
    """Generates JSON schemas without titles, in which "Infinity", "-Infinity" or "NaN" may replace a number."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def float_schema(self, schema: Any) -> Any:
        return {"anyOf": [super().float_schema(schema), {"enum": [*NOT_FINITE]}]}


def objects() -> dict[str, dict[str, Any]]:
    """{record: the JSON schemas of its fields}, the Audit first."""
    top = adapter().json_schema(schema_generator=_Schema)
    records = {"Audit": top, **top.pop("$defs")}
    return {
        name: {key: value for key, value in part["properties"].items() if "description" in value}
        for name, part in records.items()
    }


def json_schema(file: str = PLAN) -> str:
    """The JSON schema of plan.json or measurements.json, as text."""
    records = objects()
    split = {name for name, fields in records.items() if any(map(_is_measured, fields.values()))}
    kept = dict[str, dict[str, Any]]()
    for name, fields in records.items():
        kept[name] = {}
        for key, value in fields.items():
            if _is_in(value, name in split, split, file):
                # Without defaults, since the files contain every field.
                kept[name][key] = {about: item for about, item in value.items() if about not in ("default", "measured")}
    top: dict[str, Any] = dict(_TOP)
    if file == MEASUREMENTS:
        top |= _BESIDE
    top |= kept.pop("Audit")
    head = {"$schema": _Schema.schema_dialect, "title": f"{file}, format_version {FORMAT_VERSION}"}
    definitions = {name: _object(kept[name]) for name in sorted(_named_in(top, kept))}
    return json.dumps({**head, **_object(top), "$defs": definitions}, indent=2) + "\n"


def with_tables(page: str) -> str:
    """Regenerate every table of a page between `<!-- fields: RECORD -->` and `<!-- end of fields -->`.

    Raises: KeyError for a record that the files do not contain; ValueError if the page lacks a table.
    """
    result = objects()
    missing = result.keys() - {match["name"] for match in _TABLE.finditer(page)}
    if missing:
        raise ValueError(
            f"docs/plan-json.md lacks {', '.join(sorted(missing))}: add a heading for each, then the lines "
            "`<!-- fields: NAME -->` and `<!-- end of fields -->`, between which the table is written"
        )
    return _TABLE.sub(lambda match: match["start"] + _table(result[match["name"]]) + match["end"], page)


def _table(fields: Mapping[str, Any]) -> str:
    """A Markdown table with one row for each key of an object."""
    rows = [
        f"| `{key}`{' (measurements.json)' if _is_measured(value) else ''} | {value['description']} |"
        for key, value in fields.items()
    ]
    return "\n".join(("", "| field | meaning |", "|---|---|", *rows, "", ""))


def with_exceptions(page: str) -> str:
    """Regenerate a page's table of CUDA kernels that round otherwise than once, between its two markers."""
    rows = [
        f"| {', '.join(f'`{name}`' for name in row['operations'])} | {row['says']} | {row['source']} | {row['sure']} |"
        for row in table("numerics/cuda_kernels")["exceptions"]
    ]
    lines = ("", "| operations | what CUDA computes | source | how sure |", "|---|---|---|---|", *rows, "", "")
    return _EXCEPTIONS.sub(lambda match: match["start"] + "\n".join(lines) + match["end"], page)


def _is_measured(value: Any) -> bool:
    return bool(value.get("measured"))


def _is_in(value: Any, in_split: bool, split: set[str], file: str) -> bool:
    """Whether `file`, plan.json or measurements.json, contains a field. A split record has fields in both files."""
    if file == PLAN:
        return not _is_measured(value)
    return not in_split or _is_measured(value) or any(f'"#/$defs/{name}"' in json.dumps(value) for name in split)


def _object(properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties]}


def _named_in(fields: Any, records: Mapping[str, Any]) -> set[str]:
    """Names of the records that `fields` refer to, directly or through other records."""
    names = set(re.findall(r'"#/\$defs/(\w+)"', json.dumps(fields))) & records.keys()
    others = {name: part for name, part in records.items() if name not in names}
    return names.union(*(_named_in(records[name], others) for name in names))


def main(directory: Path) -> None:
    """Rewrite plan.schema.json and measurements.schema.json, the pages about rules, and the tables of plan-json.md and
    emulation.md in place."""
    for name, rewritten in (("plan-json.md", with_tables), ("emulation.md", with_exceptions)):
        page = directory / name
        page.write_text(rewritten(page.read_text(encoding="utf-8")), encoding="utf-8")
    for file in (PLAN, MEASUREMENTS):
        (directory / file.replace(".json", ".schema.json")).write_text(json_schema(file), encoding="utf-8")
    (directory / "rules").mkdir(exist_ok=True)
    for name, text in pages(load_rules()).items():
        (directory / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
