"""A plan.json from an earlier audit and a model loaded today become a `patched_model.py`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..artefact.emit import emit
from ..artefact.precision_table import plan_table
from ..artefact.strategies import GRAPHS
from ..errors import PlanError
from ..isolation import isolated
from ..isolation.members import size_of, structure_of
from ..numerics.formats import runs
from ..plan.workbench import raising
from ..records import Plan, ScopeChoice, Subject
from ..verify import NotHandedOver, Verifier
from .live import apply, pick
from .read import loaded, read_document


def read_plans(file: Path, name: str | None) -> tuple[dict[str, Any], dict[str, Plan], str]:
    """The document, those of its plans that can be run as records, and the name of the one to use: `name`, or the recommended one.

    What was measured and verified is left behind: it was another model that was measured, as far as anyone can tell.
    Raises: PlanError(slug="missing-plan" | "bad-plan" | "no-such-plan" | "no-arithmetic" | "plan-is-program").
    """
    document = loaded(file)
    found = read_document(document, str(file)).plans
    pick(document["plans"], name or document.get("recommended"))
    plans = {
        key: _record(key, item) for key, item in found.items() if runs(item.format) and item.strategy not in GRAPHS
    }
    return document, plans, name or str(document["recommended"])


def patched_source(
    subject: Subject, document: Mapping[str, Any], plans: Mapping[str, Plan], chosen: str, directory: Path
) -> str:
    """The text of `patched_model.py` for `subject`, to be saved in `directory`.

    Raises: PlanError(slug="plan-mismatch") where any of the plans does not fit the model.
    """
    given = document.get("subject", {})
    expected = {key: given[key] for key in ("parameters", "structure") if given.get(key)}
    for plan in plans.values():
        with isolated(subject.model):  # what one plan rounds, the next may want in FP32
            apply(subject.model, {**expected, **plan_table(plan)})
    parameters = size_of(subject.model)
    return emit(subject.origin, parameters, plans, chosen, directory, structure_of(subject.model))


def check_artefact(subject: Subject, plans: Mapping[str, Plan], chosen: str, seed: int) -> None:
    """Run the patched model once, in a fresh process. Raises: LoadError(slug="not-rebuilt"); PlanError(slug="plan-mismatch")."""
    if subject.origin is None:
        return
    with Verifier.begun(subject.batches[:1], seed=seed, gradients=False) as (verifier, folder), suppress(NotHandedOver):
        file = folder / "patched_model.py"
        emitted = {**plans, **raising(subject)}
        file.write_text(emit(subject.origin, size_of(subject.model), emitted, None, folder), encoding="utf-8")
        failure = verifier.answers(file, [chosen])[chosen]
        if isinstance(failure, str):
            raise PlanError(f"under {chosen} the model does not run: {failure}", slug="plan-mismatch")


def _record(name: str, found: Any) -> Plan:
    scopes = {
        path: ScopeChoice(
            choice.precision,
            tuple(choice.because),
            choice.output,
            choice.cost,
            tuple(choice.keep),
        )
        for path, choice in found.scopes.items()
    }
    return Plan(
        name=name,
        strategy=found.strategy,
        format=found.format,
        scopes=scopes,
        predicted_error=found.predicted_error,
        low_precision_flops=found.low_precision_flops,
        predicted_speedup=found.predicted_speedup,
        raised=found.raised,
        stored_low=found.stored_low,
    )
