"""Public architectures as their libraries write them, made tiny, with seeded random weights and nothing downloaded."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

Kwargs = dict[str, Any]
Made = tuple[nn.Module, tuple[Any, ...], Kwargs]

VOCABULARY = 64
_WIDTHS: Kwargs = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64}
_DEPTHS: Kwargs = {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 32}


@dataclass(frozen=True)
class Specimen:
    """A model in eval mode, and the positional and keyword arguments of one call of it."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Kwargs

    def outputs(self, model: nn.Module) -> list[Tensor]:
        """Tensors that `model` returns for these arguments; caches are left out."""
        with torch.no_grad():
            return [x for x in pytree.tree_leaves(model(*self.args, **self.kwargs)) if isinstance(x, Tensor)]

    def lowered(self, dtype: torch.dtype) -> Specimen:
        """The same call with its floating-point inputs in `dtype`."""

        def lower(tree: Any) -> Any:
            return pytree.tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, tree)

        return Specimen(self.model, lower(self.args), lower(self.kwargs))


def specimen(name: str, among: Mapping[str, Callable[[], Made]] | None = None) -> Specimen:
    """The architecture of that name, the same every time; skips the test where its library is not installed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, args, kwargs = (ZOO if among is None else among)[name]()
    return Specimen(model.eval(), args, kwargs)


def _resnet() -> Made:
    blocks = library("torchvision.models.resnet")
    model = blocks.ResNet(blocks.BasicBlock, [1, 1, 1, 1], num_classes=10, width_per_group=64)
    return model, (_images(3, 32),), {}


def _vit() -> Made:
    transformer = library("timm.models.vision_transformer").VisionTransformer
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4, "num_classes": 10}
    return transformer(**sizes), (_images(3, 32),), {}


def _mobilenet_v3() -> Made:
    timm = library("timm")
    return timm.create_model("mobilenetv3_small_050", pretrained=False, num_classes=10), (_images(3, 64),), {}


def _bert() -> Made:
    text = library("transformers")
    config = text.BertConfig(**_WIDTHS, **_DEPTHS)
    return text.BertForSequenceClassification(config), (), _padded()


def _deberta() -> Made:
    text = library("transformers")
    relative = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8}
    return text.DebertaV2Model(text.DebertaV2Config(**_WIDTHS, **_DEPTHS, **relative)), (), _padded()


def _gpt2() -> Made:
    text = library("transformers")
    config = text.GPT2Config(vocab_size=VOCABULARY, n_positions=32, n_embd=32, n_layer=2, n_head=4)
    return text.GPT2LMHeadModel(config), (_tokens(),), {}


def _llama() -> Made:
    text = library("transformers")
    config = text.LlamaConfig(**_WIDTHS, **_DEPTHS, num_key_value_heads=2)
    return text.LlamaForCausalLM(config), (_tokens(),), {}


def _t5() -> Made:
    text = library("transformers")
    config = text.T5Config(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    return text.T5ForConditionalGeneration(config), (), {"input_ids": _tokens(), "decoder_input_ids": _tokens(6)}


def _whisper() -> Made:
    text = library("transformers")
    shared = {"vocab_size": VOCABULARY, "num_mel_bins": 16, "d_model": 32, "pad_token_id": 0, "bos_token_id": 1}
    encoder = {"encoder_layers": 1, "encoder_attention_heads": 4, "encoder_ffn_dim": 64, "max_source_positions": 16}
    decoder = {"decoder_layers": 1, "decoder_attention_heads": 4, "decoder_ffn_dim": 64, "max_target_positions": 16}
    ends = {"eos_token_id": 2, "decoder_start_token_id": 1}
    model = text.WhisperForConditionalGeneration(text.WhisperConfig(**shared, **encoder, **decoder, **ends))
    return model, (), {"input_features": torch.randn(2, 16, 32), "decoder_input_ids": _tokens(6)}


def _mamba() -> Made:
    text = library("transformers")
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 1}
    return text.MambaForCausalLM(text.MambaConfig(**sizes)), (_tokens(6),), {}


def _mixtral() -> Made:
    text = library("transformers")
    experts = {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    return text.MixtralForCausalLM(text.MixtralConfig(**_WIDTHS, **_DEPTHS, **experts)), (_tokens(),), {}


def library(name: str) -> Any:
    pytest.importorskip(name.partition(".")[0])
    return importlib.import_module(name)


def _images(channels: int, size: int) -> Tensor:
    return torch.randn(2, channels, size, size)


def _tokens(length: int = 12) -> Tensor:
    return torch.randint(3, VOCABULARY, (2, length))


def _padded() -> Kwargs:
    """Tokens whose second row ends in padding, so that masks matter."""
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, 8:] = 0
    return {"input_ids": _tokens(), "attention_mask": mask}


ZOO: dict[str, Callable[[], Made]] = {
    "resnet": _resnet,
    "vit": _vit,
    "mobilenet_v3": _mobilenet_v3,
    "bert": _bert,
    "deberta_v2": _deberta,
    "gpt2": _gpt2,
    "llama": _llama,
    "t5": _t5,
    "whisper": _whisper,
    "mamba": _mamba,
    "mixtral": _mixtral,
}
