"""transformers: every model type that builds from a config whose sizes are made small."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto
from transformers.models.bert import modeling_bert  # noqa: F401  imports what every model does

from . import Built, Unbuilt
from .calls import calls_of, set_all
from .shrinking import pictured, shallow, shrunk

MOST_PARAMETERS = 150_000_000
_TASKS = [name for name in vars(modeling_auto) if name.startswith("MODEL_FOR") and name.endswith("_MAPPING")]
MAPPINGS = ("MODEL_MAPPING", *sorted(_TASKS))


def names() -> list[str]:
    """Model types."""
    return sorted(CONFIG_MAPPING.keys())


def build(name: str) -> Built:
    """The model of that type, as small as it can be made by the names of its config's fields, and a call that it runs."""
    config_class, reasons = CONFIG_MAPPING[name], list[str]()
    made = False
    for make in (*(partial(shrunk, ratio=ratio) for ratio in (1, 2, 4, 8, 16)), pictured, shallow, lambda c: c()):
        for model_class in _classes(config_class):
            try:
                model = _model(model_class, make(config_class))
            except Exception as error:  # sizes that do not go together; others may
                reasons.append(f"{model_class.__name__}: {type(error).__name__}: {' '.join(str(error).split())}")
                continue
            made = True
            call, reason = _running(model)
            if call is not None:
                return model, (), call
            reasons.append(f"{model_class.__name__}: {reason}")
    what = "no call found" if made else "config not shrunk"
    raise Unbuilt(f"{what}: {reasons[0] if reasons else 'no model class'}"[:400])


def _model(model_class: Callable[[Any], nn.Module], config: Any) -> nn.Module:
    with torch.device("meta"):
        size = sum(p.numel() for p in model_class(config).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size} parameters")
    torch.manual_seed(0)
    return model_class(config).float().eval()


def _running(model: nn.Module) -> tuple[dict[str, Any] | None, str]:
    reason = ""
    for cached in (True, False):
        if not cached:  # a cache of the kind that the model asks for may need layers that a small model has not
            set_all(model.config, "use_cache", False)
        for call in calls_of(model):
            try:
                torch.manual_seed(0)
                with torch.no_grad():
                    model(**call)
                return call, ""
            except Exception as error:  # a wrong guess may fail in any way
                line = (str(error).strip().splitlines() or [""])[0]
                reason = reason or f"{type(error).__name__}: {line} ({', '.join(call)})"
    return None, reason or "no input known"


def _classes(config_class: type) -> list[Any]:
    """Model classes for a config: the base model first, then by task, then whatever its module defines."""
    found: list[Any] = []
    for mapping in MAPPINGS:
        entry = getattr(modeling_auto, mapping).get(config_class, None)
        found += list(entry) if isinstance(entry, tuple | list) else [entry]
    module = config_class.__module__.replace("configuration_", "modeling_")
    found = [entry for entry in found if entry is not None]
    try:
        defined = vars(importlib.import_module(module)).values()
    except ImportError:
        defined = ()
    found += [entry for entry in defined if _defined(entry, module, config_class)]
    return list(dict.fromkeys(found))[:3]


def _defined(entry: Any, module: str, config_class: type) -> bool:
    """Whether a module's name is a model of its own for the config."""
    own = inspect.isclass(entry) and issubclass(entry, transformers.PreTrainedModel) and entry.__module__ == module
    return own and entry.config_class is config_class and "forward" in vars(entry)
