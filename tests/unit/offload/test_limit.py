"""What is resident stays below a limit as far as it can be let go of; a model that would not fit is given one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from auditor.errors import AuditorError
from auditor.loading import load
from auditor.offload import Limit, fitting, limit, now, resident_limit
from auditor.offload.files import LARGE, is_offloaded
from auditor.offload.limit import EACH, HELD, ROOM, free, resident, words
from auditor.settings import Settings


def test_what_operations_make_is_let_go_of_and_comes_back() -> None:
    with resident_limit(None) as held:
        assert held is None and now() is None
    with resident_limit(resident() + ROOM + (60 << 20)) as held:
        assert held is not None and now() is held
        kept = [torch.full((2_500_000,), float(i)) for i in range(40)]  # 400 MB
        assert all(bool((x == i).all()) for i, x in enumerate(kept))
        assert all(map(is_offloaded, kept))
    assert now() is None
    assert held.peak < held.size


def test_what_is_free_is_no_longer_resident() -> None:
    with resident_limit(1 << 40):
        before, small = resident(), list[bytes]()
        for _ in range(40):
            large = torch.ones(2_500_000)
            small += [bytes(1000) for _ in range(200)]
            del large
        assert resident() - before < 40_000_000


def test_too_small_a_limit_says_what_is_enough() -> None:
    said = r"--memory 10MB is too little for this audit: give [\d.]+[MG]B or more"
    with pytest.raises(AuditorError, match=said) as error:
        Limit(10_000_000)
    assert error.value.slug == "memory-too-small"
    least = int(Settings(memory=str(error.value).split()[-3]).memory)
    held = Limit(least + (8 << 20))
    with pytest.raises(AuditorError, match="is too little"):
        held.need(1 << 30)


def test_a_system_that_says_nothing_of_memory_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(limit, "_STATM", tmp_path / "none")
    with pytest.raises(AuditorError, match="leave --memory out") as error, resident_limit(10**9):
        raise AssertionError
    assert error.value.slug == "no-paging"


@pytest.mark.parametrize("size", [1, 123_456_789, 999_999_999, 10**9, 1_234_567_890, 7 * 10**10])
def test_a_size_in_words_is_enough_when_given_again(size: int) -> None:
    assert size <= Settings(memory=words(size)).memory <= max(1.1 * size, 10**7)


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
    monkeypatch.setattr(limit, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(limit, "_GROUP", tmp_path)
    return tmp_path


def test_a_model_that_fits_has_no_limit_and_a_larger_one_has(machine: Path) -> None:
    assert free() == 8_192_000_000
    assert fitting(int(8_192_000_000 / HELD)) is None
    assert fitting(int(8_192_000_000 / HELD) + 1) == int(EACH * 8_192_000_000)
    (machine / "memory.max").write_text("2000000000\n", encoding="utf-8")
    (machine / "memory.current").write_text("500000000\n", encoding="utf-8")
    assert free() == 1_500_000_000
    (machine / "memory.max").write_text("max\n", encoding="utf-8")
    assert free() == 8_192_000_000
    (machine / "meminfo").unlink()
    assert free() is None and fitting(10**15) is None
