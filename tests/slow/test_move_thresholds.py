"""No threshold of a rule can be moved by a quarter without a case that notices."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from auditor.resources import resource_dir
from auditor.rulebook.load import load_rules
from tests.rules.thresholds import thresholds
from tests.slow.move_thresholds import moves, survivors

pytestmark = pytest.mark.slow
RULES = resource_dir("rules")


def test_every_move_is_noticed() -> None:
    found = list(moves(RULES))
    unnoticed = survivors(found)
    print(f"\n{len(found)} moves, {len(unnoticed)} unnoticed")
    assert [str(move) for move in unnoticed] == []


def test_every_threshold_is_moved() -> None:
    moved = {(move.file.stem[:6], float(move.old)) for move in moves(RULES)}
    assert {(item.code, float(item.bound)) for item in thresholds(load_rules())} == moved


def test_a_threshold_without_a_case_survives(tmp_path: Path) -> None:
    shutil.copytree(RULES, tmp_path / "rules")
    file = next((tmp_path / "rules" / "norms").glob("NRM003*"))
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace("when = [", 'when = [\n    { fact = "numel", at_least = 4 },', 1), encoding="utf-8")
    unnoticed = survivors([move for move in moves(tmp_path / "rules") if move.file == file])
    assert [(move.old, move.new) for move in unnoticed] == [("4", "3"), ("4", "5")]
