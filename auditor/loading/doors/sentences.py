"""Builds models of sentence-transformers."""

from __future__ import annotations

import importlib
import json
import logging
from pathlib import Path
from typing import Any

from ...errors import LoadError, describe
from ...isolation.process import reseed
from ...records import Origin
from ..discover import BuiltModel, load_checkpoint
from ..target import Target, call
from .checkpoints import low_entries, silence
from .folders import SENTENCES, ModelFolder, read_json

DETAILS = "config_sentence_transformers.json"
"""The file that names the class of the model."""

FIRST = "0_Transformer"
"""The folder of the transformer's checkpoint in models of earlier versions."""


def build(folder: ModelFolder, target: Target, seed: int) -> BuiltModel:
    """Build the model in FP32. Raises: LoadError(slug="model-raises" | "remote-code")."""
    library: Any = importlib.import_module("sentence_transformers")
    logging.getLogger("sentence_transformers").setLevel(logging.ERROR)
    silence("transformers")
    refuse_code(folder.path)
    kind = model_kind(folder.path)
    if not hasattr(library, kind):
        message = (
            f"{folder.path / DETAILS} names the class {kind}, which sentence-transformers {library.__version__} lacks"
        )
        raise LoadError(f"{message}: install the version that wrote the folder", slug="model-raises")
    arguments = {"device": "cpu", "local_files_only": True, "model_kwargs": {"torch_dtype": "float32"}}
    reseed(seed)
    what = f"{kind} from {folder.path.name}"
    model = call(getattr(library, kind), what, "model-raises", str(folder.path), **arguments).float().eval()
    origin = Origin(None, "sentence_transformers", kind, "factory", (), arguments, folder=str(folder.path))
    if folder.repository:
        revision = {"revision": folder.revision} if folder.revision else {}
        origin = Origin(None, "sentence_transformers", kind, "factory", (folder.repository,), {**arguments, **revision})
    stored = load_checkpoint(folder.path) or load_checkpoint(folder.path / FIRST)
    return BuiltModel(model, origin, stored_low=low_entries(stored.items(), model))


def refuse_code(folder: Path) -> None:
    """Refuse a model with modules outside the library, whose code versions before 6 run without being asked.

    Raises: LoadError(slug="remote-code" | "model-raises").
    """
    try:
        modules = json.loads((folder / SENTENCES).read_text(encoding="utf-8"))
        types = [str(module["type"]) for module in modules]
    except (OSError, ValueError, TypeError, KeyError) as error:
        message = f"cannot read {folder / SENTENCES} ({describe(error)}): restore the file"
        raise LoadError(message, slug="model-raises") from error
    foreign = [name for name in types if not name.startswith("sentence_transformers.")]
    if foreign:
        message = f"{folder} contains the module {foreign[0]}, which is not of sentence-transformers"
        hint = "an hf: target never runs such code; read it, then audit a model.py that returns the model"
        raise LoadError(f"{message}: {hint}", slug="remote-code")


def model_kind(folder: Path) -> str:
    """The class of the model: SentenceTransformer, SparseEncoder or another of the library."""
    if not (folder / DETAILS).is_file():
        return "SentenceTransformer"
    return str(read_json(folder / DETAILS).get("model_type") or "SentenceTransformer")
