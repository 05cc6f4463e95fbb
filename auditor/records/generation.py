"""Records of generation: the prompts, and how the generated tokens change under a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from .written import FileField


@dataclass(frozen=True)
class PartShare:
    """One part of the model, such as its head, and the part's share of the error in token choices."""

    part: Annotated[str, FileField("name of the part, such as `head` or `norms`")]
    share: Annotated[float, FileField("share of the squared error in the margins between tokens", least=0, most=1)]
    operations: Annotated[int, FileField("number of operations of this part in low precision under the plan", least=0)]
    flips: Annotated[float | None, FileField("flips per 1,000 tokens, predicted with this part in FP32")] = None


@dataclass(frozen=True)
class TokenComparison:
    """Comparison of a plan with FP32, step by step: the plan decodes FP32's tokens with its own cache.

    A flip is a step at which the plan chooses another token. Up to the first flip, both generate the same text.
    """

    kl: Annotated[float | None, FileField("mean Kullback-Leibler divergence of next tokens from FP32's, in nats")]
    kl_99: Annotated[float | None, FileField("99th percentile of the divergence over tokens")] = None
    kl_most: Annotated[float | None, FileField("maximum of the divergence over tokens")] = None
    same_top: Annotated[float | None, FileField("share of tokens with FP32's likeliest token", least=0, most=1)] = None
    rms_probability: Annotated[float | None, FileField("RMS change in the probability of FP32's token")] = None
    flips: Annotated[float | None, FileField("tokens per 1,000 whose choice differs from FP32's", least=0)] = None
    flips_low: Annotated[float | None, FileField("lower end of the 95 % interval of `flips`", least=0)] = None
    flips_high: Annotated[float | None, FileField("upper end of the 95 % interval of `flips`", least=0)] = None
    predicted_flips: Annotated[float | None, FileField("first-order prediction of `flips`; `null`: unavailable")] = None
    first_flip: Annotated[
        int | None, FileField("tokens up to and including the first flip: median over prompts; `null`: half never flip")
    ] = None
    predicted_first_flip: Annotated[int | None, FileField("prediction; `null`: unavailable, or half never flip")] = None
    first_flip_10: Annotated[int | None, FileField("10th percentile of `first_flip`; `null`: 90 % never flip")] = None
    kl_by_position: Annotated[tuple[float, ...], FileField("`kl` by position after the prompt, up to 32 values")] = ()
    one_pass_kl: Annotated[float | None, FileField("`kl` if one pass reads all tokens, without a cache")] = None
    one_pass_flips: Annotated[float | None, FileField("`flips` if one pass reads all tokens, without a cache")] = None
    parts: Annotated[tuple[PartShare, ...], FileField("parts of the model, in decreasing order of `share`")] = ()
    failure: Annotated[str | None, FileField("why decoding failed, in one line")] = None


@dataclass(frozen=True)
class StoredCache:
    """Results of the FP32 model with its key-value cache stored in a low-precision format, on the reference tokens."""

    stored: Annotated[str, FileField("format: `bf16`, `fp8_e4m3` or `int8`")]
    fixed_bytes: Annotated[float, FileField("cache bytes of a text that do not depend on its length", least=0)]
    bytes_per_token: Annotated[float, FileField("cache bytes per token of a text", least=0)]
    saturated: Annotated[
        float,
        FileField(
            "share of the written entries, each counted once, that exceed the range of their scale", least=0, most=1
        ),
    ]
    generated: Annotated[TokenComparison, FileField("comparison with the tokens of the unrounded cache")]
    scale: Annotated[
        str,
        FileField(
            "scale of a one-byte format: set by the largest entry of the prompt, per `tensor` or per `head`; or `one`, fixed at 1",
            choices=("tensor", "head", "one"),
        ),
    ] = "tensor"


@dataclass(frozen=True)
class CachedTensor:
    """The keys or values of one layer, or of neighbouring layers that were measured together."""

    name: Annotated[str, FileField("the layers' keys or values, such as `layer 0 keys`")]
    layers: Annotated[tuple[int, ...], FileField("numbers of the layers; empty for a state without layers")]
    stored: Annotated[str, FileField("format in the recommended cache")]
    kl: Annotated[float | None, FileField("`kl` with only this tensor in the smaller format; `null`: not run")] = None
    flips: Annotated[float | None, FileField("`flips` with only this tensor in the smaller format")] = None


@dataclass(frozen=True)
class CachePlan:
    """A cache in one byte per entry, except for the keys or values that need BF16: the fewest bytes within the limits."""

    stored: Annotated[str, FileField("the smaller format: `fp8_e4m3` or `int8`")]
    scale: Annotated[str, FileField("its scale, as in `caches[].scale`", choices=("tensor", "head", "one"))]
    tensors: Annotated[tuple[CachedTensor, ...], FileField("every layer's keys and values")]
    bits: Annotated[float, FileField("mean bits per entry of the cache", least=8, most=16)]
    fixed_bytes: Annotated[float, FileField("as in `caches[]`", least=0)]
    bytes_per_token: Annotated[float, FileField("as in `caches[]`", least=0)]
    generated: Annotated[TokenComparison, FileField("comparison with the tokens of the unrounded cache")]
    runs: Annotated[int, FileField("number of decoding runs of the search", least=0)] = 0

    @property
    def kept(self) -> tuple[CachedTensor, ...]:
        """The keys and values that stay in BF16."""
        return tuple(one for one in self.tensors if one.stored != self.stored)


@dataclass(frozen=True)
class Generation:
    """Results of generation with the FP32 model, whose tokens are the reference for every plan."""

    prompts: Annotated[int, FileField("number of prompts that were continued", least=1)]
    steps: Annotated[int, FileField("number of tokens generated per prompt", least=1)]
    tokens: Annotated[int, FileField("number of tokens that are compared: up to the end of each text", least=0)]
    temperature: Annotated[float, FileField("sampling temperature; 0: always the likeliest token", least=0)] = 0.0
    caches: Annotated[tuple[StoredCache, ...], FileField("the FP32 model with its key-value cache in fewer bits")] = ()
    recommended_cache: Annotated[
        str | None, FileField("smallest of `caches` that meets the limits under the recommended plan; `null`: none")
    ] = None
    scaled_caches: Annotated[
        tuple[StoredCache, ...], FileField("the one-byte caches with other scales: per head, or fixed at 1")
    ] = ()
    cache_plan: Annotated[
        CachePlan | None, FileField("the smallest cache with a format per layer that meets the limits; `null`: none")
    ] = None
