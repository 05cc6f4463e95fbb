"""Folders of PEFT adapters, on their base model."""

import json
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from auditor.cli import main
from auditor.errors import LoadError
from auditor.loading import load
from tests.support.refusing import refused

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture
def adapter(here: Path) -> Path:
    """An adapter in the folder `lora` on a BF16 base in the folder `base`, which its config names relatively."""
    peft: Any = pytest.importorskip("peft")
    transformers: Any = pytest.importorskip("transformers")
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).bfloat16().save_pretrained("base")
    base = transformers.LlamaForCausalLM.from_pretrained("base")
    how = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], r=2, init_lora_weights=False)
    peft.get_peft_model(base, how).save_pretrained("lora")
    return here / "lora"


def changed(adapter: Path, **entries: Any) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))


def test_an_adapter_is_loaded_on_its_base(adapter: Path) -> None:
    import peft

    subject = load("hf:lora")
    expected = peft.AutoPeftModelForCausalLM.from_pretrained("lora", dtype=torch.float32).eval()
    ids = torch.arange(8)[None]
    assert torch.equal(subject.model(input_ids=ids).logits, expected(input_ids=ids).logits)
    assert not subject.random_weights
    assert subject.batches[0][1]["input_ids"].shape == (2, 16)
    assert subject.stored_low.keys() == {"bfloat16"}
    assert any("LlamaForCausalLM from base with the adapter lora" in warning for warning in subject.warnings)


def test_the_patched_model_loads_adapter_and_base(adapter: Path) -> None:
    assert main(["hf:lora", "--quick", "-q", "--out", "out", "--fail-on", "never"]) == 0
    model = runpy.run_path("out/patched_model.py")["build"]()
    assert type(model).__name__ == "PeftModelForCausalLM"
    assert model(input_ids=torch.arange(8)[None]).logits.isfinite().all()


def test_weights_that_the_model_lacks_are_noted(adapter: Path) -> None:
    from safetensors.torch import load_file, save_file

    assert not any("ignored" in warning for warning in load("hf:lora").warnings)
    file = adapter / "adapter_model.safetensors"
    save_file({**load_file(file), "base_model.model.absent.lora_A.weight": torch.ones(1)}, file)
    assert any("lacks are ignored (1: base_model.model.absent" in warning for warning in load("hf:lora").warnings)


def test_a_missing_base_says_what_to_download(adapter: Path) -> None:
    shutil.rmtree("base")
    with refused(LoadError, "missing-target", "the base model 'base' of the adapter lora", "`hf download base`"):
        load("hf:lora")


@pytest.mark.parametrize(
    ("entries", "slug", "said"),
    [
        ({"base_model_name_or_path": None}, "missing-target", "names no base model"),
        ({"task_type": "NO_SUCH"}, "model-raises", "the task_type 'NO_SUCH'"),
        ({"task_type": None}, "model-raises", "write a model.py that returns PeftModel.from_pretrained"),
        ({"peft_type": "NO_SUCH"}, "model-raises", "NO_SUCH"),
    ],
)
def test_a_config_that_names_too_little(entries: dict[str, Any], slug: str, said: str, adapter: Path) -> None:
    changed(adapter, **entries)
    with refused(LoadError, slug, said):
        load("hf:lora")


def test_an_adapter_without_weights(adapter: Path) -> None:
    (adapter / "adapter_model.safetensors").unlink()
    with refused(LoadError, "missing-weights", "no adapter_model.safetensors"):
        load("hf:lora")


def test_corrupt_weights_are_one_line(adapter: Path) -> None:
    (adapter / "adapter_model.safetensors").write_bytes(b"corrupt")
    with refused(LoadError, "bad-weights", "adapter_model.safetensors"):
        load("hf:lora")


def test_a_corrupt_config_is_one_line(adapter: Path) -> None:
    (adapter / "adapter_config.json").write_text("{")
    with refused(LoadError, "model-raises", "adapter_config.json"):
        load("hf:lora")


def test_an_adapter_without_peft_says_what_to_install(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "adapter_config.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "peft", None)
    with refused(LoadError, "missing-package", "`pip install peft`"):
        load("hf:.")
