"""Models inside torch.compile, DataParallel and DistributedDataParallel: the one inside is audited, and plans fit both."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import auditor
from auditor.capture.emulation import as_on
from auditor.isolation.answer import answer
from auditor.numerics.metrics import output_error
from tests.any_model.holding import Around, Call, Net, held
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
    torch.manual_seed(0)
    model = around(wrap(Loud()))
    return model, ((torch.randn(4, 16),), {})


def unwrapped(model: nn.Module) -> nn.Module:
    return model


WRAPS = [compiled, compiled_in_place, compiled_forward, nn.DataParallel, DistributedDataParallel, twice]


@pytest.fixture(autouse=True, scope="module")
def process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch._dynamo.reset()


@pytest.mark.parametrize("wrap", thinned(WRAPS), ids=lambda wrap: wrap.__name__)
def test_audited_without_being_compiled(wrap: Wrap) -> None:
    audit = held(lambda: build(wrap, Around))
    assert all(plan.is_verified for plan in audit.plans.values())
    assert audit.plans["cast_bf16"].low_precision_flops == 1


@pytest.mark.parametrize(
    ("wrap", "around"), [(compiled, Around), (DistributedDataParallel, unwrapped), (twice, unwrapped)]
)
def test_a_plan_of_either_fits_the_other(wrap: Wrap, around: Callable[[nn.Module], nn.Module]) -> None:
    (model, call), (plain, _) = build(wrap, around), build(unwrapped, around)
    expected = answer(plain, call)
    for audit, other in ((audited(model, call), unwrapped), (audited(plain, call), wrap)):
        for name, plan in audit.plans.items():
            patched = auditor.apply(build(other, around)[0], audit, name)
            found = answer(patched, call, around=lambda: as_on("cpu"))
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
    assert not any("wrapped" in caution for caution in held(lambda: build(unwrapped)).warnings)


def test_a_module_of_ones_own_that_only_looks_wrapped() -> None:
    audit = held(lambda: build(lambda _: Model(lambda m, x: 2 * m._orig_mod(x), _orig_mod=Loud())))
    assert {report.node.owner for report in audit.nodes} >= {"_orig_mod.first"}


def test_training_through_a_wrapper() -> None:
    model, (args, _) = build(compiled)
    loss = nn.MSELoss()
    audit = auditor.audit(model, (*args, torch.zeros(4, 8)), device="cpu", mode="training", loss_fn=loss)
    assert audit.training is not None
