"""Models inside torch.compile, DataParallel and DistributedDataParallel: the one inside is audited, and plans fit both."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.parallel import DistributedDataParallel

import auditor
from auditor.emulation.emulate import emulate_unless_native
from auditor.isolation.run_model import run_model
from auditor.numerics.metrics import output_error
from tests.any_model.holding import Call, Net, around, drawn, held
from tests.support.replaying import Model
from tests.support.thinned import thinned

Wrap = Callable[[nn.Module], nn.Module]


class Loud(Net):
    """Beyond FP16 in its first layer: there this is an island."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.normal_(self.first.weight, std=1e5)


def refusing(graph: object, inputs: object) -> Any:
    raise AssertionError("something was compiled")


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend=refusing)


def compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend=refusing)
    return model


def compiled_forward(model: nn.Module) -> nn.Module:
    model.forward = torch.compile(model.forward, backend=refusing)  # type: ignore[method-assign]
    return model


def twice(model: nn.Module) -> nn.Module:
    return nn.DataParallel(compiled(model))


def build(wrap: Wrap, around: Callable[[nn.Module], nn.Module] = lambda model: model) -> tuple[nn.Module, Call]:
    return drawn(lambda: around(wrap(Loud())), 4, 16)()


def unwrapped(model: nn.Module) -> nn.Module:
    return model


WRAPS = [compiled, compiled_in_place, compiled_forward, nn.DataParallel, DistributedDataParallel, twice]


@pytest.fixture(autouse=True, scope="module")
def _process(process_group: None) -> Iterator[None]:
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("wrap", thinned(WRAPS), ids=lambda wrap: wrap.__name__)
def test_audited_without_being_compiled(wrap: Wrap) -> None:
    audit = held(lambda: build(wrap, around))
    assert all(plan.is_verified for plan in audit.plans.values())
    assert audit.plans["cast_bf16"].low_precision_flops == 1


@pytest.mark.parametrize(
    ("wrap", "around"), [(compiled, around), (DistributedDataParallel, unwrapped), (twice, unwrapped)]
)
def test_a_plan_of_either_fits_the_other(wrap: Wrap, around: Callable[[nn.Module], nn.Module]) -> None:
    (model, call), (plain, _) = build(wrap, around), build(unwrapped, around)
    expected = run_model(plain, call)
    for audit, other in ((audited(model, call), unwrapped), (audited(plain, call), wrap)):
        for name, plan in audit.plans.items():
            patched = auditor.apply(build(other, around)[0], audit, name)
            found = run_model(patched, call, around=lambda: emulate_unless_native("cpu"))
            assert output_error(expected, found) == pytest.approx(plan.measured_error, rel=1e-6), name


def audited(model: nn.Module, call: Call) -> auditor.Audit:
    args, _ = call
    audit = auditor.audit(model, args, device="cpu")
    assert any(path.endswith(("first", "last", "norm")) for plan in audit.plans.values() for path in plan.scopes)
    return audit


def test_the_names_are_those_of_the_model_inside_and_the_reader_is_told() -> None:
    model, (args, _) = build(twice)
    audit = auditor.audit(model, args, device="cpu")
    assert [report.node.owner for report in audit.nodes if report.node.owner] == ["first", "norm", "last"]
    assert any("wrapped in DataParallel: the audit covers the Loud inside" in caution for caution in audit.warnings)


def test_a_module_of_ones_own_that_only_looks_wrapped() -> None:
    audit = held(lambda: build(lambda _: Model(lambda m, x: 2 * m._orig_mod(x), _orig_mod=Loud())))
    assert {report.node.owner for report in audit.nodes} >= {"_orig_mod.first"}
    assert not any("wrapped" in caution for caution in audit.warnings)


def test_training_through_a_wrapper() -> None:
    model, (args, _) = build(compiled)
    loss = nn.MSELoss()
    audit = auditor.audit(model, (*args, torch.zeros(4, 8)), device="cpu", mode="training", loss_fn=loss)
    assert audit.training is not None


# TorchScript, exported programs and fx graphs, whole or as a part: audited operation by operation.


class Large(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x * 1e6)


@torch.jit.script  # type: ignore[untyped-decorator]
def activation(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def traced(model: nn.Module, x: Tensor) -> Any:
    return torch.jit.trace(model.eval(), x, check_trace=False)


def scripted(model: nn.Module, x: Tensor) -> Any:
    return torch.jit.script(model.eval())


def frozen(model: nn.Module, x: Tensor) -> Any:
    return torch.jit.freeze(scripted(model, x))


def call_of(make: Callable[[Tensor], Any]) -> tuple[Any, Call]:
    torch.manual_seed(0)
    x = torch.randn(4, 16)
    return make(x), ((x.clone(),), {})


@pytest.mark.parametrize("how", thinned([traced, scripted, frozen], 2), ids=lambda how: how.__name__)
def test_operations_of_a_script_are_audited(how: Any) -> None:
    audit = held(lambda: call_of(lambda x: around(how(Net(), x))))
    ops = [report.node.op.split(".")[1] for report in audit.nodes]
    assert ops[:4] == ["linear", "relu", "layer_norm", "linear"]
    assert audit.plans["autocast_fp16"].low_precision_flops == 1


def test_a_function_that_is_a_script() -> None:
    audit = held(lambda: call_of(lambda x: Model(lambda m, x: activation(m.layer(x)), layer=nn.Linear(16, 8))))
    assert [report.node.op.split(".")[1] for report in audit.nodes] == ["linear", "mul", "sigmoid", "mul"]


def test_one_that_ran_before_and_runs_after() -> None:
    """TorchScript specialises what it runs; an audit sees the operations as they were written, and leaves no trace."""
    model, (args, _) = call_of(lambda x: scripted(Net(), x))
    before = [model(*args) for _ in range(4)][-1]
    audit = auditor.audit(model, args, device="cpu")
    after = [model(*args) for _ in range(4)]
    assert [report.node.op.split(".")[1] for report in audit.nodes] == ["linear", "relu", "layer_norm", "linear"]
    assert all(torch.equal(before, x) for x in after)


def test_a_script_keeps_no_casts_of_the_region_that_it_ran_in_first() -> None:
    """FP16 overflows here and BF16 does not, whichever came first."""
    model = torch.jit.script(Large().eval())
    with torch.no_grad(), auditor.emulate("cuda"):
        for dtype in (torch.float16, torch.bfloat16):
            with torch.autocast("cuda", dtype=dtype):
                found = [model(torch.ones(2, 16)) for _ in range(3)]
    assert all(x.dtype is torch.bfloat16 and bool(x.isfinite().all()) for x in found)


def exported(model: nn.Module, x: torch.Tensor) -> Any:
    return torch.export.export(model.eval(), (x,)).module()


def symbolic(model: nn.Module, x: torch.Tensor) -> Any:
    return torch.fx.symbolic_trace(model.eval())


def unflattened(model: nn.Module, x: torch.Tensor) -> Any:
    return torch.export.unflatten(torch.export.export(model.eval(), (x,)))


def concrete(model: nn.Module, x: torch.Tensor) -> Any:
    model.eval()
    return make_fx(lambda x: model(x))(x)


@pytest.mark.parametrize("how", thinned([exported, symbolic, unflattened, concrete], 2), ids=lambda how: how.__name__)
def test_graphs_are_audited(how: Callable[..., Any]) -> None:
    """An exported module refuses `eval()`; the dropout after it is switched off all the same."""
    audit = held(lambda: call_of(lambda x: nn.Sequential(how(Net(), x), nn.Dropout(0.5), nn.Linear(8, 4))))
    assert audit.plans["cast_bf16"].low_precision_flops == 1
    assert not any("dropout" in report.node.op for report in audit.nodes)
