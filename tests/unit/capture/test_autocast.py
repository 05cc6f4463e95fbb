"""Autocast inside an emulated run is CUDA's, also beside the lists that numerics/test_lists.py goes through."""

import gc
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap

import auditor
from auditor.capture.record import record
from tests.support.replaying import Model, kinds, linear, operations, replayed
from tests.support.subjects import normal, seeded

FP16, BF16, WIDE = torch.float16, torch.bfloat16, torch.float32


def test_refused() -> None:
    x = torch.full((2,), 0.5)
    with auditor.emulate(), torch.autocast("cuda"), pytest.raises(RuntimeError, match="cannot run under autocast"):
        nn.functional.binary_cross_entropy(x, x)
    with auditor.emulate():
        assert nn.functional.binary_cross_entropy(x, x).dtype is WIDE


def test_a_default_that_was_set_counts() -> None:
    torch.set_autocast_dtype("cuda", BF16)
    try:
        with auditor.emulate(), torch.autocast("cpu"):
            assert torch.ones(2, 2).mm(torch.ones(2, 2)).dtype is BF16
    finally:
        torch.set_autocast_dtype("cuda", FP16)


@pytest.mark.parametrize("region", [FP16, BF16])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_run_in_fp16_in_a_bf16_region_too(kind: type[nn.RNNBase], region: torch.dtype) -> None:
    layer, x = kind(4, 4, num_layers=2, bidirectional=True), normal(3, 2, 4)  # cuDNN's autocast wrapper hard-codes it
    with auditor.emulate(), torch.autocast("cuda", dtype=region):
        found = layer(x)[0]
    with auditor.emulate(), torch.autocast("cuda", dtype=FP16):
        assert torch.equal(layer(x)[0], found)
    assert found.dtype is FP16
    with auditor.emulate():  # stored in BF16 it is BF16
        assert layer.bfloat16()(x.bfloat16())[0].dtype is BF16


class Scaled(torch.autograd.Function):
    """Asks for FP32, as code that goes with CUDA kernels of its own does."""

    seen: list[tuple[torch.dtype, bool]]

    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Scaled.seen = [(x.dtype, torch.is_autocast_enabled("cuda"))]
        return x * 2

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        Scaled.seen.append((gradient.dtype, torch.is_autocast_enabled("cuda")))
        return gradient * 2


def test_functions_that_cast_their_inputs() -> None:
    x = torch.ones(2, 2, requires_grad=True)
    with auditor.emulate():
        with torch.autocast("cuda", dtype=FP16):
            low = x.mm(x)
            result = Scaled.apply(low)
        result.sum().backward()
    assert (low.dtype, result.dtype) == (FP16, WIDE)
    assert Scaled.seen == [(WIDE, False), (WIDE, False)]


# Operations inside functorch and higher-order operators, held to what torch's own autocast does on a CPU. The CPU's
# lists and CUDA's agree on the products used here; where they do not, the expected dtype is CUDA's.


NET = seeded(lambda: nn.ModuleDict({"lin": nn.Linear(8, 8), "conv": nn.Conv1d(1, 2, 3)}))
X, W = normal(6, 8), normal(6, 8, 8, seed=1)
WEIGHTS = {name: weight.detach() for name, weight in NET.lin.named_parameters()}


def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
    return functional_call(NET.lin, weights, (x,)).float().pow(2).mean()


ALIKE: dict[str, Callable[[], Any]] = {
    "vmap": lambda: vmap(NET.lin)(X),  # FP32: autocast sees the product and the sum that vmap makes of it
    "vmap over weights": lambda: vmap(lambda v, m: F.linear(v, m))(X, W),
    "vmap of matmul": lambda: vmap(lambda v, m: v @ m)(X, W),
    "vmap of einsum": lambda: vmap(lambda v, m: torch.einsum("i,ij->j", v, m))(X, W),
    "vmap in vmap": lambda: vmap(vmap(lambda v, m: v.dot(m)), (None, 0))(W[0], W[1:3]),
    "grad": lambda: grad(lambda y: NET.lin(y).float().sum())(X),
    "jvp": lambda: jvp(NET.lin, (X,), (X,)),
    "jacrev": lambda: jacrev(NET.lin)(X[0]),
    "jacfwd": lambda: jacfwd(NET.lin)(X[0]),
    "hessian": lambda: hessian(lambda y: NET.lin(y).float().square().sum())(X[0]),
    "weights": lambda: grad(loss)(WEIGHTS, X)["weight"],
    "samples": lambda: vmap(grad(loss), (None, 0))(WEIGHTS, X)["weight"],
}


def in_emulation(function: Callable[[], Any]) -> Any:
    with auditor.emulate(), torch.autocast("cuda", dtype=BF16):
        return function()


@pytest.mark.parametrize("name", ALIKE)
def test_as_torchs_own_autocast(name: str) -> None:
    with torch.autocast("cpu", dtype=BF16):
        expected = torch.utils._pytree.tree_leaves(ALIKE[name]())
    actual = torch.utils._pytree.tree_leaves(in_emulation(ALIKE[name]))
    assert [x.dtype for x in actual] == [x.dtype for x in expected]
    for a, e in zip(actual, expected, strict=True):
        assert torch.allclose(a.float(), e.float(), rtol=2**-7, atol=2**-9)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda: vmap(NET.conv)(X[:, None]), BF16),  # CUDA lists `convolution`, the CPU does not
        (lambda: vmap(torch.exp)(X.bfloat16()), WIDE),
        (lambda: vmap(torch.sum)(X.bfloat16()), WIDE),
        (lambda: vmap(lambda v: F.layer_norm(v, (8,)))(X.bfloat16()), WIDE),  # becomes native_layer_norm, on the list
        (lambda: vmap(lambda v: F.softmax(v, -1))(X.bfloat16()), BF16),  # becomes _softmax, which is on none
        (lambda: grad(lambda y: F.mse_loss(y, y.detach() + 1))(X.bfloat16()), BF16),
    ],
)
def test_cudas_lists(function: Callable[[], Tensor], expected: torch.dtype) -> None:
    assert in_emulation(function).dtype is expected


def test_a_region_inside_a_transform() -> None:
    def careful(v: Tensor) -> Tensor:
        with torch.autocast("cuda", enabled=False):
            return W[0].mv(v)

    assert in_emulation(lambda: vmap(careful)(X)).dtype is WIDE
    assert in_emulation(lambda: vmap(lambda v: W[0].mv(v))(X)).dtype is BF16


@pytest.mark.parametrize(("x", "expected"), [(X.abs(), 1), (-X.abs(), 2)])
def test_cond(x: Tensor, expected: int) -> None:
    result = in_emulation(lambda: torch.cond(x.sum() > 0, lambda x: NET.lin(x), lambda x: NET.lin(x) * 2, (x,)))
    assert torch.equal(result, in_emulation(lambda: NET.lin(x) * expected))
    assert result.dtype is BF16


class Square(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.mv(x.diagonal())

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None: ...


def test_a_function_of_the_authors_in_a_transform() -> None:
    assert in_emulation(lambda: vmap(Square.apply)(W)).dtype is BF16


# What autograd computes inside a forward is on the recording, operation by operation.


def forces(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        total = torch.tanh(self.layer(x)).sum()
        return total, torch.autograd.grad(total, x, create_graph=True)[0]


def forces_of_a_caller_with_gradients(self: Any, x: Tensor) -> Tensor:
    x.requires_grad_()
    return torch.autograd.grad(torch.tanh(self.layer(x)).sum(), x)[0]


@pytest.mark.parametrize("forward", [forces, forces_of_a_caller_with_gradients])
def test_gradients_taken_in_forward(forward: Callable[..., Any]) -> None:
    found = replayed(Model(forward, layer=linear(8, 8)), X)
    assert "tanh_backward" in operations(found)
    assert kinds(found) == ["input", "parameter", "parameter"]  # nothing that autograd kept is a constant


# Custom operators made of Python functions, and what a recording costs.


@torch.library.custom_op("recording_test_python::scaled", mutates_args=())
def scaled(x: Tensor, factor: float = 2.0) -> Tensor:
    return x * factor


@torch.library.custom_op("recording_test_python::raised", mutates_args={"x"})
def raised(x: Tensor, by: Tensor) -> None:
    x += by


def test_operators_made_of_python_functions() -> None:
    def forward(self: Any, x: Tensor) -> tuple[Tensor, ...]:
        y = scaled(x, factor=3.0)
        raised(y[0], by=x[1])
        raised(self.seen, by=y)
        return y, self.seen * 2

    model = Model(forward, seen=torch.ones(3, 4))
    found = operations(replayed(model, normal(3, 4)))
    assert (found.count("scaled"), found.count("raised")) == (1, 2)
    assert torch.equal(model.seen, torch.ones(3, 4))


# What a recording costs grows with the operations, not with their square: counted, since clocks vary.

ROW = normal(4, 8)
FEW, MANY = 25, 100


def chain(count: int) -> Callable[..., Tensor]:
    def forward(self: Any, x: Tensor) -> Tensor:
        for _ in range(count // 2):
            x = x * 1.0001 + 0.1
        return x

    return forward


def writes(count: int) -> Callable[..., Tensor]:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = torch.zeros(count, 8)
        for i in range(count):
            y[i] = x[i % 4]
        return y

    return forward


def calls_of(function: Callable[[], Any]) -> int:
    """How many functions written in Python were called."""
    count = 0

    def tell(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(tell)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def peak_of(function: Callable[[], Any]) -> int:
    gc.collect()
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def recording(loop: Callable[[int], Callable[..., Tensor]], count: int) -> Callable[[], Any]:
    model = Model(loop(count))

    def run() -> Any:
        with torch.no_grad():
            return record(model, ((ROW,), {}))

    return run


@pytest.mark.parametrize("loop", [chain, writes])
def test_work_and_memory_are_linear(loop: Callable[[int], Callable[..., Tensor]]) -> None:
    recording(loop, 10)()  # what is made once
    for measure in (calls_of, peak_of):
        few, many = measure(recording(loop, FEW)), measure(recording(loop, MANY))
        assert many <= 1.25 * MANY / FEW * few
