"""Builds models of exported programs (`.pt2`)."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from ...errors import LoadError, describe
from ...isolation.process import swap_attribute
from ...records import Origin
from ..discover import BuiltModel
from ..inputs import Inputs, as_batches
from ..target import Target


def build(target: Target) -> BuiltModel:
    """Load an exported program, with the example inputs that it contains.

    Raises: LoadError(slug="model-raises") for a file that torch cannot read.
    """
    path = Path(str(target.args[0]))
    try:
        with swap_attribute(logging.getLogger("torch.export"), "disabled", True):  # it logs a traceback
            program = torch.export.load(path)
        model = program.module()
    except Exception as error:
        hint = "write it with torch.export.save(torch.export.export(model, inputs), path), in this version of torch"
        message = f"{path.name} cannot be read as an exported program ({describe(error)})"
        raise LoadError(f"{message}: {hint}", slug="model-raises") from error
    origin = Origin(None, "torch.export", "load", "program", folder=str(path))
    inputs = None
    if program.example_inputs is not None:
        batches = as_batches([program.example_inputs], path.name)
        inputs = Inputs(batches, f"the example inputs in {path.name}")
    return BuiltModel(model, origin, inputs=inputs)
