"""`emulate` as a context manager: nested, in threads, around exceptions and compiled models, and what it says no to."""

import threading
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler

import auditor
from auditor.emulation.emulate import Emulation, Endless, scaled_as_on_cuda
from auditor.emulation.regions import Region
from auditor.errors import MeasureError
from auditor.numerics.kernels import UnsupportedInFormat
from tests.support.capturing import Function
from tests.support.refusing import refused
from tests.support.subjects import normal, seeded

HALF = torch.float16


def net() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1), nn.Linear(8, 8)))


def low(model: nn.Module, x: Tensor, device: str = "cuda") -> Tensor:
    with torch.autocast(device, dtype=HALF):
        return model(x)


@pytest.mark.parametrize("device", ["tpu", "mps", "cuda:1", "", "cpu"])
def test_an_unknown_device_gets_one_line_with_the_known_ones(device: str) -> None:
    line = r"^there is no emulation of '.*': use emulate\('cuda'\)\.$"
    with refused(MeasureError, "unknown-device", match=line), auditor.emulate(device):
        pass


def test_a_second_thread_is_told_to_wait() -> None:
    said: list[MeasureError] = []

    def other() -> None:
        with pytest.raises(MeasureError) as caught, auditor.emulate():
            pass
        said.append(caught.value)

    with auditor.emulate():
        run_in_thread(other)
    assert said[0].slug == "emulation-busy"
    assert "\n" not in str(said[0])
    with auditor.emulate():  # and afterwards there is room again
        pass


def test_threads_of_the_body_are_not_emulated() -> None:
    model, x, found = net(), normal(4, 8), list[object]()

    def other() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found.append(low(model, x).dtype)
            with torch.autocast("cuda", dtype=HALF):
                found.append(torch.is_autocast_enabled("cuda"))

    with auditor.emulate(), torch.autocast("cuda", dtype=HALF):
        run_in_thread(other)
        assert model(x).dtype is HALF
    assert found == [torch.float32, False]


def run_in_thread(target: object) -> None:
    thread = threading.Thread(target=target)
    thread.start()
    thread.join()


def test_an_audit_inside_an_emulation_or_of_a_model_that_emulates_says_so() -> None:
    def emulates_itself(x: Tensor) -> Tensor:
        with auditor.emulate():
            return x.exp()

    busy = "emulation-busy"
    with auditor.emulate(), refused(MeasureError, busy, match="start this run after the other has ended.$"):
        auditor.audit(nn.Linear(8, 8), normal(4, 8))
    with refused(MeasureError, busy, match="being recorded or emulated"):
        auditor.audit(Function(emulates_itself), normal(4, 8))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_exception_leaves_nothing_on(error: type[BaseException]) -> None:
    def fails() -> None:
        with auditor.emulate(), torch.autocast("cuda", dtype=HALF), torch.no_grad():
            low(net(), normal(4, 8))
            raise error

    with pytest.raises(error):
        fails()
    with auditor.emulate():
        assert low(net(), normal(4, 8)).dtype is HALF


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_models_run_eagerly_inside_and_compiled_afterwards(backend: str) -> None:
    calls = list[int]()
    inner = torch._dynamo.lookup_backend(backend)

    def counted(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        run = inner(graph, inputs)
        return lambda *args: (calls.append(1), run(*args))[1]

    torch._dynamo.reset()
    model, x = net(), normal(4, 8)
    compiled = torch.compile(model, backend=counted)
    with torch.no_grad():
        before = compiled(x)
        assert len(calls) == 1
        with auditor.emulate():
            inside, plain = low(compiled, x), low(model, x)
        assert len(calls) == 1
        assert torch.equal(inside, plain)
        assert torch.equal(compiled(x), before)
    assert len(calls) == 2


def test_a_tracer_inside_is_named() -> None:
    def traces() -> None:
        with auditor.emulate():
            torch.export.export(net(), (normal(4, 8),))

    with refused(MeasureError, "emulation-ended", match="trace the model before or after"):
        traces()


# The handler that runs operations as CUDA does: dtypes on the way in, arithmetic, and what CUDA lacks.

aten = torch.ops.aten
OFF = Region(False, "float32")
X = torch.tensor([[1.0, 2.0]])


def test_what_cuda_lacks_raises_or_is_rounded() -> None:
    half = torch.eye(2, dtype=torch.float16)
    with pytest.raises(UnsupportedInFormat, match="kernel on CUDA"):
        Emulation().run_leaf_op(aten.linalg_cholesky.default, (half,), {}, OFF)
    found = Emulation(lenient=True).run_leaf_op(aten.linalg_cholesky.default, (half,), {}, OFF)
    assert (found.dtype, found.tolist()) == (torch.float16, [[1, 0], [0, 1]])


def test_a_run_that_goes_on_and_on_is_ended_and_casts_are_not_counted() -> None:
    emulation = Emulation(most=2)
    for _ in range(5):
        emulation.run_leaf_op(aten._to_copy.default, (X,), {"dtype": torch.float16}, OFF)
    for _ in range(2):
        emulation.run_leaf_op(aten.relu.default, (X.half(),), {}, OFF)
    with pytest.raises(Endless, match="stopped after 2 operations"):
        emulation.run_leaf_op(aten.relu.default, (X.half(),), {}, OFF)


def test_dropout_outside_of_training_returns_what_it_is_given() -> None:
    x, mode = torch.randn(8).half(), Emulation()
    assert mode.run_op(aten.dropout.default, (x, 0.5, False), {}, OFF) is x
    torch.manual_seed(0)
    thinned = mode.run_op(aten.dropout.default, (x, 0.5, True), {}, OFF)
    torch.manual_seed(0)
    assert torch.equal(thinned, torch.dropout(x.float(), 0.5, True).half())


# `GradScaler("cuda")` without CUDA: it scales in the body and in its thread, and is itself again afterwards.


@pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA there is nothing to stand in for")
@pytest.mark.filterwarnings("ignore:torch.cuda.amp.GradScaler is enabled", "ignore:.*CUDA is not available")
def test_outside_and_in_other_threads_it_is_torchs_own() -> None:
    original = GradScaler.__init__
    enabled = {}

    def elsewhere() -> None:
        enabled["thread"] = GradScaler("cuda").is_enabled()

    with scaled_as_on_cuda():
        run_in_thread(elsewhere)
        enabled["off"] = GradScaler("cuda", enabled=False).is_enabled()
    enabled["after"] = GradScaler("cuda").is_enabled()
    assert enabled == {"thread": False, "off": False, "after": False}
    assert GradScaler.__init__ is original
