"""Random models: rows of the other files' tables and blocks around them, drawn by hypothesis; each ends in an audit that keeps
its promises, or in one line."""

from __future__ import annotations

import os
import random
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from auditor.errors import AuditorError
from tests.any_model import test_aliasing, test_operators, test_sparse, test_state
from tests.any_model.holding import held
from tests.support.replaying import Model

Part = Callable[[Tensor], Any]
Make = Callable[[], Part]


def linear() -> nn.Linear:
    return nn.Linear(8, 8)


def of(function: Callable[[Any, Tensor], Any]) -> Make:
    """A row of a table: a function of a model and its input, with what all of those tables ask of a model."""

    def make() -> Part:
        state = {
            **{name: linear() for name in ("first", "second", "third")},
            "gate": nn.Linear(8, 3),
            "experts": nn.ModuleList(linear() for _ in range(3)),
            "weight": nn.Parameter(torch.randn(3, 3, dtype=torch.complex64)),
            "square": nn.Parameter(torch.randn(8, 8)),
            "edges": nn.Parameter(torch.randn(5)),
            "poles": nn.Parameter(torch.randn(3, dtype=torch.complex64) - 2),
            "angles": torch.polar(torch.ones(4, 4), torch.rand(4, 4)),
            "turn": torch.randn(8, dtype=torch.complex64).conj(),
            "table": torch.linspace(0, 1, 8, dtype=torch.float64),
            "window": torch.hann_window(16),
        }
        return Model(function, **state)

    return make


def rows(table: dict[str, Callable[..., Any]]) -> dict[str, Make]:
    return {name: of(function) for name, function in table.items()}


def alone(table: dict[str, Callable[[Tensor], Any]]) -> dict[str, Make]:
    return {name: (lambda function=function: function) for name, function in table.items()}


def with_channels(layer: Callable[[], nn.Module]) -> Make:
    return lambda: nn.Sequential(nn.Unflatten(-1, (1, 8)), layer(), nn.Flatten(1))


def ended_early(m: Any, h: Tensor) -> Any:
    while h.abs().amax() > 0.5:
        h = h * 0.5
    return m.first(h) if h.sum() > 0 else m.second(h) * h.mean().item()


MODULES: dict[str, Make] = {
    **{kind.__name__: kind for kind in (nn.GELU, nn.Softplus, nn.PReLU, nn.Hardswish, linear)},
    "softmax": lambda: nn.Softmax(-1),
    "inplace": lambda: nn.Sequential(linear(), nn.SiLU(inplace=True)),
    **{kind.__name__: (lambda kind=kind: kind(8)) for kind in (nn.LayerNorm, nn.RMSNorm, nn.BatchNorm1d)},
    "GroupNorm": lambda: nn.GroupNorm(2, 8),
    "Conv1d": with_channels(lambda: nn.Conv1d(1, 1, 3, padding=1)),
    "ConvTranspose1d": with_channels(lambda: nn.ConvTranspose1d(1, 1, 3, padding=1)),
    "GRU": lambda: nn.GRU(8, 8),
    "LSTMCell": lambda: nn.LSTMCell(8, 8),
    "encoder": lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
    "weight_norm": lambda: parametrizations.weight_norm(linear()),
    "spectral_norm": lambda: parametrizations.spectral_norm(linear()),
    "Bilinear": lambda: Model(lambda m, h: m.f(h, h.flip(0)), f=nn.Bilinear(8, 8, 8)),
    "Embedding": lambda: Model(lambda m, h: h + m.f(h.detach().argmax(-1)), f=nn.Embedding(8, 8, max_norm=1.0)),
}

SCALES: dict[str, Callable[[Tensor], Any]] = {
    **{f"times {factor:g}": (lambda h, f=factor: h * f) for factor in (3e-8, 1e-4, 1e2, 1e5)},
    **{f"there and back {factor:g}": (lambda h, f=factor: (h * f) * (1 / f)) for factor in (1e-6, 1e5)},
    "exponentials": lambda h: (h * 3).exp() / (1 + (h * 3).exp()),
    "normalized": lambda h: h / (h.square().sum(-1, keepdim=True) + 1e-12).sqrt(),
    "logarithm": lambda h: torch.log(h.abs() + 1e-10) / 5,
    "cancelled": lambda h: (h + 2048.0) - 2048.0,
    "undefined": lambda h: torch.nan_to_num(torch.log(h - 1)),
    "infinite": lambda h: torch.nan_to_num(h / (h - h[:1]), posinf=1.0, neginf=-1.0),
}

DTYPES: dict[str, Callable[..., Any]] = {
    "doubled": lambda m, h: h.double().cumsum(-1).to(h.dtype) / 8,
    "a table in FP64": lambda m, h: (h * m.table).to(h.dtype),
    "half": lambda m, h: h.half().float() * 1.5,
    "FP8": lambda m, h: h.to(torch.float8_e4m3fn).to(h.dtype),
    "whole": lambda m, h: h + (h * 4).round().int().float() / 4,
    "quantized": lambda m, h: torch.quantize_per_tensor(h.float(), 0.1, 0, torch.qint8).dequantize(),
    "bytes": lambda m, h: (h.sigmoid() * 255).to(torch.uint8).float() / 255,
    "conjugate": lambda m, h: torch.view_as_complex(h.float().reshape(4, 4, 2).contiguous()).conj() * 1j,
}

PYTHON: dict[str, Callable[..., Any]] = {
    **{
        function.__name__: function
        for function in (test_aliasing.added_by_index, test_aliasing.sorted_and_split, ended_early)
    },
    "some rows": lambda m, h: h + m.first(h[h.abs().amax(-1) > 0.1]).sum(0),
    "rows that are near": lambda m, h: h[torch.nonzero(torch.cdist(h, h) < 4)[:, 1]],
    "sorted": lambda m, h: m.first(h[h.sum(-1).argsort()]),
    "one by one": lambda m, h: torch.stack([m.first(row) for row in h]),
    "dropout": lambda m, h: F.dropout(h, 0.5, training=True),
    "noise": lambda m, h: h + torch.randn_like(h),
    "drawn rows": lambda m, h: h[torch.multinomial(h.softmax(-1), 1)[:, 0] % 4],
    "written": lambda m, h: m.first(h).masked_fill_(h > 1, 1.0).relu_().T[1:3].sub_(1),
    "input written": lambda m, h: h.add_(1),
}

KINDS = (test_aliasing.OneStorage, test_aliasing.BufferOnAWeight, test_aliasing.flat_weights)
TABLES: dict[str, dict[str, Make]] = {
    "dtypes": rows(DTYPES | test_operators.MODELS),
    "functions": alone(test_operators.OPERATIONS) | rows(test_operators.CASES | test_sparse.ONLY_DENSE),
    "modules": MODULES,
    "python": rows(PYTHON),
    "scales": alone(SCALES),
    "state": {kind.__name__: kind for kind in (*test_state.HISTORY, *test_state.BENIGN, *KINDS)},
}
PARTS = {name: make for table in TABLES.values() for name, make in table.items()}
BLOCKS = ("residual", "twice", "sequential", "scope", "unrolled", "remembered", "detached", "mixed", "early", "vmapped")
SEED = int(os.environ.get("DRAWN_SEED", "") or random.SystemRandom().randrange(1 << 32))

DESERVED = {"nan-output", "nothing-to-audit", "capture-failed", "unsupported-op"}
"""What some models are refused for; the last: a Fourier transform in the model's own BF16 region, which CUDA refuses."""


@dataclass(frozen=True)
class Step:
    """A part, or a block around further steps."""

    name: str
    inside: tuple[Step, ...] = ()


@dataclass(frozen=True)
class Program:
    """What a model is made of, and how it is audited."""

    steps: tuple[Step, ...]
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)


class Block(nn.Module):
    """Steps that share a module, and how they are run."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.kind = step.name
        self.steps: list[Part] = [made(inner) for inner in step.inside]
        self.held = nn.ModuleList(part for part in self.steps if isinstance(part, nn.Module))
        self.gate = nn.Parameter(torch.ones(()))

    def forward(self, h: Tensor) -> Tensor:
        if self.kind == "residual":
            return h + self.run(h)
        if self.kind == "twice":
            return self.run(self.run(h))
        if self.kind == "unrolled":
            for _ in range(3):
                h = self.run(h) * self.gate
            return h
        if self.kind == "remembered" and h.requires_grad:
            return checkpoint(self.run, h, use_reentrant=False)
        if self.kind == "detached":
            with torch.no_grad():
                return self.run(h.detach())
        if self.kind == "mixed":
            with torch.autocast("cuda", dtype=torch.bfloat16):
                h = self.run(h)
            return h.float()
        if self.kind == "vmapped":
            return torch.vmap(self.run)(h[None])[0]
        if self.kind == "early":
            for part in self.steps:
                h = like(h, part(h))
                if float(h.detach().mean()) > 0.2:
                    break
            return h
        return self.run(h)

    def run(self, h: Tensor) -> Tensor:
        for part in self.steps:
            h = like(h, part(h))
        return h


def like(h: Tensor, result: Any) -> Tensor:
    """What a part gives, of the shape of what it was given: where it has another, a number of it is added."""
    x = next(leaf for leaf in torch.utils._pytree.tree_leaves(result) if isinstance(leaf, Tensor))
    x = x.to_dense() if x.layout is not torch.strided else x
    x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    if x.is_floating_point() and x.numel() == h.numel():
        return x.reshape(h.shape).to(h.dtype)
    return h + x.to(h.dtype).mean().tanh()


def made(step: Step) -> Part:
    if step.name not in BLOCKS:
        return PARTS[step.name]()
    block = Block(step)
    if step.name == "sequential" and all(isinstance(part, nn.Module) for part in block.steps):
        return nn.Sequential(*block.held)
    return block


def built(program: Program) -> tuple[nn.Module, Any]:
    """The model and its call, the same every time."""
    torch.manual_seed(program.seed)
    parts = {"entry": linear(), "body": Block(Step("scope", program.steps)), "head": linear()}
    return Model(lambda m, x: m.head(m.body(m.entry(x))), **parts).eval(), ((torch.randn(4, 8),), {})


def programs(table: str) -> st.SearchStrategy[Program]:
    """Programs whose parts come from one table more often than from the others."""
    leaf = st.builds(Step, st.sampled_from([*TABLES[table]]) | st.sampled_from(sorted(PARTS)))
    block = st.builds(Step, st.sampled_from(BLOCKS), st.lists(leaf, min_size=1, max_size=2).map(tuple))
    outer = st.builds(Step, st.sampled_from(BLOCKS), st.lists(leaf | block, min_size=1, max_size=1).map(tuple))
    ways = st.sampled_from((("autocast",), ("cast",), ("autocast", "cast")))
    kinds = st.sampled_from((("fp16",), ("bf16",), ("fp16", "bf16")))
    options = st.fixed_dictionaries(
        {"strategies": ways, "formats": kinds, "max_error": st.sampled_from((0.01, 0.01, 1e-3, 0.1))}
    )
    return st.builds(
        Program, st.lists(leaf | leaf | block | outer, min_size=1, max_size=3).map(tuple), st.integers(0, 3), options
    )


def runs(program: Program) -> bool:
    """Whether the model runs as its user runs it; what does not is none of the auditor's business."""
    with torch.random.fork_rng(devices=[]):
        try:
            model, (args, kwargs) = built(program)
            with torch.no_grad():
                model(*args, **kwargs)
        except Exception:
            return False
    return True


def outcome(program: Program) -> str:
    """The slug of a refusal, or "audited": after that all promises were kept. "no run": the model itself raises."""
    if not runs(program):
        return "no run"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            audit = held(lambda: built(program), some_plan_verified=False, **program.options)
        except AuditorError as error:
            if "\n" in str(error) or not error.slug:
                raise
            return error.slug
    for verdict in (verdict for report in audit.nodes for verdict in report.verdicts.values()):
        assert verdict.verdict and (verdict.reason or verdict.verdict == "safe")
        assert "internal error" not in verdict.reason
    for plan in audit.plans.values():
        ran = plan.verification
        assert plan.is_verified or plan.measured_error is not None or ran.failure or not ran.finite
    return "audited"


def audited(table: str) -> Counter[str]:
    """How often draws came to what."""
    found: Counter[str] = Counter()

    def one(program: Program) -> None:
        found[outcome(program)] += 1

    options = settings(
        max_examples=50,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
        phases=(Phase.generate, Phase.shrink),
    )
    seed(SEED)(options(given(programs(table))(one)))()
    return found


@pytest.mark.parametrize("step", [Step("vmapped", (Step("quantized"),)), Step("conjugate")])
def test_quantized_under_vmap_and_conjugated(step: Step) -> None:
    assert outcome(Program((step,), options={"formats": ("bf16",), "strategies": ("cast",)})) == "audited"


@pytest.mark.slow
@pytest.mark.parametrize("table", TABLES)
def test_models_that_no_run_before_has_seen(table: str) -> None:
    """Refusals are rare, and of kinds that a model can deserve. The seed is printed, and set by DRAWN_SEED to see them again."""
    print(f"DRAWN_SEED={SEED}")
    found = audited(table)
    ran = found.total() - found["no run"]
    assert ran >= 0.7 * found.total(), found
    assert found["audited"] + found["nan-output"] >= 0.95 * ran, found
    assert found["audited"] >= 0.8 * ran, found
    assert set(found) <= {"audited", "no run"} | DESERVED, found


@pytest.mark.slow
def test_300_random_models_are_not_kept_in_fp32_without_need() -> None:
    """`held` checks every page of each audit; here enough of them, of all tables, with a seed of their own."""
    found = sum((audited(table) for table in TABLES), Counter[str]())
    assert found["audited"] >= 240, found
