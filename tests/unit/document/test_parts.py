"""What the file holds is read off the records: in their order or another, inlined, by format, and never twice."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest

from auditor.document.parts import inner, nullable, part_of
from auditor.document.write import written
from auditor.records.written import ByFormat, Inlined, Written


@dataclass(frozen=True)
class Inner:
    second: Annotated[int, Written("two", before="third")]
    fourth: Annotated[float | None, Written("four", key="last")] = None


@dataclass(frozen=True)
class Error:
    size: Annotated[float, Written("how large")]
    seen: Annotated[str | None, Written("where")] = None
    private: int = 0


@dataclass(frozen=True)
class Outer:
    first: Annotated[str, Written("one")]
    third: Annotated[int | None, Written("three, if any", left_out=True)]
    inner: Annotated[Inner | None, Inlined()]
    verdicts: Annotated[Mapping[str, str], ByFormat(), Written("what is said")]
    errors: Annotated[Mapping[str, Error], ByFormat(left_out=True)]


@dataclass(frozen=True)
class Judged:
    verdicts: Annotated[Mapping[str, str], ByFormat(), Written("what is said")]
    errors: Annotated[Mapping[str, Error], ByFormat()]


def test_order_inlining_and_formats() -> None:
    record = Outer("a", 3, Inner(2, 4.0), {"fp16": "fine", "bf16": "bad"}, {"bf16": Error(0.5)})
    assert list(written(record).items()) == [
        ("first", "a"),
        ("second", 2),
        ("third", 3),
        ("last", 4.0),
        ("fp16", {"verdicts": "fine"}),
        ("bf16", {"verdicts": "bad", "size": 0.5, "seen": None}),
    ]


def test_what_is_none() -> None:
    assert written(Outer("a", None, None, {}, {})) == {"first": "a", "second": None, "last": None}


def test_a_format_that_lacks_what_is_not_left_out_has_null() -> None:
    assert written(Judged({"fp16": "fine"}, {})) == {"fp16": {"verdicts": "fine", "size": None, "seen": None}}


def test_a_key_stands_once() -> None:
    @dataclass(frozen=True)
    class Twice:
        size: Annotated[int, Written("one")]
        length: Annotated[int, Written("another", key="size")]

    with pytest.raises(ValueError, match="would hold size twice"):
        part_of(Twice)


def test_a_type_without_its_none() -> None:
    assert inner(int | None) is int
    assert inner(int | str | None) is Any  # of one of several types nothing is known
    assert inner(int) is int
    assert [nullable(type_) for type_ in (int, int | str, int | None)] == [False, False, True]


FIELD = '    carbon: Annotated[float | None, Written("grams of CO2 of one forward", least=0)] = None\n'
BEFORE = "    pareto: Annotated["
PROGRAM = """
import json, sys
from auditor.document.read import read_document
from auditor.document.reference import json_schema, with_tables
from auditor.document.write import written
from auditor.errors import PlanError
from auditor.records import Plan, ScopeChoice

plan = written(Plan("cast_fp16", "cast", "fp16", {"": ScopeChoice("fp16")}, 0.1, 0.9, 2.0, carbon=1.23456789))
print(plan["carbon"], list(plan).index("carbon") < list(plan).index("pareto"))
document = {"format_version": 1, "plans": {"cast_fp16": plan}}
print(read_document(document, "it").plans["cast_fp16"].carbon)
try:
    read_document({"format_version": 1, "plans": {"cast_fp16": {**plan, "carbon": "much"}}}, "it")
except PlanError as error:
    print(error)
field = json.loads(json_schema())["$defs"]["Plan"]["properties"]["carbon"]
print(field["description"], field["anyOf"], "carbon" in json.loads(json_schema())["$defs"]["Plan"]["required"])
print([line for line in with_tables(open(sys.argv[1]).read()).splitlines() if "carbon" in line])
print("torch" in sys.modules)
"""


def test_one_line_in_a_record_is_a_field_of_the_file_its_reader_its_schema_and_its_page(
    root: Path, tmp_path: Path
) -> None:
    shutil.copytree(root / "auditor", tmp_path / "auditor", ignore=shutil.ignore_patterns("__pycache__"))
    source = tmp_path / "auditor" / "records" / "plan.py"
    text = source.read_text(encoding="utf-8")
    assert text.count(BEFORE) == 1
    source.write_text(text.replace(BEFORE, FIELD + BEFORE), encoding="utf-8")
    command = [sys.executable, "-c", PROGRAM, str(root / "docs" / "plan-json.md")]
    done = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "1.234568 True",
        "1.234568",
        'it: `$.plans.cast_fp16.carbon` should be a number, is "much". Audit the model again to write a new one, or undo '
        "what was changed in it.",
        "grams of CO2 of one forward [{'minimum': 0, 'type': 'number'}, {'type': 'null'}] True",
        "['| `carbon` | grams of CO2 of one forward |']",
        "False",
    ]
