"""diffusers: every U-Net, transformer, autoencoder and control network, its constructor's arguments made small."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from itertools import islice, product
from typing import Any

import diffusers
import torch
from torch import nn

from . import Built, Unbuilt
from .diffusion import ENTRIES, entry, filled
from .shrinking import small

BATCH, TOKENS = 2, 8
MOST_PARAMETERS = 60_000_000
ROOMS = [
    importlib.import_module(f"diffusers.models.{room}")
    for room in ("autoencoders", "unets", "transformers", "controlnets")
]
TRIES = 40

_CONTEXT = (
    *("cross_attention_dim", "joint_attention_dim", "text_embed_dim", "text_dim", "caption_channels", "cap_feat_dim"),
    *("context_in_dim", "caption_projection_dim"),
)
_WIDTHS = (
    *_CONTEXT,
    *("pooled_projection_dim", "base_channels", "encoder_base_channels", "decoder_base_channels", "dim", "image_dim"),
    *("ffn_dim", "mid_block_channels"),
)
_DEPTHS = ("layers_per_block", "num_single_layers", "num_refiner_layers", "num_dit_layers")
_USUAL = (
    *("timestep", "encoder_hidden_states", "pooled_projections", "img_ids", "txt_ids", "encoder_hidden_states_mask"),
    *("img_shapes", "guidance"),
)
_TEXTS = (
    *("encoder_hidden_states", "context", "prompt_embeds", "txt", "encoder_hidden_states_t5", "clip_text_pooled"),
    *("encoder_hidden_states_llama3", "cap_feats", "encoder_hidden_states_image"),
)


def names() -> list[str]:
    """Model classes."""
    found = []
    for module in ROOMS:
        found += [
            n for n, value in vars(module).items() if inspect.isclass(value) and issubclass(value, diffusers.ModelMixin)
        ]
    return sorted(set(found))


def build(name: str) -> Built:
    """A small model of that class, and a call that it runs."""
    return _specified(name) if name in ENTRIES else _guessed(name)


def _specified(name: str) -> Built:
    if "part_of" in ENTRIES[name]:
        raise Unbuilt(f"cannot run by itself: it is a part of {ENTRIES[name]['part_of']}")
    try:
        model, call = _entry(name)
        with torch.no_grad():
            model(**call)
    except Exception as error:  # another version of the package may raise anything
        raise Unbuilt(f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]) from error
    return model, (), call


def _entry(name: str) -> tuple[nn.Module, dict[str, Any]]:
    kind = _class(name)
    found = entry(kind)
    if "controlnets" in found["make"]:
        model = kind([build(each)[0] for each in found["make"]["controlnets"]]).eval()
    else:
        model = _model(kind, _arguments(kind, 1) | found["make"])
    if "transformer" in found:
        model = kind.from_transformer(model, _entry(found["transformer"])[0])
    if found.get("then"):
        getattr(model, found["then"])()
    torch.manual_seed(0)
    return model, filled(found["call"])


def _guessed(name: str) -> Built:
    kind, reason = _class(name), ""
    for ratio in (1, 2, 4, 8, 0):
        try:
            model = _model(kind, _arguments(kind, ratio) if ratio else {})
        except Exception as error:  # sizes that do not go together; others may
            reason = reason or f"config not shrunk: {type(error).__name__}: {' '.join(str(error).split())}"
            continue
        for call in _calls(model):
            try:
                torch.manual_seed(0)
                with torch.no_grad():
                    model(**call)
                return model, (), call
            except Exception as error:  # a wrong guess may fail in any way
                line = " ".join(str(error).split())
                reason = reason or f"no call found: {type(error).__name__}: {line} ({', '.join(call)})"
    raise Unbuilt((reason or "no input known")[:400])


def _class(name: str) -> Any:
    return next(getattr(module, name) for module in ROOMS if hasattr(module, name))


def _model(kind: Any, arguments: dict[str, Any]) -> nn.Module:
    with torch.device("meta"):
        size = sum(p.numel() for p in kind(**arguments).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size} parameters")
    torch.manual_seed(0)
    model: nn.Module = kind(**arguments).float().eval()
    return model


def _arguments(kind: Any, ratio: int) -> dict[str, Any]:
    found = {}
    for p in inspect.signature(kind.__init__).parameters.values():
        if p.name == "self" or p.default is p.empty:
            continue
        if (value := _small(p.name, p.default, ratio)) is not None:
            found[p.name] = value
    return found


def _small(name: str, default: Any, ratio: int) -> Any:
    if name in ("block_out_channels", "encoder_block_out_channels", "decoder_block_out_channels") and not isinstance(
        default, int
    ):
        return tuple(16 * ratio for _ in default)
    if name in _DEPTHS and isinstance(default, int):
        return 1
    if name in ("norm_num_groups", "num_groups") and default:
        return 4
    if name in ("sample_size", "sample_height", "sample_width") and isinstance(default, int):
        return min(default, 16)
    if name in _WIDTHS and isinstance(default, int):
        return min(default, 32 * ratio)
    if name == "attention_head_dim" and isinstance(default, int):
        return min(default, 8 * ratio)
    return small(name, default, ratio)


def _calls(model: Any) -> Iterator[dict[str, Any]]:
    """Keyword arguments to try: what has to be given, then all that is known."""
    declared = inspect.signature(model.forward).parameters.values()
    parameters = [p for p in declared if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    required = [p.name for p in parameters if p.default is p.empty]
    rest = [p.name for p in parameters if p.name not in required and _values(p.name, model.config)]
    usual = [n for n in rest if n in _USUAL]
    for choice in ([*required], [*required, *usual], [*required, *rest]):
        options = [_values(n, model.config) for n in choice]
        if all(options):
            for values in islice(product(*reversed(options)), TRIES):  # what comes first varies first
                yield dict(zip(choice, reversed(values), strict=True))


def _number(config: Any, *names: str, default: int) -> int:
    values = [config.get(name) for name in names]
    return next((v for v in values if isinstance(v, int) and not isinstance(v, bool)), default)


def _values(name: str, config: Any) -> list[Any]:
    """Values to try for a parameter of that name; none where nothing is known of it."""
    torch.manual_seed(0)
    channels = _number(config, "in_channels", "num_latent_channels", "in_dim", default=4)
    width = _number(config, *_CONTEXT, default=32)
    if name in ("sample", "hidden_states", "x", "noisy_latents"):
        side = _number(config, "sample_size", default=16)
        return [
            torch.randn(BATCH, channels, side, side),
            torch.randn(BATCH, TOKENS, channels),
            torch.randn(BATCH, channels, 1, 32, 32),
            torch.randn(BATCH, channels, 5, 16, 16),
            torch.randn(BATCH, 16, channels),
            torch.randn(BATCH, 2, channels, 16, 16),
            torch.randn(BATCH, channels, 64),
            torch.randn(BATCH, channels, 64, 64),
            torch.randn(BATCH, channels, 9, 32, 32),
            torch.randn(BATCH, _number(config, "audio_channels", default=1), 4096),
        ]
    if name in ("timestep", "timesteps", "t", "timestep_r", "timestep_ratio", "guidance"):
        steps, shares = torch.tensor([5, 9]), torch.tensor([0.5, 0.9])
        return [shares] if name == "timestep_ratio" else [steps, shares]
    if name in _TEXTS:
        return [torch.randn(BATCH, TOKENS, width)]
    if name in ("pooled_projections", "pooled_projection", "global_hidden_states", "pooled_embeds", "clip_embeddings"):
        return [torch.randn(BATCH, _number(config, "pooled_projection_dim", "global_states_input_dim", default=32))]
    if name in ("img_ids", "txt_ids", "image_rotary_emb"):
        return [torch.zeros(TOKENS, _ids(config))]
    if name in ("encoder_hidden_states_mask", "encoder_attention_mask", "attention_mask", "encoder_mask"):
        return [torch.ones(BATCH, TOKENS, dtype=torch.bool), torch.ones(BATCH, TOKENS, dtype=torch.long)]
    if name == "img_shapes":
        return [[[(1, 2, 4)]] * BATCH]
    if name == "txt_seq_lens":
        return [[TOKENS] * BATCH]
    if name == "class_labels":
        return [torch.tensor([1, 2])]
    if name == "added_cond_kwargs":
        return [
            {"resolution": None, "aspect_ratio": None},
            {"text_embeds": torch.randn(BATCH, 32), "time_ids": torch.randn(BATCH, 6)},
        ]
    return _control(name, config)


def _control(name: str, config: Any) -> list[Any]:
    side = _number(config, "sample_size", default=16)
    if name == "controlnet_cond":
        channels = _number(config, "conditioning_channels", default=3)
        return [torch.randn(BATCH, channels, 8 * side, 8 * side), torch.randn(BATCH, channels, side, side)]
    return []


def _ids(config: Any) -> int:
    axes = config.get("axes_dims_rope")
    return len(axes) if axes else 3
