"""The CPU as the target: its own kernels and autocast lists, run for real, give the errors that an audit states."""

import copy
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import auditor
from auditor.emulation.regions import one_stack, region_now
from auditor.errors import AuditorError
from auditor.flow import run
from auditor.isolation.run_model import run_model
from auditor.loading import load
from auditor.numerics.devices import NATIVE_CPU, on_target, target_type
from auditor.numerics.kernels import run_op
from auditor.numerics.metrics import output_error
from auditor.numerics.operations import operation
from auditor.results import Audit
from auditor.settings import Settings
from auditor.training.replay import gradient_error
from tests.architectures.zoo import ZOO, specimen
from tests.corpus.case import Case
from tests.corpus.catalogue import INFERENCE
from tests.native_cpu.plainly import differences, plain_run

aten = torch.ops.aten


class Recurrent(nn.Module):
    """A recurrent layer and a head."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer = kind(16, 32, batch_first=True)
        self.head = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, time, 16] -> [batch, time, 8]."""
        return self.head(self.layer(x)[0])


class Regions(nn.Module):
    """Two layers, the first in an autocast region of its own."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 16)
        self.device_type = device_type

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, 16] -> [batch, 16]."""
        with torch.autocast(self.device_type, dtype=torch.bfloat16):
            x = self.first(x)
        return self.second(x.float()).softmax(-1)


class Several(nn.Module):
    """Convolution, norms, an embedding and a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3)
        self.norms = nn.Sequential(nn.BatchNorm2d(8), nn.ReLU(), nn.GroupNorm(2, 8))
        self.embedding = nn.Embedding(10, 8)
        self.head = nn.Linear(16, 4)

    def forward(self, images: torch.Tensor, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[batch, 3, 8, 8] and [batch, words] -> [batch, 4] and [batch]."""
        seen = self.norms(self.convolution(images)).mean((2, 3))
        both = torch.cat([seen, self.embedding(words).mean(1)], 1)
        return self.head(both).cumsum(-1), torch.linalg.vector_norm(both, dim=-1)


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


MODELS = {
    "encoder": lambda: (encoder(), (torch.randn(2, 8, 32),)),
    "gru": lambda: (Recurrent(nn.GRU), (torch.randn(2, 5, 16),)),
    "lstm": lambda: (Recurrent(nn.LSTM), (torch.randn(2, 5, 16),)),
    "cuda region": lambda: (Regions("cuda"), (torch.randn(4, 16),)),
    "cpu region": lambda: (Regions("cpu"), (torch.randn(4, 16),)),
    "several": lambda: (Several(), (torch.randn(2, 3, 8, 8), torch.randint(0, 10, (2, 5)))),
}


def audited(model: nn.Module, inputs: Any, **options: Any) -> auditor.Audit:
    return auditor.audit(model, inputs, on="cpu", **{"measure_time": False, **options})


@pytest.mark.parametrize("name", MODELS)
def test_stated_errors_are_those_of_plain_runs(name: str) -> None:
    model, inputs = MODELS[name]()
    before = copy.deepcopy(model.eval())
    audit = audited(model, inputs)
    assert differences(before, inputs, {}, audit) == []
    assert audit.environment.execution == "native"
    assert {plan.verification.execution for plan in audit.plans.values() if plan.verification} == {"native"}


def test_the_fused_transformer_path_is_audited_as_users_get_it() -> None:
    """Its FP32 outputs differ in the last digits, so that a run without it has another error."""
    model, (inputs,) = MODELS["encoder"]()
    model.eval()
    batch = ((inputs,), {})
    fused, unfused = (run_model(model, batch, fused=fused)[0] for fused in (True, False))
    assert not torch.equal(fused, unfused)
    assert differences(copy.deepcopy(model), (inputs,), {}, audited(model, (inputs,))) == []


def test_a_region_of_cuda_has_no_effect_on_a_cpu() -> None:
    with on_target(NATIVE_CPU), one_stack():
        with torch.autocast("cuda", dtype=torch.float16):
            assert not region_now().enabled
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert region_now() == (True, "bfloat16")
    with one_stack(), torch.autocast("cuda", dtype=torch.float16):
        assert region_now() == (True, "float16")


def test_the_lists_of_autocast_are_those_of_the_target() -> None:
    softmax, einsum, binary = "aten.softmax.int", "aten.einsum.default", "aten.binary_cross_entropy.default"
    assert [operation(op).autocast for op in (softmax, binary)] == ["fp32_unless_dtype", "banned"]
    with on_target(NATIVE_CPU):
        assert [operation(op).autocast for op in (softmax, einsum, binary)] == ["none", "lower", "fp32"]
        assert not operation("aten.lstm.input").only_fp16
    assert operation("aten.lstm.input").only_fp16
    assert target_type() == "cuda"


@pytest.mark.parametrize(
    "call", ["lstm", "gru", "rnn_tanh", "rnn_relu", "rnn_tanh_cell", "einsum", "inner", "tensordot"]
)
def test_products_that_autocast_lowers_inside_composite_operations(call: str) -> None:
    """The table says `lower` of an operation exactly if torch's autocast changes its result on this CPU."""
    a, b = torch.randn(3, 4), torch.randn(3, 4)
    cell = (torch.randn(2, 3), torch.randn(2, 4), torch.randn(4, 3), torch.randn(4, 4))
    layers = {
        "lstm": nn.LSTM(4, 5),
        "gru": nn.GRU(4, 5),
        "rnn_tanh": nn.RNN(4, 5),
        "rnn_relu": nn.RNN(4, 5, nonlinearity="relu"),
    }
    calls = {
        **{name: lambda layer=layer: layer(a[None])[0] for name, layer in layers.items()},
        "rnn_tanh_cell": lambda: torch.rnn_tanh_cell(*cell),
        "einsum": lambda: torch.einsum("ij,kj->ik", a, b),
        "inner": lambda: torch.inner(a, b),
        "tensordot": lambda: torch.tensordot(a, b.T, 1),
    }
    with torch.no_grad():
        wide = calls[call]()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            low = calls[call]()
    assert not torch.equal(wide, low.float())
    with on_target(NATIVE_CPU):
        assert operation(call).autocast == "lower"


def test_operations_run_by_the_cpus_own_kernels() -> None:
    """A sum of FP16 numbers beyond its range: CUDA's kernels and the CPU's add in FP32, and products of a CPU may not
    round where CUDA's do; so the results are torch's own, bit for bit."""
    x, y = torch.randn(40, 300).half(), torch.randn(300, 40).half()
    with on_target(NATIVE_CPU):
        for op, args in ((aten.mm.default, (x, y)), (aten.softmax.int, (x, -1)), (aten.gelu.default, (x,))):
            assert torch.equal(run_op(op, args, {}), op(*args))


def test_what_the_cpu_lacks_is_refused_by_torch_and_kept_in_fp32() -> None:
    class Solving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """[8, 8] -> [8, 8]."""
            return torch.linalg.inv(self.layer(x) + 10 * torch.eye(8, dtype=x.dtype))

    audit = audited(Solving().eval(), (torch.randn(8, 8),), strategies="cast")
    node = next(each for each in audit.nodes if each.node.op.startswith("aten.linalg_inv"))
    assert {node.verdicts[fmt].verdict for fmt in audit.formats} == {"unsafe"}
    assert all("CUDA" not in str(error.unsupported) for error in node.errors.values())


@pytest.mark.parametrize("options", [{"device": "cuda"}, {"gpu": "H100"}], ids=str)
def test_options_of_a_gpu_are_refused(options: dict[str, str]) -> None:
    with pytest.raises(AuditorError, match="on='cpu'"):
        audited(nn.Linear(2, 2), (torch.randn(1, 2),), **options)


FILE = """
import torch
from torch import nn

def get_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64))

def get_inputs():
    return torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
"""


def test_the_artefact_does_in_the_users_process_what_was_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The audit verifies it in a fresh process; here it is imported as users import it."""
    file = tmp_path / "net.py"
    file.write_text(FILE)
    audit = Audit.of(run(load(str(file)), Settings(on="cpu", measure_time=False)))
    audit.save(tmp_path / "out")
    monkeypatch.syspath_prepend(str(tmp_path / "out"))
    patched_model, inputs = (
        import_module("patched_model"),
        torch.randn(64, 64, generator=torch.Generator().manual_seed(0)),
    )
    reference = plain_run(patched_model.original(), (inputs,), {})
    for name, plan in audit.plans.items():
        outputs = plain_run(patched_model.build(plan=name).eval(), (inputs,), {})
        assert output_error(reference, outputs) == plan.measured_error
    assert not any("own process" in warning for warning in audit.warnings)
    assert audit.cpu is not None
    assert [one.kernels_failure for one in audit.cpu.runs.values()] == [None] * 5
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        assert any(key.startswith("matmul in BF16: ") for key in audit.cpu.runs["cast_bf16"].kernels)
        assert audit.cpu.isa


def test_a_training_step_runs_on_the_cpu() -> None:
    """The stated error of its gradients is that of a plain step, in a region of the CPU's autocast."""
    model = nn.Sequential(nn.Linear(16, 32), nn.Softmax(-1), nn.Linear(32, 4))
    inputs, targets = torch.randn(8, 16), torch.randint(0, 4, (8,))
    loss_fn = nn.functional.cross_entropy
    before = copy.deepcopy(model)
    audit = audited(model, (inputs, targets), mode="training", loss_fn=loss_fn, formats="bf16", strategies="autocast")
    assert audit.training is not None

    def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
        loss_fn(model(inputs).float(), targets).backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    patched = auditor.apply(copy.deepcopy(before), audit.plans["autocast_bf16"])
    assert audit.training.plan == "autocast_bf16"
    error = gradient_error(gradients(before), gradients(patched))
    assert audit.training.errors["bf16"] == pytest.approx(error, rel=1e-6)


def test_rules_about_gpus_are_left_out() -> None:
    """Convolutions of seven channels fit no tensor core, and run in TF32 there."""
    model, inputs = nn.Conv2d(3, 7, 3).eval(), (torch.randn(2, 3, 8, 8),)
    assert not [each for each in audited(model, inputs, strategies="cast").findings if each.rule.startswith("HWR")]
    assert [rule for rule in Settings().rulebook if rule.code.startswith("HWR")]


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_stated_errors_of_public_architectures_are_those_of_plain_runs(name: str) -> None:
    found = specimen(name)
    before = copy.deepcopy(found.model)
    audit = audited(found.model, found.args, kwargs=found.kwargs)
    assert differences(before, found.args, found.kwargs, audit) == []


@pytest.mark.slow
@pytest.mark.parametrize("case", INFERENCE, ids=lambda case: case.name)
def test_stated_errors_of_reported_failures_are_those_of_plain_runs(case: Case) -> None:
    model, inputs = case.build()
    before = copy.deepcopy(model.eval())
    assert differences(before, inputs, {}, audited(model, inputs)) == []
