"""Models of timm and Hugging Face by name: `timm:NAME`, `hf:NAME_OR_PATH`; nothing is downloaded, ever."""

from __future__ import annotations

import difflib
import importlib
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import LoadError
from ..isolation.process import reseed, swapped
from ..offload import onto
from ..records import Origin
from .discover import Found
from .sandbox import blame, call
from .target import Target
from .weights import counted, fitted, low_of, refuse_quantised, stored_by, told

PACKAGES = {"timm": ("timm",), "hf": ("transformers", "huggingface_hub")}
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin", "*.index.json")


@contextmanager
def offline() -> Iterator[None]:
    """No request to the Hub, by either of the two ways in which its client can be told."""
    kept = {name: os.environ.get(name) for name in OFFLINE}
    os.environ.update(dict.fromkeys(OFFLINE, "1"))
    try:
        with ExitStack() as stack:
            with suppress(ImportError):  # then there is no client
                constants = importlib.import_module("huggingface_hub.constants")
                stack.enter_context(swapped(constants, "HF_HUB_OFFLINE", True))
            yield
    finally:
        for name, value in kept.items():
            os.environ.pop(name, None)
            os.environ |= {} if value is None else {name: value}


def require(target: Target) -> None:
    """Imports the packages the target needs. Raises: LoadError(slug="missing-package")."""
    for name in PACKAGES[target.hub]:
        try:
            importlib.import_module(name)
        except ImportError as error:
            lacking = error.name.partition(".")[0] if isinstance(error, ModuleNotFoundError) and error.name else name
            needed = name if lacking == name else f"{name}, which needs {lacking}"
            raise LoadError(
                f"{target.text} needs {needed}: `pip install {lacking}`, then run again", "missing-package"
            ) from error
        except Exception as error:  # such as a torchvision built for another torch
            raise LoadError(
                f"{name} cannot be imported, {blame(error)}: mend its installation", "missing-package"
            ) from error


def build(target: Target, seed: int) -> Found:
    """The model a hub target names, in FP32, and how to make it again.

    Raises: LoadError(slug="missing-target" | "no-symbol" | "bad-target" | "model-raises" | "quantised-model" |
    "remote-code" | "missing-weights" | "bad-weights" | "weights-mismatch").
    """
    with offline():
        reseed(seed)
        return call(_timm if target.hub == "timm" else _hugging_face, f"building {target.text}", "model-raises", target)


def weights_of(target: Target) -> int:
    """Bytes that the parameters of the checkpoint take in FP32 which a target of Hugging Face's names; 0 where that is not known
    before the model is made."""
    with suppress(LoadError, ImportError), offline():
        folder = _folder(str(target.args[0])) if target.hub == "hf" else None
        return sum(4 * x.numel() for x in stored_by(folder).values() if x.is_floating_point()) if folder else 0
    return 0


def _timm(target: Target) -> Found:
    timm = importlib.import_module("timm")
    name = str(target.args[0])
    if not timm.is_model(name):
        close = difflib.get_close_matches(name, timm.list_models(), n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else "timm.list_models() has them all"
        raise LoadError(f"timm knows no model {name!r}: {hint}", slug="no-symbol")
    model = call(timm.create_model, f"timm.create_model({name!r})", "model-raises", *target.args, **target.kwargs)
    origin = Origin(None, "timm", "create_model", "factory", target.args, dict(target.kwargs))
    return Found(model, origin)


def _hugging_face(target: Target) -> Found:
    transformers = importlib.import_module("transformers")
    folder = _folder(str(target.args[0]))
    config = _config(transformers, folder)
    refuse_quantised(config, folder)
    kind, notes = _class_of(transformers, config)
    maker = getattr(transformers, kind)
    if not any(next(folder.glob(pattern), None) for pattern in WEIGHT_FILES):
        make = maker.from_config if kind == "AutoModel" else maker
        return Found(_float(call(make, f"{kind} from {folder.name}", "model-raises", config)), None, notes=notes)
    stored = stored_by(folder)
    arguments = {"dtype": "float32", "local_files_only": True}
    symbol = f"{kind}.from_pretrained"
    with _quiet(transformers):
        model, info = call(
            maker.from_pretrained,
            f"{symbol} on {folder.name}",
            "model-raises",
            str(folder),
            **arguments,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    onto(model)
    counts = counted(model, stored)
    said = (*fitted(model, info, folder.name), *told(model, counts))
    name, _, revision = str(target.args[0]).partition("@")
    of = {"revision": revision} if revision else {}
    local = Path(target.args[0]).is_dir()
    where: dict[str, Any] = {"folder": str(folder)} if local else {}
    args, kwargs = ((), arguments) if local else ((name,), {**arguments, **of})
    origin = Origin(None, "transformers", symbol, "factory", args, kwargs, **where)
    return Found(model, origin, stored_low=low_of(counts), notes=notes, checkpoint=said)


def _config(transformers: Any, folder: Path) -> Any:
    """Code of the directory's own is never run. Raises: LoadError(slug="remote-code" | "model-raises")."""
    what, read = f"reading {folder / 'config.json'}", transformers.AutoConfig.from_pretrained
    try:
        return call(read, what, "model-raises", str(folder), trust_remote_code=False)
    except LoadError as error:
        if "custom code" not in str(error):
            raise
        raise LoadError(
            f"{folder} holds a model whose code is its own, and hf: runs no code of a directory: read it, write a model.py "
            "whose get_model() calls from_pretrained(..., trust_remote_code=True), and audit that",
            slug="remote-code",
        ) from error


def _class_of(transformers: Any, config: Any) -> tuple[str, tuple[str, ...]]:
    """The class that config.json names, and what to say where transformers has none of that name."""
    wanted = str((getattr(config, "architectures", None) or ["AutoModel"])[0])
    found = getattr(transformers, wanted, None)
    if wanted == "AutoModel" or (isinstance(found, type) and issubclass(found, nn.Module)):
        return wanted, ()
    return "AutoModel", (
        f"config.json names the class {wanted}, which transformers does not have: the model without a head of its own is "
        "audited, as AutoModel makes it; for all of it, write a model.py that makes it",
    )


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """No bar and no table of names on stderr: what the latter says is said in notes."""
    logging = transformers.utils.logging
    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()


def _float(model: nn.Module) -> nn.Module:
    """A config may say bfloat16; random weights are as good in FP32."""
    return model.float()


def _folder(name: str) -> Path:
    """The directory itself, or the snapshot of a repository that the local cache holds."""
    path = Path(name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise LoadError(f"{path} has no config.json: name the directory of one model", slug="missing-target")
        return path.resolve()
    hub: Any = importlib.import_module("huggingface_hub")
    repository, _, revision = name.partition("@")
    try:
        found = hub.snapshot_download(repository, revision=revision or None, local_files_only=True)
    except Exception as error:  # a name may be malformed, unknown or just not cached: the way on is the same
        hint = f"download it first (`hf download {repository}`), or give a directory"
        raise LoadError(f"{name!r} is no directory and not in the local cache: {hint}", "missing-target") from error
    return Path(found)
