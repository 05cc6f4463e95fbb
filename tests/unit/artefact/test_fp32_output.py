"""Products with low-precision inputs and FP32 output: their numbers, their gradients, and the kernels that a GPU runs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from auditor.artefact.applying import apply_plan
from auditor.numerics import fp32_output
from tests.support.capturing import Function
from tests.support.patching import plan
from tests.support.subjects import normal

HALF = torch.float16
WIDE = ["addmm", "baddbmm", "bmm", "linear", "matmul", "mm"]

CALLS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "linear": (F.linear, (normal(2, 3, 8), normal(5, 8), normal(5))),
    "matmul": (torch.matmul, (normal(2, 1, 3, 8), normal(4, 8, 5))),
    "@": (lambda x, y: x @ y, (normal(2, 3, 8), normal(8, 5))),
    "mm": (torch.mm, (normal(3, 8), normal(8, 5))),
    "bmm": (torch.bmm, (normal(2, 3, 8), normal(2, 8, 5))),
    "addmm": (torch.addmm, (normal(5), normal(3, 8), normal(8, 5))),
    "baddbmm": (torch.baddbmm, (normal(2, 3, 5), normal(2, 3, 8), normal(2, 8, 5))),
}
each = pytest.mark.parametrize("name", CALLS)
both = pytest.mark.parametrize("strategy", ["autocast", "cast"])


def patched(function: Callable[..., Tensor], strategy: str) -> nn.Module:
    scopes: dict[str, Any] = {"": {"precision": "fp16", "fp32_output": WIDE, "output": "keep"}}
    return apply_plan(Function(function), plan(strategy, scopes, "fp16"))


@each
@both
def test_inputs_are_rounded_and_the_output_is_not(name: str, strategy: str) -> None:
    function, inputs = CALLS[name]
    found = patched(function, strategy)(*inputs)
    exact = function(*(x.half().double() for x in inputs))
    assert found.dtype is torch.float32
    assert (found - exact).abs().max() < 1e-5
    assert (found - exact.half()).abs().max() > 1e-4  # an output in FP16 is not within that of it


@each
def test_gradients_are_rounded_as_autocast_rounds_them(name: str) -> None:
    """A product's gradients are those of the rounded factors and the rounded gradient of its result."""
    function, inputs = CALLS[name]
    leaves, low = ([x.clone().requires_grad_() for x in rounded] for rounded in (inputs, [x.half() for x in inputs]))
    found = patched(function, "autocast")(*leaves)
    gradient = normal(*found.shape)
    found.backward(gradient)
    wide = [x.detach().float().requires_grad_() for x in low]
    function(*wide).backward(gradient.half().float())
    for leaf, other in zip(leaves, wide, strict=True):
        torch.testing.assert_close(leaf.grad, other.grad.half().float(), rtol=0, atol=0)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, torch.dtype, torch.dtype, str]]:
    """Calls of torch.mm and torch.bmm with `out_dtype`: kernel, dtypes of factors and result, and device."""
    seen = list[tuple[str, torch.dtype, torch.dtype, str]]()

    def watch(kernel: str) -> Callable[..., Tensor]:
        real = getattr(torch, kernel)

        def run(x: Tensor, y: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
            if out_dtype is None:
                return real(x, y)
            seen.append((kernel, x.dtype, out_dtype, x.device.type))
            assert x.dtype is y.dtype
            return real(x.float(), y.float())

        return run

    for kernel in ("mm", "bmm"):
        monkeypatch.setattr(fp32_output.torch, kernel, watch(kernel))
    return seen


@each
def test_a_gpu_multiplies_with_out_dtype(name: str, kernels: list[Any]) -> None:
    """On fake tensors of a GPU, each product is one kernel with half inputs and FP32 output; none computes in FP32."""
    function, inputs = CALLS[name]
    shape = function(*inputs).shape
    del kernels[:]
    with FakeTensorMode(), torch.no_grad():
        found = patched(function, "autocast")(*(torch.empty(x.shape, device="cuda") for x in inputs))
    assert (found.dtype, found.shape, found.device.type) == (torch.float32, shape, "cuda")
    assert [call[1:] for call in kernels] == [(HALF, torch.float32, "cuda")]


@pytest.mark.parametrize("name", [name for name in CALLS if "add" not in name])
def test_the_kernels_of_a_gpu_give_what_the_cpu_does(name: str, kernels: list[Any]) -> None:
    """The same calls with the kernels of a GPU in place of the CPU's: shapes, numbers and gradients."""
    function, inputs = CALLS[name]
    x, y = (x.half().requires_grad_() for x in inputs[:2])
    found = fp32_output.half_matmul(x, y.mT if name == "linear" else y)
    expected = function(*(z.detach().float() for z in (x, y)))
    assert len(kernels) == 1
    torch.testing.assert_close(found, expected)
    gradient = normal(*found.shape)
    wide = [z.detach().float().requires_grad_() for z in (x, y)]
    found.backward(gradient)
    function(*wide).backward(gradient.half().float())
    for leaf, other in zip((x, y), wide, strict=True):
        torch.testing.assert_close(leaf.grad.float(), other.grad, rtol=2e-3, atol=2e-3)
