"""Draws that no run before has seen: the seed is printed, and set by DRAWN_SEED to see them again."""

from __future__ import annotations

import os
import random

import pytest

from tests.any_model.drawn import TABLES, audited, mostly_audited

SEED = int(os.environ.get("DRAWN_SEED", "") or random.SystemRandom().randrange(1 << 32))
SHARDS = 40


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(SHARDS))
def test_models_of_every_kind(shard: int) -> None:
    print(f"DRAWN_SEED={SEED}")
    mostly_audited(audited((list(TABLES)[shard % len(TABLES)],), 2000 // SHARDS, start=SEED + shard))
