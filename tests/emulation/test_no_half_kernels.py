"""The emulation calls no half-precision kernel of the CPU, whose arithmetic is not CUDA's, forwards or backwards.

`python -m tests.emulation.test_no_half_kernels` runs PyTorch's OpInfo samples and prints the result as JSON, in a process
of its own: importing torch's tests sets flags of torch's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import auditor

FORMATS = {"fp16": torch.float16, "bf16": torch.bfloat16}
HALVES = (*FORMATS.values(), torch.complex32)
SAMPLES = 2
"""Number of OpInfo's samples of each operation."""

COPIES = {"_to_copy", "copy_", "to", "clone", "lift_fresh", "item", "_local_scalar_dense"}
MEMORY = {
    *("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "resize_", "set_"),
    *("zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones", "full", "full_like", "new_full"),
    *("scalar_tensor", "fill", "fill_", "zero_"),
}
UNINITIALIZED = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
"""OpInfo's names of operations whose results have no defined values."""
REFUSED = {
    *("sparse.mm reduce", "torch.ops.aten._flash_attention_forward", "torch.ops.aten._efficient_attention_forward"),
    *("baddbmm", "float_power"),
}
"""OpInfo's names of operations that do not run: no half kernel, kernels that a CPU lacks, and samples that torch refuses
to compute in place."""
OTHER_FORMULA = {"prod", "masked.prod"}
"""OpInfo's names of operations whose gradient torch computes by another formula while any dispatch mode is active
(`isTensorSubclassLike` in torch/csrc/autograd/FunctionsManual.cpp)."""


class HalfKernelError(Exception):
    """A half-precision kernel of the CPU was called."""


class NoHalfKernels(TorchDispatchMode):
    """In the `with` block, ATen kernels that receive or return half-precision tensors raise HalfKernelError.

    See `is_allowed` for the others. Moves on the bits, as 16-bit integers, do not count. called: names of the refused
    kernels.
    """

    def __init__(self) -> None:
        super().__init__()
        self.called = set[str]()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False, since True would import the compiler."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        allowed = is_allowed(func)
        if not allowed:
            self._refuse(func, (args, kwargs))
        result = func(*args, **kwargs)
        if not allowed:
            self._refuse(func, result)
        return result

    def _refuse(self, func: Any, tree: Any) -> None:
        tensors = (x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor))
        if any(x.dtype in HALVES and x.device.type == "cpu" for x in tensors):
            self.called.add(str(func))
            raise HalfKernelError(str(func))


def is_allowed(func: Any) -> bool:
    """Whether a kernel only casts, copies, views, or creates or fills memory."""
    name = func._schema.name.partition("::")[2]
    is_view = any(x.alias_info is not None for x in func._schema.returns) and not func._schema.is_mutable
    return is_view or name in COPIES | MEMORY or torch.Tag.inplace_view in func.tags


@contextmanager
def emulated(mode: NoHalfKernels | None) -> Iterator[None]:
    """Emulate CUDA, with fixed random numbers; the mode is pushed first, so that it sees what the emulation calls."""
    with torch.random.fork_rng(devices=[]), nullcontext() if mode is None else mode, auditor.emulate("cuda"):
        torch.default_generator.manual_seed(0)  # `torch.manual_seed` keeps a traceback for each other device
        yield


def is_equal(x: Any, y: Any) -> bool:
    """Whether two results have the same tensors, bit for bit, and the same other values."""
    return list(map(_content, pytree.tree_leaves(x))) == list(map(_content, pytree.tree_leaves(y)))


def _content(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return repr(value)  # NaN == NaN
    dense = value.detach() if value.layout is torch.strided else value.detach().to_dense()
    numbers = dense.resolve_conj().resolve_neg().reshape(-1)
    real = torch.view_as_real(numbers) if numbers.is_complex() else numbers
    return value.dtype, value.shape, real.contiguous().view(torch.uint8).tolist()


def with_gradients(call: Callable[[], Any], leaves: list[Tensor]) -> tuple[Any, Any]:
    """(the results of a call, the gradients of their sum for the leaves), without the results' graphs."""
    results = call()
    dense = [x for x in pytree.tree_leaves(results) if isinstance(x, Tensor) and x.layout is torch.strided]
    roots = [x for x in dense if x.requires_grad]
    gradients: Any = None
    if roots and leaves:
        ones = [torch.ones_like(x) for x in roots]
        gradients = torch.autograd.grad(roots, leaves, ones, allow_unused=True)
    return pytree.tree_map_only(Tensor, Tensor.detach, results), gradients


# ---- OpInfo: one process, which prints what it did ------------------------------------------------------------------


@cache
def of_op_db() -> dict[str, Any]:
    """Results of a fresh process that runs `check_op_db`."""
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "tests.emulation.test_no_half_kernels"]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def check_op_db() -> dict[str, Any]:
    """Run samples of every operation that has a half kernel on CUDA, with and without the mode.

    {"calls": number of emulated calls, "refused": {operation and format: the emulation's reason},
    "kernels": {operation and format: half kernels called}, "different": operations with other results in the mode}.
    """
    from tests.support import opinfo

    found: dict[str, Any] = {"calls": 0, "refused": {}, "kernels": {}, "different": []}
    for info in opinfo._op_db():
        if info.name.startswith("jiterator"):  # these compile the user's CUDA code
            continue
        for name, dtype in FORMATS.items():
            if dtype in info.dtypesIfCUDA:
                has_gradients = info.supports_autograd and dtype in info.backward_dtypesIfCUDA
                torch.default_generator.manual_seed(0)
                samples = info.sample_inputs_func(info, "cpu", dtype, has_gradients)
                for sample in islice(samples, SAMPLES):
                    _check(info, f"{info.name} {info.variant_test_name} {name}".replace("  ", " "), sample, found)
    return found


def _check(info: Any, name: str, sample: Any, found: dict[str, Any]) -> None:
    """Run one sample forwards and backwards, and in place without gradients."""
    for variant, backward in ((info.op, True), (info.inplace_variant, False)):
        if variant is None:
            continue
        try:
            plain = _run(variant, sample, backward, None)
        except Exception as error:
            found["refused"][name] = str(error)[:200]
            continue
        found["calls"] += 1
        mode = NoHalfKernels()
        try:
            strict = _run(variant, sample, backward, mode)
        except Exception:
            if not mode.called:
                raise
        if mode.called:
            found["kernels"].setdefault(name, []).extend(sorted(mode.called))
        elif info.name not in UNINITIALIZED | OTHER_FORMULA and not is_equal(plain, strict):
            found["different"].append(name)


def _run(variant: Any, sample: Any, backward: bool, mode: NoHalfKernels | None) -> Any:
    """(result, gradients) of a sample on copies of its tensors, emulated."""

    def copied(x: Tensor) -> Tensor:
        return x.detach().clone().requires_grad_(x.requires_grad and backward)

    arguments = pytree.tree_map_only(Tensor, copied, (sample.input, *sample.args))
    options = pytree.tree_map_only(Tensor, copied, sample.kwargs)
    leaves = [x for x in pytree.tree_leaves((arguments, options)) if isinstance(x, Tensor) and x.requires_grad]
    with emulated(mode):
        return with_gradients(lambda: variant(*arguments, **options), leaves)


@pytest.mark.parametrize("part", ["kernels", "different"])
def test_no_operation_of_opinfo_calls_a_half_kernel_of_the_cpu(part: str) -> None:
    assert not of_op_db()[part]


def test_opinfo_runs_what_cuda_runs() -> None:
    """So that the test above is not empty."""
    result = of_op_db()
    assert result["calls"] > 2500
    assert {name.rpartition(" ")[0] for name in result["refused"]} == REFUSED


# ---- Models ---------------------------------------------------------------------------------------------------------


class Cnn(nn.Module):
    """Convolutions, batch norm, pooling, interpolation and a sampled grid. Shapes: [2, 3, 8, 8] -> []."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 4, 3, padding=1, groups=2)
        self.transposed = nn.ConvTranspose2d(4, 4, 2, stride=2)
        self.grid = nn.Parameter(torch.linspace(-0.9, 0.9, 2 * 5 * 5 * 2).reshape(2, 5, 5, 2))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)))
        x = F.max_pool2d(x, 2)
        x = F.silu(self.second(x))
        x = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
        x = F.avg_pool2d(self.transposed(x), 2)
        x = F.grid_sample(x, self.grid.to(x.dtype), align_corners=False)
        x = F.adaptive_avg_pool2d(x, 1).flatten(1)
        scores: Tensor = self.head(F.dropout(x, 0.2))
        return F.smooth_l1_loss(scores, torch.ones_like(scores))


class Transformer(nn.Module):
    """Embedding, layer norm, attention with a mask, and a classifier of the next token. Shapes: [2, 6] -> []."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.norms = nn.ModuleList([nn.LayerNorm(8), nn.RMSNorm(8)])
        self.qkv = nn.Linear(8, 24)
        self.rise = nn.Linear(8, 16)
        self.fall = nn.Linear(16, 8)
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, -1))
        fused = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        hidden = torch.ones(6, 6, dtype=torch.bool).triu(1)
        scores = (q @ k.transpose(-1, -2) / 2).masked_fill(hidden, -torch.inf)
        composed = F.softmax(scores, -1) @ v
        x = x + (fused + composed).transpose(1, 2).flatten(2)
        x = x + self.fall(F.gelu(self.rise(self.norms[1](x))))
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), label_smoothing=0.1)


class Recurrent(nn.Module):
    """A GRU, an LSTM of two directions, and a cell. Shapes: [5, 2, 4] -> []."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(4, 5)
        self.lstm = nn.LSTM(5, 3, bidirectional=True)
        self.cell = nn.GRUCell(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.gru(x)
        x, _ = self.lstm(x)
        state = self.cell(x[-1])
        result: Tensor = state.square().mean() + F.softplus(x).mean()
        return result


class Gnn(nn.Module):
    """Messages along edges are gathered, added and averaged. Shapes: [4, 3] -> []."""

    def __init__(self) -> None:
        super().__init__()
        self.message = nn.Linear(6, 5)
        self.head = nn.Linear(10, 3)
        self.register_buffer("edges", torch.tensor([[0, 1, 2, 3, 0, 2], [1, 2, 3, 0, 2, 1]]))

    def forward(self, x: Tensor) -> Tensor:
        source, target = self.edges
        messages = F.elu(self.message(torch.cat([x[source], x.index_select(0, target)], 1)))
        rows = target.unsqueeze(1).expand_as(messages)
        empty = messages.new_zeros(4, 5)
        added = empty.index_add(0, target, messages) + empty.scatter_add(0, rows, messages)
        mean = empty.scatter_reduce(0, rows, messages, "mean", include_self=False)
        scores = F.log_softmax(self.head(torch.cat([added, mean], 1)), 1)
        return F.nll_loss(scores, torch.tensor([0, 1, 2, 0]))


INPUTS: dict[type[nn.Module], Tensor] = {
    Cnn: torch.linspace(-1, 1, 2 * 3 * 8 * 8).sin().reshape(2, 3, 8, 8),
    Transformer: torch.tensor([[1, 5, 2, 9, 0, 3], [4, 4, 7, 10, 6, 8]]),
    Recurrent: torch.linspace(-2, 2, 40).cos().reshape(5, 2, 4),
    Gnn: torch.linspace(-3, 3, 12).sin().reshape(4, 3),
}


def train(model_class: type[nn.Module], dtype: torch.dtype, autocast: bool, mode: NoHalfKernels | None) -> list[Tensor]:
    """One step of training under emulation: [loss, gradients, parameters afterwards, buffers].

    autocast: whether the weights are FP32, in a region of `dtype`; otherwise weights and inputs have the dtype.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = model_class()
    x = INPUTS[model_class]
    if not autocast:
        model = model.to(dtype)
        x = x.to(dtype) if x.is_floating_point() else x
    optimizer = torch.optim.AdamW(model.parameters(), eps=1e-4)
    with emulated(mode):
        with torch.autocast("cuda", dtype=dtype, enabled=autocast):
            loss = model(x)
        loss.backward()
        gradients = [p.grad.detach().clone() for p in model.parameters() if p.grad is not None]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return [loss.detach(), *gradients, *model.parameters(), *model.buffers()]


@pytest.mark.parametrize("autocast", [False, True], ids=["low weights", "autocast"])
@pytest.mark.parametrize("dtype", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("model_class", INPUTS, ids=lambda model_class: model_class.__name__)
def test_a_model_trains_without_half_kernels_of_the_cpu(
    model_class: type[nn.Module], dtype: torch.dtype, autocast: bool
) -> None:
    mode = NoHalfKernels()
    strict = train(model_class, dtype, autocast, mode)
    assert not mode.called
    assert is_equal(strict, train(model_class, dtype, autocast, None))


def test_the_mode_raises_without_the_emulation() -> None:
    with pytest.raises(HalfKernelError), NoHalfKernels():
        torch.ones(2, dtype=torch.float16) + 1


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(check_op_db()))
