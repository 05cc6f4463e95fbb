"""Made-up inputs for a model that came with none: of the kind its library says, or of the shape its first layer expects."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import LoadError
from ..records import Batch
from .sandbox import blame
from .state import in_eval

BATCH = 2
TOKENS = 16
SAMPLES = 16_000
"""One second of sound at the rate speech models take."""


def typical(model: nn.Module) -> tuple[Batch, str] | None:
    """Made-up values in the shapes that a timm or Hugging Face model declares; None where it declares none that run."""
    for batch, source in (*_timm(model), *_hugging_face(model)):
        if _runs(model, batch):
            return batch, source
    return None


def _timm(model: nn.Module) -> Iterator[tuple[Batch, str]]:
    declared = getattr(model, "pretrained_cfg", None)
    size = declared.get("input_size") if isinstance(declared, Mapping) else None
    if size:
        yield (((torch.randn(BATCH, *size),), {}), f"the size timm gives for it, {tuple(size)}, values made up")


def _hugging_face(model: nn.Module) -> Iterator[tuple[Batch, str]]:
    config, name = getattr(model, "config", None), str(getattr(model, "main_input_name", None))
    if config is None or name not in _MAKERS:
        return
    value = _MAKERS[name](model, config)
    if value is None:
        return
    decoder = _tokens(model, config) if getattr(config, "is_encoder_decoder", False) else None
    yield (
        ((), {name: value, **({"decoder_input_ids": decoder} if decoder is not None else {})}),
        f"{name} as the config has them, values made up",
    )


def _tokens(model: Any, config: Any) -> Tensor | None:
    """Token ids over the whole vocabulary but its first few, which tend to mean padding or the end."""
    size = getattr(config, "vocab_size", None)
    if not isinstance(size, int) or size < 2:
        return None
    longest = getattr(config, "max_position_embeddings", None) or TOKENS
    return torch.randint(min(4, size - 1), size, (BATCH, min(TOKENS, int(longest))))


def _pixels(model: Any, config: Any) -> Tensor | None:
    part = getattr(config, "vision_config", config)
    size, channels = getattr(part, "image_size", 224), getattr(part, "num_channels", 3)
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return torch.randn(BATCH, channels, height, width)


def _spectrogram(model: Any, config: Any) -> Tensor | None:
    bins, positions = getattr(config, "num_mel_bins", None), getattr(config, "max_source_positions", None)
    return torch.randn(BATCH, bins, 2 * positions) if bins and positions else None


def _sound(model: Any, config: Any) -> Tensor | None:
    return torch.randn(BATCH, SAMPLES)


_MAKERS: Mapping[str, Callable[[Any, Any], Tensor | None]] = {
    "input_ids": _tokens,
    "pixel_values": _pixels,
    "input_features": _spectrogram,
    "input_values": _sound,
}


def _runs(model: nn.Module, batch: Batch) -> bool:
    try:
        with in_eval(model), torch.no_grad():
            model(*batch[0], **batch[1])
    except Exception:  # what a config says need not fit; there are other ways to inputs
        return False
    return True


LENGTHS = (16, 8, 32, 64, 128)
SIDES = (32, 64, 28, 224, 8, 16, 96, 128, 256)

_TYPES: tuple[tuple[tuple[type[nn.Module], ...], Callable[[Any], Iterator[Tensor]]], ...] = (
    ((nn.Conv1d, nn.ConvTranspose1d), lambda m: (_normal(BATCH, _channels(m), 8 * n) for n in LENGTHS)),
    ((nn.Conv2d, nn.ConvTranspose2d), lambda m: (_normal(BATCH, _channels(m), n, n) for n in SIDES)),
    ((nn.Conv3d, nn.ConvTranspose3d), lambda m: (_normal(BATCH, _channels(m), n, n, n) for n in (16, 8, 32))),
    ((nn.Embedding, nn.EmbeddingBag), lambda m: (torch.randint(_rows(m), (BATCH, n)) for n in LENGTHS)),
    ((nn.RNNBase, nn.RNNCellBase), lambda m: iter(_features(int(m.input_size)))),
    ((nn.BatchNorm2d,), lambda m: (_normal(BATCH, int(m.num_features), n, n) for n in SIDES)),
    ((nn.LayerNorm, nn.RMSNorm), lambda m: iter(_features(*m.normalized_shape))),
    ((nn.MultiheadAttention,), lambda m: iter(_features(int(m.embed_dim)))),
    ((nn.Linear,), lambda m: iter(_features(int(m.in_features)))),
)


def synthesise(model: nn.Module) -> tuple[Batch, str]:
    """A batch that `model` runs on, and a phrase that says how it was made up.

    Raises: LoadError(slug="no-inputs"), also where the model takes more than one argument.
    """
    hint = "define get_inputs() beside the model, or pass --inputs 'x:float32[1,3,224,224]'"
    required = [p for p in inspect.signature(model.forward).parameters.values() if _is_required(p)]
    first = next(((name, m) for name, m in model.named_modules() if isinstance(m, _known_types())), None)
    if first is None or len(required) > 1:
        names = ", ".join(p.name for p in required)
        raise LoadError(f"no example inputs found for forward({names}): {hint}", slug="no-inputs")
    name, layer = first
    make = next(make for types, make in _TYPES if isinstance(layer, types))
    place, error = f"{name or 'the root'} ({type(layer).__name__})", None
    for tensor in make(layer):
        error = _failure(model, tensor)
        if error is None:
            return ((tensor,), {}), f"synthesised for {place}"
    assert error is not None
    raise LoadError(
        f"no example inputs, and none made up for {place} run, {blame(error)}: {hint}", "no-inputs"
    ) from error


def vocabulary(model: nn.Module) -> int:
    """Rows of the model's first embedding, 2 where it has none."""
    return next((m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), 2)


def _failure(model: nn.Module, tensor: Tensor) -> Exception | None:
    try:
        with in_eval(model), torch.no_grad():
            model(tensor)
    except Exception as error:  # a wrong guess may fail in any way; the next one is tried
        return error
    return None


def _is_required(parameter: inspect.Parameter) -> bool:
    variadic = (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.default is parameter.empty and parameter.kind not in variadic


def _known_types() -> tuple[type[nn.Module], ...]:
    return tuple(kind for types, _ in _TYPES for kind in types)


def _features(*shape: int) -> list[Tensor]:
    """As rows, then as sequences, since a layer over the last axis takes both."""
    return [_normal(BATCH, *shape), _normal(BATCH, 16, *shape)]


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float32)  # whatever default the user's file has set


def _channels(module: Any) -> int:
    return int(module.in_channels)


def _rows(module: Any) -> int:
    return int(module.num_embeddings)
