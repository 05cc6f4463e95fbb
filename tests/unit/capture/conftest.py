"""What an emulated run may switch on in torch, looked up before and after every test: nothing may stay on."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.amp.autocast_mode import autocast
from torch.amp.grad_scaler import GradScaler

KEYS = ("PreDispatch", "PythonDispatcher", "Python", "AutocastIPU")


def switches() -> dict[str, Any]:
    """Everything about this thread and process that an emulated run changes."""
    torch.autocast_increment_nesting()
    state: dict[str, Any] = {
        "autocast": [getattr(autocast, name) for name in ("__init__", "__enter__", "__exit__")],
        "custom_fwd": torch.amp.autocast_mode._cast,
        "scaler": GradScaler.__init__,
        "regions": [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")],
        "nesting": torch.autocast_decrement_nesting(),
        "cache": torch.is_autocast_cache_enabled(),
        "fast path": torch.backends.mha.get_fastpath_enabled(),
        "modes": (torch._C._len_torch_dispatch_stack(), _len_torch_dispatch_stack_pre_dispatch()),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
    }
    for name in KEYS:
        key = getattr(torch._C.DispatchKey, name)
        state[name] = (
            torch._C._dispatch_tls_is_dispatch_key_included(key),
            torch._C._dispatch_tls_is_dispatch_key_excluded(key),
        )
    if "torch._dynamo" in sys.modules:
        state["stance"] = sys.modules["torch._dynamo.eval_frame"]._stance.stance
    return state


@pytest.fixture(autouse=True)
def nothing_stays_on() -> Iterator[None]:
    before = switches()
    yield
    after = switches()
    assert after.pop("stance", "default") == "default"
    before.pop("stance", None)
    assert after == before
