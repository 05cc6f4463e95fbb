"""Small models of packages that people use, a module for each field; what is not installed is left out."""

from __future__ import annotations

import importlib
import pkgutil

import torch

from .. import Built, Unbuilt
from .subjects import SUBJECTS

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")


def names() -> list[str]:
    """`package/model` of each."""
    return list(SUBJECTS)


def build(name: str) -> Built:
    """The model in eval mode, once its forward has run."""
    try:
        torch.manual_seed(0)
        model, args, kwargs = SUBJECTS[name]()
        model.eval()
        with torch.no_grad():
            model(*args, **kwargs)
    except Exception as error:  # packages of other versions raise anything
        raise Unbuilt(f"{type(error).__name__}: {error}") from error
    return model, args, kwargs
