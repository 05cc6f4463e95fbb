"""Builds the base model of a PEFT adapter, with the adapter in it."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from torch import nn

from ...errors import LoadError
from ...isolation.process import reseed
from ...records import Origin
from ..discover import BuiltModel, load_checkpoint
from ..statedicts import few
from ..target import Target, call
from .checkpoints import low_entries, silence, tensors_in
from .folders import ADAPTER, ModelFolder, is_directory, read_json, snapshot

WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")

AUTO = {
    "CAUSAL_LM": "AutoPeftModelForCausalLM",
    "SEQ_2_SEQ_LM": "AutoPeftModelForSeq2SeqLM",
    "SEQ_CLS": "AutoPeftModelForSequenceClassification",
    "TOKEN_CLS": "AutoPeftModelForTokenClassification",
    "QUESTION_ANS": "AutoPeftModelForQuestionAnswering",
    "FEATURE_EXTRACTION": "AutoPeftModelForFeatureExtraction",
    None: "AutoPeftModel",
}
"""{`task_type` of an adapter: the class of peft that loads it with its base}"""


def build(folder: ModelFolder, target: Target, seed: int) -> BuiltModel:
    """Build the base model that the adapter's config names, in FP32, and load the adapter.

    Raises: LoadError(slug="missing-target" | "missing-weights" | "model-raises" | "weights-mismatch").
    """
    config = read_json(folder.path / ADAPTER)
    base = base_folder(config, folder.path)
    files = [folder.path / name for name in WEIGHTS if (folder.path / name).is_file()]
    if not files:
        message = f"{folder.path} has an {ADAPTER}, but no {WEIGHTS[0]}"
        raise LoadError(f"{message}: give the folder that `save_pretrained` of the PeftModel wrote", "missing-weights")
    symbol = f"{_auto_class(config, folder.path)}.from_pretrained"
    arguments = {"dtype": "float32", "local_files_only": True}
    stored = {**dict(tensors_in(files[:1])), **load_checkpoint(base)}
    silence("transformers")
    reseed(seed)
    peft: Any = importlib.import_module("peft")
    make = getattr(peft, symbol.partition(".")[0]).from_pretrained
    what = f"loading the adapter {folder.path.name} on {base.name}"
    model = call(make, what, "model-raises", str(folder.path), **arguments).float().eval()
    low = low_entries(stored.items(), model)
    notes = (
        f"The model is {type(model.get_base_model()).__name__} from {base.name} with the adapter {folder.path.name}.",
    )
    return BuiltModel(
        model, _origin(folder, symbol, arguments), stored_low=low, notes=notes, checkpoint=_unused(model, files[0])
    )


def base_folder(config: Any, folder: Path) -> Path:
    """The folder of the adapter's base model. Raises: LoadError(slug="missing-target")."""
    name = config.get("base_model_name_or_path")
    if not name:
        message = f"{folder / ADAPTER} names no base model"
        hint = (
            "set its base_model_name_or_path, or write a model.py that returns PeftModel.from_pretrained(base, folder)"
        )
        raise LoadError(f"{message}: {hint}", slug="missing-target")
    if is_directory(Path(name)):
        return Path(name)
    try:
        return snapshot(str(name), str(config.get("revision") or ""), str(name))
    except LoadError as error:
        message = f"the base model {name!r} of the adapter {folder.name} is neither a directory nor in the local cache"
        hint = f"download it first (`hf download {name}`), or correct base_model_name_or_path in {folder / ADAPTER}"
        raise LoadError(f"{message}: {hint}", slug="missing-target") from error


def _auto_class(config: Any, folder: Path) -> str:
    task = config.get("task_type")
    if task not in AUTO or (task is None and not config.get("auto_mapping")):
        message = f"{folder / ADAPTER} has the task_type {task!r}, for which peft chooses no class of the base model"
        hint = "write a model.py that returns PeftModel.from_pretrained(base, folder)"
        raise LoadError(f"{message}: {hint}", slug="model-raises")
    return AUTO[task]


def _origin(folder: ModelFolder, symbol: str, arguments: dict[str, Any]) -> Origin:
    where = str(Path.cwd())  # the name of the base model may be a relative path
    if not folder.repository:
        return Origin(None, "peft", symbol, "factory", (), arguments, folder=str(folder.path), working_directory=where)
    revision = {"revision": folder.revision} if folder.revision else {}
    return Origin(None, "peft", symbol, "factory", (folder.repository,), {**arguments, **revision})


def _unused(model: nn.Module, file: Path) -> tuple[str, ...]:
    """A note about weights of the adapter that the model lacks: peft ignores them without a word."""
    peft: Any = importlib.import_module("peft")
    known = set(peft.get_peft_model_state_dict(model))
    left = sorted(name for name, _ in tensors_in([file]) if name not in known)
    return (f"weights of the adapter that the model lacks are ignored ({len(left)}: {few(left)})",) if left else ()
