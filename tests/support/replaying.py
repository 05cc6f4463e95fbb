"""A model is captured, and its recording must answer what the model itself answers, bit for bit."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from auditor.capture.capture import capture
from auditor.isolation.outputs import tensor_outputs
from auditor.isolation.run_model import run_model
from auditor.records import Batch, Capture, Subject
from tests.support.subjects import FORMATS


class Model(nn.Module):
    """A function of the model and its inputs; further modules, parameters and buffers are its own."""

    def __init__(self, function: Callable[..., Any], **state: Any) -> None:
        super().__init__()
        self.function = function
        for name, value in state.items():
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def linear(*sizes: int, seed: int = 0) -> nn.Linear:
    """A linear layer with the same weights every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Linear(*sizes)


def replayed(model: nn.Module, *args: Any, method: str = "run", **kwargs: Any) -> Capture:
    """The capture, once its replay has been compared with a run of the model that nothing looks at."""
    batch: Batch = (args, kwargs)
    expected = run_model(model, batch)
    found = capture(Subject(model, (batch,), "toy", "toy.py", "toy", "toy"), FORMATS)
    assert_same(replay(found, model, batch), expected)
    assert found.method == method
    return found


def replay(found: Capture, model: nn.Module, batch: Batch) -> list[Tensor]:
    with torch.no_grad():
        return tensor_outputs(fx.Interpreter(found.graph_module).run(*found.bind(model, batch)))


def assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    """Equal to the last bit, in dtype, layout and shape too; NaN equals NaN."""
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        assert (a.dtype, a.layout, a.is_nested) == (b.dtype, b.layout, b.is_nested)
        if a.is_nested:
            assert_same(list(a.unbind()), list(b.unbind()))
            continue
        assert a.shape == b.shape
        a, b = plain(a), plain(b)
        assert torch.equal(torch.isnan(a), torch.isnan(b))
        assert torch.equal(a[~torch.isnan(a)], b[~torch.isnan(b)])


def plain(x: Tensor) -> Tensor:
    """A tensor that comparisons know how to take, with the same entries."""
    x = x.detach()
    x = x.dequantize() if x.is_quantized else x if x.layout is torch.strided else x.to_dense()
    if x.is_complex():
        return torch.view_as_real(x.resolve_conj())
    return x.double() if x.is_floating_point() else x


def operations(found: Capture) -> list[str]:
    """`linear`, `softmax`, ... in execution order."""
    return [node.op.split(".")[1] if "." in node.op else node.op for node in found.nodes.values()]


def kinds(found: Capture) -> list[str]:
    """What the placeholders that something reads are."""
    used = {node.name for node in found.graph_module.graph.nodes if node.op == "placeholder" and node.users}
    return sorted(placeholder.kind for placeholder in found.placeholders if placeholder.name in used)
