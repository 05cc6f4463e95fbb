"""`python -m auditor.document.reference DIR` writes what is generated of the documents in DIR: JSON schemas, and tables."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from ..records.audit import FORMAT_VERSION
from ..records.written import NOT_FINITE
from .codec import MEASUREMENTS, PLAN, adapter

_TABLE = re.compile(r"(?P<start><!-- fields: (?P<name>[^\n]+?) -->\n).*?(?P<end><!-- end of fields -->)", re.DOTALL)
_TOP = {"format_version": {"const": FORMAT_VERSION, "type": "integer", "description": str(FORMAT_VERSION)}}
_BESIDE = {
    "plan": {
        "type": "string",
        "description": "SHA-256 of the plan.json that was written with it, as JSON with sorted keys and without spaces, without "
        "`environment.seconds` and `environment.held`",
    }
}


class _Schema(GenerateJsonSchema):
    """Keys speak for themselves; a text may stand for a number."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def float_schema(self, schema: Any) -> Any:
        return {"anyOf": [super().float_schema(schema), {"enum": [*NOT_FINITE]}]}


def objects() -> dict[str, Any]:
    """{record: its JSON schema}, the Audit first."""
    top = adapter().json_schema(schema_generator=_Schema)
    result = {"Audit": top, **top.pop("$defs")}
    for part in result.values():
        part["properties"] = {key: value for key, value in part["properties"].items() if "description" in value}
    return result


def json_schema(file: str = PLAN) -> str:
    """docs/plan.schema.json, or docs/measurements.schema.json: what this version writes."""
    result = objects()
    split = {name for name, part in result.items() if any(map(_is_measured, part["properties"].values()))}
    for name, part in result.items():
        kept = {key: value for key, value in part["properties"].items() if _is_in(value, name in split, split, file)}
        part["properties"] = {key: _bare(value) for key, value in kept.items()}
    top = result.pop("Audit")["properties"]
    properties = {**_TOP, **(_BESIDE if file == MEASUREMENTS else {}), **top}
    head = {"$schema": _Schema.schema_dialect, "title": f"{file}, format_version {FORMAT_VERSION}"}
    reached = _objects_in(properties, result)
    return (
        json.dumps(
            {**head, **_object(properties), "$defs": {name: reached[name] for name in sorted(reached)}}, indent=2
        )
        + "\n"
    )


def with_tables(page: str) -> str:
    """The page, every table between `<!-- fields: RECORD -->` and `<!-- end of fields -->` written afresh.

    Raises: KeyError for a record that the files do not hold; ValueError where the page lacks one.
    """
    result = objects()
    missing = result.keys() - {match["name"] for match in _TABLE.finditer(page)}
    if missing:
        raise ValueError(f"the page lacks the fields of {', '.join(sorted(missing))}")
    return _TABLE.sub(lambda match: match["start"] + _table(result[match["name"]]) + match["end"], page)


def _table(part: Any) -> str:
    """One row for each key of an object, as Markdown."""
    rows = [
        f"| `{key}`{' (measurements.json)' if _is_measured(value) else ''} | {value['description']} |"
        for key, value in part["properties"].items()
    ]
    return "\n".join(("", "| field | meaning |", "|---|---|", *rows, "", ""))


def _is_measured(value: Any) -> bool:
    return bool(value.get("measured"))


def _is_in(value: Any, in_split: bool, split: set[str], file: str) -> bool:
    """Whether a file holds a field; of objects that are in both each has its share."""
    if file == PLAN:
        return not _is_measured(value)
    return not in_split or _is_measured(value) or any(f'"#/$defs/{name}"' in json.dumps(value) for name in split)


def _bare(value: Any) -> Any:
    """Without defaults, which a file does not have."""
    return {key: item for key, item in value.items() if key not in ("default", "measured")}


def _object(properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties]}


def _objects_in(properties: Any, objects: Any) -> dict[str, Any]:
    """The objects that these properties hold, and what those do."""
    names = set(re.findall(r'"#/\$defs/(\w+)"', json.dumps(properties))) & objects.keys()
    others = {name: part for name, part in objects.items() if name not in names}
    result = {name: _object(objects[name]["properties"]) for name in names}
    return {**result, **{k: v for name in names for k, v in _objects_in(objects[name]["properties"], others).items()}}


def main(directory: Path) -> None:
    """Rewrite plan.schema.json and measurements.schema.json, and the tables of plan-json.md in place."""
    page = directory / "plan-json.md"
    page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")
    for file in (PLAN, MEASUREMENTS):
        (directory / file.replace(".json", ".schema.json")).write_text(json_schema(file), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
