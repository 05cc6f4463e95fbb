"""Plans as documents, the patched_model that belongs to them, and snippets run as a user would paste them."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import nn

from auditor.artefact.emit import emit
from auditor.document.contents import shared_modules, tied_parameters
from auditor.records import Plan, ScopeChoice

Scopes = dict[str, dict[str, str]]


def document(plans: dict[str, Scopes], recommended: str | None, model: nn.Module | None = None) -> dict[str, Any]:
    """What plan.json holds, as far as a snippet reads it; all plans verified. Names are `strategy_format`."""
    groups = {"tied_parameters": tied_parameters, "shared_modules": shared_modules} if model is not None else {}
    found = {key: [list(names) for names in of(model)] for key, of in groups.items()}
    return {
        "format_version": 1,
        "subject": {"name": "toy", "parameters": 1, **found},
        "budget": {"max_error": 0.01},
        "recommended": recommended,
        "plans": {
            name: {
                "strategy": name.partition("_")[0],
                "format": name.partition("_")[2],
                "scopes": scopes,
                "measured_error": 0.004,
                "verified": True,
            }
            for name, scopes in plans.items()
        },
    }


def pasted(
    code: str, monkeypatch: pytest.MonkeyPatch, model: nn.Module | None = None, plans: dict[str, Scopes] | None = None
) -> dict[str, Any]:
    """The names that a snippet defines, run beside the patched_model.py of these plans of this model."""
    if model is not None:
        monkeypatch.setitem(sys.modules, "patched_model", patched_model(model, plans or {}))
    namespace: dict[str, Any] = {"__name__": "pasted"}
    exec(compile(code, "pasted.py", "exec"), namespace)
    return namespace


def patched_model(model: nn.Module, plans: dict[str, Scopes]) -> ModuleType:
    """What an audit of the model would have written."""
    records = {}
    for name, scopes in plans.items():
        strategy, _, fmt = name.partition("_")
        choices = {path: ScopeChoice(entry["precision"], (), entry["output"]) for path, entry in scopes.items()}
        records[name] = Plan(name, strategy, fmt, choices, 0.001, 0.5, 1.5)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    module = ModuleType("patched_model")
    module.__file__ = str(Path("nowhere", "patched_model.py"))
    exec(emit(None, parameters, records, None, Path()), module.__dict__)
    return module
