"""`python -m auditor.document DIR` writes what is generated of the documents in DIR: JSON schemas, and tables."""

from __future__ import annotations

import sys
from pathlib import Path

from .reference import FILES, json_schema, with_tables


def main(directory: Path) -> None:
    """Rewrite plan.schema.json and measurements.schema.json, and the tables of plan-json.md in place."""
    page = directory / "plan-json.md"
    page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")
    for file in FILES:
        (directory / file.replace(".json", ".schema.json")).write_text(json_schema(file), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
