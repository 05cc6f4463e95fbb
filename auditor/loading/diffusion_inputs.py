"""Generates inputs for a model of diffusers, from the names of the arguments of `forward` and the sizes in its config."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..records import Batch

BATCH, TOKENS, FRAMES, SIDE = 2, 16, 5, 16
"""Sizes that no config names: rows, tokens of a text, frames of a video, and height and width of a latent image."""

LARGEST = 128
"""Largest height and width of an image for an autoencoder, whose config names those of its training."""

TIMES = 1000
"""Number of timesteps of a schedule."""

SAMPLES = ("sample", "hidden_states", "x", "z", "latents")
"""Names of the argument that is denoised, encoded or decoded."""

TEXT_WIDTHS = (
    "encoder_hid_dim",
    "joint_attention_dim",
    "caption_channels",
    "text_embed_dim",
    "cross_attention_input_dim",
    "text_dim",
    "cap_feat_dim",
    "cross_attention_dim",
    "caption_projection_dim",
)
"""Entries of a config that give the width of a text's embedding, in the order in which they count."""


def is_of_diffusers(model: Any) -> bool:
    """Whether a model is of a class of diffusers, and has a config."""
    names = (kind.__module__.partition(".")[0] for kind in type(model).__mro__)
    return "diffusers" in names and isinstance(getattr(model, "config", None), Mapping)


def batches_of(model: Any) -> Iterator[Batch]:
    """Inputs to try, in order: a video, an image, a sequence of tokens or of samples, whichever the model takes."""
    config = model.config
    parameters = inspect.signature(model.forward).parameters
    main = next((name for name in SAMPLES if name in parameters), None)
    if main is None:
        return
    for shape in _shapes(model, main, parameters):
        values = {main: torch.randn(shape)}
        values |= _conditions(config, parameters, shape)
        yield (), values


def _shapes(model: Any, main: str, parameters: Mapping[str, Any]) -> list[tuple[int, ...]]:
    """Shapes of the main argument, the likeliest first."""
    config, kind = model.config, type(model).__name__
    is_decoder = main in ("z", "latents") or getattr(model.forward, "__name__", "") == "decode"
    channels = _channels(config, main, is_decoder)
    height, width = _sides(config, is_autoencoder="timestep" not in parameters, is_decoder=is_decoder)
    image = (BATCH, channels, height, width)
    clip = (BATCH, channels, FRAMES, height, width)
    frames_first = (BATCH, FRAMES, channels, height, width)
    tokens = (BATCH, height * width // 4, channels)
    samples = (BATCH, channels, 8 * height)
    if "3D" in kind or "Temporal" in kind or "Motion" in kind or "Video" in kind:
        return [clip, frames_first, image, tokens]
    if "img_ids" in parameters:
        return [tokens, image]
    if "1D" in kind or "Audio" in kind:
        return [samples, image, tokens]
    return [image, tokens, clip, frames_first, samples]


def _channels(config: Mapping[str, Any], main: str, is_decoder: bool) -> int:
    names: Sequence[str] = ("in_channels", "latent_channels", "audio_channels")
    if is_decoder:
        names = ("latent_channels", "z_dim", "vq_embed_dim", "in_channels")
    elif config.get("latent_channels") is None:
        names = ("in_channels", "audio_channels")
    return int(next((config[name] for name in names if config.get(name)), 3))


def _sides(config: Mapping[str, Any], is_autoencoder: bool, is_decoder: bool) -> tuple[int, int]:
    """Height and width; those of an autoencoder's latent image are unknown, and small."""
    if is_decoder:
        return SIDE, SIDE
    size = config.get("sample_size") or SIDE
    height, width = size if isinstance(size, list | tuple) else (size, size)
    if "sample_height" in config:
        height, width = config["sample_height"], config["sample_width"]
    if is_autoencoder:
        return min(int(height), LARGEST), min(int(width), LARGEST)
    return int(height), int(width)


def _conditions(config: Mapping[str, Any], parameters: Mapping[str, Any], shape: tuple[int, ...]) -> dict[str, Any]:
    """The further arguments that `forward` requires or that the config describes."""
    result = dict[str, Any]()
    for name, parameter in parameters.items():
        if name in SAMPLES or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        is_needed = parameter.default is parameter.empty
        value = _condition(name, config, shape, is_needed)
        if value is not None:
            result[name] = value
    return result


def _condition(name: str, config: Mapping[str, Any], shape: tuple[int, ...], is_needed: bool) -> Any:
    """The value of one argument; None to leave it out."""
    makers: Mapping[str, Callable[[], Any]] = {
        "class_labels": lambda: _labels(config),
        "pooled_projections": lambda: _vectors(config.get("pooled_projection_dim")),
        "added_cond_kwargs": lambda: _added(config),
        "guidance": lambda: torch.full((BATCH,), 3.5) if config.get("guidance_embeds") else None,
        "img_ids": lambda: _positions(shape[1]),
        "txt_ids": lambda: _positions(TOKENS),
        "controlnet_cond": lambda: _condition_image(config, shape),
        "proj_embedding": lambda: _vectors(config.get("embedding_dim")),
    }
    if name in makers:
        return makers[name]()
    if name in ("t", "timestep", "timesteps", "timestep_r", "r_timestep", "timestep_ratio"):
        return torch.randint(TIMES, (BATCH,)) if is_needed or name in ("timestep", "timesteps") else None
    if name.startswith(("encoder_hidden_states", "cap_feats")):
        width = next((config[key] for key in TEXT_WIDTHS if isinstance(config.get(key), int)), None)
        return torch.randn(BATCH, TOKENS, width) if width and (is_needed or name == "encoder_hidden_states") else None
    if not is_needed:
        return None
    if name.endswith("mask"):
        return torch.ones(BATCH, TOKENS, dtype=torch.int64)
    if name in ("original_size", "target_size", "crop_coords"):
        return torch.full((BATCH, 2), float(8 * shape[-1]))
    if name == "added_time_ids":
        return torch.ones(BATCH, 3)
    return None


def _labels(config: Mapping[str, Any]) -> Tensor | None:
    """Random class labels; None for a model that is not conditioned on classes, or that computes its labels."""
    if config.get("class_embed_type") in ("timestep", "projection", "simple_projection"):
        return None
    classes = config.get("num_class_embeds")
    if config.get("norm_type") in ("ada_norm_zero", "ada_norm"):
        classes = config.get("num_embeds_ada_norm")
    return torch.randint(classes, (BATCH,)) if classes else None


def _vectors(width: int | None) -> Tensor | None:
    return torch.randn(BATCH, width) if width else None


def _positions(count: int) -> Tensor:
    """[count, 3] positions of tokens."""
    return torch.arange(count, dtype=torch.float32)[:, None].expand(count, 3).clone()


def _added(config: Mapping[str, Any]) -> dict[str, Tensor | None] | None:
    """The argument `added_cond_kwargs`: text embeddings and sizes for SDXL, empty entries for PixArt; None for other
    models."""
    if config.get("addition_embed_type") == "text_time":
        side = 8.0 * float(config.get("sample_size") or SIDE)
        sizes = torch.tensor([[side, side, 0.0, 0.0, side, side]])
        width = config["projection_class_embeddings_input_dim"] - 6 * config["addition_time_embed_dim"]
        return {"text_embeds": torch.randn(BATCH, width), "time_ids": sizes.expand(BATCH, 6).clone()}
    if "use_additional_conditions" in config:
        return {"resolution": None, "aspect_ratio": None}
    return None


def _condition_image(config: Mapping[str, Any], shape: tuple[int, ...]) -> Tensor:
    """The image that conditions a ControlNet, which halves it between the layers of an embedding."""
    scale = 2 ** (len(config.get("conditioning_embedding_out_channels") or range(4)) - 1)
    return torch.rand(BATCH, config.get("conditioning_channels") or 3, scale * shape[-2], scale * shape[-1])
