"""On a GPU, wrappers cost less than one percent of a forward under plain autocast."""

from __future__ import annotations

import pytest
import torch


@pytest.mark.gpu
@pytest.mark.slow
def test_wrappers_cost_less_than_one_percent() -> None:
    threads = torch.get_num_threads()
    from benchmarks.wrapper_overhead import overhead

    try:
        row = overhead("vit_base_patch16_224", "cuda")
    finally:
        torch.set_num_threads(threads)  # the harness times on one thread
    assert row["wrapped norms / plain"] < 1.01
    assert row["norms in FP32 / plain"] < 1.01
