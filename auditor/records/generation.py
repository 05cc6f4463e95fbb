"""The prompts that were continued, and how their tokens change under a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from .written import FileField


@dataclass(frozen=True)
class Generation:
    """The tokens that FP32 generated, the reference for every plan."""

    prompts: Annotated[int, FileField("how many prompts were continued", least=1)]
    steps: Annotated[int, FileField("tokens by which each was continued", least=1)]
    tokens: Annotated[int, FileField("of these all that count: none behind the end of a text", least=0)]
    temperature: Annotated[float, FileField("0: the likeliest token; else tokens are sampled", least=0)] = 0.0


@dataclass(frozen=True)
class PartShare:
    """A part of the model, and its share of the error in token choices."""

    part: Annotated[str, FileField("what it is, such as `head` or `norms`")]
    share: Annotated[float, FileField("of the squared error that moves the margins of tokens", least=0, most=1)]
    operations: Annotated[int, FileField("operations of it that round in the plan", least=0)]
    flips: Annotated[float | None, FileField("flips in 1,000 tokens predicted with this part in FP32")] = None


@dataclass(frozen=True)
class Generated:
    """Decoding under a plan with its own cache, compared with FP32 step by step on FP32's tokens.

    Up to the first flip, the plan would generate the same text by itself.
    """

    kl: Annotated[
        float | None, FileField("mean Kullback-Leibler divergence of FP32's next token from the plan's, nats")
    ]
    kl_99: Annotated[float | None, FileField("the same, of the token at 99 %")] = None
    kl_most: Annotated[float | None, FileField("the largest of any token")] = None
    same_top: Annotated[
        float | None, FileField("share of tokens whose likeliest choice is FP32's", least=0, most=1)
    ] = None
    rms_probability: Annotated[
        float | None, FileField("root mean square of what FP32's token's probability differs by")
    ] = None
    flips: Annotated[float | None, FileField("tokens in 1,000 that are chosen otherwise", least=0)] = None
    flips_low: Annotated[float | None, FileField("lower end of the 95 % interval of `flips`", least=0)] = None
    flips_high: Annotated[float | None, FileField("its upper end", least=0)] = None
    predicted_flips: Annotated[float | None, FileField("what first order predicts for `flips`; `null`: no form")] = None
    first_flip: Annotated[int | None, FileField("tokens to the first flip, median prompt; `null`: none in half")] = None
    first_flip_10: Annotated[int | None, FileField("the same, of the prompt at 10 %; `null`: none")] = None
    kl_by_position: Annotated[tuple[float, ...], FileField("mean by position, in up to 32 equal runs of steps")] = ()
    one_pass_kl: Annotated[
        float | None, FileField("`kl` where the plan reads all tokens in one pass, with no cache")
    ] = None
    one_pass_flips: Annotated[float | None, FileField("`flips` likewise")] = None
    parts: Annotated[tuple[PartShare, ...], FileField("parts of the model, the largest share first")] = ()
    failure: Annotated[str | None, FileField("why it did not decode, in one line")] = None
