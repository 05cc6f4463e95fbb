"""Two audits of one model, on the CPU and on the pretend GPU, compared in what they found."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

import auditor
from auditor import Audit
from auditor.plan.recommend import recommend
from auditor.records import Plan
from auditor.records.training import Training

CLOSE = 0.02
"""Relative difference up to which two errors are one: FP32 sums in another order."""

LAYOUT = ("aten.contiguous.default",)
"""Operations that are there or not as attention's kernels lay out their results."""

COUNTED = ("aten.histc.default",)
"""By which transformers counts what goes to every expert: of floats on a CPU, which refuses integers, and of integers elsewhere."""

TRANSFERS = ("to_device",)


def audits(model: nn.Module, *inputs: Any, **options: Any) -> tuple[Audit, Audit]:
    """The emulated audit and the native one."""
    emulated, native = (auditor.audit(model, inputs, device=device, **options) for device in ("cpu", "pretend"))
    return emulated, native


def same(emulated: Audit, native: Audit) -> None:
    """Fails where they differ."""
    found = differences(emulated, native)
    assert not found, found


def differences(emulated: Audit, native: Audit, transfers: bool = False) -> list[str]:
    """What is not the same in them, a line each.

    transfers: values go from one device to another in the native one, which takes time there alone: of the plans, which
    are the same, it has to recommend the same one but for that.
    """
    left_out = (*LAYOUT, *TRANSFERS) if transfers else LAYOUT
    return [
        *_unequal(
            "recommended", emulated.recommended, _but_for_times(native, emulated) if transfers else native.recommended
        ),
        *_unequal("rules", [(f.rule, f.node) for f in emulated.findings], [(f.rule, f.node) for f in native.findings]),
        *_of_nodes(emulated, native, left_out),
        *_of_plans(emulated, native),
        *_of_baselines(emulated, native),
        *_of_training(emulated.training, native.training),
    ]


def _but_for_times(native: Audit, emulated: Audit) -> str | None:
    """What it would recommend if its plans gained as much time as the other's do."""
    plans = {
        name: replace(plan, predicted_speedup=emulated.plans[name].predicted_speedup)
        for name, plan in native.plans.items()
    }
    return recommend(plans, native.max_error, native.use)[0]


def _of_nodes(emulated: Audit, native: Audit, left_out: tuple[str, ...]) -> Iterator[str]:
    known = {report.node.name: report for report in native.nodes}
    laid_out = {r.node.name for r in (*emulated.nodes, *native.nodes) if r.node.op in left_out}
    counted = [r.node for r in emulated.nodes if r.node.op in COUNTED]
    counted_in = {name for node in counted for name in (node.name, *node.inputs)}
    names = [r.node.name for r in emulated.nodes]
    yield from _unequal("nodes", sorted({*names} - laid_out), sorted({*known} - laid_out))
    for ours in emulated.nodes:
        name, theirs = ours.node.name, known.get(ours.node.name)
        if theirs is None or name in laid_out or name in counted_in:
            continue
        for fmt in emulated.formats:
            a, b = ours.verdicts[fmt], theirs.verdicts[fmt]
            yield from _unequal(f"verdict of {name} in {fmt}", a.verdict, b.verdict)
            if fmt in ours.errors:
                yield from _apart(
                    f"error of {name} in {fmt}", ours.errors[fmt].local_error, theirs.errors[fmt].local_error
                )
                yield from _unequal(
                    f"whether {name} runs in {fmt}", *(x.errors[fmt].unsupported is None for x in (ours, theirs))
                )


def _of_plans(emulated: Audit, native: Audit) -> Iterator[str]:
    yield from _unequal("plans", sorted(emulated.plans), sorted(native.plans))
    for name, ours in emulated.plans.items():
        theirs = native.plans[name]
        yield from _unequal(f"scopes of {name}", _precisions(ours), _precisions(theirs))
        yield from _unequal(f"verified {name}", ours.is_verified, theirs.is_verified)
        yield from _apart(f"error of {name}", ours.measured_error, theirs.measured_error)


def _precisions(plan: Plan) -> dict[str, tuple[str, str]]:
    """What every scope runs in and hands on; the reasons quote what the device said of an operation that it refused."""
    return {path: (choice.precision, choice.output) for path, choice in plan.scopes.items()}


def _of_baselines(emulated: Audit, native: Audit) -> Iterator[str]:
    for name, ours in emulated.baselines.items():
        theirs = native.baselines[name]
        yield from _apart(f"error of plain {name}", ours.measured_error, theirs.measured_error)
        yield from _unequal(f"whether plain {name} runs", ours.failure is None, theirs.failure is None)


def _of_training(ours: Training | None, theirs: Training | None) -> Iterator[str]:
    if ours is None or theirs is None:
        yield from _unequal("training", ours, theirs)
        return
    yield from _apart("loss", ours.loss, theirs.loss)
    yield from _unequal("format to train in", ours.format, theirs.format)


def _unequal(what: str, ours: Any, theirs: Any) -> Iterator[str]:
    if ours != theirs:
        yield f"{what}: {ours} emulated, {theirs} natively"


def _apart(what: str, ours: float | None, theirs: float | None) -> Iterator[str]:
    if ours is None or theirs is None or not (math.isfinite(ours) and math.isfinite(theirs)):
        yield from _unequal(what, ours, theirs)
    elif not math.isclose(ours, theirs, rel_tol=CLOSE, abs_tol=1e-9):
        yield f"{what}: {ours:.6g} emulated, {theirs:.6g} natively"
