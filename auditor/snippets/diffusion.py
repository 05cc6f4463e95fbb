"""Code that uses a plan in a pipeline of diffusers."""

from __future__ import annotations

import re

from ..artefact.text import comment
from ..records import Audit, Plan
from .offer import Tool

NAMES = {
    "UNet": "unet",
    "Autoencoder": "vae",
    "VQModel": "vae",
    "ControlNet": "controlnet",
    "Prior": "prior",
    "Transformer": "transformer",
}
"""{part of a class's name: the usual name of such a component in a pipeline}"""

AUTOENCODERS = ("vae", "movq")
"""Components that a pipeline enters by `decode`."""

LAST = ("vocoder", "safety_checker")
"""Components whose results no other component reads."""

FOLDER = re.compile(r"hf:((?P<pipeline>.+)/)?(?P<name>[A-Za-z]\w*)(@[^:]*)?(:\w+)?")

RUN = re.compile(r"\d+ calls? in a run of \w+, ")
"""The origin of the inputs of a component that was audited on the calls of its pipeline."""

_NOTE = (
    "patched_model.py is in the directory of plan.json. Load the pipeline in FP32, without torch_dtype: the plan sets the "
    "dtypes. The pipeline may be moved to a GPU before or after. Its calls of other methods, such as decode, follow the "
    "plan too.",
    "For plans of several components: auditor.apply(pipe.vae, DIRECTORY) reads the plan.json in DIRECTORY.",
)

_CODE = """
import torch
from diffusers import DiffusionPipeline
{imported}
import patched_model

pipe = DiffusionPipeline.from_pretrained({folder!r}, torch_dtype=torch.float32)
patched_model.apply(pipe.{component}, plan={plan!r})
{hook}# pipe.to("cuda")
"""

_HOOK = """

def in_fp32(module, inputs, output):
    \"\"\"The scheduler and the other components continue in FP32.\"\"\"
    return tree_map_only(torch.Tensor, lambda x: x.float() if x.is_floating_point() else x, output)


pipe.{component}.register_forward_hook(in_fp32)
"""


_DECODE = """

def in_fp32(decode):
    \"\"\"A vocoder, and other components that read the results, continue in FP32.\"\"\"

    def run(*args, **kwargs):
        result = decode(*args, **kwargs)
        return tree_map_only(torch.Tensor, lambda x: x.float() if x.is_floating_point() else x, result)

    return run


pipe.{component}.decode = in_fp32(pipe.{component}.decode)
"""


def component_of(audit: Audit) -> tuple[str, str] | None:
    """(folder of the pipeline, name of the component) of an audited component; None for other models.

    The folder of a component that was audited alone is unknown: "path/to/pipeline".
    """
    target = audit.subject.target
    is_from_run = RUN.match(audit.subject.inputs_source) is not None
    match = FOLDER.fullmatch(target)
    if match is not None and is_from_run:
        return match["pipeline"] or "path/to/pipeline", match["name"]  # a target elsewhere is recorded by its name
    if match is not None and match["pipeline"] and match["name"] in _usual_names():
        return match["pipeline"], match["name"]
    if target.startswith("diffusers."):
        name = target.rpartition(":")[2]
        usual = next((usual for part, usual in NAMES.items() if part in name), None)
        return None if usual is None else ("path/to/pipeline", usual)
    return None


def _usual_names() -> set[str]:
    others = {"text_encoder", "text_encoder_2", "text_encoder_3", "image_encoder", "safety_checker", "vocoder"}
    return {*NAMES.values(), "transformer_2", "decoder", "movq", *others}


def _render(audit: Audit, plan: Plan) -> str:
    folder, component = component_of(audit) or ("path/to/pipeline", "unet")
    hook = _in_fp32(component).format(component=component)
    imported = "from torch.utils._pytree import tree_map_only\n" if hook else ""
    code = _CODE.format(folder=folder, component=component, plan=plan.name, hook=hook, imported=imported)
    return comment(*_NOTE) + code


def _in_fp32(component: str) -> str:
    """Code that converts a component's results to FP32, if other components read them."""
    if _is_encoder(component) or component in LAST:
        return ""
    return _DECODE if component in AUTOENCODERS else _HOOK


def _is_encoder(component: str) -> bool:
    return component.startswith(("text_encoder", "image_encoder"))


def _unusable(audit: Audit, plan: Plan) -> str | None:
    """Why a pipeline cannot follow the plan: it gives its latents the dtype of the text encoder's weights."""
    _, component = component_of(audit) or ("", "")
    if plan.strategy == "cast" and _is_encoder(component):
        return (
            f"The pipeline makes its inputs in the dtype of {component}, which the other components may not have. Use an "
            f"autocast plan, whose weights stay in FP32: --plan autocast_{plan.format}."
        )
    return None


DIFFUSERS = Tool("diffusers", ("autocast", "cast"), "", _render, _unusable)
