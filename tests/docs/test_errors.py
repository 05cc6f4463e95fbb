"""docs/errors.md against the code: every slug that can be raised is explained there, and nothing else is."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

POSITION = {"call": 2}  # target.call(function, what, slug)


def slug_of(call: ast.Call) -> ast.expr | None:
    """The argument that is a slug; None for a call that takes none."""
    for keyword in call.keywords:
        if keyword.arg == "slug":
            return keyword.value
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    position = 1 if name.endswith("Error") else POSITION.get(name)
    return call.args[position] if position is not None and len(call.args) > position else None


def calls(root) -> Iterator[tuple[str, ast.Call]]:
    for path in sorted(root.glob("auditor/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                yield f"{path.relative_to(root)}:{node.lineno}", node


def slugs_in_code(root) -> set[str]:
    found = (slug_of(call) for _, call in calls(root))
    return {node.value for node in found if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def slugs_in_docs(root) -> list[str]:
    return re.findall(r"(?m)^### (\S+)$", (root / "docs" / "errors.md").read_text(encoding="utf-8"))


def test_every_slug_is_explained_and_none_is_stale(root):
    assert sorted(slugs_in_docs(root)) == sorted(slugs_in_code(root))


def test_every_error_that_is_raised_has_a_slug(root):
    ours = {
        node.name
        for node in ast.walk(ast.parse((root / "auditor" / "errors.py").read_text()))
        if hasattr(node, "bases")
    }
    assert "PlanError" in ours
    without = [place for place, call in calls(root) if getattr(call.func, "id", "") in ours and slug_of(call) is None]
    assert without == []


def test_every_entry_says_what_it_means_and_what_to_do(root):
    text = (root / "docs" / "errors.md").read_text(encoding="utf-8")
    entries = re.split(r"(?m)^### \S+$", text)[1:]
    assert entries
    for entry in entries:
        body = entry.partition("\n## ")[0].strip()
        assert len(body.split(". ")) >= 2 or len(body.splitlines()) >= 2, body
