"""What a training audit finds, against autograd on the model itself."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from auditor.api import audit
from auditor.emulation.emulate import emulate
from auditor.errors import AuditorError
from auditor.features.training.measure import conclude, prepare
from auditor.features.training.objective import training_subject
from auditor.numerics.formats import FORMATS
from auditor.numerics.histogram import magnitudes_of, underflow_share
from tests.features.rehearsal.cases import Gate, detour
from tests.features.training.conftest import Trained, loss_fn, made
from tests.support.refusing import refused
from tests.support.replaying import Model


def reference_gradients(trained: Trained) -> dict[str, torch.Tensor]:
    """By autograd, over both batches, with dropout as the audit fixed it."""
    model = copy.deepcopy(trained.before)
    model.train()
    found: dict[str, torch.Tensor] = {}
    tokens, targets = trained.batch
    for batch in ((tokens, targets), (tokens.flip(0), targets)):
        model.zero_grad()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            loss_fn(model(batch[0]), batch[1]).backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                found[name] = torch.cat((found.get(name, torch.zeros(0)), parameter.grad.flatten()))
    return found


def test_parameter_histograms_are_those_of_autograd(trained: Trained) -> None:
    training = trained.audit.training
    expected = reference_gradients(trained)
    assert [p.name for p in training.parameters if p.gradient.nonzero] == [n for n, g in expected.items() if g.any()]
    for parameter in training.parameters:
        ours, theirs = parameter.gradient, magnitudes_of(expected[parameter.name])
        assert ours.max_abs == pytest.approx(theirs.max_abs, rel=1e-4)
        assert ours.norm == pytest.approx(theirs.norm, rel=1e-4)
        said = pytest.approx(underflow_share(theirs.exponents, FORMATS["fp16"]), abs=0.01)
        assert underflow_share(ours.exponents, FORMATS["fp16"]) == said
    weights = dict(trained.before.named_parameters())
    assert all(p.weight.max_abs == float(weights[p.name].detach().abs().max()) for p in training.parameters)


@pytest.mark.gpu
def test_on_a_gpu_the_low_steps_run_natively() -> None:
    model, tokens, targets = made()
    found = audit(model, (tokens, targets), mode="training", loss_fn=loss_fn, device="cuda").training
    assert found.fp16 is not None
    assert found.errors["fp16"] is not None and found.errors["fp16"] < 0.01
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())


def masked(m: Any, mask: torch.Tensor) -> torch.Tensor:
    """A root whose slope is infinite in FP16 at entries that the mask keeps from the weights, and one where it is not."""
    absorbed = torch.where(mask > 0, m.weight, torch.full_like(m.weight, 1e-9)).sqrt().sum()
    if m.harmful:
        absorbed = absorbed + torch.rsqrt(m.weight * 1e-9 + 1e-9).sum() * 1e-5
    return absorbed


def test_only_the_operation_that_breaks_the_low_step_is_blamed() -> None:
    blamed = {}
    for harmful in (False, True):
        model = Model(masked, weight=nn.Parameter(torch.tensor([0.5, 2.0])), harmful=harmful)
        subject = training_subject(model, torch.tensor([1.0, 0.0]), {}, None)
        nodes = prepare(subject, ("fp16",), 0).nodes
        assert next(n for n in nodes if "aten.sqrt" in n.op).errors["fp16"].overflow == 1
        blamed[harmful] = [node.op for node in nodes if node.reasons]
    assert blamed == {False: [], True: ["aten.rsqrt.default"]}


def test_a_gradient_that_fp32_breaks_is_the_users_to_mend() -> None:
    model = nn.Linear(2, 1, bias=False)
    subject = training_subject(model, (torch.zeros(2, 2), torch.ones(2, 1)), {}, lambda y, t: y.abs().sqrt().sum())
    with refused(AuditorError, "bad-loss", match="gradient of weight is not finite"):
        prepare(subject, ("fp16",), 0)


def test_small_gradients_alone_are_no_fault_of_an_operation() -> None:
    """What a loss scale mends: gradients of 1e-9 are zero in FP16."""
    model = nn.Linear(4, 3)
    subject = training_subject(
        model, (torch.ones(2, 4), torch.ones(2, 3)), {}, lambda y, t: (y - t).square().mean() * 1e-9
    )
    prepared = prepare(subject, ("fp16",), 0)
    linear = next(node for node in prepared.nodes if node.owner == "")
    assert linear.errors["fp16"].local_error < 1e-3
    found = conclude(prepared, {}, None)
    assert found.fp16.minimum > 1


@pytest.mark.parametrize("rare", [0, 1])
def test_a_batch_that_breaks_counts_wherever_it_stands(rare: int) -> None:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(64, 16, generator=generator) * 0.3, torch.randint(4, (64,), generator=generator)
    batches = [(x, y), (x, y)]
    batches[rare] = (torch.cat([torch.nn.functional.pad(torch.tensor([[14.0]]), (0, 15)), x[1:]]), y)
    made = audit(Gate(), batches, mode="training", loss_fn=nn.CrossEntropyLoss())
    found = made.training
    broken = {node.op: node.reasons for node in found.nodes if node.reasons}
    assert list(broken) == ["aten.div.Tensor"]
    assert broken["aten.div.Tensor"]["fp16"].endswith("(batch 2)") == bool(rare)
    assert (found.format, found.batches) == ("bf16", 2)
    assert made.plans["autocast_fp16"].scopes[""].precision == "fp32" and found.errors["fp16"] < 1e-3


def test_where_a_step_overflows_at_the_scale_the_window_ends_below_it() -> None:
    """Inside its backward pass a function of the model's own is 4096 times larger than the gradients that are recorded."""

    x, y = torch.randn(32, 16), torch.randint(4, (32,))
    found = audit(detour(), (x, y), mode="training", loss_fn=nn.CrossEntropyLoss(), formats=["fp16"]).training
    assert found.format == "fp16"
    assert found.fp16.init == max(found.fp16.minimum, found.fp16.maximum / 16)
    assert found.fp16.largest == ""  # whose forward calls the function; the largest recorded gradients are those of b
    with emulate("cuda"):
        finite = {}
        for scale in (found.fp16.maximum, 64 * found.fp16.maximum):
            model = detour()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = nn.functional.cross_entropy(model(x), y)
            (loss * scale).backward()
            finite[scale] = all(bool(p.grad.isfinite().all()) for p in model.parameters())
    assert list(finite.values()) == [True, False]


def test_noise_is_that_of_one_batch() -> None:
    """Of 2,000 numbers drawn with deviation 1 around 1 the mean is off by 1 / sqrt(2000) = 0.022."""

    def scaled() -> nn.Module:
        return Model(lambda m, x: x * m.weight, weight=nn.Parameter(torch.ones(256)))

    x = torch.randn(2000, 256, generator=torch.Generator().manual_seed(0)) + 1
    found = audit(scaled(), (x,), mode="training", loss_fn=lambda y: y.mean(0).sum()).training
    assert found.noise == pytest.approx(2000**-0.5, rel=0.1)
    alone = audit(scaled(), (x[:1],), mode="training", loss_fn=lambda y: y.mean(0).sum()).training
    assert alone is not None and alone.noise is None


def test_a_loss_that_overflows_inside_the_region_is_named() -> None:
    """The plan of the model runs the loss in FP32, where 1e5 is finite; many loops compute it in the region."""

    def loss(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (out * 1e5 * 1e-5 - y).abs().mean()

    torch.manual_seed(0)
    batch = torch.randn(8, 4), torch.randn(8, 2)
    training = audit(nn.Linear(4, 2), batch, mode="training", loss_fn=loss, device="cpu", quick=True).training
    said = {one.evidence["format"]: one for one in training.advice if one.code == "loss-overflows"}
    assert set(said) == {"fp16"}
    assert "first at mul (test_stage.py:" in said["fp16"].text
    assert training.advice[0] is said["fp16"]
