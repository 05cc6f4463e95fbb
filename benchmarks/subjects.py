"""The models that are timed, with random weights and batch 4: what an audit costs does not depend on training."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

# Lets timm import a torchvision without compiled operators.
runpy.run_path(str(Path(__file__).resolve().parents[1] / "tests" / "stubs" / "sitecustomize.py"))

BATCH = 4
Built = tuple[nn.Module, tuple[Any, ...]]


def build(name: str) -> Built:
    """A model in eval mode and its arguments, the same every time."""
    torch.manual_seed(0)
    model, args = {**MODELS, **SMALL}[name]()
    _arguments[name] = args
    return model.eval(), args


def arguments(name: str) -> tuple[Any, ...]:
    """The arguments alone; no second model where this process built one, as a user's file makes them without any."""
    return _arguments[name] if name in _arguments else build(name)[1]


_arguments: dict[str, tuple[Any, ...]] = {}


def gpt(layers: int, width: int = 128, tokens: int = 64) -> Built:
    """A GPT-2 of any depth."""
    import transformers

    config = transformers.GPT2Config(
        vocab_size=256, n_positions=tokens, n_embd=width, n_layer=layers, n_head=4, use_cache=False
    )
    return transformers.GPT2LMHeadModel(config).eval(), (torch.randint(0, 256, (BATCH, tokens)),)


def vit(layers: int) -> Built:
    """A vision transformer of any depth, without literals that depend on a dtype."""
    from timm.models.vision_transformer import VisionTransformer

    model = VisionTransformer(img_size=32, patch_size=8, embed_dim=64, depth=layers, num_heads=4, num_classes=10)
    return model.eval(), (torch.randn(BATCH, 3, 32, 32),)


def _vision(name: str, batch: int = BATCH) -> Callable[[], Built]:
    def make() -> Built:
        import timm

        return timm.create_model(name, pretrained=False), (torch.randn(batch, 3, 224, 224),)

    return make


def _gpt2_small() -> Built:
    import transformers

    config = transformers.GPT2Config(use_cache=False)
    return transformers.GPT2LMHeadModel(config), (torch.randint(0, config.vocab_size, (BATCH, 128)),)


MODELS: dict[str, Callable[[], Built]] = {
    "resnet50": _vision("resnet50"),
    "vit_base_patch16_224": _vision("vit_base_patch16_224"),
    "convnext_tiny": _vision("convnext_tiny"),
    "gpt2": _gpt2_small,
}


def _example(name: str) -> Callable[[], Built]:
    def make() -> Built:
        module = runpy.run_path(str(Path(__file__).resolve().parents[1] / "examples" / f"{name}.py"))
        return module["get_model"](), module["get_inputs"]()

    return make


def _tiny(family: str, **more: int) -> Callable[[], Built]:
    def make() -> Built:
        import transformers

        sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = getattr(transformers, f"{family}Config")(**sizes, intermediate_size=64, **more)
        return getattr(transformers, f"{family}Model")(config), (torch.randint(3, 64, (2, 12)),)

    return make


SMALL: dict[str, Callable[[], Built]] = {
    "01_digits_attention": _example("01_digits_attention"),
    "tiny_bert": _tiny("Bert"),
    "tiny_albert": _tiny("Albert", embedding_size=16),
    "mobilenetv3_small_100": _vision("mobilenetv3_small_100", batch=1),
    "resnet18": _vision("resnet18", batch=1),
}
"""Models that cost less than importing torch does."""
