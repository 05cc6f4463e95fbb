"""Large memory goes back as soon as it is free, though small pieces are held that were made beside it."""

from __future__ import annotations

import torch

from auditor.offload.freeing import LEAST, freeing
from auditor.offload.limit import resident


def test_what_is_free_is_no_longer_resident() -> None:
    with freeing(LEAST):
        before, small = resident(), list[bytes]()
        for _ in range(40):
            large = torch.ones(2_500_000)
            small += [bytes(1000) for _ in range(200)]
            del large
        assert resident() - before < 40_000_000
