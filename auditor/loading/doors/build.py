"""Builds the model of a target that names no Python code: a folder, an exported program, or a name in a library."""

from __future__ import annotations

import importlib
import importlib.util
from contextlib import suppress
from dataclasses import replace

from ...errors import LoadError
from ...isolation.process import swap_attribute
from ..discover import BuiltModel, built_for_method, from_timm, from_transformers, load_checkpoint
from ..target import Target, blame, call, parse
from . import adapters, diffusion, programs, sentences
from .folders import INSTALLED_AS, ModelFolder, locate, needed_package

BUILDERS = {
    "component": diffusion.build,
    "adapter": adapters.build,
    "sentences": sentences.build,
}
"""{kind of a folder: the function that builds its model}; transformers builds all others."""

NO_SENTENCES = (
    "modules.json: the model is one of sentence-transformers, which is not installed, so only its transformer is "
    "audited, without pooling (`pip install sentence-transformers`)"
)


def needed_packages(target: Target) -> None:
    """Check that the packages which the target needs can be imported.

    Raises: LoadError(slug="missing-package"), and the errors of `locate`.
    """
    if target.hub == "program":
        return
    if target.hub == "timm":
        _import("timm", target)
    _import("huggingface_hub", target)
    if target.hub == "hf":
        folder = locate(target)
        _import("transformers" if _is_readable_without(folder) else needed_package(folder), target)


def _is_readable_without(folder: ModelFolder) -> bool:
    """Whether transformers reads the folder although the library that wrote it is missing."""
    is_missing = importlib.util.find_spec(needed_package(folder)) is None
    return is_missing and folder.kind == "sentences" and (folder.path / "config.json").is_file()


def _import(name: str, target: Target) -> None:
    try:
        importlib.import_module(name)
    except Exception as error:  # the package is absent, lacks a dependency, or was built for another torch
        message = f"{target.text} needs {name}, and importing {name} raised {blame(error)}"
        hint = f"`pip install {INSTALLED_AS.get(name, name)}`, or fix the installation"
        raise LoadError(f"{message}: {hint}", "missing-package") from error


def build(target: Target, seed: int, inputs: str | None = None) -> BuiltModel:
    """Build the model of a target, and the inputs that come with it. inputs: the option `--inputs`.

    Raises: LoadError.
    """
    if target.hub == "program":
        built = programs.build(target)
        return replace(built, inputs=None) if inputs else built
    if target.hub == "timm":
        return call(from_timm, f"building {target.text}", "model-raises", target, seed)
    with swap_attribute(importlib.import_module("huggingface_hub.constants"), "HF_HUB_OFFLINE", True):
        folder = locate(target)
        if folder.kind == "pipeline":
            diffusion.refuse_pipeline(target, folder)
        calls = diffusion.calls_for(folder, target, seed, inputs)
        built = call(_build_folder, f"building {target.text}", "model-raises", folder, target, seed)
        method = target.symbol or calls.method
        if method:
            built = built_for_method(built, method, target)
        return replace(built, inputs=calls.inputs, notes=(*built.notes, *calls.notes))


def _build_folder(folder: ModelFolder, target: Target, seed: int) -> BuiltModel:
    if folder.kind in BUILDERS and not _is_readable_without(folder):
        return BUILDERS[folder.kind](folder, target, seed)
    notes = (NO_SENTENCES,) if folder.kind == "sentences" else ()
    if not folder.inside:
        built = from_transformers(target, folder.path, seed)
        return replace(built, notes=(*built.notes, *notes))
    built = from_transformers(replace(target, args=(str(folder.path),)), folder.path, seed)
    if built.origin is None:
        return built
    places = {"subfolder": folder.inside, "revision": folder.revision}
    arguments = {**built.origin.init_kwargs, **{name: value for name, value in places.items() if value}}
    origin = replace(built.origin, folder=None, init_args=(folder.repository,), init_kwargs=arguments)
    return replace(built, origin=origin)


def weights_of(text: str) -> int:
    """Size in bytes, in FP32, of the checkpoint of an `hf:` target; 0 if it is unknown before the model is built."""
    with suppress(LoadError, ImportError):  # loading the checkpoint later reports the error
        target = parse(text)
        if target.hub == "hf":
            stored = load_checkpoint(locate(target).path)
            return sum(4 * x.numel() for x in stored.values() if x.is_floating_point())
    return 0
