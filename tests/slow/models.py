"""Kinds of model, as their libraries write them: small enough to run once per node many times over, or of full size."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from tests.architectures import zoo
from tests.architectures.zoo import Made, library

BATCH = 8
VOCABULARY = 200
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}


def _resnet() -> Made:
    model = library("timm").create_model("resnet10t", pretrained=False, num_classes=20, zero_init_last=False)
    return model, (torch.randn(BATCH, 3, 64, 64),), {}


def _vit() -> Made:
    transformer = library("timm.models.vision_transformer").VisionTransformer
    model = transformer(img_size=32, patch_size=8, embed_dim=64, depth=4, num_heads=4, num_classes=20)
    return model, (torch.randn(BATCH, 3, 32, 32),), {}


def _gpt2() -> Made:
    text = library("transformers")
    sizes = {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 64, "n_layer": 3, "n_head": 4}
    config = text.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2, use_cache=False)
    return text.GPT2LMHeadModel(config), (_tokens(16),), {}


def _t5() -> Made:
    text = library("transformers")
    sizes = {"vocab_size": VOCABULARY, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
    model = text.T5ForConditionalGeneration(text.T5Config(**sizes, use_cache=False))
    return model, (), {"input_ids": _tokens(16), "decoder_input_ids": _tokens(12)}


def _whisper() -> Made:
    text = library("transformers")
    encoder = {"encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 128, "max_source_positions": 32}
    decoder = {"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 128, "max_target_positions": 16}
    sizes = {"vocab_size": VOCABULARY, "num_mel_bins": 16, "d_model": 64, "use_cache": False}
    model = text.WhisperForConditionalGeneration(text.WhisperConfig(**sizes, **SPECIAL, **encoder, **decoder))
    return model, (), {"input_features": torch.randn(BATCH, 16, 64), "decoder_input_ids": _tokens(12)}


def _resnet50() -> Made:
    model = library("timm").create_model("resnet50", pretrained=False, zero_init_last=False)
    return model, (torch.randn(BATCH // 2, 3, 224, 224),), {}


def _convnext() -> Made:
    model = library("timm").create_model("convnext_tiny", pretrained=False, ls_init_value=1.0)
    return model, (torch.randn(BATCH // 2, 3, 224, 224),), {}


def _tokens(length: int) -> Tensor:
    return torch.randint(3, VOCABULARY, (BATCH, length))


MODELS: dict[str, Callable[[], Made]] = {"resnet": _resnet, "vit": _vit, "gpt2": _gpt2, "t5": _t5, "whisper": _whisper}
LARGE: dict[str, Callable[[], Made]] = {"resnet50": _resnet50, "convnext_tiny": _convnext}
"""Of full size, and so attributed with a pass or two; every branch adds to the outputs, as in a trained model."""

specimen = partial(zoo.specimen, among=MODELS | LARGE)
