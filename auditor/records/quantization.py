"""Records of quantization: each layer under each scheme."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from .measure import Verdict
from .written import FileField

KEEP = "keep"
"""The remedy that does not quantize a layer."""

UNJUDGED = Verdict("untested", "not judged yet")


@dataclass(frozen=True)
class QuantizedLayer:
    """One layer, alone with quantized weight and input under one scheme; everything else in FP32."""

    scheme: Annotated[str, FileField("name of the [scheme](quantization.md)")]
    node: Annotated[str, FileField("name of the operation in the captured graph")]
    owner: Annotated[str, FileField("module that contains the operation")]
    op: Annotated[str, FileField("ATen overload of the operation")]
    effect: Annotated[float, FileField("output change, as `contributions[].isolated`; decides the verdict")]
    weight_effect: Annotated[float, FileField("first-order output change with only the weight quantized")]
    activation_effect: Annotated[float, FileField("first-order output change with only the input quantized")]
    decided_by: Annotated[
        str,
        FileField(
            "origin of `effect`: `first-order`: predicted; `re-run`: measured; `not-run`: unknown without a run",
            choices=("first-order", "re-run", "not-run"),
        ),
    ]
    error: Annotated[float, FileField("relative L2 error of the layer's result")]
    weight_error: Annotated[float, FileField("relative L2 error of the result with only the weight quantized")]
    activation_error: Annotated[float, FileField("relative L2 change of the result by quantizing the input too")]
    saturated: Annotated[int, FileField("entries of weight and input that exceed the largest element", least=0)]
    zeroed: Annotated[int, FileField("non-zero entries of weight and input that become zero", least=0)]
    part: Annotated[str, FileField("the part with the larger effect", choices=("weight", "activation", "both"))]
    cause: Annotated[
        str,
        FileField(
            "cause of that part's error: `outlier channel` of the summed dimension; `outlier row`: an output channel "
            "of a weight, a row of an activation; `slice`: of a fused weight; `range`: entries saturate or become zero; "
            "`rounding`",
            choices=("outlier channel", "outlier row", "slice", "range", "rounding"),
        ),
    ]
    place: Annotated[str, FileField("the channels, rows or slice of the cause, in words; empty: none")] = ""
    remedy: Annotated[
        str,
        FileField("cheapest remedy: a scheme with finer scales, or `keep` the layer unquantized; empty: none needed"),
    ] = ""
    remedied: Annotated[float, FileField("measured `effect` with the remedy")] = 0.0
    criterion: Annotated[str, FileField("the criterion of which this layer uses the largest share")] = ""
    verdict: Annotated[Verdict, FileField("verdict and reason")] = UNJUDGED
