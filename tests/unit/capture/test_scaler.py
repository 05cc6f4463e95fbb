"""`GradScaler("cuda")` without CUDA: it scales in the body and in its thread, and is itself again afterwards."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.amp import GradScaler

from auditor.capture.emulation import scaled_as_on_cuda

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA there is nothing to stand in for"),
    pytest.mark.filterwarnings("ignore:torch.cuda.amp.GradScaler is enabled", "ignore:.*CUDA is not available"),
]


def test_outside_and_in_other_threads_it_is_torchs_own() -> None:
    original = GradScaler.__init__
    enabled = {}

    def elsewhere() -> None:
        enabled["thread"] = GradScaler("cuda").is_enabled()

    with scaled_as_on_cuda():
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        enabled["off"] = GradScaler("cuda", enabled=False).is_enabled()
    enabled["after"] = GradScaler("cuda").is_enabled()
    assert enabled == {"thread": False, "off": False, "after": False}
    assert GradScaler.__init__ is original
