"""What kind of inputs a model takes, by its first layers and the names of forward's arguments: a suggestion to paste, and
sizes of images to try."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from typing import Any

from torch import nn

from .target import arguments_of

ROWS, NODES, EDGES, TOKENS, SAMPLES, SIDE = 8, 10, 20, 16, 16_000, 224
CLASSES, STEPS = 10, 1000
PREFIXES = range(6)
"""Numbers of tokens, such as class tokens, that an image transformer may put before those of patches."""

NAMED = {
    "edge_index": f"int64[2,{EDGES}]<{NODES}",
    "edge_weight": f"float32[{EDGES}]",
    "batch": f"int64[{NODES}]<1",
    "attention_mask": f"int64[1,{TOKENS}]<2",
    "mask": f"bool[1,{TOKENS}]",
    "token_type_ids": f"int64[1,{TOKENS}]<2",
    "lengths": f"int64[1]<{TOKENS}",
    "timestep": f"int64[1]<{STEPS}",
    "timesteps": f"int64[1]<{STEPS}",
    "t": f"int64[1]<{STEPS}",
    "labels": f"int64[1]<{CLASSES}",
}
"""{argument of forward: values of the usual shape}."""

IDS = ("input_ids", "ids", "idx", "tokens", "token_ids", "decoder_input_ids", "src", "tgt")


def suggest_inputs(model: nn.Module) -> str:
    """Text for `--inputs` that fits the model: a shape for every required argument of forward."""
    names = _required(model)
    if not names:
        return f"x:{_first_shape(model, names)}"
    first = _first_shape(model, names)
    words = [f"{names[0]}:{NAMED.get(names[0], first)}"]
    for name in names[1:]:
        words.append(f"{name}:{NAMED.get(name, first)}")
    return " ".join(words)


def _required(model: nn.Module) -> list[str]:
    """The names of forward's arguments without a default."""
    parameters = arguments_of(model.forward).values()
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in parameters if p.kind in named and p.default is p.empty]


def _first_shape(model: nn.Module, names: list[str]) -> str:
    """Dtype and shape of the first argument, by the first layer with weights."""
    layer = next((part for part in model.modules() if _is_layer(part)), None)
    is_graph = "edge_index" in names
    match layer:
        case nn.Embedding() | nn.EmbeddingBag():
            return f"int64[1,{TOKENS}]<{layer.num_embeddings}"
        case nn.Conv1d():
            return f"float32[1,{layer.in_channels},{SAMPLES}]"
        case nn.Conv2d():
            side = next(image_sides(model), SIDE)
            return f"float32[1,{layer.in_channels},{side},{side}]"
        case nn.Conv3d():
            return f"float32[1,{layer.in_channels},{TOKENS},{SIDE // 2},{SIDE // 2}]"
        case nn.RNNBase():
            return f"float32[1,{TOKENS},{layer.input_size}]"
        case nn.MultiheadAttention():
            return f"float32[1,{TOKENS},{layer.embed_dim}]"
        case nn.Linear():
            return f"float32[{NODES if is_graph else ROWS},{layer.in_features}]"
    if names and names[0] in IDS:
        return f"int64[1,{TOKENS}]<100"
    return f"float32[1,3,{SIDE},{SIDE}]"


def _is_layer(part: nn.Module) -> bool:
    kinds = (
        nn.Embedding,
        nn.EmbeddingBag,
        nn.Conv1d,
        nn.Conv2d,
        nn.Conv3d,
        nn.RNNBase,
        nn.MultiheadAttention,
        nn.Linear,
    )
    return isinstance(part, kinds)


def image_sides(model: nn.Module) -> Iterator[int]:
    """Sides of square images that an image transformer may take: declared by a module, or by the number of patches that a
    table of positions has."""
    for part in model.modules():
        for name in ("img_size", "image_size"):
            size: Any = getattr(part, name, None)
            side = size[0] if isinstance(size, list | tuple) and size else size
            if isinstance(side, int) and not isinstance(side, bool) and side > 0:
                yield side
    patch = _patch_side(model)
    if patch is None:
        return
    for name, weight in model.named_parameters():
        if "pos" not in name or weight.dim() not in (2, 3):
            continue
        tokens = weight.shape[-2]  # [1, tokens, features] or [tokens, features]
        for prefix in PREFIXES:
            across = math.isqrt(max(tokens - prefix, 0))
            if across > 1 and across**2 == tokens - prefix:
                yield across * patch


def _patch_side(model: nn.Module) -> int | None:
    """The side of the patches that the first layer reads: of a convolution whose stride is its kernel, or of a layer over
    the flattened patches of an image with 3 channels or 1."""
    for part in model.modules():
        match part:
            case nn.Conv2d():
                side = part.kernel_size[0]
                return side if part.stride[0] == side > 1 else None
            case nn.LayerNorm():
                return _side_of(part.normalized_shape[-1])
            case nn.Linear():
                return _side_of(part.in_features)
    return None


def _side_of(features: int) -> int | None:
    for channels in (3, 1):
        side = math.isqrt(features // channels)
        if side > 1 and channels * side**2 == features:
            return side
    return None
