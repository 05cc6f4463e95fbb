"""Drawn models: each ends in an audit that keeps its promises, or in one line."""

from __future__ import annotations

import os
import random

import pytest

from tests.any_model.drawn import EXAMPLES, TABLES, Program, Step, audited, mostly_audited, outcome

SEED = int(os.environ.get("DRAWN_SEED", "") or random.SystemRandom().randrange(1 << 32))
SHARDS = 40


@pytest.mark.parametrize(
    "table", [*sorted(TABLES)[:2], *(pytest.param(name, marks=pytest.mark.slow) for name in sorted(TABLES)[2:])]
)
def test_models_of_one_kind(table: str) -> None:
    mostly_audited(audited((table,), EXAMPLES))


@pytest.mark.parametrize("step", [Step("vmapped", 0, (Step("discrete", 4),)), Step("complexes", 0)])
def test_quantised_under_vmap_and_conjugated(step: Step) -> None:
    assert outcome(Program((step,), options={"formats": ("bf16",), "strategies": ("cast",)})) == "audited"


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(SHARDS))
def test_models_that_no_run_before_has_seen(shard: int) -> None:
    """The seed is printed, and set by DRAWN_SEED to see them again."""
    print(f"DRAWN_SEED={SEED}")
    mostly_audited(audited((list(TABLES)[shard % len(TABLES)],), 2000 // SHARDS, start=SEED + shard))
