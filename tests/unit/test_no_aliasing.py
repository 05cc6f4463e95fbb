"""Nothing the auditor computes writes into what it was given: every in-place call is listed here, and run on every dtype.

A tensor's `.to(dtype)`, `.float()`, `.contiguous()`, `.detach()` and `.reshape()` may all hand back the caller's memory;
an in-place call behind one of them overwrites it where it has that dtype or layout already.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor.capture.functional import copy as copying
from auditor.capture.record import record
from auditor.execution.step import bind_step, run_step
from auditor.isolation.answer import copied
from auditor.isolation.draws import in_float32
from auditor.isolation.members import raise_in_place
from auditor.loading import placement
from auditor.measure.estimates import estimate
from auditor.measure.measure import measure
from auditor.measure.probes import inner_products
from auditor.measure.probes import signs as drawn_signs
from auditor.numerics.formats import FORMATS
from auditor.offload.files import Offloading, is_offloaded
from auditor.training.backward import backward_errors
from auditor.training.objective import in_training, training_subject
from auditor.training.step import capture_step, step_batches
from tests.subjects import capture_of, normal, seeded, subject_of

PACKAGE = Path(auditor.__file__).parent
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
LOW = ("fp16", "bf16")
LOW_DTYPES = (torch.float16, torch.bfloat16)


@contextmanager
def unchanged(*tensors: Tensor) -> Iterator[None]:
    """The tensors' values, and whether they want a gradient, are after the body what they were before it."""
    before = [(x.detach().clone(), x.requires_grad) for x in tensors]
    yield
    for x, (value, wanted) in zip(tensors, before, strict=True):
        torch.testing.assert_close(x.detach(), value, rtol=0, atol=0, equal_nan=True)
        assert x.requires_grad is wanted
        assert x.grad is None


class Net(nn.Module):
    """Reads its input, a weight and a buffer, and adds positions, which depend on no floating-point input."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.register_buffer("table", normal(4, seed=2).to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        scaled = self.linear(x.float()) * self.table
        return torch.softmax(scaled + torch.arange(4).to(x.dtype), -1) * scaled


def net(dtype: torch.dtype) -> tuple[Net, Tensor, list[Tensor]]:
    """A model, its input, and every tensor that its owner holds."""
    model, x = seeded(lambda: Net(dtype)), normal(3, 6).to(dtype)
    return model, x, [x, *model.parameters(), *model.buffers()]


def awkward(numbers: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    """Normal deviates with a zero, a subnormal number, and others that are not finite."""
    x = normal(numbers, seed=seed)
    x[:5] = torch.tensor([0.0, 1e-40, torch.inf, torch.nan, -torch.inf])
    return x.to(dtype)


def inner(dtype: torch.dtype) -> None:
    for other in (torch.float32, dtype):
        for error_of in (None, *(FORMATS[name] for name in LOW), FORMATS["fp32"]):
            for gradient, value in (
                (normal(2, 30).to(other), normal(2, 30).to(dtype)),
                (normal(1, 20_000).to(other), normal(1, 20_000).to(dtype)),
                (awkward(60, other), awkward(60, dtype)),
            ):
                with unchanged(gradient, value):
                    inner_products(gradient, value, 1, error_of)


def signs(dtype: torch.dtype) -> None:
    x = awkward(40, dtype)
    with unchanged(x):
        drawn_signs(x, torch.Generator().manual_seed(0))


def measured(dtype: torch.dtype) -> None:
    model, x, held = net(dtype)
    with unchanged(*held):
        captured = capture_of(model, x)
        found = measure(captured, model, ((x,), {}), LOW)
        kept = [value for value in found.values.values() if isinstance(value, Tensor)]
        with unchanged(*kept):
            estimate(found, 0)


def trained(dtype: torch.dtype) -> None:
    model, x, held = net(dtype)
    target = normal(3, 4, seed=5).to(dtype)
    subject = training_subject(model, [(x, target)], {}, lambda output, target: (output - target).square().mean())
    with unchanged(target, *held), in_training(model):
        step = run_step(bind_step(capture_step(subject, LOW), subject, step_batches(subject)[0], 0))
        backward_errors(step, LOW)


def drawn(dtype: torch.dtype) -> None:
    """A random operation in place writes to its own argument alone, which is the caller's wish."""
    for low in (torch.float16, torch.bfloat16, dtype):
        target, chances = torch.zeros(8, dtype=low), normal(8).abs().clamp(max=1).to(dtype)
        with unchanged(chances):
            in_float32(torch.ops.aten.bernoulli_.Tensor, (target, chances), {})


def recorded(dtype: torch.dtype) -> None:
    model, x, held = net(dtype)
    with unchanged(*held):
        copied(((x,), {}))
        record(model, ((x,), {}))


def rewritten(dtype: torch.dtype) -> None:
    source = normal(8).to(dtype)
    target = torch.zeros(8, dtype=dtype)
    with unchanged(source, target):
        copying(target, source)


def raised(dtype: torch.dtype) -> None:
    for held in (*LOW_DTYPES, dtype):
        together = normal(8).to(held)
        parts = [together[:3], together[3:]]
        with unchanged(together):
            raise_in_place(parts)
            own = parts[0].untyped_storage().data_ptr() == together.untyped_storage().data_ptr()
            assert own is (held not in LOW_DTYPES)


def moved(dtype: torch.dtype) -> None:
    model, x, tensors = net(dtype)
    model.shift = normal(4).to(dtype)
    with unchanged(*tensors, model.shift):
        placement.moved(subject_of(model, x), "meta")
        placement.moved(subject_of(model, x.clone().requires_grad_()), "meta")


def spilt(dtype: torch.dtype) -> None:
    for x in (normal(600, 4000).to(dtype), normal(4000, 600).to(dtype).t()):
        with unchanged(x), Offloading():
            made = [x * 2, x.t().contiguous(), x.float(), x.contiguous(), x[1:, ::2] + 1]
        assert is_offloaded(made[0]) and is_offloaded(made[-1])


Case = Callable[[torch.dtype], None]

# {file:function: (its in-place calls, in the order of the source; what runs them)}
IN_PLACE: dict[str, tuple[str, Case]] = {
    "isolation/draws.py:in_float32": ("copy_", drawn),
    "isolation/members.py:raise_in_place": ("set_", raised),
    "measure/probes.py:signs": ("mul_ sub_ masked_fill_", signs),
    "measure/measure.py:_leaf": ("requires_grad_", measured),
    "measure/reference.py:Reference._connected.connect": ("requires_grad_", measured),
    "measure/probes.py:_products": ("sub_ mul_ nan_to_num_", inner),
    "loading/placement.py:_inputs.move": ("requires_grad_", moved),
    "loading/placement.py:_Move._moved": ("requires_grad_", moved),
    "isolation/answer.py:copied": ("requires_grad_", recorded),
    "capture/record.py:_Recorder.begin.copied": ("requires_grad_", recorded),
    "capture/functional.py:copy": ("copy_", rewritten),
    "training/backward.py:_vjp.leaf": ("requires_grad_", trained),
    "execution/step.py:bind_step": ("requires_grad_", trained),
    "offload/files.py:laid_as": ("set_", spilt),
}
ON_PURPOSE = {
    "isolation/tensors.py:_write": "resize_ copy_",
    "isolation/tensors.py:_bytes": "set_",
    "isolation/tensors.py:TensorState.restore": "requires_grad_",
    "isolation/tensors.py:TensorState._cut_off": "detach_ detach_",
    "numerics/scans.py:scanned": "copy_",
}
"""What undoes in the caller's tensors what a run did to them, and what the author wrote as an operation in place."""

CASES = list(dict.fromkeys(case for _, case in IN_PLACE.values()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_what_was_given_is_as_it_was(case: Case, dtype: torch.dtype) -> None:
    case(dtype)


class _Calls(ast.NodeVisitor):
    """{file:function: {line: in-place calls}}: methods and functions that torch marks by an underscore, and `out=`."""

    def __init__(self, file: str) -> None:
        self.file, self.path = file, list[str]()
        self.found: dict[str, list[tuple[int, int, str]]] = {}

    def _scope(self, node: ast.FunctionDef | ast.ClassDef) -> None:
        self.path.append(node.name)
        self.generic_visit(node)
        self.path.pop()

    visit_FunctionDef = visit_ClassDef = _scope

    def visit_Call(self, node: ast.Call) -> None:
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        marked = [name] if name.endswith("_") and not name.endswith("__") else []
        for call in [*marked, *("out=" for keyword in node.keywords if keyword.arg == "out")]:
            place = (node.end_lineno or 0, node.end_col_offset or 0, call)
            self.found.setdefault(f"{self.file}:{'.'.join(self.path)}", []).append(place)
        self.generic_visit(node)


def in_place_calls() -> dict[str, list[tuple[int, int, str]]]:
    found: dict[str, list[tuple[int, int, str]]] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        calls = _Calls(file.relative_to(PACKAGE).as_posix())
        calls.visit(ast.parse(file.read_text(encoding="utf-8")))
        found |= {place: sorted(named) for place, named in calls.found.items()}
    return found


def test_every_in_place_call_is_named_here_with_what_runs_it() -> None:
    """A new one? Make sure that its receiver is a fresh tensor in every dtype and layout, and add it with a case above."""
    found = {place: " ".join(name for *_, name in calls) for place, calls in in_place_calls().items()}
    assert found == ON_PURPOSE | {place: names for place, (names, _) in IN_PLACE.items()}


def lines_run(case: Case) -> set[tuple[str, int]]:
    """(file, line) of the auditor that a case runs."""
    found: set[tuple[str, int]] = set()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        file = frame.f_code.co_filename
        if not file.startswith(str(PACKAGE)):
            return None
        found.add((Path(file).relative_to(PACKAGE).as_posix(), frame.f_lineno))
        return trace

    earlier = sys.gettrace()
    sys.settrace(trace)
    try:
        case(torch.float32)
    finally:
        sys.settrace(earlier)
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_the_cases_run_the_calls_that_they_stand_for(case: Case) -> None:
    ran = lines_run(case)
    for place, calls in in_place_calls().items():
        file, _, function = place.partition(":")
        if place in IN_PLACE and IN_PLACE[place][1] is case:
            assert {line for line, _, _ in calls if (file, line) not in ran} == set(), function
