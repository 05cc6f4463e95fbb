"""A patched model emulated on the CPU: CUDA's autocast lists, each operation in the dtype of its region."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from auditor.artefact.applying import apply_plan
from auditor.records import TimeAndMemory
from auditor.verify import running
from auditor.verify.running import FEWEST, WARM_UP, Answers, ModelRuns, clock, peak, run_patched, time_forward
from tests.support import small_models
from tests.support.replaying import Model
from tests.support.small_models import moody
from tests.support.subjects import normal, seeded


def plan(precision: str, **others: str) -> dict[str, Any]:
    scopes = {"": {"precision": precision}, **{path: {"precision": kept} for path, kept in others.items()}}
    return {"strategy": "autocast", "format": precision, "scopes": scopes}


def linear(x: Tensor, layer: nn.Linear, dtype: torch.dtype) -> Tensor:
    """As a tensor core does it: rounded operands, FP32 sums, one rounding."""
    return (x.to(dtype).float() @ layer.weight.to(dtype).float().t() + layer.bias.to(dtype).float()).to(dtype)


def shown(m: Any, x: Tensor) -> Any:
    """What lies between the layers too."""
    between = m.first(x).softmax(-1)
    return between, m.second(between)


def test_cudas_lists_and_not_the_cpus() -> None:
    # Inputs and weights of few bits: FP32 holds every sum of the products exactly, whichever kernel adds first.
    model = seeded(lambda: Model(shown, first=nn.Linear(4, 4), second=nn.Linear(4, 4)))
    x = (normal(3, 4) * 4).round() / 4
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_((weight * 16).round() / 16)
        expected = linear(x, model.first, torch.float16).float().softmax(-1)
        ((between, actual),) = run_patched(apply_plan(model, plan("fp16")), [((x,), {})], "cpu")
        assert torch.equal(actual, linear(expected, model.second, torch.float16))
    assert (between.dtype, actual.dtype) == (torch.float32, torch.float16)  # CUDA raises softmax, the CPU does not
    assert torch.equal(between, expected)


def branching() -> nn.Module:
    """The sign of a value decides which layer runs."""
    return Model(lambda m, x: m.up(x) if float(x.sum()) > 0 else m.down(x), up=nn.Linear(4, 4), down=nn.Linear(4, 4))


def test_every_batch_takes_its_own_path() -> None:
    model, x = seeded(branching), normal(3, 4).abs()
    patched = apply_plan(model, plan("bf16"))
    (up,), (down,) = run_patched(patched, [((x,), {}), ((-x[:2],), {})], "cpu")
    with torch.no_grad():
        assert torch.equal(up, linear(x, model.up, torch.bfloat16))
        assert torch.equal(down, linear(-x[:2], model.down, torch.bfloat16))


def answers_of(model: nn.Module, batches: Any, gradients: bool = True) -> Answers | str:
    return ModelRuns(lambda plan: nullcontext(model), batches, gradients=gradients).answers("plan")


def test_the_first_batch_is_run_with_gradients_too() -> None:
    model = moody(nn.Linear(4, 4), raises=False)
    found = answers_of(model, [((normal(3, 4),), {}), ((normal(2, 4),), {})])
    assert isinstance(found, Answers)
    assert torch.allclose(found.graded[0], 3 * found.outputs[0][0])
    assert not found.graded[0].requires_grad


def test_what_raises_with_gradients_alone_says_so() -> None:
    model = moody(nn.Linear(4, 4), raises=True)
    batches: Any = [((normal(3, 4),), {})]
    lines = Path(small_models.__file__).read_text(encoding="utf-8").splitlines()
    place = next(number for number, line in enumerate(lines, 1) if "raise KeyError(" in line)
    found = answers_of(model, batches)
    assert isinstance(found, Answers)
    assert (found.graded, found.ungraded) == (None, f"KeyError: 'gradients' (small_models.py:{place})")
    assert isinstance(answers_of(model, batches, gradients=False), Answers)


# One forward is timed as its user runs it, over and over from the same state, and the model comes back.

X = torch.ones(4, 64)


class Counting(nn.Module):
    """It counts its calls in four ways, and says what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(64, 256)
        self.calls, self.cache = 0, []
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("large", torch.zeros(20 << 20))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.cache.append(x)
        self.steps += 1
        self.large[0] += 1
        modes = _get_current_dispatch_mode(), torch.is_grad_enabled()
        torch.forwards_seen.append((self.calls, len(self.cache), float(self.steps), modes, float(x.sum())))
        x.zero_()
        return self.lin(x)


def test_every_forward_is_the_first_of_a_model_in_peace(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Counting(), X.clone()
    seen: list[Any] = []
    monkeypatch.setattr(running, "SECONDS", 0.001)
    monkeypatch.setattr(torch, "forwards_seen", seen, raising=False)  # a global of this module would be put back
    found = time_forward(model, ((x,), {}), "cpu", apart=False)
    times = found.eager
    assert times is not None and times.repeats >= FEWEST
    assert 0 < times.low <= times.median <= times.high
    watched, weighed = 1, 1
    assert len(seen) == watched + WARM_UP + times.repeats + weighed
    assert set(seen[1:]) == {(1, 1, 1.0, (None, False), 256.0)}
    assert (model.calls, model.cache, float(model.steps), float(model.large[0])) == (0, [], 0, 0)
    assert torch.equal(x, X)
    assert found.missing["compiled"].startswith("the model was given as an object")


def test_memory_is_that_of_weights_inputs_and_what_lives_at_one_time() -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).eval()
    model[2].weight = nn.Parameter(model[0].weight.t())  # shares memory
    weights = 4 * (64 * 256 + 256 + 64)
    found = time_forward(model, ((X,), {}), "cpu", apart=False)
    assert found.memory == weights + 4 * 4 * 64 + 2 * 4 * 4 * 256  # ReLU reads one hidden tensor and gives another


def test_what_does_not_run_has_a_reason_for_every_number() -> None:
    class Refusing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("no kernel for Half")

    found = time_forward(Refusing(), ((X,), {}), "cpu")
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    place = next(number for number, line in enumerate(lines, 1) if "raise RuntimeError(" in line)
    said = f"RuntimeError: no kernel for Half ({Path(__file__).name}:{place})"
    assert found == TimeAndMemory(missing=dict.fromkeys(("eager", "compiled", "memory"), said))


def test_compiled_it_is_timed_where_the_process_is_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []

    monkeypatch.setattr(torch, "compile", lambda model, dynamic: lambda x: (called.append("compiled"), model(x))[1])
    monkeypatch.setattr(running, "SECONDS", 0.001)
    found = time_forward(nn.Linear(64, 4), ((X,), {}), "cpu")
    assert found.compiled is not None and len(called) == WARM_UP + found.compiled.repeats
    assert found.cuda_graph is None and "cuda_graph" not in found.missing


def test_memory_is_the_most_at_one_time(capfd: pytest.CaptureFixture[str]) -> None:
    with peak("cpu") as most:
        first = torch.empty(1 << 20)
        del first
        second = torch.empty(1 << 18)
        third = torch.empty(1 << 18)
    assert 4 << 20 <= most() < 5 << 20
    del second, third
    assert capfd.readouterr().err == ""
    with peak("cpu") as most:
        pass
    assert most() == 0


def test_the_clock_waits_for_a_gpu_before_and_after(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    gpu = SimpleNamespace(synchronize=lambda device: log.append("all done"))
    monkeypatch.setattr(torch, "get_device_module", lambda kind: gpu)
    with clock("cuda:0"):
        log.append("body")
    assert log == ["all done", "body", "all done"]


class Counted(nn.Linear):
    """Notes of each call whether gradients are enabled."""

    calls: ClassVar[list[bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(torch.is_grad_enabled())
        return super().forward(x)


@pytest.mark.parametrize("trains", [False, True])
def test_a_native_run_repeats_the_model_only_for_training(trains: bool) -> None:
    Counted.calls.clear()
    model = Counted(4, 4)
    runs = ModelRuns(lambda plan: nullcontext(model), [((torch.ones(2, 4),), {})], gradients=True)
    assert runs.natively("cast_fp16", trains) == ""
    assert Counted.calls == ([False, True] if trains else [False])
