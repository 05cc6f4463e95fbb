"""FP16 and BF16 are rows of a table: nowhere else in the package does code name them, but for what is about one of them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from auditor.formats import FORMATS
from auditor.strategies import runtime

NAMES = re.compile(r"(?<![a-z0-9])(fp16|bf16|b?float16)(?![0-9])")
"""`fp16`, `bf16`, `float16` and `bfloat16`, also as a part of a longer name."""

ALLOWED = {
    "cache/surroundings.py": "flags of torch, by their names",
    "document/contents.py": "the rounding of gradients that plan.json has keys for",
    "document/reference.py": "an example, in a document",
    "facts/table.py": "examples of addresses, and the names that facts had before they were kept by format",
    "graphs/onnxmodel.py": "types of the ONNX format",
    "imitation/mode.py": "cuDNN's recurrent layers run in FP16 in a region of BF16 too",
    "loading/statedicts.py": "types of the safetensors format",
    "measure/backward.py": "differences that enter inner products alone are kept in two bytes",
    "measure/testrun.py": "differences that enter inner products alone are kept in two bytes",
    "ops/autocast.py": "cuDNN's recurrent layers run in FP16 in a region of BF16 too",
    "ops/lists.py": "cuDNN's recurrent layers run in FP16 in a region of BF16 too",
    "ops/products.py": "products that some processors have in BF16",
    "ops/recurrent.py": "recurrent layers in BF16 are left to torch, whose products in it are quick",
    "ops/table.py": "both of these, as columns of the operations",
    "plan/units.py": "the rounding that a metric is tried on",
    "records/audit.py": "examples, in a document",
    "records/plan.py": "examples, in a document",
    "records/run.py": "values, in a document",
    "replay/running.py": "cuDNN's recurrent layers run in FP16 in a region of BF16 too",
    "report/following.py": "formats to ask for where no plan holds",
    "report/gradients.py": "loss scaling, which FP16 needs",
    "report/questions.py": "a question about BF16 models in FP16",
    "report/training.py": "loss scaling, which FP16 needs, and weights stored in BF16",
    "rulebook/reference.py": "an example, in a document",
    "snippets/huggingface.py": "options of a Trainer",
    "snippets/lightning.py": "settings of Lightning's precision plugin",
    "snippets/offer.py": "loss scaling, which FP16 needs",
    "snippets/onnx.py": "a converter to FP16",
    "state/half.py": "text of patched_model.py, which has nothing but torch to read",
    "state/flags.py": "flags of torch, by their names",
    "strategies/runtime.py": "text of patched_model.py, which has nothing but torch to read",
    "tape/stand_in.py": "the format that stands in for those without a dtype",
    "training/advice.py": "loss scaling, which FP16 needs, and weights stored in BF16",
    "training/batches.py": "loss scaling, which FP16 needs",
    "training/recommend.py": "FP16 with a scaler, BF16 without one, or FP32",
    "training/stage.py": "loss scaling, which FP16 needs, and weights stored in BF16",
    "training/trials.py": "loss scaling, which FP16 needs",
    "training/updates.py": "weights stored in BF16",
    "training/window.py": "loss scaling, which FP16 needs",
    "verify/loaders.py": "types of the ONNX format",
}
"""{file: what it says of the one format}."""


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
    found = {
        path.relative_to(package).as_posix(): places
        for path in sorted(package.rglob("*.py"))
        if path.parent.name != "formats" and (places := [*named(path)])
    }
    assert {path: places for path, places in found.items() if path not in ALLOWED} == {}
    assert ALLOWED.keys() - found.keys() == set()  # no reason outlives what it is a reason for


def test_names_are_found_in_code_and_not_in_prose(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        '"""FP16: fp16."""\nimport torch\nA = {"bf16": torch.float16}  # fp16\nB = x.half()\nC = "bfloat16s", 0.16\n'
        'D = "fp160", "int16"\nE = "only_fp16"\n',
        encoding="utf-8",
    )
    assert sorted(place.split(": ")[1] for place in named(file)) == [
        "bf16",
        "bfloat16s",
        "float16",
        "half",
        "only_fp16",
    ]


def test_what_a_patched_model_brings_along_agrees_with_the_table() -> None:
    run = {name: row.dtype for name, row in FORMATS.items() if row.native and row.bytes <= 4}
    assert run == runtime.DTYPES
    assert {*runtime.DTYPES.values()} <= {torch.float16, torch.bfloat16, torch.float32}
