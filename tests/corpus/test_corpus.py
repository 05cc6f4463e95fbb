"""The failures that users met: they happen, are found, planned around and repaired, in training too."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from torch import Tensor, nn

import auditor
from auditor.capture.capture import capture
from auditor.execution.policy import choice_from_scopes
from auditor.isolation import in_eval
from auditor.loading import from_object
from auditor.measure.calibrate import calibrate
from auditor.numerics.metrics import output_error
from auditor.records import Node
from auditor.records.audit import Audit
from auditor.rulebook.verdicts import judge
from auditor.verify.running import run_patched
from tests.corpus.case import Build, Case, Trap
from tests.corpus.catalogue import CASES, INFERENCE, plainly
from tests.corpus.conftest import Audited
from tests.corpus.traps import TRAPS

ROWS = [pytest.param(case, fmt, id=f"{case.name}-{fmt}") for case in CASES for fmt in case.formats]
TRAP_ROWS = [pytest.param(trap, fmt, id=f"{trap.name}-{fmt}") for trap in TRAPS for fmt in trap.formats]


def holds(case: Case, build: Build, fmt: str) -> bool:
    """Whether the model, cast as a whole, stays within the case's tolerance; raising does not count as that."""
    model, inputs = build()
    reference = plainly(model, inputs, "fp32", case.mode)
    try:
        low = plainly(model, inputs, fmt, case.mode)
    except (RuntimeError, NotImplementedError):
        return False
    return case.distance(reference, low) <= case.tolerance


@pytest.mark.parametrize(("case", "fmt"), ROWS)
def test_it_fails_and_its_twin_does_not(case: Case, fmt: str) -> None:
    assert not holds(case, case.build, fmt)
    assert holds(case, case.twin, fmt)


@pytest.mark.parametrize(("trap", "fmt"), TRAP_ROWS)
def test_the_trap_is_harmless(trap: Trap, fmt: str) -> None:
    model, inputs = trap.build()
    assert output_error(plainly(model, inputs, "fp32"), plainly(model, inputs, fmt)) <= trap.tolerance


# The culprit of every case is unsafe, in the right module; nothing in a twin or a trap is.


def is_culprit(case: Case, node: Node) -> bool:
    """Whether the case names this operation, in this module, as a cause."""
    packet = node.op.removeprefix("aten.").split(".")[0]
    return any(packet == operation and node.owner.startswith(owner) for operation, owner in case.culprits)


def test_the_culprit_is_unsafe(audited: Callable[[Case], Audited]) -> None:
    rows = [(case, fmt) for case in INFERENCE if not case.only_on_cpu for fmt in case.formats]
    misses = []
    for case, fmt in rows:
        unsafe = [report.node for report in audited(case).audit.nodes if report.verdicts[fmt].verdict == "unsafe"]
        if not any(is_culprit(case, node) for node in unsafe):
            misses.append((case.name, fmt))
            print(f"{case.name} {fmt}: expected one of {case.culprits}, unsafe {[(n.op, n.owner) for n in unsafe]}")
    print(f"{len(rows) - len(misses)} of {len(rows)} rows hold")
    # The relative error of these boxes, 2e-4 in FP16 and 4e-3 in BF16, is within the budget of 1 %. What hurts is half a
    # pixel of 2800, which a relative error does not know of; test_repair gives the budget in pixels.
    assert misses == [("yolo_grid_decode", "fp16"), ("yolo_grid_decode", "bf16")]
    assert len(misses) <= 0.05 * len(rows)


def unsafe_nodes(build: Build, formats: tuple[str, ...], max_error: float = 0.01) -> list[str]:
    """A line for every unsafe node in every format; the stages up to the verdicts, no plans."""
    model, inputs = build()
    with in_eval(model):
        subject = from_object(model, inputs)
        captured = capture(subject, formats)
        found = calibrate(captured, subject, formats, 0)
        verdicts = judge(captured, found, formats, max_error).verdicts
    return [
        f"{name} of {captured.nodes[name].owner!r} in {fmt}: {verdict.reason}"
        for name, by_format in verdicts.items()
        for fmt, verdict in by_format.items()
        if verdict.verdict == "unsafe"
    ]


@pytest.mark.parametrize("case", INFERENCE, ids=lambda case: case.name)
def test_nothing_of_the_twin_is_unsafe(case: Case) -> None:
    assert unsafe_nodes(case.twin, case.formats) == []


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.name)
def test_nothing_of_the_trap_is_unsafe(trap: Trap) -> None:
    assert unsafe_nodes(trap.build, trap.formats) == []


# Every failing case, patched by every plan of its audit, passes the test its users put it to.


def outputs_under(plan: str, audit: Audit, model: nn.Module, inputs: tuple[Any, ...]) -> Sequence[Tensor]:
    """What a copy of the model answers once it follows the plan, on a GPU or its emulation."""
    patched = auditor.apply(copy.deepcopy(model), audit, plan)
    (outputs,) = run_patched(patched, [(inputs, {})], "cpu")
    return outputs


@pytest.mark.parametrize("case", INFERENCE, ids=lambda case: case.name)
def test_every_plan_repairs_the_case(case: Case, audited: Callable[[Case], Audited]) -> None:
    found = audited(case)
    reference = plainly(found.model, found.inputs, "fp32")
    failures = set()
    for plan in found.audit.plans.values():
        error = case.distance(reference, outputs_under(plan.name, found.audit, found.model, found.inputs))
        print(f"{case.name} {plan.name}: {error:.3g}, allowed {case.tolerance:.3g}")
        assert plan.is_verified, plan.verification
        if not error <= case.tolerance:
            failures.add((case.name, plan.name))
    assert len(found.audit.plans) == 2 * len(case.formats)
    # Half a pixel of 2800 is within a relative budget of 1 %, so these boxes are left low: see below.
    known = {("yolo_grid_decode", "cast_fp16"), ("yolo_grid_decode", "cast_bf16")}
    assert failures == {one for one in known if one[0] == case.name}


def test_a_budget_in_pixels_repairs_the_boxes() -> None:
    (case,) = [case for case in INFERENCE if case.name == "yolo_grid_decode"]
    model, inputs = case.build()
    reference = plainly(model, inputs, "fp32")
    audit = auditor.audit(model, inputs, metric=case.distance, max_error=case.tolerance, device="cpu")
    for plan in audit.plans:
        assert case.distance(reference, outputs_under(plan, audit, model, inputs)) <= case.tolerance, plan


# Mode training on the corpus: the culprit is unsafe where only the gradient fails, and nothing of its twin is.

TRAINING = tuple(case for case in CASES if case.mode == "train")


def audited(build: Build, case: Case) -> Audit:
    model, inputs = build()
    return auditor.audit(model, inputs, mode="training", formats=case.formats, device="cpu", strategies=("cast",))


def unsafe(audit: Audit, fmt: str) -> list:
    return [report for report in audit.nodes if report.verdicts[fmt].verdict == "unsafe"]


@pytest.mark.parametrize("case", TRAINING, ids=lambda case: case.name)
def test_the_culprit_is_unsafe_backwards(case: Case) -> None:
    found = audited(case.build, case)
    for fmt in case.formats:
        broken = unsafe(found, fmt)
        assert broken
        assert all(is_culprit(case, report.node) for report in broken)
        assert any("backward pass" in report.verdicts[fmt].reason for report in broken)
        assert choice_from_scopes(found.plans[f"cast_{fmt}"].scopes)(broken[0].node.owner) == "fp32"
    assert any(advice.code == "backward-fails" for advice in found.training.advice)


@pytest.mark.parametrize("case", TRAINING, ids=lambda case: case.name)
def test_nothing_of_the_twin_is(case: Case) -> None:
    found = audited(case.twin, case)
    assert [unsafe(found, fmt) for fmt in case.formats] == [[] for _ in case.formats]
