"""Builds the model of a target that names no Python code: an exported program, or a name in a library."""

from __future__ import annotations

import importlib
from dataclasses import replace

from ...errors import LoadError
from ..discover import BuiltModel, from_hub
from ..target import Target, blame
from . import programs


def needed_packages(target: Target) -> None:
    """Import the packages that the target needs. Raises: LoadError(slug="missing-package")."""
    if target.hub != "program":
        _import(target.module, target)
        _import("huggingface_hub", target)


def _import(name: str, target: Target) -> None:
    try:
        importlib.import_module(name)
    except Exception as error:  # the package is absent, lacks a dependency, or was built for another torch
        said = f"{target.text} needs {name}, and importing {name} raised {blame(error)}"
        raise LoadError(f"{said}: `pip install {name}`, or fix the installation", "missing-package") from error


def build(target: Target, seed: int, inputs: str | None = None) -> BuiltModel:
    """Build the model of a target, and the inputs that come with it. inputs: the option `--inputs`.

    Raises: LoadError.
    """
    if target.hub == "program":
        built = programs.build(target)
        return replace(built, inputs=None) if inputs else built
    return from_hub(target, seed)
