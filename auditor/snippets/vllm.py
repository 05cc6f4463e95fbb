"""Plans for vLLM, which runs a whole model in one dtype, and joins layers that read the same input."""

from __future__ import annotations

from ..artefact.cache_flags import vllm_flags, vllm_notes
from ..artefact.configs import compressed_code
from ..artefact.libraries import LIBRARIES, Library
from ..artefact.text import comment
from ..numerics.formats import FORMATS, label
from ..numerics.schemes import Scheme
from ..records import Audit, Plan
from .offer import Tool

NAME = "vllm"

REFUSES_FP16 = "Gemma 2, Gemma 3 and GLM-4"
"""Models that vLLM refuses to run in FP16."""

JOINED = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
)
"""Names of layers of one module that vLLM joins into one layer: it refuses a checkpoint that quantizes them differently."""

_NOTE = (
    "vLLM has kernels of its own, and computes norms and softmax in FP32. The audit ran the model's own code: compare outputs "
    "of both before you serve the model."
)

_SERVE = '''
# Command line: vllm serve CHECKPOINT --dtype {dtype}


def serve(checkpoint, **options):
    """Load a checkpoint of transformers. options: arguments of vllm.LLM."""
    from vllm import LLM

    return LLM(model=checkpoint, dtype={dtype!r}, **options)
'''

_SCHEMES = '''

# Command line, once the checkpoint is written: vllm serve CHECKPOINT


def serve(checkpoint, **options):
    """Load the checkpoint that llm-compressor wrote: vLLM reads the configuration from its config.json."""
    from vllm import LLM

    return LLM(model=checkpoint, **options)
'''


def _in_one_dtype(audit: Audit, plan: Plan) -> str:
    """Code that serves the model in the plan's format."""
    refused = f"vLLM refuses FP16 for {REFUSES_FP16}." if plan.format == "fp16" else ""
    return comment(_NOTE, refused, *_cache_notes(audit)) + _SERVE.format(dtype=FORMATS[plan.format].storage)


def _cache_notes(audit: Audit) -> list[str]:
    """Comments with the options for the key-value cache that the audit recommends, if it generated text."""
    made = audit.generation
    if made is None or made.cache_plan is None or not (flags := vllm_flags(made.cache_plan)):
        return []
    return [f"Key-value cache within the limits: {flags}", *vllm_notes(made.cache_plan)]


def _needs_two_dtypes(audit: Audit, plan: Plan) -> str | None:
    """Why vLLM cannot follow the plan: it keeps something in FP32."""
    kept = [path or "the model" for path, choice in plan.scopes.items() if choice.precision == "fp32"]
    kept += [f"{name} in {path or 'the model'}" for path, name in plan.exceptions]
    if not kept:
        return None
    listed = ", ".join(kept[:6]) + (f" and {len(kept) - 6} more" if len(kept) > 6 else "")
    said = f"vLLM has one dtype for the whole model, and the plan keeps this in FP32: {listed}."
    whole = {name.partition("_")[2]: run for name, run in audit.baselines.items() if run.holds}
    if fmt := next((each for each in ("bf16", "fp16") if each in whole), None):
        error = whole[fmt].measured_error
        return f"{said} The whole model in {label(fmt)} also holds, with an error of {error:.2g}: vllm serve CHECKPOINT --dtype {FORMATS[fmt].storage}"
    return f"{said} The whole model in low precision does not hold: vllm serve CHECKPOINT --dtype float32"


def _kinds(scheme: Scheme) -> tuple[str, ...]:
    """The kinds of layers that vLLM reads in a scheme: those of compressed-tensors, whose inputs have a scale for each
    token if they are INT8 with dynamic scales."""
    by = scheme.activation
    is_per_tensor = by is not None and by.block == (0, 0) and not by.calibrated and by.element.row is None
    return () if is_per_tensor else LIBRARIES["compressed-tensors"].kinds(scheme)


TOOL = Tool("vLLM", ("autocast", "cast"), "", _in_one_dtype, _needs_two_dtypes)
SCHEME_PLANS = Library(
    "vLLM",
    _kinds,
    lambda layers, kept: compressed_code(layers, kept) + _SCHEMES,
    LIBRARIES["compressed-tensors"].notes,
    joined=JOINED,
)
"""What vLLM accepts was read from vLLM 0.33: `compressed_tensors.py` and its `utils.py`, and `config/model.py`."""
