"""The JSON schemas of the files, and the tables of their fields in docs/plan-json.md, made from what the records say."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from ..records import FORMAT_VERSION
from .contents import Measurements, PlanFile
from .models import WRITER, model_of
from .parts import MEASUREMENTS, PLAN, Part, part_of, records_in

_TABLE = re.compile(r"(?P<start><!-- fields: (?P<name>[^\n]+?) -->\n).*?(?P<end><!-- end of fields -->)", re.DOTALL)


FILES: Mapping[str, type] = {PLAN: PlanFile, MEASUREMENTS: Measurements}
"""What stands at the top of each file."""


class _Untitled(GenerateJsonSchema):
    """Keys speak for themselves."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def json_schema(file: str = PLAN) -> str:
    """docs/plan.schema.json, or docs/measurements.schema.json: what this version writes."""
    found = _bare(model_of(FILES[file], WRITER, file).model_json_schema(schema_generator=_Untitled))
    head = {
        "$schema": GenerateJsonSchema.schema_dialect,
        "title": f"{file}, format_version {FORMAT_VERSION}",
        "type": found.pop("type"),
    }
    definitions = found.pop("$defs")
    return json.dumps({**head, **found, "$defs": definitions}, indent=2) + "\n"


def _bare(part: Any) -> Any:
    """Without titles, which repeat names of classes, and defaults, which a file does not have."""
    if isinstance(part, list):
        return [_bare(item) for item in part]
    if not isinstance(part, dict):
        return part
    kept = {key: value for key, value in part.items() if key not in ("title", "default") or isinstance(value, dict)}
    return {key: _bare(value) for key, value in kept.items()}


def with_tables(page: str) -> str:
    """The page, every table between `<!-- fields: NAME -->` and `<!-- end of fields -->` written afresh.

    NAME is that of a record, or `NAME by format`. Raises: KeyError for one that plan.json does not hold; ValueError where
    the page lacks one.
    """
    parts = {part.name: part for part in all_parts()}
    missing = parts.keys() - {match["name"] for match in _TABLE.finditer(page)}
    if missing:
        raise ValueError(f"the page lacks the fields of {', '.join(sorted(missing))}")
    return _TABLE.sub(lambda match: match["start"] + table(parts[match["name"]]) + match["end"], page)


def table(part: Part) -> str:
    """One row for each key of an object, as Markdown."""
    rows = [f"| `{entry.key}` | {entry.written.meaning} |" for entry in part.entries]
    if part.by_format is not None:
        rows.append("| `fp16`, `bf16`, ... | what was found in the format of that name |")
    return "\n".join(("", "| field | meaning |", "|---|---|", *rows, "", ""))


def all_parts(file: str = "") -> tuple[Part, ...]:
    """Every kind of object in a file, from the top on; in both where none is named.

    Raises: ValueError where two kinds have one name.
    """
    waiting: list[Part] = [part_of(record, name) for name, record in FILES.items() if file in ("", name)]
    found: dict[str, Part] = {}
    while waiting:
        part = waiting.pop(0)
        if part.name in found:
            if [e.key for e in part.entries] != [e.key for e in found[part.name].entries]:
                raise ValueError(f"two kinds of objects are called {part.name}")
            continue
        found[part.name] = part
        waiting += [part.by_format] if part.by_format is not None else []
        waiting += [part_of(record, entry.file) for entry in part.entries for record in records_in(entry.type)]
    return tuple(found.values())
