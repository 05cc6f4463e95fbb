"""Configs of transformers made small: the fields of each, by what their names say they count."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

WIDTH, HEADS, HEAD, LAYERS, VOCABULARY, EXPERTS = 32, 4, 8, 2, 128, 4
KV_HEADS = 2
IMAGE, PATCH = 32, 8
SIDE = 64
"""Of images for a config that is small in nothing else."""
SPECIAL = 16
"""Ids at the end of the vocabulary that are left to image, audio and other placeholder tokens."""

_SIDE = r"image_size|img_size|input_resolution|pretrain_image_size"
_NAMES: tuple[tuple[str, int], ...] = (
    (r"(vocab_size|num_embeddings|codebook_size|n_words|.*_vocab_size(_\w+)?)", VOCABULARY),
    (r"(n_|num_)?(routed_|local_|sparse_)?(experts|num_experts|moe_num_experts|n_routed_experts)", EXPERTS),
    (r"(num_experts_per_tok|num_experts_per_token|moe_topk|moe_k|top_k_experts|experts_per_token)", 2),
    (r"(n_group|topk_group|num_expert_groups?)", 1),
    (r"(n_|num_)(shared_experts|moe_shared_experts)", 1),
    (r"(num_)?(kv|key_value|multi_query)_(heads|groups|group_num)|num_key_value_heads|n_kv_heads?", KV_HEADS),
    (r"(\w+_)?(head_dim|d_kv|head_size|dim_head|kv_channels)", HEAD),
    (r"(kv|q|o)_lora_rank|\w+_lora_rank|lora_rank_\w+|\w+_low_rank_dim|\w+_rank_dim", 16),
    (r"(\w+_)?(num_(\w+_)?)?(n_)?(attention_)?heads?|n_head|num_attention_heads|\w+_n_heads|mamba_n_heads", HEADS),
    (
        r"(\w+_)?(intermediate_size|ffn_dim|d_ff|inner_dim|n_inner|mlp_dim|ffn_hidden_size|feedforward_dim)"
        r"|dim_feedforward",
        2 * WIDTH,
    ),
    (
        r"(\w+_)?(hidden_size|d_model|n_embd|embed_dim|hidden_dim|embedding_size|emb_dim|projection_dim|output_dim|"
        r"out_hidden_size|encoder_width|dim|embedding_dim|hidden_channels|attn_hidden_size|embed_dims|d_embed)",
        WIDTH,
    ),
    (r"upsample_initial_channel", 2 * WIDTH),
    (r"(\w+_)?(num_(\w+_)?layers|n_layers?|layers|num_blocks|depth|num_hidden_groups)", LAYERS),
    (_SIDE, IMAGE),
    (r"patch_size", PATCH),
    (
        r"max_position_embeddings|n_positions|max_(source|target)_positions|context_length|max_seq_len(gth)?|n_ctx"
        r"|seq_length",
        64,
    ),
    (r"sliding_window|attention_window|local_attention|window_attention", 8),
    (r"mamba_d_state|state_size|ssm_state_size|d_state", 8),
    (r"num_queries", 10),
    (r"index_topk", 8),
    (r"num_mel_bins|num_filter_banks", 16),
    (r"codebook_dim", 8),
    (r"num_codebooks|n_codebooks", 2),
)

_ABSENT = {"num_experts_per_tok": 2, "vocab_size": VOCABULARY, "prediction_length": 8, "sliding_window": 8}
"""Fields that a model needs, and that its config leaves to its user."""

_STAGES = r"(\w+_)?(hidden_sizes|embed_dims|dims|conv_dim|channels|hidden_dims|widths|tdnn_dim)"


def shrunk(config_class: type, ratio: int = 1) -> Any:
    """A config with small sizes throughout, its sub-configs too. ratio: multiplies the widths."""
    return config_class(**_fields(config_class, ratio))


def shallow(config_class: type) -> Any:
    """A config as it ships, but for its depth and its vocabulary."""
    return config_class(
        **{k: v for k, v in _fields(config_class, 1).items() if v in (LAYERS, VOCABULARY) or isinstance(v, dict)}
    )


def pictured(config_class: Callable[[], Any]) -> Any:
    """A config as it ships, but for the sides of its images, and of the features that it says are made of them."""
    config = config_class()
    largest = max([SIDE, *_sides(config)])
    return type(config)(**_pictured(config, lambda side: max(1, side * SIDE // largest)))


def _sides(config: Any) -> Iterator[int]:
    for name, value in vars(config).items():
        if hasattr(value, "model_type"):
            yield from _sides(value)
        elif re.fullmatch(_SIDE, name):
            yield from [value] if isinstance(value, int) else value or ()


def _pictured(config: Any, scale: Callable[[int], int]) -> dict[str, Any]:
    def scaled(value: Any) -> Any:
        return scale(value) if isinstance(value, int) else [scaled(each) for each in value]

    found: dict[str, Any] = {}
    for name, value in vars(config).items():
        if hasattr(value, "model_type"):
            found[name] = {**value.to_dict(), **_pictured(value, scale)}
        elif value and re.fullmatch(rf"{_SIDE}|\w+_feature_sizes", name):
            found[name] = scaled(value)
    return found


def _fields(config_class: type, ratio: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config_class):
        default = field.default if field.default is not dataclasses.MISSING else None
        value = small(field.name, default, ratio)
        if value is not None:
            found[field.name] = value
    for key, spec in getattr(config_class, "sub_configs_defaults", {}).items():
        if not getattr(spec, "optional", False):
            found[key] = _part(spec, ratio)
    return found


def _part(spec: Any, ratio: int) -> dict[str, Any]:
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    known = isinstance(spec.config_class, type) and issubclass(spec.config_class, PreTrainedConfig)
    config_class = spec.config_class if known else CONFIG_MAPPING[spec.model_type]
    given = {name: (value, small(name, value, ratio)) for name, value in (spec.init_kwargs or {}).items()}
    chosen = {name: before if after is None else after for name, (before, after) in given.items()}
    return {**_fields(config_class, ratio), **chosen, "model_type": config_class.model_type}


def small(name: str, default: Any, ratio: int) -> Any:
    """What a field becomes; None where it stays."""
    if default is None and name in _ABSENT:
        return _ABSENT[name]
    if name.endswith(("token_id", "token_index")) and isinstance(default, int) and default >= VOCABULARY - SPECIAL:
        return VOCABULARY - 1 - hash_of(name) % SPECIAL
    if isinstance(default, Mapping) and default and all(isinstance(key, int) for key in default):
        return {key: value for key, value in default.items() if key < LAYERS}
    for pattern, value in _NAMES:
        if re.fullmatch(pattern, name):
            value = HEADS if value == KV_HEADS and ratio > 1 and "head" in name else value
            return _like(default, value * (ratio if value in (WIDTH, 2 * WIDTH, HEAD) else 1))
    if name in ("depths", "num_blocks", "layers", "encoder_depths") and isinstance(default, list | tuple):
        return type(default)(1 for _ in default)
    if _numbers(default) and re.fullmatch(_STAGES, name):
        return type(default)(max(8, WIDTH // 2 * ratio * v // max(1, min(default)) // 8 * 8) for v in default)
    return None


def _numbers(default: Any) -> bool:
    return isinstance(default, list | tuple) and bool(default) and all(isinstance(v, int) for v in default)


def hash_of(name: str) -> int:
    """Another number for most names, the same in every process."""
    return sum(name.encode())


def _like(default: Any, value: int) -> Any:
    """The value in the form of the default: a number, or one a stage; never more than there was."""
    if isinstance(default, bool | str | Mapping):
        return None
    if isinstance(default, int):
        return min(default, value)
    if _numbers(default):
        least = max(1, min(default))
        if len(set(default)) == 1:
            return type(default)(min(v, value) for v in default)
        small = max(1, value // 4)
        return type(default)(min(v, small * v // least) for v in default)
    return None
