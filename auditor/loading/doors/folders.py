"""Determines from a model's folder, by its files, which library wrote it."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import LoadError, describe
from ..target import Target

PIPELINE = "model_index.json"
"""The file in which diffusers lists the components of a pipeline."""

ADAPTER = "adapter_config.json"
SENTENCES = "modules.json"
CONFIG = "config.json"
LORA = "pytorch_lora_weights.safetensors"

PACKAGES = {"pipeline": "diffusers", "component": "diffusers", "adapter": "peft", "sentences": "sentence_transformers"}
"""{kind of a folder: the package that reads it}; transformers reads all others."""

INSTALLED_AS = {"sentence_transformers": "sentence-transformers"}
"""{package: its name for pip}, if the names differ."""


@dataclass(frozen=True)
class ModelFolder:
    """A model's folder. kind: pipeline | component | adapter | sentences | model (of transformers).

    inside: the folder inside the repository that the target names, such as "unet"; "" for the repository itself.
    repository, revision: of a folder in the local cache of Hugging Face.
    """

    path: Path
    kind: str
    inside: str = ""
    repository: str = ""
    revision: str = ""

    @property
    def pipeline(self) -> Path | None:
        """The folder of the diffusers pipeline to which this component belongs, if there is one."""
        above = self.path.parent
        if self.kind == "pipeline" or not (above / PIPELINE).is_file():
            return None
        entry = read_json(above / PIPELINE).get(self.path.name)
        return above if isinstance(entry, list) else None


def locate(target: Target) -> ModelFolder:
    """The folder that an `hf:` target names: a directory, or a repository in the local cache, or a folder in it.

    Raises: LoadError(slug="missing-target" | "model-raises").
    """
    name = str(target.args[0])
    path = Path(name)
    if is_directory(path):
        path = path.resolve()
        return ModelFolder(path, kind_of(path))
    repository, inside, revision = split_repository(name)
    path = snapshot(repository, revision, name) / inside
    if not path.is_dir():
        raise LoadError(f"{repository} has no folder {inside!r} in the local cache: check the name", "missing-target")
    return ModelFolder(path, kind_of(path), inside, repository, revision)


def is_directory(path: Path) -> bool:
    """Whether a path is a directory; False for a name that no path can have."""
    try:
        return path.is_dir()
    except OSError:
        return False


def split_repository(name: str) -> tuple[str, str, str]:
    """`org/name/unet@main` -> ("org/name", "unet", "main")."""
    where, _, revision = name.partition("@")
    parts = where.split("/")
    return "/".join(parts[:2]), "/".join(parts[2:]), revision


def snapshot(repository: str, revision: str, name: str) -> Path:
    """A repository's folder in the local cache. Raises: LoadError(slug="missing-target")."""
    hub: Any = importlib.import_module("huggingface_hub")
    try:
        return Path(hub.snapshot_download(repository, revision=revision or None, local_files_only=True))
    except Exception as error:  # a name may be malformed, unknown or not cached: the advice is the same
        hint = f"download it first (`hf download {repository}`), or give a directory"
        raise LoadError(f"{name!r} is neither a directory nor in the local cache: {hint}", "missing-target") from error


def kind_of(folder: Path) -> str:
    """The kind of a model's folder, see ModelFolder. Raises: LoadError(slug="missing-target" | "model-raises")."""
    files = {"pipeline": PIPELINE, "adapter": ADAPTER, "sentences": SENTENCES}
    for kind, file in files.items():
        if (folder / file).is_file():
            return kind
    if (folder / CONFIG).is_file():
        return "component" if "_class_name" in read_json(folder / CONFIG) else "model"
    if (folder / LORA).is_file():
        hint = "write a model.py that loads the pipeline, calls its load_lora_weights, and returns one component"
        raise LoadError(
            f"{folder} has weights of a LoRA for a diffusers pipeline, and no model: {hint}", "missing-target"
        )
    within = sorted(path.parent.name for path in folder.glob(f"*/{CONFIG}"))
    example = f" (for example {folder / within[0]})" if within else ""
    names = f"no {CONFIG}, {PIPELINE}, {ADAPTER} or {SENTENCES}"
    raise LoadError(f"{folder} has {names}: give the directory of one model{example}", slug="missing-target")


def read_json(file: Path) -> Mapping[str, Any]:
    """The object in a JSON file. Raises: LoadError(slug="model-raises") if there is none."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LoadError(f"cannot read {file} ({describe(error)}): restore the file", slug="model-raises") from error
    if not isinstance(value, dict):
        raise LoadError(f"{file} should contain a JSON object: restore the file", slug="model-raises")
    return value


def needed_package(folder: ModelFolder) -> str:
    """The package that reads the folder."""
    return PACKAGES.get(folder.kind, "transformers")
