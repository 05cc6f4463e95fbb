"""The prompts that were continued, and how their tokens change under a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from .written import FileField


@dataclass(frozen=True)
class PartShare:
    """A part of the model, and its share of the error in token choices."""

    part: Annotated[str, FileField("name of the part, such as `head` or `norms`")]
    share: Annotated[float, FileField("share of the squared error in the margins of tokens", least=0, most=1)]
    operations: Annotated[int, FileField("number of its operations that run low under the plan", least=0)]
    flips: Annotated[float | None, FileField("flips per 1,000 tokens predicted with this part in FP32")] = None


@dataclass(frozen=True)
class TokenComparison:
    """Decoding under a plan with its own cache, compared with FP32 step by step on FP32's tokens.

    Up to the first flip, the plan would generate the same text by itself.
    """

    kl: Annotated[float | None, FileField("mean Kullback-Leibler divergence of next tokens from FP32's, nats")]
    kl_99: Annotated[float | None, FileField("its 99th percentile over tokens")] = None
    kl_most: Annotated[float | None, FileField("its maximum over tokens")] = None
    same_top: Annotated[
        float | None, FileField("share of tokens whose likeliest choice is FP32's", least=0, most=1)
    ] = None
    rms_probability: Annotated[float | None, FileField("RMS change in the probability of FP32's token")] = None
    flips: Annotated[float | None, FileField("tokens per 1,000 that are chosen differently", least=0)] = None
    flips_low: Annotated[float | None, FileField("lower end of the 95 % interval of `flips`", least=0)] = None
    flips_high: Annotated[float | None, FileField("its upper end", least=0)] = None
    predicted_flips: Annotated[float | None, FileField("first-order prediction of `flips`; `null`: unavailable")] = None
    first_flip: Annotated[int | None, FileField("tokens to the first flip, median prompt; `null`: none in half")] = None
    first_flip_10: Annotated[int | None, FileField("the same for the worst 10 % of prompts; `null`: none")] = None
    kl_by_position: Annotated[tuple[float, ...], FileField("mean by position, in up to 32 intervals of steps")] = ()
    one_pass_kl: Annotated[float | None, FileField("`kl` if all tokens are read in one pass, without a cache")] = None
    one_pass_flips: Annotated[float | None, FileField("`flips` likewise")] = None
    parts: Annotated[tuple[PartShare, ...], FileField("parts of the model, the largest share first")] = ()
    failure: Annotated[str | None, FileField("why decoding failed, in one line")] = None


@dataclass(frozen=True)
class StoredCache:
    """The FP32 model on the same tokens, with its key-value cache stored in a format."""

    stored: Annotated[str, FileField("`bf16`; `fp8_e4m3`, `int8` with a scale for each tensor, set by the prompt")]
    fixed_bytes: Annotated[float, FileField("bytes of one text that do not depend on its length", least=0)]
    bytes_per_token: Annotated[float, FileField("bytes per token of a text", least=0)]
    saturated: Annotated[float, FileField("share of the entries beyond the scale's range", least=0, most=1)]
    generated: Annotated[TokenComparison, FileField("the tokens compared with those of the exact cache")]


@dataclass(frozen=True)
class Generation:
    """The tokens that FP32 generated, the reference for every plan."""

    prompts: Annotated[int, FileField("how many prompts were continued", least=1)]
    steps: Annotated[int, FileField("number of tokens generated per prompt", least=1)]
    tokens: Annotated[int, FileField("number of tokens that count, up to the end of each text", least=0)]
    temperature: Annotated[float, FileField("0: the likeliest token; else tokens are sampled", least=0)] = 0.0
    caches: Annotated[tuple[StoredCache, ...], FileField("the FP32 model with its key-value cache in fewer bits")] = ()
