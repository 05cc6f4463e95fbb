"""Audits under a limit, with nearly all tensors in files and those let go of at every look: the same to the byte."""

import json
import re
import subprocess
import sys
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
from auditor.loading import load
from auditor.offload import files, limit, limit_for, now, resident_limit
from auditor.offload.files import LARGE, is_offloaded
from auditor.offload.limit import EACH, HELD, free, resident, words
from auditor.records import Audit
from auditor.settings import Settings
from tests.support.refusing import refused
from tests.support.replaying import Model
from tests.support.small_models import tied


def transformer() -> nn.Module:
    return tied(50, 32, block=nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True))


def flat() -> nn.Module:
    """No modules inside: parameters, and buffers of which it writes one."""

    def forward(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        m.calls += 1
        y = torch.exp(-(x @ m.w).square() * 300) @ m.v * m.gain[:32]
        return y / y.square().mean(-1, keepdim=True).sqrt(), y.softmax(-1)

    weights = {"w": nn.Parameter(torch.randn(32, 48) / 6), "v": nn.Parameter(torch.randn(48, 32) / 7)}
    return Model(forward, **weights, gain=torch.rand(1024), calls=torch.zeros(512))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "tied weights": (transformer, lambda: torch.randint(0, 50, (2, 7))),
    "flat": (flat, lambda: torch.randn(6, 32)),
    "layers": (lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)), lambda: torch.randn(2, 8)),
}


def texts(audit: Audit) -> tuple[str, str]:
    """Both files, but for times, and what is said of memory."""
    plan = steady(audit.to_dict())
    plan["environment"].pop("memory", None)
    measured = {name: value for name, value in audit.to_measurements().items() if name != "plan"}
    return json.dumps(plan), json.dumps(measured)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all files that are made: nearly all tensors, let go of at every look."""
    made: list[int] = []

    def noted(storage: torch.UntypedStorage) -> torch.UntypedStorage:
        made.append(storage.nbytes())
        return in_file(storage)

    in_file = files.in_file
    monkeypatch.setattr(files, "in_file", noted)
    monkeypatch.setattr(files, "LARGE", 256)
    for name in ("NEARLY", "OWN", "STEP"):
        monkeypatch.setattr(limit, name, 0.0)
    return made


def made_of(name: str) -> tuple[nn.Module, Tensor]:
    make, given = MODELS[name]
    torch.manual_seed(1)
    return make().eval(), given()


TRAINED = {"mode": "training", "loss_fn": lambda y: y.square().mean(), "formats": "fp16", "strategies": "autocast"}


@pytest.mark.parametrize(
    ("name", "asked"),
    [pytest.param("tied weights", {}, marks=pytest.mark.slow), ("flat", {"formats": "fp16"}), ("layers", TRAINED)],
)
def test_under_a_limit_the_audit_is_the_same_to_the_byte(name: str, asked: Any, written: list[int]) -> None:
    model, x = made_of(name)
    without = texts(auditor.audit(model, x, device="cpu", **asked))
    assert not written
    before = {key: (value, value.data_ptr(), value.clone()) for key, value in model.state_dict(keep_vars=True).items()}
    audit = auditor.audit(model, x, device="cpu", memory=resident() + (300 << 20), **asked)
    assert texts(audit) == without
    assert audit.environment.peak_memory and audit.environment.memory
    assert sum(written) > 4 * sum(p.numel() for p in model.parameters())
    for key, (value, place, entries) in before.items():
        now = model.state_dict(keep_vars=True)[key]
        assert now is value and now.data_ptr() == place and torch.equal(now, entries)


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
    here: Path, capsys: pytest.CaptureFixture[str], written: list[int]
) -> None:
    Path("model.py").write_text(SOURCE, encoding="utf-8")
    asked = ["model.py", "-q", "--device", "cpu", "--fail-on", "never", "--formats", "fp16", "--strategies", "cast"]
    size = resident() + (400 << 20)
    assert main([*asked, "--out", "within", f"--memory={size}"]) == 0
    within = json.loads((here / "within" / "plan.json").read_text())
    assert sum(written) > 4 * 1024 * 1024
    shown = " ".join(capsys.readouterr().out.split())
    peak = re.search(r"Memory ([0-9.]+) GB", shown)  # no file has it, since equal runs write equal files
    assert peak is not None and 0 < float(peak[1]) * 1e9 < size + (64 << 20)
    assert within["environment"]["memory"][0].startswith("large tensors in memory-mapped files, with a limit of ")
    assert sorted(p.name for p in here.iterdir()) == ["model.py", "within"]


def run_alone(*words: str) -> subprocess.CompletedProcess[str]:
    """Python in a process of its own: limits near what is resident mean nothing in one that has grown by other tests."""
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)


def test_too_small_a_limit_is_one_line_before_any_measurement_and_names_what_is_enough(here: Path) -> None:
    Path("model.py").write_text(SOURCE.replace("512", "2000"), encoding="utf-8")
    asked = ["-m", "auditor", "model.py", "-q", "--device", "cpu", "--formats", "fp16", "--strategies", "cast"]
    least, refusals = "1MB", []
    while (ended := run_alone(*asked, "--memory", least)).returncode == 2 and len(refusals) < 4:
        assert [path.name for path in Path().iterdir() if path.name != "__pycache__"] == ["model.py"]
        (said,) = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
        (least,) = re.fullmatch(
            r"error: the limit of --memory is too low for this audit: give (\S+) or more", said
        ).groups()
        refusals.append(least)
    assert ended.returncode == 0, ended.stderr
    assert len(refusals) > 1  # before the model is loaded, and again when it is known what it needs


# What is resident stays below a limit as far as it can be let go of; a model that would not fit is given one.


TIGHT = """
import torch
from auditor.offload import now, resident_limit
from auditor.offload.files import is_offloaded
from auditor.offload.limit import ROOM, resident

with resident_limit(resident() + ROOM + (60 << 20)) as held:
    assert now() is held
    kept = [torch.full((2_500_000,), float(i)) for i in range(40)]  # 400 MB
    assert all(bool((x == i).all()) for i, x in enumerate(kept))
    assert sum(map(is_offloaded, kept)) > 30  # the others fit in memory
assert now() is None
assert held.peak < held.size, (held.peak, held.size)
"""


def test_what_operations_make_is_let_go_of_and_comes_back() -> None:
    with resident_limit(None) as held:
        assert held is None and now() is None
    ended = run_alone("-c", TIGHT)
    assert ended.returncode == 0, ended.stderr


FREED = """
import torch
from auditor.offload import resident_limit
from auditor.offload.limit import resident

with resident_limit(1 << 40) as held:
    before, small = resident(), []
    for _ in range(40):
        large = torch.ones(6_000_000)
        small.append(torch.ones(20_000))
        del large
    held.drop_mapped_files()
    assert resident() - before < 30_000_000, resident() - before
"""


def test_what_is_free_is_no_longer_resident() -> None:
    ended = run_alone("-c", FREED)
    assert ended.returncode == 0, ended.stderr


def test_a_system_that_says_nothing_of_memory_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(limit, "STATM", tmp_path / "none")
    with refused(AuditorError, "no-paging", match="leave --memory out"), resident_limit(10**9):
        raise AssertionError


@pytest.mark.parametrize("size", [1, 123_456_789, 999_999_999, 10**9, 1_234_567_890, 7 * 10**10])
def test_a_size_in_words_is_enough_when_given_again(size: int) -> None:
    assert size <= Settings(memory=words(size)).memory <= max(1.1 * size, 10**7)


@pytest.mark.slow
def test_a_checkpoint_in_bf16_is_raised_into_files(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=5000, hidden_size=256, intermediate_size=1024, num_hidden_layers=1, num_attention_heads=2
    )
    saved = transformers.LlamaForCausalLM(config).bfloat16()
    saved.save_pretrained(tmp_path)
    with resident_limit(1 << 40):
        model = load(f"hf:{tmp_path}").model
        large = [x for x in model.parameters() if x.numel() * 4 >= LARGE]
        assert len(large) >= 2 and all(map(is_offloaded, large))
        for name, value in model.state_dict().items():
            assert torch.equal(value, saved.state_dict()[name].float())


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 8 GB available, in no group."""
    (tmp_path / "meminfo").write_text("MemTotal: 16000000 kB\nMemAvailable:    8000000 kB\n", encoding="utf-8")
    monkeypatch.setattr(limit, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(limit, "GROUP", tmp_path)
    return tmp_path


def test_a_model_that_fits_has_no_limit_and_a_larger_one_has(machine: Path) -> None:
    assert free() == 8_192_000_000
    assert limit_for(int(8_192_000_000 / HELD)) is None
    assert limit_for(int(8_192_000_000 / HELD) + 1) == int(EACH * 8_192_000_000)
    (machine / "memory.max").write_text("2000000000\n", encoding="utf-8")
    (machine / "memory.current").write_text("500000000\n", encoding="utf-8")
    assert free() == 1_500_000_000
    (machine / "memory.max").write_text("max\n", encoding="utf-8")
    assert free() == 8_192_000_000
    (machine / "meminfo").unlink()
    assert free() is None and limit_for(10**15) is None
