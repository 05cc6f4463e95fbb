"""Large results of operations lie in mapped files, and are what they are without."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from auditor.offload import Arena, Spilling
from auditor.offload.spilling import is_mapped, moved


@pytest.fixture
def arena(tmp_path: Path) -> Arena:
    return Arena(tmp_path)


def lies_there(x: Tensor) -> bool:
    return is_mapped(x.untyped_storage())


MAKING: dict[str, Callable[[Tensor], Tensor]] = {
    "a product": lambda x: x @ x,
    "columns first": lambda x: torch.empty_strided((64, 64), (1, 64)).copy_(x),
    "with gaps": lambda x: (x + 1)[::2, 1::3],
    "half": Tensor.half,
    "booleans": lambda x: x.repeat(8, 1) > 0,
    "one of several": lambda x: torch.linalg.qr(x)[1],
    "of a list": lambda x: torch.stack(list(x.split(32))).sum(0).repeat(4, 1),
    "complex": torch.fft.fft2,
    "expanded": lambda x: (x * 2).unsqueeze(0).expand(3, 64, 64),
}


@pytest.mark.parametrize("make", MAKING.values(), ids=MAKING)
def test_a_large_result_is_the_same_entries_at_the_same_strides(make: Callable[[Tensor], Tensor], arena: Arena) -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    plain = make(x)
    with Spilling(arena, 4096):
        spilt = make(x)
    assert lies_there(spilt) and arena.written > 0
    assert torch.equal(plain, spilt) and plain.dtype is spilt.dtype
    assert (plain.shape, plain.stride(), plain.storage_offset()) == (
        spilt.shape,
        spilt.stride(),
        spilt.storage_offset(),
    )


LEAVING: dict[str, Callable[[Tensor], Tensor]] = {
    "a view": lambda x: x.t(),
    "itself": lambda x: x.add_(0),
    "written out": lambda x: torch.add(x, 1, out=x),
    "detached": Tensor.detach,
    "a small one": lambda x: x[0] + 1,
    "sparse": lambda x: x.to_sparse(),
}


@pytest.mark.parametrize("make", LEAVING.values(), ids=LEAVING)
def test_what_was_there_before_stays_where_it_is(make: Callable[[Tensor], Tensor], arena: Arena) -> None:
    x = torch.randn(64, 64)
    with Spilling(arena, 4096):
        made = make(x)
    assert arena.written == 0
    assert made.layout is not torch.strided or made.numel() < 4096 or made.data_ptr() == x.data_ptr()


def test_gradients_are_the_same_and_what_autograd_keeps_lies_there_too(arena: Arena) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Softmax(-1)), torch.randn(64, 64)

    def gradients() -> list[Tensor]:
        model.zero_grad()
        model(x).square().sum().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    plain, kept = gradients(), list[Tensor]()
    with Spilling(arena, 4096), torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        spilt = gradients()
    assert len(plain) == 4 and all(map(torch.equal, plain, spilt))
    given = {p.data_ptr() for p in [x, *model.parameters()]}
    assert kept and all(lies_there(t) for t in kept if t.numel() >= 1024 and t.data_ptr() not in given)
    assert [lies_there(g) for g in spilt] == [True, False, True, False]


def test_a_model_may_be_made_there(arena: Arena) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(64, 64)
    torch.manual_seed(0)
    with Spilling(arena, 4096):
        model = nn.Linear(64, 64)
    assert lies_there(model.weight) and type(model.weight) is nn.Parameter
    assert torch.equal(model.weight, plain.weight) and torch.equal(model.bias, plain.bias)


def test_all_of_a_storage_is_moved(arena: Arena) -> None:
    whole = torch.arange(100.0)
    part = moved(whole[10:20], arena)
    assert part.tolist() == list(range(10, 20)) and part.untyped_storage().nbytes() == 400


def test_a_tensor_that_is_made_larger_leaves_the_file(arena: Arena) -> None:
    with Spilling(arena, 4096):
        x = torch.arange(5000.0)
        assert lies_there(x)
        x.resize_(9000)
        assert x.shape == (9000,) and torch.equal(x[:5000], torch.arange(5000.0))
        out = torch.empty(5000)
        with pytest.warns(UserWarning, match="was resized"):
            torch.add(torch.ones(9000), 1, out=out)
    assert torch.equal(out, torch.full((9000,), 2.0))


def test_what_an_operation_raises_otherwise_is_raised(arena: Arena) -> None:
    with Spilling(arena, 4096), pytest.raises(RuntimeError, match="must match"):
        torch.ones(5000) + torch.ones(4000)


LATE = """
import sys, torch
from auditor.offload import Arena, Spilling
x, arena = torch.randn(1, 2, 16, 8), Arena()
with Spilling(arena, 1):
    assert "torch._dynamo" not in sys.modules
    from torch.nn.attention.flex_attention import flex_attention
    found = flex_attention(x, x, x)
assert torch.equal(found, flex_attention(x, x, x)) and arena.written
"""


def test_a_model_may_import_what_compiles_as_it_runs() -> None:
    """Attention by a function compiles itself, and may not be split: in a process of its own, where nothing has compiled yet."""
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def gated(x: Tensor, weight: Tensor) -> Tensor:
    h = x @ weight
    return torch.sigmoid(h) * h


@pytest.mark.filterwarnings("ignore:audited_here..gated")
@pytest.mark.parametrize("key", ["CPU", "CompositeExplicitAutograd", "CompositeImplicitAutograd"])
def test_autograd_looks_into_an_operation_of_whose_derivative_nothing_is_registered(key: str, arena: Arena) -> None:
    with torch.library._scoped_library("audited_here", "DEF") as library:
        library.define("gated(Tensor x, Tensor weight) -> Tensor")
        library.impl("gated", gated, key)
        x, weight = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64)

        def gradient() -> Tensor:
            (found,) = torch.autograd.grad(torch.ops.audited_here.gated(x, weight).sum(), x)
            return found

        without = gradient()
        with Spilling(arena):
            within = gradient()
            with torch.no_grad():
                assert not torch.ops.audited_here.gated(x, weight).requires_grad
        assert torch.equal(within, without) and without.abs().sum() > 0


def test_a_derivative_that_is_registered_is_taken_once(arena: Arena) -> None:
    taken = []

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            taken.append(x)
            with torch._C._AutoDispatchBelowAutograd():
                found: Tensor = torch.ops.audited_here.twice(x)
            return found

        @staticmethod
        def backward(ctx: object, *gradients: Tensor) -> Tensor:
            return 3 * gradients[0]

    with torch.library._scoped_library("audited_here", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: 2 * x, "CPU")
        library.impl("twice", Twice.apply, "Autograd")
        x = torch.randn(64, 64, requires_grad=True)
        with Spilling(arena):
            torch.ops.audited_here.twice(x).sum().backward()
    assert len(taken) == 1 and x.grad is not None and torch.equal(x.grad, torch.full((64, 64), 3.0))
