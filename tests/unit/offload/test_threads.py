"""Weights that transformers raises while it reads them lie in files where memory is limited."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from auditor import offload as mapped
from auditor.loading import load
from auditor.offload.spilling import is_mapped
from auditor.offload.threads import SINGLE, in_this_thread


@pytest.mark.parametrize("before", [None, "0"])
def test_it_is_asked_for_where_memory_is_limited(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SINGLE, raising=False)
    if before is not None:
        monkeypatch.setenv(SINGLE, before)
    with in_this_thread():
        assert os.environ.get(SINGLE) == before
    with mapped.limited(1 << 40), in_this_thread():
        assert os.environ[SINGLE] == "1"
    assert os.environ.get(SINGLE) == before


def test_a_checkpoint_in_bf16_is_raised_into_files(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=5000, hidden_size=256, intermediate_size=512, num_hidden_layers=1, num_attention_heads=2
    )
    saved = transformers.LlamaForCausalLM(config).bfloat16()
    saved.save_pretrained(tmp_path)
    with mapped.limited(1 << 40) as limit:
        assert limit is not None
        model = load(f"hf:{tmp_path}").model
        large = [x for x in model.parameters() if x.numel() * 4 >= limit.large]
        assert len(large) >= 2
        assert all(is_mapped(x.untyped_storage()) for x in large)
        for name, value in model.state_dict().items():
            assert torch.equal(value, saved.state_dict()[name].float())
