"""Large results of operations, and weights, lie in mapped files without names, and are what they are without."""

import ctypes
import itertools
import mmap
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from auditor.errors import AuditorError
from auditor.offload import files, onto, resident_limit
from auditor.offload.files import OffloadMode, in_file, is_offloaded, release
from auditor.offload.limit import resident

NUMBERS = 8_000_000


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where files are made, from 4 KiB on."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(files, "LARGE", 4096)
    return tmp_path


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
def test_a_large_result_is_the_same_entries_at_the_same_strides(make: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    plain = make(x)
    with OffloadMode():
        found = make(x)
    assert is_offloaded(found) and torch.equal(plain, found) and plain.dtype is found.dtype
    laid = [(y.shape, y.stride(), y.storage_offset()) for y in (plain, found)]
    assert laid[0] == laid[1]


LEAVING: dict[str, Callable[[Tensor], Tensor]] = {
    "a view": lambda x: x.t(),
    "itself": lambda x: x.add_(0),
    "written out": lambda x: torch.add(x, 1, out=x),
    "detached": Tensor.detach,
    "a small one": lambda x: x[0] + 1,
    "sparse": lambda x: x.to_sparse(),
}


@pytest.mark.parametrize("make", LEAVING.values(), ids=LEAVING)
def test_what_was_there_before_stays_where_it_is(make: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(64, 64)
    with OffloadMode():
        made = make(x)
    assert not is_offloaded(made)
    assert made.layout is not torch.strided or made.numel() < 4096 or made.data_ptr() == x.data_ptr()


def test_gradients_are_the_same_and_what_autograd_keeps_lies_there_too() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Softmax(-1)), torch.randn(64, 64)

    def gradients() -> list[Tensor]:
        model.zero_grad()
        model(x).square().sum().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    plain, kept = gradients(), list[Tensor]()
    with OffloadMode(), torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        found = gradients()
    assert len(plain) == 4 and all(map(torch.equal, plain, found))
    given = {p.data_ptr() for p in [x, *model.parameters()]}
    assert kept and all(is_offloaded(t) for t in kept if t.numel() >= 1024 and t.data_ptr() not in given)
    assert [is_offloaded(g) for g in found] == [True, False, True, False]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 32), nn.Linear(32, 50, bias=False)
        self.head.weight = self.embed.weight
        whole = torch.randn(2, 32, 32)
        self.first, self.second = nn.Parameter(whole[0]), nn.Parameter(whole[1])
        self.register_buffer("table", torch.randn(32, 32).t())
        self.register_buffer("small", torch.ones(3))


def test_weights_are_the_same_objects_with_the_same_entries_over_as_many_storages() -> None:
    model = Tied()
    before = {name: (x, x.detach().clone(), x.stride()) for name, x in model.state_dict(keep_vars=True).items()}
    with resident_limit(1 << 40):
        onto(model)
    for name, x in model.state_dict(keep_vars=True).items():
        same, entries, strides = before[name]
        assert x is same and torch.equal(x, entries) and x.stride() == strides
        assert is_offloaded(x) == (name != "small")
    assert model.first.untyped_storage().data_ptr() == model.second.untyped_storage().data_ptr()
    torch.manual_seed(0)
    plain = nn.Linear(64, 64)
    torch.manual_seed(0)
    with OffloadMode():
        made = nn.Linear(64, 64)
    assert is_offloaded(made.weight) and type(made.weight) is nn.Parameter
    assert torch.equal(made.weight, plain.weight) and torch.equal(made.bias, plain.bias)


def test_a_tensor_that_is_made_larger_leaves_the_file() -> None:
    with OffloadMode():
        x = torch.arange(5000.0)
        assert is_offloaded(x)
        x.resize_(9000)
        assert x.shape == (9000,) and torch.equal(x[:5000], torch.arange(5000.0))
        out = torch.empty(5000)
        with pytest.warns(UserWarning, match="was resized"):
            torch.add(torch.ones(9000), 1, out=out)
        with pytest.raises(RuntimeError, match="must match"):
            torch.ones(5000) + torch.ones(4000)
    assert torch.equal(out, torch.full((9000,), 2.0))


def test_what_is_let_go_of_comes_back_and_the_checkpoints_of_others_do(folder: Path) -> None:
    checkpoint = folder / "weights"
    torch.arange(float(NUMBERS)).numpy().tofile(checkpoint)
    private = torch.empty(0).set_(torch.UntypedStorage.from_file(str(checkpoint), False, 4 * NUMBERS), 0, (NUMBERS,))
    private[5] = -1.0
    x = torch.empty(0).set_(in_file(torch.full((NUMBERS,), 1.5).untyped_storage()), 0, (NUMBERS,))
    totals = [float(y.double().sum()) for y in (x, private)]
    held = [resident()]
    for others in (False, True):
        release(others=others)
        held.append(resident())
    assert all(before - after > 3 * NUMBERS for before, after in itertools.pairwise(held))
    assert [float(y.double().sum()) for y in (x, private)] == totals and private[5] == -1.0
    assert torch.from_file(str(checkpoint), size=NUMBERS)[5] == 5.0


def test_files_go_with_their_tensor_and_a_process_that_is_killed(folder: Path) -> None:
    def mapped() -> bool:
        return str(folder) in Path("/proc/self/maps").read_text()

    storage = in_file(torch.ones(5000).untyped_storage())
    assert mapped() and list(folder.iterdir()) == []
    del storage
    assert not mapped()
    code = (
        "import os, signal, torch; from auditor.offload.files import in_file\n"
        "s = in_file(torch.ones(5000).untyped_storage()); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode == -9 and list(folder.iterdir()) == []


def test_a_file_without_room_is_one_line(folder: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    large = torch.ones(1 << 19)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        assert in_file(large[:100].clone().untyped_storage()).nbytes() == 400
        with pytest.raises(AuditorError, match=r"no space for 2 MiB more in .*File too large\).*TMPDIR") as error:
            in_file(large.untyped_storage())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert error.value.slug == "disk-full" and "\n" not in str(error.value) and list(folder.iterdir()) == []


LATE = """
import sys, torch
from auditor.offload import files
files.LARGE = 1
x = torch.randn(1, 2, 16, 8)
with files.OffloadMode():
    assert "torch._dynamo" not in sys.modules
    from torch.nn.attention.flex_attention import flex_attention
    found = flex_attention(x, x, x)
assert torch.equal(found, flex_attention(x, x, x)) and files.is_offloaded(found)
"""


@pytest.mark.slow
def test_a_model_may_import_what_compiles_as_it_runs() -> None:
    """Attention by a function compiles itself, and may not be split: in a process of its own, where nothing has compiled yet."""
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def gated(x: Tensor, weight: Tensor) -> Tensor:
    h = x @ weight
    return torch.sigmoid(h) * h


@pytest.mark.filterwarnings("ignore:offloaded_here..gated")
@pytest.mark.parametrize("key", ["CPU", "CompositeExplicitAutograd", "CompositeImplicitAutograd"])
def test_autograd_looks_into_an_operation_of_whose_derivative_nothing_is_registered(key: str) -> None:
    with torch.library._scoped_library("offloaded_here", "DEF") as library:
        library.define("gated(Tensor x, Tensor weight) -> Tensor")
        library.impl("gated", gated, key)
        x, weight = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64)

        def gradient() -> Tensor:
            (found,) = torch.autograd.grad(torch.ops.offloaded_here.gated(x, weight).sum(), x)
            return found

        without = gradient()
        with OffloadMode():
            within = gradient()
            with torch.no_grad():
                assert not torch.ops.offloaded_here.gated(x, weight).requires_grad
        assert torch.equal(within, without) and without.abs().sum() > 0


def test_memory_where_a_file_was_mapped_is_left_alone() -> None:
    """The addresses of a storage that has ended belong to whoever asks next."""
    freed = [in_file(torch.zeros(NUMBERS).untyped_storage()) for _ in range(4)]
    places = {storage.data_ptr() // mmap.PAGESIZE + page for storage in freed for page in range(NUMBERS // 1024)}
    freed.clear()
    others = [mmap.mmap(-1, 4 * NUMBERS) for _ in range(4)]
    for other in others:
        other[:] = b"\1" * len(other)
    assert any(ctypes.addressof(ctypes.c_char.from_buffer(other)) // mmap.PAGESIZE in places for other in others)
    release(others=True)
    assert all(other[:] == b"\1" * len(other) for other in others)
