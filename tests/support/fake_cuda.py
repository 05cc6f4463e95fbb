"""CUDA autocast without CUDA: fake tensors carry shapes and dtypes through torch's own dispatcher."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from auditor.records import Capture

NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}


@contextmanager
def autocast(dtype: torch.dtype | None) -> Iterator[None]:
    """Inside it, `torch.empty(..., device="cuda")` works, and CUDA autocast is on; off for None."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    try:
        with FakeTensorMode(), torch.no_grad():
            torch.set_autocast_enabled("cuda", dtype is not None)
            if dtype is not None:
                torch.set_autocast_dtype("cuda", dtype)
            yield
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])
        torch.clear_autocast_cache()


def overload(name: str) -> Any:
    """`torch.ops.aten` overload of `softmax.int` or `exp`."""
    packet, _, rest = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), rest or "default")


def first_dtype(result: Any) -> torch.dtype:
    """Dtype of the first tensor in a result."""
    return next(leaf.dtype for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor))


def recorded_dtypes(capture: Capture, flat: list[Any], dtype: torch.dtype) -> dict[str, str]:
    """{node: dtype} of a capture run under CUDA autocast; "" for discrete results."""
    with autocast(dtype):
        moved = [_moved(x) for x in flat]
        recorder = _Recorder(capture.graph_module)
        recorder.run(*moved)
    return {name: recorder.dtypes[name] for name in capture.nodes}


def _moved(value: Any) -> Any:
    """A fake CUDA tensor of the same shape and dtype; a CPU device becomes CUDA's."""
    if isinstance(value, torch.device):
        return torch.device("cuda")
    if isinstance(value, torch.Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device="cuda")
    return value


class _Recorder(fx.Interpreter):
    def __init__(self, graph_module: fx.GraphModule) -> None:
        super().__init__(graph_module)
        self.dtypes: dict[str, str] = {}

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return _moved(super().get_attr(target, args, kwargs))

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        moved = pytree.tree_map_only(torch.device, _moved, (args, kwargs))
        return super().call_function(target, *moved)

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.dtypes[n.name] = NAMES.get(tensors[0].dtype, "") if tensors else ""
        return result
