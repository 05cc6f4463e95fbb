"""Audits under a limit, with nearly all tensors in files and those let go of at every look: the same to the byte."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor.cli import main
from auditor.document.codec import steady
from auditor.errors import AuditorError
from auditor.offload import arena, limit
from auditor.offload.limit import ROOM, resident
from auditor.records import Audit


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 32), nn.Linear(32, 50, bias=False)
        self.block = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.block(self.embed(tokens)))
        return logits


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(16, 24, 2, batch_first=True, bidirectional=True), nn.Linear(48, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0]).log_softmax(-1)


class Flat(nn.Module):
    """No modules inside: parameters, and buffers of which it writes one."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(torch.randn(32, 48) / 6), nn.Parameter(torch.randn(48, 32) / 7)
        self.register_buffer("gain", torch.rand(1024))
        self.register_buffer("calls", torch.zeros(512))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        y = torch.exp(-(x @ self.w).square() * 300) @ self.v * self.gain[:32]
        return y / y.square().mean(-1, keepdim=True).sqrt(), y.softmax(-1)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(24, 3), nn.ModuleList(nn.Linear(24, 24) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            out = out + (weights * (chosen == index)).sum(-1, keepdim=True) * torch.nn.functional.gelu(expert(x))
        return out


def convolutions() -> nn.Module:
    first, second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3)
    head = [nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(144, 10)]
    return nn.Sequential(first, nn.BatchNorm2d(8), nn.ReLU(), second, nn.ReLU(), *head)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "convolutions": (convolutions, lambda: torch.randn(2, 3, 9, 9)),
    "tied weights": (Tied, lambda: torch.randint(0, 50, (2, 7))),
    "recurrent": (Recurrent, lambda: torch.randn(2, 6, 16)),
    "flat": (Flat, lambda: torch.randn(6, 32)),
    "experts": (Experts, lambda: torch.randn(2, 9, 24)),
}


def told(plan: dict[str, Any]) -> dict[str, Any]:
    """What plan.json holds, but for times, and what is said of memory."""
    plan = steady(plan)
    plan["environment"].pop("memory", None)
    return plan


def texts(audit: Audit) -> tuple[str, str]:
    """Both files, but for that."""
    plan = told(audit.to_json())
    measured = {name: value for name, value in audit.to_measurements().items() if name != "plan"}
    return json.dumps(plan), json.dumps(measured)


@pytest.fixture
def arenas(monkeypatch: pytest.MonkeyPatch) -> list[arena.Arena]:
    """Those that are made; what the limit leaves to memory is next to nothing."""
    made: list[arena.Arena] = []

    def kept(self: arena.Arena, *args: Any) -> None:
        made.append(self)
        init(self, *args)

    init = arena.Arena.__init__
    monkeypatch.setattr(arena.Arena, "__init__", kept)
    for name, value in {"SMALL": 256, "SHARES": 1 << 19, "OWN": 0.0, "NEARLY": 0.0, "STEP": 0.0}.items():
        monkeypatch.setattr(limit, name, value)
    return made


def made_of(name: str) -> tuple[nn.Module, Tensor]:
    make, given = MODELS[name]
    torch.manual_seed(1)
    return make().eval(), given()


@pytest.mark.parametrize("name", MODELS)
def test_under_a_limit_the_audit_is_the_same_to_the_byte(name: str, arenas: list[arena.Arena]) -> None:
    model, x = made_of(name)
    without = texts(auditor.audit(model, x, device="cpu"))
    before = {key: (value, value.data_ptr(), value.clone()) for key, value in model.state_dict(keep_vars=True).items()}
    for room in (300 << 20, 900 << 20):
        audit = auditor.audit(model, x, device="cpu", memory=resident() + room)
        assert texts(audit) == without
        assert audit.environment.held and audit.environment.memory
    smaller, larger = arenas
    assert smaller.written > larger.written > 4 * sum(p.numel() for p in model.parameters())
    assert smaller.dropped > 20 and larger.dropped > 20
    for key, (value, place, entries) in before.items():
        now = model.state_dict(keep_vars=True)[key]
        assert now is value and now.data_ptr() == place and torch.equal(now, entries)


def test_a_training_step_is_the_same_too(arenas: list[arena.Arena]) -> None:
    model, x = made_of("experts")
    asked: dict[str, Any] = {"mode": "training", "loss_fn": lambda y: y.square().mean(), "device": "cpu"}
    without = texts(auditor.audit(model, x, **asked))
    assert texts(auditor.audit(model, x, memory=resident() + (300 << 20), **asked)) == without
    assert arenas[0].written > 0 and arenas[0].dropped > 20


SOURCE = """
import torch
from torch import nn

def get_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(512, 1024), nn.Tanh(), nn.Linear(1024, 512), nn.LayerNorm(512))

def get_inputs():
    return torch.randn(2, 512, generator=torch.Generator().manual_seed(1))
"""


def test_a_command_under_a_limit_makes_the_model_in_files_and_says_what_it_came_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arenas: list[arena.Arena]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(SOURCE, encoding="utf-8")
    asked = ["model.py", "-q", "--device", "cpu", "--fail-on", "never", "--formats", "fp16"]
    assert main([*asked, "--out", "without"]) == 0 and not arenas
    capsys.readouterr()
    size = resident() + (400 << 20)
    assert main([*asked, "--out", "within", f"--memory={size}"]) == 0
    without, within = (json.loads((tmp_path / name / "plan.json").read_text()) for name in ("without", "within"))
    assert told(without) == told(within)
    (made,) = arenas
    assert made.written > 4 * 1024 * 1024
    gigabytes, peak = within["environment"]["held"].split(" GB")[0], within["environment"]["held"].split("; ")[1]
    assert float(gigabytes) <= made.written / 1e9 + 0.01 and 0 < float(peak.split()[0]) * 1e9 < size + (64 << 20)
    shown = " ".join(capsys.readouterr().out.split())
    assert f"Memory {within['environment']['held'][:30]}" in shown
    assert within["environment"]["memory"][0].startswith("large tensors in mapped files, to hold no more than ")
    assert within["environment"]["held"] in (tmp_path / "within" / "report.html").read_text(encoding="utf-8")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.py", "within", "without"]


def test_too_small_a_limit_is_one_line_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Linear(2_000, 5_000)
    with pytest.raises(AuditorError, match=r"is too little for this audit: give \S+ or more") as error:
        auditor.audit(model, torch.randn(1, 2_000), device="cpu", memory=resident() + ROOM + (100 << 20))
    assert error.value.slug == "memory-too-small"
    least = str(error.value).split("give ")[1].split()[0]
    assert auditor.audit(model, torch.randn(1, 2_000), device="cpu", memory=least, formats="fp16").plans
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(SOURCE, encoding="utf-8")
    assert main(["model.py", "-q", "--memory", "1MB"]) == 2
    assert "--memory 10MB is too little" in capsys.readouterr().err
    assert [path.name for path in Path().iterdir()] == ["model.py"]


def test_a_disk_that_is_full_is_one_line(
    monkeypatch: pytest.MonkeyPatch, arenas: list[arena.Arena], tmp_path: Path
) -> None:
    model, x = made_of("tied weights")
    files, held = os.posix_fallocate, [0]

    def fills(descriptor: int, start: int, size: int) -> None:
        held[0] += size
        if held[0] > 40_000:
            raise OSError(28, "No space left on device")
        files(descriptor, start, size)

    monkeypatch.setattr(arena, "FIRST", 1 << 12)
    monkeypatch.setattr(os, "posix_fallocate", fills)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(arena.tempfile, "tempdir", None)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(AuditorError, match=r"no room for .* MiB more in .*No space left on device") as error:
        auditor.audit(model, x, device="cpu", memory=resident() + (300 << 20))
    assert error.value.slug == "disk-full" and not list(tmp_path.glob("*auditor*"))
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
