"""FP16 and BF16 are rows of a table: nowhere else in the package does code name them, but for what is about one of them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from auditor.artefact import runtime
from auditor.numerics.formats import FORMATS

NAMES = re.compile(r"(?<![a-z0-9])(fp16|bf16|b?float16)(?![0-9])")
"""`fp16`, `bf16`, `float16` and `bfloat16`, also as a part of a longer name."""

ALLOWED = {
    "artefact": "text of patched_model.py, which has nothing but torch to read",
    "capture": "the format that stands in for those without a dtype",
    "graphs": "types of the ONNX format",
    "isolation": "flags of torch, by their names; text of patched_model.py, which has nothing but torch to read",
    "numerics": "cuDNN's recurrent layers run in FP16 in a region of BF16 too; columns of the operations",
    "plan": "the rounding that a metric is tried on",
    "records": "values and examples, in a document",
    "report": "formats to ask for where no plan holds; loss scaling, which FP16 needs, and weights stored in BF16",
    "rulebook": "examples of addresses, in a document",
    "snippets": "options of other tools; loss scaling, which FP16 needs",
    "training": "loss scaling, which FP16 needs, and weights stored in BF16",
    "verify": "types of the ONNX format",
}
"""{room: what it says of the one format}."""


def named(path: Path) -> Iterator[str]:
    """Strings and attributes of a module that name FP16 or BF16; docstrings, comments and local names do not count."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        text = node.attr if isinstance(node, ast.Attribute) else node.value if isinstance(node, ast.Constant) else None
        if isinstance(text, str) and id(node) not in prose and (NAMES.search(text) or text == "half"):
            yield f"{path.name}:{node.lineno}: {text[:60]}"


def test_no_other_module_names_them(root) -> None:
    package = root / "auditor"
    found: dict[str, list[str]] = {}
    for path in sorted(package.rglob("*.py")):
        if path != package / "numerics" / "formats.py" and (places := [*named(path)]):
            found.setdefault(path.relative_to(package).parts[0], []).extend(places)
    assert {room: places for room, places in found.items() if room not in ALLOWED} == {}
    assert ALLOWED.keys() - found.keys() == set()  # no reason outlives what it is a reason for


def test_what_a_patched_model_brings_along_agrees_with_the_table() -> None:
    run = {name: row.dtype for name, row in FORMATS.items() if row.native and row.bytes <= 4}
    assert run == runtime.DTYPES
    assert {*runtime.DTYPES.values()} <= {torch.float16, torch.bfloat16, torch.float32}
