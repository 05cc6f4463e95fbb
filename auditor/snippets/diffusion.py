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

FOLDER = re.compile(r"hf:(?P<pipeline>.+)/(?P<name>[A-Za-z]\w*)(@[^:]*)?(:\w+)?")

_NOTE = (
    "patched_model.py is in the directory of plan.json. Load the pipeline in FP32, without torch_dtype: the plan sets the "
    "dtypes. The pipeline may be moved to a GPU before or after. Its calls of other methods, such as decode, follow the "
    "plan too.",
    "For plans of several components: auditor.apply(pipe.vae, DIRECTORY) reads the plan.json in DIRECTORY.",
)

_CODE = """
import torch
from diffusers import DiffusionPipeline

import patched_model

pipe = DiffusionPipeline.from_pretrained({folder!r}, torch_dtype=torch.float32)
patched_model.apply(pipe.{component}, plan={plan!r})
# pipe.to("cuda")
"""


def component_of(audit: Audit) -> tuple[str, str] | None:
    """(folder of the pipeline, name of the component) of an audited component; None for other models.

    The folder of a component that was audited alone is unknown: "path/to/pipeline".
    """
    target = audit.subject.target
    if (match := FOLDER.fullmatch(target)) is not None and match["name"] in _usual_names():
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
    return comment(*_NOTE) + _CODE.format(folder=folder, component=component, plan=plan.name)


DIFFUSERS = Tool("diffusers", ("autocast", "cast"), "", _render)
