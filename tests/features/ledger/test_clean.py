"""No cast is reported of models whose every cast is asked for: of timm, of transformers, stored in several dtypes, and our own."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.features.ledger.planted import ledger
from tests.support.thinned import thinned

EXAMPLES = sorted(Path("examples").glob("0*.py"))
TIMM = (
    "test_byobnet test_convnext test_convnext2 test_efficientnet test_efficientnet_evos test_efficientnet_gn test_mambaout "
    "test_maxvit test_nfnet test_resnet test_vit test_vit2 test_vit4 test_vit_relpos test_coatnet"
).split()
SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
HEADS: dict[str, Any] = {**SIZES, "num_attention_heads": 2, "num_key_value_heads": 2}
GPT2 = {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 1, "eos_token_id": 2}
T5 = {
    "vocab_size": 64,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 2,
    "num_heads": 2,
    "decoder_start_token_id": 0,
}
TRANSFORMERS = {
    "T5": ("T5ForConditionalGeneration", T5),
    "Llama": ("LlamaForCausalLM", HEADS),
    "Bert": ("BertForMaskedLM", {**SIZES, "num_attention_heads": 2}),
    "GPT2": ("GPT2LMHeadModel", GPT2),
    "Mistral": ("MistralForCausalLM", HEADS),
    "Qwen2": ("Qwen2ForCausalLM", HEADS),
    "Mixtral": ("MixtralForCausalLM", {**HEADS, "num_local_experts": 4}),
    "Gemma": ("GemmaForCausalLM", {**HEADS, "head_dim": 8}),
    "Phi": ("PhiForCausalLM", {**HEADS, "pad_token_id": 0}),
    "GPTNeoX": ("GPTNeoXForCausalLM", {**SIZES, "num_attention_heads": 2}),
}
"""{configuration: (model class, sizes)}."""


def silent(target: str) -> list[tuple[str, str | None, str]]:
    return [(one.rule, one.source, one.message) for one in ledger(target)[1]]


@pytest.mark.parametrize("file", thinned(EXAMPLES), ids=lambda file: file.stem)
def test_an_example_has_no_silent_cast(file: Path, root: Path) -> None:
    assert silent(str(root / file)) == []


@pytest.mark.parametrize("name", thinned(TIMM, 5))
def test_a_model_of_timm_has_none(name: str) -> None:
    pytest.importorskip("timm")
    assert silent(f"timm:{name}") == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", thinned(TRANSFORMERS, 4))
def test_a_directory_of_transformers_has_none_in_any_dtype_that_is_asked_for(
    name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    kind, sizes = TRANSFORMERS[name]
    torch.manual_seed(0)
    model = getattr(text, kind)(getattr(text, f"{name}Config")(**sizes))
    model.save_pretrained("wide")
    model.to(getattr(torch, dtype)).save_pretrained("stored")
    assert silent("hf:stored") == []
    ids = "'input_ids': torch.arange(8)[None]" + (
        ", 'decoder_input_ids': torch.arange(4)[None]" if name == "T5" else ""
    )
    Path("model.py").write_text(
        f"import torch\nfrom transformers import {kind}\n\ndef get_model():\n"
        f"    return {kind}.from_pretrained('wide', dtype=torch.{dtype})\n\ndef get_inputs():\n    return {{{ids}}}\n"
    )
    assert silent("model.py") == []
