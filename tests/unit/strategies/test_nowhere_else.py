"""No module asks a strategy for its name where it could ask for what it does, but for what is true of that one alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from auditor.strategies import SHIPPED
from tests.structure import PACKAGE

OUTPUT = "what becomes of a scope's output, `cast` or `keep`"
ALLOWED = {
    "facts/gather.py": "a fact: what autocast does with an operation",
    "measure/estimates.py": "the error of casting a value, one of three kinds",
    "ops/table.py": "a column of the operations: what autocast does with them",
    "patch/emit.py": OUTPUT,
    "plan/choose.py": OUTPUT,
    "plan/nonfinite.py": "what an exported program with everything low is run as",
    "records/plan.py": OUTPUT,
    "replay/lowstep.py": "the training step of a model that is low as a whole: loss, gradients and weights",
    "report/training.py": "training, which runs under autocast",
    "report/tallies.py": "the sentence on operations that autocast protects and a model with cast weights does not",
    "snippets/fsdp2.py": "strategies that the tool can follow",
    "snippets/gradscaler.py": "strategies that the tool can follow",
    "snippets/huggingface.py": "strategies that the tool can follow",
    "snippets/lightning.py": "strategies that the tool can follow",
    "snippets/onnx.py": "strategies that the tool can follow",
    "strategies/__init__.py": "the list of those that ship",
    "strategies/autocast.py": "its own file",
    "strategies/cast.py": "its own file",
    "training/lowered.py": "training, which runs under autocast",
    "training/recommend.py": "training, which runs under autocast",
    "training/stage.py": "training, which runs under autocast",
}
"""{file: what it means by the word}."""


def named(file: Path) -> Iterator[str]:
    """Strings that are the name of a strategy that ships, or begin with it as names of plans do."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        word = node.value if isinstance(node, ast.Constant) else None
        if isinstance(word, str) and (word in SHIPPED or word in {f"{name}_" for name in SHIPPED}):
            yield f"{file.name}:{node.lineno}: {word!r}"


def places() -> dict[str, list[str]]:
    files = {file.relative_to(PACKAGE).as_posix(): list(named(file)) for file in sorted(PACKAGE.rglob("*.py"))}
    return {name: found for name, found in files.items() if found}


def test_no_other_module_names_them() -> None:
    assert {name: found for name, found in places().items() if name not in ALLOWED} == {}


def test_the_list_names_no_module_that_has_stopped() -> None:
    assert set(ALLOWED) - set(places()) == set()
