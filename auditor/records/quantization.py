"""Records of quantization: each layer under each scheme, and plans of a scheme for every layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from .generation import TokenComparison
from .measure import Verdict
from .plan import Score
from .written import FileField, empty

KEEP = "keep"
SMOOTH = "smooth"
"""Value of the field `remedy` that means: leave the layer unquantized."""

MIXED = "mixed"
"""Name of the plan that chooses among several schemes."""

UNJUDGED = Verdict("untested", "not judged yet")


@dataclass(frozen=True)
class QuantizedLayer:
    """Errors of one layer if only this layer's weight and input are quantized, under one scheme."""

    scheme: Annotated[str, FileField("name of the [scheme](quantization.md)")]
    node: Annotated[str, FileField("name of the operation in the captured graph")]
    owner: Annotated[str, FileField("module that contains the operation")]
    op: Annotated[str, FileField("ATen overload of the operation")]
    key: Annotated[str, FileField("name of the layer in `quantized_plans[].layers`")]
    effect: Annotated[float, FileField("output change, as `contributions[].isolated`; decides the verdict")]
    weight_effect: Annotated[float, FileField("first-order output change with only the weight quantized")]
    activation_effect: Annotated[float, FileField("first-order output change with only the input quantized")]
    decided_by: Annotated[
        str,
        FileField(
            "origin of `effect`: `first-order`: predicted; `re-run`: measured, always if a choice such as a top-k depends on "
            "the layer; `not-run`: unknown without a run",
            choices=("first-order", "re-run", "not-run"),
        ),
    ]
    error: Annotated[float, FileField("relative L2 error of the layer's result")]
    weight_error: Annotated[float, FileField("relative L2 error of the result with only the weight quantized")]
    activation_error: Annotated[float, FileField("relative L2 change of the result if the input is quantized too")]
    saturated: Annotated[int, FileField("number of entries of weight and input beyond the largest element", least=0)]
    zeroed: Annotated[int, FileField("number of non-zero entries of weight and input that become zero", least=0)]
    part: Annotated[str, FileField("the part with the larger effect", choices=("weight", "activation", "both"))]
    cause: Annotated[
        str,
        FileField(
            "cause of that part's error: `outlier channel` of the summed dimension; `outlier row`: an output channel "
            "of a weight, a row of an activation; `slice`: of a fused weight; `unequal channels`: output "
            "channels of a weight that share a scale; `range`: entries saturate or become zero; `rounding`",
            choices=("outlier channel", "outlier row", "slice", "unequal channels", "range", "rounding"),
        ),
    ]
    place: Annotated[str, FileField("the channels, rows or slice with the cause, in words; or empty")] = ""
    has_kernel: Annotated[
        bool, FileField("whether kernels of the scheme fit the layer; without one it stays in 16 bits under every plan")
    ] = True
    zero_blocks: Annotated[
        str,
        FileField(
            "the part with a row or block of zeros whose scale is zero: zero in the audit, NaN in torchao; empty: none",
            choices=("", "weight", "activation", "both"),
        ),
    ] = ""
    remedy: Annotated[
        str,
        FileField(
            "cheapest remedy: a scheme with finer scales; `smooth` the input, see `smoothing`; or `keep` the layer unquantized; "
            "empty: none needed"
        ),
    ] = ""
    remedied: Annotated[float, FileField("measured `effect` with the remedy")] = 0.0
    smoothing: Annotated[
        str,
        FileField(
            "module that absorbs factors which smooth the input, with their exponent; empty: not tried, or no module"
        ),
    ] = ""
    smoothed: Annotated[float | None, FileField("measured `effect` with the smoothed input; `null`: not tried")] = None
    criterion: Annotated[str, FileField("the criterion of which this layer uses the largest share")] = ""
    verdict: Annotated[Verdict, FileField("verdict and reason")] = UNJUDGED


@dataclass(frozen=True)
class LibraryCode:
    """A plan's code for one library: what its layers, its rounding and its storage give."""

    error: Annotated[
        float,
        FileField(
            "measured error on calibration and held-out inputs with the library's layers and rounding, all other layers in FP32"
        ),
    ]
    weights_bytes: Annotated[float, FileField("bytes of all parameters and buffers as this code stores them", least=0)]
    verified_by: Annotated[
        str,
        FileField(
            "what ran: `torchao`, or the audit's `emulation` of the library's rounding",
            choices=("torchao", "emulation"),
        ),
    ]


@dataclass(frozen=True)
class QuantizedPlan:
    """A scheme, or 16 bits, for every layer that the plan's schemes can quantize. Errors have the budget's measure."""

    name: Annotated[str, FileField("the scheme, or `mixed` for several schemes")]
    schemes: Annotated[tuple[str, ...], FileField("the schemes from which the plan chooses")]
    layers: Annotated[
        Mapping[str, str],
        FileField(
            "scheme of each layer, or an empty text for 16 bits, by the path of the module with the `weight`. A weight "
            "with another name is listed by its full name, a tied weight under each of its names"
        ),
    ]
    groups: Annotated[
        tuple[tuple[str, ...], ...], FileField("keys of `layers` that must have one scheme, such as q, k and v")
    ]
    effective_bits: Annotated[float, FileField("mean bits per weight of `layers`, with the scales of blocks", least=0)]
    model_bits: Annotated[
        float,
        FileField(
            "mean bits per number of all floating-point parameters and buffers; 16 bits where not quantized", least=0
        ),
    ]
    left_out: Annotated[
        tuple[str, ...],
        FileField(
            "weights of products and embeddings that stay in 16 bits since no scheme of the audit can quantize them"
        ),
    ]
    weights_bytes: Annotated[
        float, FileField("bytes of all parameters and buffers; 16 bits where not quantized", least=0)
    ]
    weights_share: Annotated[float, FileField("`weights_bytes` divided by the bytes of a model in 16 bits", least=0)]
    time_share: Annotated[
        float | None, FileField("predicted time of one forward on `--gpu`, divided by BF16's; `null`: not predicted")
    ]
    predicted_error: Annotated[
        float,
        FileField("predicted error on the calibration inputs: the sum of the output changes by each group alone"),
    ]
    single_errors: Annotated[float, FileField("sum of the layers' single effects")]
    calibration_error: Annotated[float, FileField("measured error on the calibration inputs, worst batch")]
    held_out_error: Annotated[float | None, FileField("measured error on the held-out inputs; `null`: no inputs")]
    verified_by: Annotated[
        str,
        FileField(
            "what ran: the model quantized by `torchao`, or the audit's `emulation`", choices=("torchao", "emulation")
        ),
    ]
    despite: Annotated[
        Mapping[str, str],
        FileField("layers that the plan quantizes although they are unsafe or untested alone, with the reason"),
    ] = empty()
    pasted_error: Annotated[
        float | None,
        FileField(
            "error of torchao's code as it is emitted, with its layers and all others in BF16, on calibration and held-out "
            "inputs, in emulation if a layer needs a GPU; `null`: no such code, or the model does not run in BF16"
        ),
    ] = None
    as_pasted: Annotated[
        Mapping[str, LibraryCode],
        FileField("the plan's code by the library's name; without libraries that can quantize no layer of the plan"),
    ] = empty()
    score: Annotated[Score | None, FileField("the user's score under the plan; `null`: none")] = None
    runs: Annotated[int, FileField("number of model runs from which layers were chosen", least=0)] = 0
    tested: Annotated[
        int,
        FileField(
            "number of choices with a quantized layer that ran to a finite error, in this and earlier plans", least=0
        ),
    ] = 0
    generated: Annotated[TokenComparison | None, FileField("comparison with FP32's tokens; `null`: not requested")] = (
        None
    )
    dominated_by: Annotated[
        str,
        FileField(
            "plan with no more bits, memory and time, and a smaller error or the same layers, which reports show instead; "
            "empty: none"
        ),
    ] = ""

    @property
    def error(self) -> float:
        """The larger of the errors on the calibration and on the held-out inputs."""
        return max(self.calibration_error, self.held_out_error or 0.0)

    @property
    def rank(self) -> tuple[float, float, float]:
        """Sort key: the fewest bits, then the least time, then the smallest error."""
        return self.effective_bits, self.time_share or 0.0, self.error
