"""Models of timm and Hugging Face by name: `timm:NAME`, `hf:NAME_OR_PATH`; nothing is downloaded, ever."""

from __future__ import annotations

import difflib
import importlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..errors import LoadError
from ..isolation.members import size_of
from ..isolation.process import reseed, swapped
from ..numerics.formats import is_low
from ..offload import onto
from ..records import Origin
from .discover import BuiltModel
from .state import name_of
from .statedicts import few, read_checkpoint
from .target import Target, blame, call
from .weights import refused

PACKAGES = {"timm": ("timm", "huggingface_hub"), "hf": ("transformers", "huggingface_hub")}
CHECKPOINTS = [f"{name}{index}" for name in ("model.safetensors", "pytorch_model.bin") for index in ("", ".index.json")]
"""Names that transformers looks for, in its order."""
WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin", "*.index.json")


def require(target: Target) -> None:
    """Imports the packages the target needs. Raises: LoadError(slug="missing-package")."""
    for name in PACKAGES[target.hub]:
        try:
            importlib.import_module(name)
        except Exception as error:  # it is absent, lacks another, or was built for another torch
            said = f"{target.text} needs {name}, and importing that raised {blame(error)}"
            raise LoadError(f"{said}: `pip install {name}`, or mend what is installed", "missing-package") from error


def build(target: Target, seed: int) -> BuiltModel:
    """The model a hub target names, in FP32, and how to make it again.

    Raises: LoadError(slug="missing-target" | "no-symbol" | "bad-target" | "model-raises" | "quantised-model" |
    "remote-code" | "missing-weights" | "bad-weights" | "weights-mismatch").
    """
    with swapped(importlib.import_module("huggingface_hub.constants"), "HF_HUB_OFFLINE", True):
        reseed(seed)
        return call(_timm if target.hub == "timm" else _hugging_face, f"building {target.text}", "model-raises", target)


def weights_of(target: Target) -> int:
    """Bytes in FP32 of the checkpoint of a Hugging Face target; 0 where that is not known before the model is made."""
    with suppress(LoadError, ImportError):
        if target.hub == "hf":
            return sum(4 * x.numel() for x in _stored(_folder(target)).values() if x.is_floating_point())
    return 0


def _timm(target: Target) -> BuiltModel:
    timm = importlib.import_module("timm")
    name = str(target.args[0])
    if not timm.is_model(name):
        close = difflib.get_close_matches(name, timm.list_models(), n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else "timm.list_models() has them all"
        raise LoadError(f"timm knows no model {name!r}: {hint}", slug="no-symbol")
    model = call(timm.create_model, f"timm.create_model({name!r})", "model-raises", *target.args, **target.kwargs)
    return BuiltModel(model, Origin(None, "timm", "create_model", "factory", target.args, dict(target.kwargs)))


def _hugging_face(target: Target) -> BuiltModel:
    transformers = importlib.import_module("transformers")
    folder = _folder(target)
    config = _config(transformers, folder)
    kind, notes = _class_of(transformers, config)
    maker, stored = getattr(transformers, kind), _stored(folder)
    if not any(next(folder.glob(pattern), None) for pattern in WEIGHT_FILES):
        make = maker.from_config if kind == "AutoModel" else maker
        model = call(make, f"{kind} from {folder.name}", "model-raises", config)
        return BuiltModel(model.float(), None, notes=notes)
    arguments = {"dtype": "float32", "local_files_only": True}
    wanted = {**arguments, "output_loading_info": True, "ignore_mismatched_sizes": True}
    symbol = f"{kind}.from_pretrained"
    transformers.utils.logging.set_verbosity_error()  # what its table of names says is said in notes
    transformers.utils.logging.disable_progress_bar()
    model, info = call(maker.from_pretrained, f"{symbol} on {folder.name}", "model-raises", str(folder), **wanted)
    onto(model)
    said = tuple(_differences(model, info, folder.name))
    origin = Origin(None, "transformers", symbol, "factory", (), arguments, folder=str(folder))
    if not Path(target.args[0]).is_dir():
        name, _, revision = str(target.args[0]).partition("@")
        arguments |= {"revision": revision} if revision else {}
        origin = replace(origin, init_args=(name,), folder=None)
    return BuiltModel(model, origin, stored_low=_stored_low(model, stored, info), notes=notes, checkpoint=said)


def _folder(target: Target) -> Path:
    """The directory itself, or the snapshot of a repository that the local cache holds."""
    name = str(target.args[0])
    path = Path(name)
    if os.path.isdir(name):  # noqa: PTH112 (a name too long for a path is none)
        if not (path / "config.json").is_file():
            raise LoadError(f"{path} has no config.json: name the directory of one model", slug="missing-target")
        return path.resolve()
    hub: Any = importlib.import_module("huggingface_hub")
    repository, _, revision = name.partition("@")
    try:
        return Path(hub.snapshot_download(repository, revision=revision or None, local_files_only=True))
    except Exception as error:  # a name may be malformed, unknown or just not cached: the way on is the same
        hint = f"download it first (`hf download {repository}`), or give a directory"
        raise LoadError(f"{name!r} is no directory and not in the local cache: {hint}", "missing-target") from error


def _config(transformers: Any, folder: Path) -> Any:
    """What config.json says; code of the directory's own is never run.

    Raises: LoadError(slug="remote-code" | "model-raises" | "quantised-model").
    """
    what, read = f"reading {folder / 'config.json'}", transformers.AutoConfig.from_pretrained
    try:
        config = call(read, what, "model-raises", str(folder), trust_remote_code=False)
    except LoadError as error:
        if "custom code" not in str(error):
            raise
        raise LoadError(
            f"{folder} holds a model whose code is its own, and hf: runs no code of a directory: read it, write a model.py "
            "whose get_model() calls from_pretrained(..., trust_remote_code=True), and audit that",
            slug="remote-code",
        ) from error
    if (quantised := getattr(config, "quantization_config", None)) is not None:
        told = quantised if isinstance(quantised, Mapping) else vars(quantised)
        method = told.get("quant_method", "a method of its own")
        raise LoadError(
            f"the checkpoint in {folder} is quantised ({getattr(method, 'value', method)}), so it has no FP32 values to "
            "compare with: give the checkpoint that it was made from, or save it dequantised (`model.dequantize()`, then "
            "`save_pretrained`, with no quantization_config in config.json)",
            slug="quantised-model",
        )
    return config


def _class_of(transformers: Any, config: Any) -> tuple[str, tuple[str, ...]]:
    """The class that config.json names, and what to say where transformers has none of that name."""
    wanted = str((getattr(config, "architectures", None) or ["AutoModel"])[0])
    result = getattr(transformers, wanted, None)
    if wanted == "AutoModel" or (isinstance(result, type) and issubclass(result, nn.Module)):
        return wanted, ()
    said = f"config.json names the class {wanted}, which transformers does not have: the model that AutoModel makes, without"
    return "AutoModel", (f"{said} a head of its own, is audited; for all of it, write a model.py that makes it",)


def _stored(folder: Path) -> dict[str, Tensor]:
    """The tensors of the checkpoint, mapped: nothing of them is in memory. Empty where there is none.

    Raises: LoadError(slug="missing-weights" | "bad-weights").
    """
    file = next((folder / name for name in CHECKPOINTS if (folder / name).is_file()), None)
    with refused(slug="bad-weights"):
        return {} if file is None else read_checkpoint(file)


def _stored_low(model: nn.Module, stored: Mapping[str, Tensor], info: Mapping[str, Any]) -> dict[str, int]:
    """{FP16 or BF16: how many numbers of the model's parameters the checkpoint stores in it}."""
    result, left = Counter[str](), set(info.get("unexpected_keys", ()))
    for value in {x.data_ptr(): x for name, x in stored.items() if name not in left}.values():
        if is_low(value.dtype):
            result[name_of(value.dtype)] += value.numel()
    return {name: min(count, size_of(model)) for name, count in result.items()}


def _differences(model: nn.Module, info: Mapping[str, Any], where: str) -> Iterator[str]:
    """What to say of names that only the model, or only the checkpoint, has. info: as transformers tells it.

    Raises: LoadError(slug="weights-mismatch") where shapes differ, or nothing of the checkpoint is the model's.
    """
    kind = type(model).__name__
    if wrong := sorted(info.get("mismatched_keys", ())):
        name, given, own = wrong[0]
        more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise LoadError(
            f"the checkpoint in {where} does not fit its config.json: {name} is {list(given)} there and {list(own)} in "
            f"{kind}{more}: give the config that was saved with it",
            slug="weights-mismatch",
        )
    missing, left = sorted(info.get("missing_keys", ())), sorted(info.get("unexpected_keys", ()))
    own = dict(model.named_parameters(remove_duplicate=False))
    if {id(own[name]) for name in missing if name in own} == set(map(id, own.values())):
        raise LoadError(
            f"the checkpoint in {where} holds nothing of {kind}: it has {few(left)}, and the model {few(missing)}: check "
            "`architectures` in config.json",
            slug="weights-mismatch",
        )
    if missing:
        yield (
            f"tensors of the model that the checkpoint does not have are RANDOM ({len(missing)}: {few(missing)}): what is "
            "said of them, and of all that follows them, is of no trained model"
        )
    if left:
        yield f"tensors of the checkpoint that the model does not have are left out ({len(left)}: {few(left)})"
