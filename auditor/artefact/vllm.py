"""Plans of quantization schemes for vLLM, which joins layers that read the same input, and quantizes inputs by itself."""

from __future__ import annotations

from dataclasses import replace

from ..numerics.schemes import Quantizer, Scheme
from .configs import compressed_code
from .libraries import LIBRARIES, Library

JOINED = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
)
"""Names of layers of one module that vLLM joins into one layer: it refuses a checkpoint that quantizes them differently."""

LEAST_SCALE = 1 / (448 * 512)
"""Lower bound of the scale of a token in FP8: `min_scaling_factor` of vLLM's FP8 kernels."""

LEAST_BLOCK = 1e-10
"""Lower bound of the largest magnitude of a block in FP8."""

_SCHEMES = '''

# Command line, once the checkpoint is written: vllm serve CHECKPOINT


def serve(checkpoint, **options):
    """Load the checkpoint that llm-compressor wrote: vLLM reads the configuration from its config.json."""
    from vllm import LLM

    return LLM(model=checkpoint, **options)
'''


def _kinds(scheme: Scheme) -> tuple[str, ...]:
    """The kinds of layers that vLLM reads in a scheme: those of compressed-tensors, whose inputs have a scale for each
    token if they are INT8 with dynamic scales."""
    by = scheme.activation
    is_per_tensor = by is not None and by.block == (0, 0) and not by.calibrated and by.element.row is None
    return () if is_per_tensor else LIBRARIES["compressed-tensors"].kinds(scheme)


def _rounding(by: Quantizer, is_weight: bool) -> Quantizer:
    """The checkpoint has the weights as compressed-tensors rounds them; vLLM's kernels quantize inputs, with a lower bound
    of scales in FP8, and INT8 divided by 127."""
    library = LIBRARIES["compressed-tensors"].rounding
    assert library is not None
    if is_weight or by.calibrated:
        return library(by, is_weight)
    if by.rule == "symmetric":
        return replace(by, rule="narrow")
    if by.rule == "largest" and by.block == (1, 0):
        return replace(by, least_scale=LEAST_SCALE)
    if by.rule == "largest" and all(by.block):
        return replace(by, least_scale=LEAST_BLOCK / by.element.largest)
    return library(by, is_weight)


VLLM = Library(
    "vLLM",
    _kinds,
    lambda layers, kept: compressed_code(layers, kept) + _SCHEMES,
    LIBRARIES["compressed-tensors"].notes,
    joined=JOINED,
    needs_gpu=lambda scheme: True,
    rounding=_rounding,
    stored=LIBRARIES["compressed-tensors"].stored,
    unusable=LIBRARIES["compressed-tensors"].unusable,
    where="in the checkpoint",
)
"""What vLLM accepts was read from vLLM 0.33: `compressed_tensors.py` and its `utils.py`; its scales from
`quantization/w8a8/fp8/common.cuh`, `int8/scaled_quant.cu` and `fp8_utils.py`."""
