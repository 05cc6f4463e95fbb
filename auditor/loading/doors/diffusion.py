"""Builds components of diffusers, with the inputs that a short run of their pipeline gives them."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ...errors import LoadError
from ...isolation.process import reseed
from ...records import Origin
from ..discover import BuiltModel, differences
from ..inputs import Inputs
from ..target import Target, call
from . import pipelines
from .checkpoints import low_entries, silence, tensors_in
from .folders import PIPELINE, ModelFolder, read_json

WEIGHTS = "diffusion_pytorch_model"
"""Stem of the checkpoint's file names."""


@dataclass(frozen=True)
class ComponentCalls:
    """How a pipeline calls a component. method: the method that it calls, "" for `forward`; inputs: of its calls."""

    method: str = ""
    inputs: Inputs | None = None
    notes: tuple[str, ...] = ()


def build(folder: ModelFolder, target: Target, seed: int) -> BuiltModel:
    """Build a component in FP32, as diffusers' `from_pretrained` does.

    Raises: LoadError(slug="model-raises" | "weights-mismatch" | "bad-weights" | "quantized-model").
    """
    config = read_json(folder.path / "config.json")
    kind = str(config["_class_name"])
    maker = model_class(kind, folder.path)
    if "quantization_config" in config:
        message = f"the checkpoint in {folder.path} is quantized, so there are no FP32 values to compare with"
        raise LoadError(f"{message}: give the original checkpoint", slug="quantized-model")
    what = f"{kind} from {folder.path.name}"
    reseed(seed)
    files = sorted(folder.path.glob(f"{WEIGHTS}*.safetensors")) or sorted(folder.path.glob(f"{WEIGHTS}*.bin"))
    if not files:
        model = call(maker.from_config, what, "model-raises", config)
        return BuiltModel(model.float().eval(), None)
    arguments = {"local_files_only": True, **_variant(files)}
    asked = {**arguments, "output_loading_info": True}
    model, info = call(maker.from_pretrained, what, "model-raises", str(folder.path), **asked)
    notes = tuple(differences(model, info, folder.path.name))
    low = low_entries(tensors_in(files), model, info.get("unexpected_keys", ()))
    return BuiltModel(model.float(), _origin(folder, kind, arguments), stored_low=low, checkpoint=notes)


def model_class(name: str, folder: Path) -> Any:
    """A model class of diffusers. Raises: LoadError(slug="model-raises") if there is none of this name."""
    diffusers: Any = importlib.import_module("diffusers")
    silence("diffusers")
    kind = getattr(diffusers, name, None)
    if not isinstance(kind, type) or not issubclass(kind, nn.Module):
        what = f"{folder / 'config.json'} names the class {name}"
        hint = "install the version of diffusers that wrote the folder, or write a model.py that builds the model"
        message = f"{what}, which is no model of diffusers {diffusers.__version__}: {hint}"
        raise LoadError(message, slug="model-raises")
    return kind


def _variant(files: list[Path]) -> dict[str, str]:
    """{"variant": "fp16"} if the only checkpoint is one of a variant, such as diffusion_pytorch_model.fp16.safetensors."""
    variants = {file.name.removeprefix(WEIGHTS).split(".")[1] for file in files}
    plain = {"safetensors", "bin"}
    if variants & plain:
        return {}
    return {"variant": sorted(variants)[0].partition("-")[0]}


def _origin(folder: ModelFolder, kind: str, arguments: dict[str, Any]) -> Origin:
    symbol = f"{kind}.from_pretrained"
    if not folder.repository:
        return Origin(None, "diffusers", symbol, "factory", (), arguments, folder=str(folder.path))
    places = {"subfolder": folder.inside, "revision": folder.revision}
    known = {name: value for name, value in places.items() if value}
    return Origin(None, "diffusers", symbol, "factory", (folder.repository,), {**arguments, **known})


def calls_for(folder: ModelFolder, target: Target, seed: int, text: str | None) -> ComponentCalls:
    """The calls of a component in a short run of its pipeline, if it belongs to one.

    text: the option `--inputs`; if it does not give the pipeline's arguments, the pipeline is not run.
    Raises: LoadError(slug="model-raises") if the pipeline does not run.
    """
    if folder.pipeline is None:
        return ComponentCalls()
    arguments = pipelines.arguments_from(text, folder.pipeline, seed)
    if text and arguments is None:
        return ComponentCalls()
    run = pipelines.short_run(folder.pipeline, seed, arguments)
    calls = run.calls.get(folder.path.name, {})
    if not calls or (target.symbol and target.symbol not in calls):
        what = f"`{target.symbol}` of {folder.path.name}" if target.symbol else folder.path.name
        called = ", ".join(f"{name}.{method}" for name, methods in run.calls.items() for method in methods)
        note = f"A short run of {run.kind} does not call {what} (it calls {called}), so its inputs were generated."
        return ComponentCalls(notes=(note,))
    method = target.symbol or main_method(calls)
    batches = calls[method]
    count = "1 call" if len(batches) == 1 else f"{len(batches)} calls"
    source = f"{count} in a run of {run.kind}, {run.arguments}"
    others = [f"hf:{target.args[0]}:{name}" for name in calls if name != method]
    notes = (f"The pipeline also calls other methods; to audit them: {' and '.join(others)}.",) if others else ()
    return ComponentCalls("" if method == "forward" else method, Inputs(batches, source), notes)


def main_method(calls: pipelines.Calls) -> str:
    """The method that is audited if the target names none: `forward`, or the first that the pipeline calls."""
    return "forward" if "forward" in calls else next(iter(calls))


def refuse_pipeline(target: Target, folder: ModelFolder) -> None:
    """Say how to audit a pipeline where only one model can be audited. Raises: LoadError(slug="ambiguous-model")."""
    names = pipelines.models_in(folder.path)
    examples = " or ".join(f"{target.text}/{name}" for name in names)
    message = f"{folder.path / PIPELINE} describes a pipeline of several models"
    raise LoadError(f"{message}: name one component, {examples}", slug="ambiguous-model")
