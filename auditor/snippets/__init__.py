"""Plans as code for other tools, with a comment on what the tool cannot express. Does not import torch."""

from __future__ import annotations

from typing import Any

from ..artefact.libraries import LIBRARIES, code_of, quantized_plan
from ..artefact.vllm import VLLM as SCHEMES_IN_VLLM
from ..document.read import audit_in
from ..errors import AuditorError
from .diffusion import DIFFUSERS, component_of
from .offer import code_for
from .storage import FSDP2, HUGGING_FACE
from .trainers import GRADSCALER, LIGHTNING
from .vllm import NAME as VLLM
from .vllm import TOOL

TOOLS = {
    "hf": HUGGING_FACE,
    "fsdp2": FSDP2,
    "lightning": LIGHTNING,
    "gradscaler": GRADSCALER,
    "diffusers": DIFFUSERS,  # only for components of its pipelines
}
"""{name for `--for`: its Tool}, in the order in which `snippet` prints them."""

KNOWN = (*TOOLS, VLLM, *LIBRARIES)
"""Every tool of `snippet`. vLLM takes plans of both kinds."""


def snippet(plan: Any, tool: str, name: str | None = None) -> str:
    """Python code to paste, which makes a model in `tool` follow a plan.

    plan: an Audit, a dict as in plan.json, or a path to one. tool: a key of TOOLS, of LIBRARIES for a plan of
    quantization schemes, or "vllm" for both. name: the plan's name. The default is the recommended plan; if the tool
    cannot use it, a verified plan, in the same format if possible; among plans of quantization schemes, the one with
    the fewest bits.
    Raises: AuditorError(slug="no-such-tool"), PlanError.
    """
    if not isinstance(tool, str) or tool not in KNOWN:
        known = ", ".join(KNOWN)
        raise AuditorError(f"there is no snippet for {tool!r}: choose one of {known}", slug="no-such-tool")
    audit = audit_in(plan)
    if tool in LIBRARIES:
        return code_of(audit, LIBRARIES[tool], quantized_plan(audit, name))
    if tool != VLLM:
        return code_for(audit, TOOLS[tool], name)
    if audit.quantized_plans and name not in audit.plans:
        return code_of(audit, SCHEMES_IN_VLLM, quantized_plan(audit, name))
    return code_for(audit, TOOL, name)


def snippets(plan: Any, name: str | None = None) -> dict[str, str]:
    """{tool: its snippet} for every tool that can use plans of this kind; diffusers only for its own components.

    Raises: PlanError.
    """
    audit = audit_in(plan)
    if any(name == plan.name for plan in audit.quantized_plans):
        return {key: code_of(audit, library, quantized_plan(audit, name)) for key, library in LIBRARIES.items()}
    tools = {key: tool for key, tool in TOOLS.items() if tool is not DIFFUSERS or component_of(audit) is not None}
    return {key: code_for(audit, tool, name) for key, tool in tools.items()}
