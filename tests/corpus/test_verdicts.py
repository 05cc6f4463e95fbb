"""The culprit of every case is unsafe, in the right module; nothing in a twin or a trap is."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from auditor.capture.capture import capture
from auditor.loading import from_object, in_eval
from auditor.measure.calibrate import calibrate
from auditor.records import Node
from auditor.rulebook.verdicts import judge
from tests.corpus.case import Build, Case, Trap
from tests.corpus.catalogue import INFERENCE
from tests.corpus.conftest import Audited
from tests.corpus.traps import TRAPS

# The relative error of these boxes, 2e-4 in FP16 and 4e-3 in BF16, is within the budget of 1 %. What hurts is half a
# pixel of 2800, which a relative error does not know of; test_repair gives the budget in pixels.
KNOWN_MISSES = [("yolo_grid_decode", "fp16"), ("yolo_grid_decode", "bf16")]


def is_culprit(case: Case, node: Node) -> bool:
    """Whether the case names this operation, in this module, as a cause."""
    packet = node.op.removeprefix("aten.").split(".")[0]
    return any(packet == operation and node.owner.startswith(owner) for operation, owner in case.culprits)


def test_the_culprit_is_unsafe(audited: Callable[[Case], Audited]) -> None:
    rows = [(case, fmt) for case in INFERENCE for fmt in case.formats]
    misses = []
    for case, fmt in rows:
        unsafe = [report.node for report in audited(case).audit.nodes if report.verdicts[fmt].verdict == "unsafe"]
        if not any(is_culprit(case, node) for node in unsafe):
            misses.append((case.name, fmt))
            print(f"{case.name} {fmt}: expected one of {case.culprits}, unsafe {[(n.op, n.owner) for n in unsafe]}")
    print(f"{len(rows) - len(misses)} of {len(rows)} rows hold")
    assert misses == KNOWN_MISSES
    assert len(misses) <= 0.05 * len(rows)


def unsafe_nodes(build: Build, formats: tuple[str, ...], max_error: float = 0.01) -> list[str]:
    """A line for every unsafe node in every format; the stages up to the verdicts, no plans."""
    model, inputs = build()
    with in_eval(model):
        subject = from_object(model, inputs)
        captured = capture(subject, formats)
        found = calibrate(captured, subject, formats, 0, lambda name: None)
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
