"""Plans as documents, the patched_model that belongs to them, and snippets run as a user would paste them."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import nn

from auditor.artefact.emit import emit
from auditor.document.live import fields_of
from auditor.records import Plan, ScopeChoice
from tests.support import documents

Scopes = dict[str, dict[str, str]]


def document(plans: dict[str, Scopes], recommended: str | None, model: nn.Module | None = None) -> dict[str, Any]:
    """What plan.json holds, as far as a snippet reads it; all plans verified. Names are `strategy_format`."""
    known = fields_of(model, ()) if model is not None else {}
    groups = {key: list(map(list, known[key])) for key in ("tied_parameters", "shared_modules") if known}
    of = {"verification": {"measured_error": 0.004, "holds": True}}
    made = {
        name: {"strategy": name.partition("_")[0], "format": name.partition("_")[2], "scopes": scopes, **of}
        for name, scopes in plans.items()
    }
    return documents.document(made, recommended, **groups)


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
        choices = {path: ScopeChoice(entry["precision"], entry["output"]) for path, entry in scopes.items()}
        records[name] = Plan(name, strategy, fmt, choices, 0.001, 0.5, 1.5)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    module = ModuleType("patched_model")
    module.__file__ = str(Path("nowhere", "patched_model.py"))
    exec(emit(None, parameters, records, None, Path()), module.__dict__)
    return module
