"""Plans of formats for vLLM, which runs a whole model in one dtype."""

from __future__ import annotations

from ..artefact.cache_flags import vllm_flags, vllm_notes
from ..artefact.text import comment
from ..numerics.formats import FORMATS, label
from ..records import Audit, Plan
from .offer import Tool

NAME = "vllm"

REFUSES_FP16 = "Gemma 2, Gemma 3 and GLM-4"
"""Models that vLLM refuses to run in FP16."""

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
    reason = f"vLLM has one dtype for the whole model, and the plan keeps this in FP32: {listed}."
    whole = {name.partition("_")[2]: run for name, run in audit.baselines.items() if run.holds}
    if fmt := next((each for each in ("bf16", "fp16") if each in whole), None):
        error = whole[fmt].measured_error
        return f"{reason} The whole model in {label(fmt)} also holds, with an error of {error:.2g}: vllm serve CHECKPOINT --dtype {FORMATS[fmt].storage}"
    return f"{reason} The whole model in low precision does not hold: vllm serve CHECKPOINT --dtype float32"


TOOL = Tool("vLLM", ("autocast", "cast"), "", _in_one_dtype, _needs_two_dtypes)
"""What vLLM accepts was read from vLLM 0.33: `config/model.py`."""
