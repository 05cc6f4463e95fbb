"""The names that `import auditor` offers, in whatever order they are first used."""

from __future__ import annotations

import subprocess
import sys

import pytest

ORDERS = (
    "from auditor import Audit, audit",
    "from auditor import audit, Audit",
    "import auditor; auditor.Audit, auditor.apply, auditor.load_plan; audit = auditor.audit",
)


@pytest.mark.parametrize("line", ORDERS)
def test_audit_is_the_function(line: str, root) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"{line}\nprint(callable(audit))"], cwd=root, capture_output=True, text=True
    )
    assert done.stdout.strip() == "True", done.stderr


def test_every_public_name_is_there_and_importing_them_imports_no_torch(root) -> None:
    code = """
import sys, auditor
print("torch" in sys.modules, [name for name in auditor.__all__ if getattr(auditor, name) is None])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.stdout.strip() == "False []", done.stderr


def test_the_documents_count_the_public_names(root) -> None:
    import auditor

    text = (root / "docs" / "api.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in text.splitlines()[2] for name in auditor.__all__ if not name.startswith("__"))
