"""Ten architectures of Hugging Face's transformers, small and with random weights: `models.py:NAME` builds one."""

import torch
import transformers

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
TEXT = {**SMALL, "vocab_size": 200, "max_position_embeddings": 64}


def made(kind, **settings):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **settings)
    return transformers.AutoModel.from_config(config).eval()


def bert():
    return made("bert", **TEXT)


def roberta():
    return made("roberta", **TEXT, pad_token_id=0)


def albert():
    return made("albert", **TEXT, embedding_size=32)


def electra():
    return made("electra", **TEXT, embedding_size=32)


def distilbert():
    return made("distilbert", vocab_size=200, dim=64, n_layers=2, n_heads=4, hidden_dim=128)


def gpt2():
    return made("gpt2", vocab_size=200, n_positions=64, n_embd=64, n_layer=2, n_head=4, use_cache=False)


def llama():
    return made("llama", **TEXT, use_cache=False)


def mistral():
    return made("mistral", **TEXT, num_key_value_heads=2, use_cache=False)


def vit():
    return made("vit", **SMALL, image_size=32, patch_size=8)


def convnext():
    return made("convnext", hidden_sizes=[16, 32, 64, 128], depths=[1, 1, 2, 1])


def tokens():
    return {"input_ids": torch.arange(32).reshape(2, 16)}


def images():
    return {"pixel_values": torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))}
