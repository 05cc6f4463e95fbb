"""Functions that a criterion names by their file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from auditor.criteria import criteria_of
from auditor.errors import AuditorError


def test_a_function_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "score.py").write_text(
        "def far(reference, candidate):\n    return (reference - candidate).abs().sum()\n"
    )
    (one,) = criteria_of(f"boxes: {tmp_path / 'score.py'}:far <= 0.5")
    assert one.function is not None
    assert float(one.function(torch.ones(3), torch.zeros(3))) == 3.0
    assert one.how.sign == "<="


def test_a_name_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "scores.py").write_text("far = 3\n")
    with pytest.raises(
        AuditorError, match=r"scores.py has no function 'far': a criterion names a function as f.py:name"
    ):
        criteria_of(f"boxes: {tmp_path / 'scores.py'}:far <= 0.5")
