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
