"""What a file begins by importing is imported ahead of it, as far as that is libraries, and nothing of the user's is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from auditor.loading.ahead import _is_installed, import_ahead

LIBRARY = "wsgiref.handlers"
"""A module that nothing else imports."""


def imported_after(folder: Path, source: str, name: str = LIBRARY) -> bool:
    """Whether a module is there once a file with that source was looked at."""
    (folder / "model.py").write_text(source)
    code = f"import sys; from auditor.loading.ahead import import_ahead; import_ahead('model.py'); print({name!r} in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip().endswith("True")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (f'"""A model."""\nfrom __future__ import annotations\nimport os, {LIBRARY}\n', True),
        (f"import os\nos.environ['A'] = 'b'\nimport {LIBRARY}\n", False),
        (f"import helper\nimport {LIBRARY}\n", False),
        (f"from . import helper\nimport {LIBRARY}\n", False),
        (f"import is_not_there\nimport {LIBRARY}\n", False),
        (f"import {LIBRARY}\nthis is no Python\n", False),
        (f"from wsgiref import is_not_there\nimport {LIBRARY}\n", False),
    ],
    ids=["leading", "after-code", "own", "beside", "missing", "syntax", "name"],
)
def test_the_leading_imports_of_libraries(tmp_path: Path, source: str, expected: bool) -> None:
    (tmp_path / "helper.py").write_text("raise SystemExit('the user\\'s code ran')")
    assert imported_after(tmp_path, source) is expected


def test_a_file_of_the_users_own_with_a_librarys_name_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "timm.py").write_text(f"import {LIBRARY}")
    assert not imported_after(tmp_path, "import timm\n")
    assert not _is_installed("timm", (tmp_path,))
    assert _is_installed("torch", (tmp_path,))
    assert not _is_installed("auditor_of_nothing", ())


def test_what_cannot_be_loaded_is_left_to_who_loads_it(tmp_path: Path) -> None:
    import_ahead(str(tmp_path / "none.py"))
    import_ahead("no such thing")
    import_ahead("timm")
