"""A Subject's first batch, run once and written down."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..errors import AuditorError, CaptureError, MeasureError
from ..isolation import isolated
from ..isolation.answer import from_the_start
from ..isolation.outputs import NamedTensors, tensor_outputs
from ..numerics.metrics import output_error
from ..raised import let_through
from ..records import Batch, Capture, Subject
from .binding import Binder, TapeModule, keywords_of, placeholders_of
from .builder import Tape
from .calls import aliases_of
from .history import AGREEMENT, history_matters
from .literals import compared
from .naming import describe_nodes
from .paths import of_shapes, on_the_path
from .record import record

ROUNDINGS = 8
"""Times what last places of weights and inputs move: every operation on the way rounds too."""

_NEVER = 1 << 30
"""Searches among the younger objects until one among all."""

DOUBLE = ("float64", "complex128")
"""Dtypes that no plan touches, by their names on a node."""

_PATH = "The model's Python, or the shape of a result, depends on values; the audit covers the path these inputs take."
_THREADS = (
    "The model calls modules in threads of its own: what they compute is not audited, and autocast does not reach it. "
    "Call them in the thread that runs the model to have them audited."
)


@dataclass
class Recording:
    """A tape, and what the recorded run gave, until a run of the tape was seen to give the same."""

    capture: Capture
    subject: Subject
    answer: NamedTensors
    repeated: bool = False

    def repeats(self, found: Sequence[torch.Tensor] | None = None) -> None:
        """Raises CaptureError(slug="capture-failed") unless the tape repeats the run; once it was seen to, nothing is done.

        found: outputs of an FP32 run of the tape, which stand for one more if they agree.
        """
        if self.repeated:
            return
        if found is None or not self._gave([x.detach() for x in found]):
            _check(self.capture, self.subject, self.subject.batches[0], self.answer)
        self.repeated = True

    def _gave(self, found: list[torch.Tensor]) -> bool:
        """Whether the run gave this."""
        answer, found = _unnested(self.answer), _unnested(found)
        try:
            return len(answer) == len(found) and output_error(answer, found) <= AGREEMENT
        except MeasureError:
            return False


def capture(subject: Subject, formats: tuple[str, ...] = (), seed: int = 0) -> Capture:
    """Record the subject's run on its first batch, and run the tape again.

    formats: literals that Python derives from a dtype (`torch.finfo(x.dtype).min`) are looked up for each of them.
    Raises: CaptureError(slug="capture-failed") where the model does not run, or its tape does not repeat it.
    """
    with _young_searched():
        recording = _recorded(subject, formats, seed)
        recording.repeats()
        return recording.capture


def recorded(subject: Subject, formats: tuple[str, ...] = (), seed: int = 0) -> Recording:
    """As `capture`, but for the second run: whoever runs the tape for another reason says what came out."""
    with _young_searched():
        return _recorded(subject, formats, seed)


@contextmanager
def _young_searched() -> Iterator[None]:
    """In the body only what is young is searched for garbage: a tape is many objects, and all of them stay."""
    thresholds = gc.get_threshold()
    gc.set_threshold(*thresholds[:2], _NEVER)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


def _recorded(subject: Subject, formats: tuple[str, ...], seed: int) -> Recording:
    batch: Batch = subject.batches[0]
    try:
        tape, answer, history = from_the_start(subject.model, batch, lambda: _run(subject.model, batch, seed), seed)
    except AuditorError:
        raise
    except Exception as error:
        let_through(error)
        raise CaptureError(
            f"{subject.name} could not be recorded: {_first_line(error)}. "
            "Check that the model runs on these inputs in FP32, outside torch.compile.",
            slug="capture-failed",
        ) from error
    found = assembled(tape, subject.model, batch)
    if not any(node.floating for node in found.nodes.values()):
        raise CaptureError(_nothing_floating(subject.name, answer), slug="nothing-to-audit")
    if all(node.dtype in DOUBLE for node in found.nodes.values() if node.floating):
        raise CaptureError(
            f"{subject.name} computes in FP64 alone, which is kept as it is. Pass model.float(), and inputs in FP32, to see "
            "what lower precision does to it.",
            slug="nothing-to-audit",
        )
    others = of_shapes(batch, (*subject.batches[1:], *subject.held_out)) if tape.reads else []
    found = compared(found, tape, subject.model, batch, formats, seed)
    warnings = (*found.warnings, *([history] if history else []))
    found = replace(found, same_path=on_the_path(tape, subject.model, others, seed), warnings=warnings)
    return Recording(found, subject, answer)


def _nothing_floating(name: str, answer: NamedTensors) -> str:
    """Why the recorded operations that lead to the outputs have no precision."""
    if not answer:
        return (
            f"{name} returns no tensor, so there is no output to compare. Let it return tensors: a number (.item()), an array "
            "or a text made of one cannot be followed back to the operations that it came from."
        )
    return (
        f"no floating-point operation leads to the tensors that {name} returns, so there is no precision to audit. A number "
        "(.item()), an array or a text cannot be followed back, nor can entries that choose a shape. Pass a model that "
        "computes its outputs from floating-point tensors."
    )


def _run(model: nn.Module, batch: Batch, seed: int) -> tuple[Tape, NamedTensors, str | None]:
    with isolated(batch):  # what the run does to its inputs is no state of the model
        tape, answer = record(model, batch)
    return tape, answer, history_matters(model, batch, answer, seed)


def assembled(tape: Tape, model: nn.Module, batch: Batch) -> Capture:
    """The tape as the stages read it."""
    placeholders = placeholders_of(tape, model)
    order = tuple(placeholder.name for placeholder in placeholders)
    return Capture(
        graph_module=TapeModule(nn.Module(), tape.graph),
        nodes=describe_nodes(tape, model),
        placeholders=placeholders,
        outputs=tape.outputs,
        bind=Binder(order, tape.names, tape.constants, keywords_of(batch)),
        method="path" if tape.reads else "run",
        operations=tape.operations,
        aliases=aliases_of(model),
        warnings=(*([_PATH] if tape.reads else []), *([_THREADS] if tape.elsewhere else [])),
    )


def _check(recorded: Capture, subject: Subject, batch: Batch, answer: Sequence[torch.Tensor]) -> None:
    given = recorded.bind(subject.model, batch)
    try:
        found = _replayed(recorded, given)
    except Exception as error:
        let_through(error)
        raise CaptureError(
            f"{subject.name} runs, but its recorded operations do not run again: {_first_line(error)}. Does it use an "
            "operation that only works within a context, or handles that are freed after the run?",
            slug="capture-failed",
        ) from error
    answer = _unnested(answer)
    if len(found) != len(answer) or not _agree(recorded, given, output_error(answer, found), found):
        raise CaptureError(
            f"{subject.name} answers differently when its recorded operations are run again: does it keep state outside "
            "of its modules, or use an operation that is not deterministic?",
            slug="capture-failed",
        )


def _agree(recorded: Capture, given: Sequence[Any], error: float, found: list[torch.Tensor]) -> bool:
    """Whether a replay is the run, but for rounding: what a kernel rounds otherwise on other memory, a model may magnify."""
    if error <= AGREEMENT or not math.isfinite(error):
        return error <= AGREEMENT
    signs = torch.Generator().manual_seed(0)
    moved = output_error(found, _replayed(recorded, [_last_place(x, signs) for x in given]))
    return error <= ROUNDINGS * moved


def _last_place(value: Any, signs: torch.Generator) -> Any:
    """A float tensor with every entry off by one in its last place, up or down."""
    if not isinstance(value, torch.Tensor) or value.dtype != torch.float32 or value.layout is not torch.strided:
        return value
    step = (2 * torch.randint(2, value.shape, generator=signs) - 1).to(value.device) * torch.finfo(value.dtype).eps
    return value.detach() * (1 + step)


def _replayed(recorded: Capture, given: Sequence[Any]) -> list[torch.Tensor]:
    with torch.no_grad():
        return _unnested(tensor_outputs(recorded.graph_module(*given)))


def _unnested(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [part for x in tensors for part in (x.unbind() if x.is_nested else [x])]


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:160]}" if lines else type(error).__name__
