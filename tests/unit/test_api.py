"""The public entry: its names; an audit answers, and leaves the model and the process bit for bit as they were."""

import itertools
import json
import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor.api import audit
from auditor.artefact.applying import is_wrapped
from auditor.document.codec import steady
from auditor.errors import AuditorError
from tests.support.replaying import Model
from tests.support.subjects import normal


class Net(nn.Module):
    """Everything an audit could disturb: running statistics, dropout, hooks, frozen weights, gradients, shared weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(8, 6)
        self.head.weight = nn.Parameter(self.first.weight.detach().t().clone())
        self.again = self.first
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.head(self.drop(self.norm(self.first(x)).relu())) * scale


def disturbed_model() -> Net:
    """Part in training, part in evaluation mode, with gradients, a frozen weight and hooks."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Net()
        model.train()
        model.head.eval()
        model(normal(16, 6)).sum().backward()
    model.first.bias.requires_grad_(False)
    model.norm.register_forward_hook(lambda *_: None)
    model.register_forward_pre_hook(lambda *_: None)
    return model


def model_state(model: Net) -> dict[str, Any]:
    """Everything about a model, by value and by identity."""
    found: dict[str, Any] = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        grad = None if tensor.grad is None else tensor.grad.numpy().tobytes()
        found[name] = (id(tensor), tensor.dtype, tensor.requires_grad, tensor.detach().numpy().tobytes(), grad)
    for path, module in model.named_modules():
        hooks = [list(getattr(module, f"_forward{kind}_hooks")) for kind in ("", "_pre")]
        found[f"module {path}"] = (module.training, hooks, sorted(module.__dict__), is_wrapped(module))
    return found


def input_state(x: Tensor) -> tuple[Any, ...]:
    return x.tolist(), x.requires_grad, x.grad


def process_state() -> dict[str, Any]:
    numpy = [part.tolist() if isinstance(part, np.ndarray) else part for part in np.random.get_state()]
    return {
        "random": random.getstate(),
        "numpy": numpy,
        "torch": torch.get_rng_state().tolist(),
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "gradients": torch.is_grad_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")),
        "autocast dtype": (torch.get_autocast_dtype("cpu"), torch.get_autocast_dtype("cuda")),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cuda": torch.cuda.is_initialized(),
    }


@pytest.fixture(scope="module")
def audited() -> dict[str, Any]:
    """One audit of both formats, with what was before it and after it."""
    random.seed(5)
    np.random.seed(6)
    torch.manual_seed(7)
    model, x = disturbed_model(), normal(16, 6)
    given, before, around = input_state(x), model_state(model), process_state()
    found = auditor.audit(model, (x,), kwargs={"scale": 2.0}, max_error=0.05)
    return {
        "audit": found,
        "model": (before, model_state(model)),
        "process": (around, process_state()),
        "inputs": (given, input_state(x)),
    }


@pytest.mark.parametrize("what", ["model", "process", "inputs"])
def test_it_comes_back_bit_for_bit(what: str, audited: dict[str, Any]) -> None:
    before, after = audited[what]
    assert after == before


def test_the_audit_answers(audited: dict[str, Any]) -> None:
    found = audited["audit"]
    assert isinstance(found, auditor.Audit)
    assert set(found.plans) == set(found.baselines) == {"autocast_fp16", "autocast_bf16", "cast_fp16", "cast_bf16"}
    assert found.recommended in found.plans
    plan = found.plans[found.recommended]
    assert plan.is_verified
    assert plan.measured_error <= 0.05
    assert found.live.batches[0][1] == {"scale": 2.0}
    assert {report.node.owner for report in found.nodes} == {"", "first", "norm", "head"}  # no dropout in eval


def test_the_plan_can_be_applied(audited: dict[str, Any]) -> None:
    model = auditor.apply(disturbed_model(), audited["audit"])
    assert any(is_wrapped(module) for module in model.modules())


def text_of(**options: Any) -> str:
    found = auditor.audit(disturbed_model(), (normal(8, 6),), formats=("bf16",), strategies=("autocast",), **options)
    return json.dumps(steady(found.to_dict()), indent=1, allow_nan=False)


def test_the_same_seed_gives_the_same_bytes() -> None:
    torch.manual_seed(1)
    first = text_of(seed=3)
    torch.manual_seed(2)
    assert text_of(seed=3) == first


def test_an_audit_that_fails_leaves_everything_too() -> None:
    runs = itertools.count()

    class Broken(Net):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            if next(runs):  # the first is the check that the model runs at all
                raise ValueError("no such luck")
            return super().forward(x, scale)

    model = Broken()
    model.norm.eval()
    before, around = model_state(model), process_state()
    with pytest.raises(AuditorError, match="no such luck"):
        auditor.audit(model, (normal(8, 6),))
    assert model_state(model) == before
    assert process_state() == around


# The names that `import auditor` offers, in whatever order they are first used.

ORDERS = """
import sys, auditor
print("torch" in sys.modules)
import torch
with auditor.emulate(), torch.autocast("cuda"):
    torch.nn.Linear(2, 2)(torch.ones(1, 2))
print("auditor.capture.capture" in sys.modules or "torch._dynamo" in sys.modules)
print(all(getattr(auditor, name) is not None for name in auditor.__all__))
for line in (
    "from auditor import Audit, audit",
    "import auditor; auditor.Audit, auditor.apply, auditor.load_plan; audit = auditor.audit",
):
    for name in [name for name in sys.modules if name.partition(".")[0] == "auditor"]:
        del sys.modules[name]
    exec(line)
    print(callable(audit))
"""


def test_every_public_name_is_there_in_whatever_order_it_is_used_and_importing_them_imports_no_torch(root) -> None:
    """Nor does the emulation, once it is entered, import the compiler, which takes seconds."""
    done = subprocess.run([sys.executable, "-c", ORDERS], cwd=root, capture_output=True, text=True)
    assert done.stdout.split() == [*["False"] * 2, *["True"] * 3], done.stderr


# What the records of the stages become in the audit.


def block() -> nn.Module:
    """Adds, and so stands with its operation; what it adds comes from modules that run nothing themselves."""
    return Model(lambda m, x: x + m.inner["a"](x), inner=nn.ModuleDict({"a": nn.Linear(4, 4)}))


def test_classes_are_those_of_modules_around_others_that_run_nothing_themselves() -> None:
    model = nn.Sequential(block(), block())
    found = audit(model, torch.ones(2, 4), formats=("bf16",), strategies=("autocast",), device="cpu")
    assert found.classes == {"": "Sequential", "0.inner": "ModuleDict", "1.inner": "ModuleDict"}
    assert {report.node.owner for report in found.nodes} == {"0", "0.inner.a", "1", "1.inner.a"}
