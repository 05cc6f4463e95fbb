"""Calls of a model of transformers: values for what its forward takes, in the shapes that its config has."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from itertools import islice, product
from typing import Any

import torch
from torch import Tensor, nn

from .shrinking import SPECIAL

BATCH, TOKENS = 2, 16
TRIES = 40

_FEATURES = (
    "inputs_embeds",
    "hidden_states",
    "encoder_hidden_states",
    "image_embeds",
    "query_embeds",
    "last_hidden_state",
)
_MASKS = ("attention_mask", "decoder_attention_mask", "padding_mask", "input_features_mask", "pixel_attention_mask")
_BINS = ("num_mel_bins", "feature_size", "input_feat_per_channel", "input_dim", "feature_projection_input_dim")


def calls_of(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Keyword arguments to try: what has to be given, the main input, then what else is known."""
    declared = inspect.signature(model.forward).parameters.values()
    parameters = [p for p in declared if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    names = [p.name for p in parameters]
    required = [p.name for p in parameters if p.default is p.empty]
    main = getattr(model, "main_input_name", None) or "input_ids"
    sizes = Sizes(model.config)
    known = [name for name in names if values_of(name, sizes)]
    if images := with_placeholders(model, sizes, names):
        yield images
    wanted = [
        [*required, *([main] if main in names else [])],
        [*required, *[n for n in (main, "decoder_input_ids") if n in names]],
        [*required, *[n for n in ("input_ids", "pixel_values") if n in names]],
        [*required, *[n for n in ("input_features", "input_values", "decoder_input_ids") if n in names]],
        [*required, *[n for n in ("input_ids", "bbox", "pixel_values") if n in names]],
        [*required, *[n for n in ("input_values", "input_ids", "input_features", "attention_mask") if n in names]],
        [*required, *[n for n in known if n not in ("inputs_embeds", "decoder_inputs_embeds", "past_key_values")]],
        [*required, *[n for n in ("inputs_embeds",) if n in names]],
    ]
    for choice in {tuple(dict.fromkeys(w)): None for w in wanted}:
        options = [values_of(name, sizes) for name in choice]
        if choice and all(options):
            for values in islice(product(*options), TRIES):
                yield dict(zip(choice, values, strict=True))


class Sizes:
    """What a config and its parts say of sizes."""

    def __init__(self, config: Any) -> None:
        parts = [getattr(config, key, None) for key in getattr(config, "sub_configs", {})]
        self.parts = [config, *[p for part in parts if part is not None for p in Sizes(part).parts]]

    def all(self, *names: str) -> list[Any]:
        """Every value that the config or a part of it has under one of the names, each once."""
        found = [getattr(part, name, None) for part in self.parts for name in names]
        return [value for i, value in enumerate(found) if value is not None and value not in found[:i]]

    def number(self, *names: str, default: int) -> int:
        values = [v[0] if isinstance(v, list | tuple) and v else v for v in self.all(*names)]
        return next((int(v) for v in values if isinstance(v, int) and not isinstance(v, bool)), default)


def set_all(config: Any, name: str, value: object) -> None:
    """Set a field of a config, and of its parts, where they have it."""
    for part in Sizes(config).parts:
        if hasattr(part, name):
            setattr(part, name, value)


def values_of(name: str, sizes: Sizes) -> list[Any]:
    """Values to try for a parameter of that name; none where nothing is known of it."""
    torch.manual_seed(0)
    width = sizes.number("hidden_size", "d_model", "n_embd", "embed_dim", "hidden_dim", default=32)
    if name in ("input_ids", "decoder_input_ids", "input_codes", "audio_codes", "codes"):
        smallest = min([v for v in sizes.all("vocab_size", "codebook_size") if isinstance(v, int)], default=128)
        low, high = (4, max(5, smallest - SPECIAL)) if smallest > SPECIAL + 8 else (0, max(1, smallest))
        books = sizes.number("num_codebooks", "num_quantizers", default=2)
        ids = torch.randint(low, high, (BATCH, TOKENS))
        return [ids, torch.randint(low, high, (BATCH, TOKENS, books)), torch.randint(low, high, (BATCH, books, TOKENS))]
    if name in ("pixel_values", "pixel_values_videos", "pixel_values_images", "image", "images"):
        return _pixels(sizes)
    if name in ("input_values", "audio_values", "waveform"):
        bins = sizes.number("num_mel_bins", default=16)
        frames = sizes.number("max_length", default=64)
        return [
            torch.randn(BATCH, 3200),
            torch.randn(BATCH, 1, 3200),
            torch.randn(BATCH, frames, bins),
            torch.randn(BATCH, 16000),
        ]
    if name in ("input_features", "spectrogram", "audio_features"):
        bins = sizes.number(*_BINS, default=16)
        frames = 2 * sizes.number("max_source_positions", default=32)
        return [
            torch.randn(BATCH, bins, frames),
            torch.randn(BATCH, frames, bins),
            torch.randn(BATCH, 1, frames, bins),
            torch.randn(BATCH, bins, 100),
            torch.randn(BATCH, 100, bins),
            torch.randn(BATCH, 1, 1001, 64),
        ]
    if name in _FEATURES:
        rows = [torch.randn(BATCH, TOKENS, width), torch.randn(TOKENS, width), torch.randn(BATCH, width, 8, 8)]
        return [*rows, _pixels(sizes)[-3]] if name == "hidden_states" else rows
    if name == "bbox":
        corner = torch.randint(0, 16, (BATCH, TOKENS, 2))
        return [torch.cat([corner, corner + 8], -1)]
    if name in _MASKS:
        return [torch.ones(BATCH, TOKENS, dtype=torch.long)]
    if name in ("position_ids", "cache_position"):
        return [torch.arange(TOKENS)[None].expand(BATCH, -1).contiguous()]
    if name == "spatial_shapes":
        return [torch.tensor([[4, 4], [4, 4]])]
    if name in ("aspect_ratio_ids", "aspect_ratio_mask"):
        tiles = sizes.number("max_num_tiles", default=4)
        return [torch.ones((BATCH, 1) if name == "aspect_ratio_ids" else (BATCH, 1, tiles), dtype=torch.long)]
    if name in ("grid_thw", "image_grid_thw"):
        return [torch.tensor([[1, 4, 4], [1, 4, 4]])]
    return _of_series(name, sizes)


def _of_series(name: str, sizes: Sizes) -> list[Any]:
    """Time series, and actions of an agent."""
    length = sizes.number("context_length", default=32)
    channels = sizes.number("num_input_channels", "input_size", default=1)
    past = length + max([7, *[v for v in sizes.all("lags_sequence") if isinstance(v, list) for v in v]])
    if name in ("past_values", "past_observed_mask"):
        shapes = [(BATCH, length, channels), (BATCH, past), (BATCH, length), (BATCH, past, channels)]
        return [torch.randn(s) if name == "past_values" else torch.ones(s) for s in shapes]
    if name in ("past_time_features",):
        return [torch.randn(BATCH, past, sizes.number("num_time_features", default=0))]
    if name in ("states", "actions"):
        return [torch.randn(BATCH, TOKENS, sizes.number("state_dim" if name == "states" else "act_dim", default=4))]
    if name in ("rewards", "returns_to_go"):
        return [torch.randn(BATCH, TOKENS, 1)]
    if name == "timesteps":
        return [torch.arange(TOKENS)[None].expand(BATCH, -1).contiguous()]
    return []


def _pixels(sizes: Sizes) -> list[Tensor]:
    channels = sizes.number("num_channels", "in_channels", "in_chans", "image_channels", default=3)
    sides = [
        v if isinstance(v, int) else v[0]
        for v in sizes.all("image_size", "img_size")
        if isinstance(v, int | list | tuple) and v
    ]
    frames = sizes.number("num_frames", "frames_per_clip", "tubelet_size", default=4)
    found: list[Tensor] = []
    for side in sorted({*sides, 64, 224}):
        found += [torch.randn(BATCH, channels, side, side), torch.randn(BATCH, frames, channels, side, side)]
    patch = sizes.number("patch_size", default=8)
    stacked = channels * patch * patch * sizes.number("temporal_patch_size", default=1)
    tiles = sizes.number("max_num_tiles", default=4)
    return [
        *found,
        torch.randn(32, stacked),
        torch.randn(BATCH, 16, stacked),
        torch.randn(BATCH, 1, tiles, channels, *2 * sides[:1]),
    ]


def with_placeholders(model: Any, sizes: Sizes, names: list[str]) -> dict[str, Any] | None:
    """A call with an image: as many placeholder tokens as the model makes features of it. None where that does not work."""
    token = next(iter(sizes.all("image_token_id", "image_token_index")), None)
    features = getattr(model, "get_image_features", None)
    if "pixel_values" not in names or "input_ids" not in names or features is None or token is None:
        return None
    grids = [{}, *[{"image_grid_thw": g} for g in values_of("image_grid_thw", sizes)]]
    for pixels, grid in product(_pixels(sizes), grids):
        try:
            with torch.no_grad():
                found = features(pixel_values=pixels, **grid)
            count = _rows(found)
            text = values_of("input_ids", sizes)[0][:1].expand(BATCH, -1)
            ids = torch.cat([text, torch.full((BATCH, count // BATCH), token)], 1)
            call = {"input_ids": ids, "pixel_values": pixels, **grid}
            model(**call)
            return call
        except Exception:  # a wrong guess may fail in any way
            continue
    return None


def _rows(found: Any) -> int:
    """How many feature vectors there are."""
    found = getattr(found, "pooler_output", found)
    parts = [found] if isinstance(found, Tensor) else list(found)
    return sum(part.numel() // part.shape[-1] for part in parts)
