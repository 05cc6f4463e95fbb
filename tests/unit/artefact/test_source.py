"""The original model as a patched_model.py makes it: with the weights that the audit read, and one line otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest

from auditor.artefact.source import make_original


def test_a_symbol_that_is_gone_is_named(tmp_path: Path) -> None:
    (tmp_path / "renamed_net.py").write_text("class Other: pass\n")
    source = {"path": "renamed_net.py", "digest": None, "module": "renamed_net", "working_directory": None}
    source |= {"symbol": "Net", "kind": "class", "weights": None}
    with pytest.raises(ValueError, match=r"renamed_net\.py has no 'Net' any more: audit it again"):
        make_original(source, str(tmp_path / "patched_model.py"), (), {})
