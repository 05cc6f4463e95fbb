"""Fixes of training steps: the order of an optimizer's calls, and a loss in FP32, where a rehearsal names the line."""

from __future__ import annotations

import ast
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...capture.places import from_repository
from ...capture.source import kind_of
from ...errors import AuditorError
from ...loading.target import parse
from ...records import Change, Fix, FixedText, Fixes
from ..rehearsal.load import load_step
from ..rehearsal.rehearse import problems_of, rehearse_as_written
from ..rehearsal.result import AS_WRITTEN, RecipeRun
from .candidates import SAFE, UNSAFE, Candidate, Proposer
from .places import Sources
from .source import Edits, Source, edited_texts, first_line, unified_diff
from .workshop import open_for_step

STEPS = 40
"""Number of steps of a rehearsal of an edited step."""
MOST_REPAIRS = 5
"""Maximum number of problems that are repaired one after the other."""
MOST_TRIALS = 24
"""Maximum number of rehearsals of edited sources."""
CLOSE = 1e-3
"""Largest relative difference of the final FP32 loss after a fix, unless the loss is smaller."""
CLOSER = 0.5
"""A fix that removes no named problem must reduce the distance of the loss from FP32's at least by this factor."""


@dataclass(frozen=True)
class StepStanding:
    """What a rehearsal says of a step as written, and in FP32.

    problems: (kind, sentence, line as `file.py:line`). loss, fp32: final losses. files: {file name: paths} of the user's
    modules. blamed: lines at which Inf or NaN first appeared. kinds: what the names in functions stand for.
    """

    problems: tuple[tuple[str, str, str], ...] = ()
    loss: float = math.nan
    fp32: float = math.nan
    files: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    blamed: tuple[str, ...] = ()
    crash: str = ""


def is_step(target: str) -> bool:
    """Whether a TARGET names a training step: a function of a file that calls `backward`; without a symbol, whether the
    file has such a function and no `get_model`."""
    parsed = parse(target)
    if parsed.path is None:
        return False
    try:
        tree = ast.parse(parsed.path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return False
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    stepping = {name for name, node in functions.items() if _calls(node, "backward")}
    if parsed.symbol is not None:
        return parsed.symbol in stepping
    return bool(stepping) and "get_model" not in functions


def _calls(node: ast.AST, name: str) -> bool:
    attributes = [one for one in ast.walk(node) if isinstance(one, ast.Attribute)]
    return any(one.attr == name for one in attributes)


def rehearse_step(job: Mapping[str, Any]) -> StepStanding:
    """In a process of its own: rehearse the step of an edited source, as written and in FP32."""
    with ExitStack() as stack:
        step, batches, name = stack.enter_context(load_step(job["target"], None, job["seed"]))
        runs = rehearse_as_written(step, batches, STEPS, job["seed"], name)
        modules = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
        own = [file for file in modules if isinstance(file, str) and kind_of(file) == "own"]
        files: dict[str, tuple[str, ...]] = {}
        for file in own:
            files[Path(file).name] = (*files.get(Path(file).name, ()), file)
        if AS_WRITTEN not in runs:
            return StepStanding(loss=runs["fp32"].last_loss(), fp32=runs["fp32"].last_loss(), files=files)
        run = runs[AS_WRITTEN]
        problems = tuple((one.kind, one.text, one.line) for one in problems_of(AS_WRITTEN, runs))
        return StepStanding(problems, run.last_loss(), runs["fp32"].last_loss(), files, _blamed(run))


def _blamed(run: RecipeRun) -> tuple[str, ...]:
    """The lines at which Inf or NaN first appeared, as `file.py:line`."""
    texts = [one.where for one in (*run.skipped, *run.bad_losses) if one.where]
    lines = [text.rpartition("(")[2].rstrip(")") for text in texts]
    return tuple(dict.fromkeys(line for line in lines if ":" in line))


def fix_step(target: str, seed: int, tell: Callable[[str], object] = str) -> Fixes:
    """Search for changes of a training step that repair what a rehearsal reports; each was rehearsed in a fresh process.

    Accepted changes leave no new problem, remove the repaired one or bring the final loss closer to FP32's, and do not
    raise the loss of the step in FP32. Raises: AuditorError(slug="bad-step") if the step cannot be rehearsed.
    """
    with open_for_step({"target": target, "seed": seed}) as workshop:
        tell("rehearse the step as it is")
        first = workshop.ask("rehearse", {})
        if isinstance(first, str):
            raise AuditorError(f"the step cannot be rehearsed: {first.partition(chr(10))[0]}", "bad-step")
        return _Repairs(workshop, tell).run(first)


class _Repairs:
    """One search for repairs of a step."""

    def __init__(self, workshop: Any, tell: Callable[[str], object]) -> None:
        self._workshop, self._tell = workshop, tell
        self._sources = Sources()
        self._trials = 0

    def run(self, first: StepStanding) -> Fixes:
        """Repair one problem after the other, as long as a rehearsal confirms it."""
        now = first
        taken: Edits = ()
        fixes: list[Fix] = []
        for _ in range(MOST_REPAIRS):
            found = self._best(now, taken)
            if found is None:
                break
            candidate, problem, after = found
            fixes.append(self._fix(candidate, problem, now, after))
            taken = (*taken, *candidate.edits)
            now = after
        texts = edited_texts(self._sources.by_file, taken)
        return Fixes(
            tuple(fixes),
            unified_diff(self._sources.by_file, taken),
            None,
            None,
            1.0,
            1.0,
            first.loss,
            now.loss,
            tuple(dict.fromkeys(kind for kind, _, _ in first.problems)),
            tuple(dict.fromkeys(kind for kind, _, _ in now.problems)),
            trials=self._trials,
            texts=tuple(FixedText(file, self._sources[file].text, text) for file, text in sorted(texts.items())),
        )

    def _best(self, now: StepStanding, taken: Edits) -> tuple[Candidate, str, StepStanding] | None:
        """The first candidate that a rehearsal confirms, with its problem; None if there is none."""
        for candidate, problem in self._candidates(now):
            if self._trials >= MOST_TRIALS:
                return None
            try:
                texts = edited_texts(self._sources.by_file, (*taken, *candidate.edits))
                for text in texts.values():
                    compile(text.encode(), "edited", "exec", dont_inherit=True)
            except (ValueError, SyntaxError):
                continue
            self._trials += 1
            self._tell(f"rehearsal {self._trials}")
            after = self._workshop.ask("rehearse", texts)
            if isinstance(after, StepStanding) and is_repaired(now, after):
                return candidate, problem, after
        return None

    def _candidates(self, now: StepStanding) -> Iterator[tuple[Candidate, str]]:
        for kind, text, line in now.problems:
            for place in self._places(now, line):
                if kind in REPAIRS:  # others, such as a loss behind FP32's, have no line
                    for candidate in REPAIRS[kind](*place):
                        yield candidate, f"{kind}: {text.partition(':')[0]}"
        for line in now.blamed:
            for place in self._places(now, line):
                for candidate in _in_fp32(*place):
                    yield candidate, f"Inf or NaN first appears at {line}"

    def _places(self, now: StepStanding, line: str) -> Iterator[tuple[Source, ast.stmt]]:
        """The statements in functions of the user's at a line such as `train.py:12`: several files may have one name."""
        name, _, number = line.rpartition(":")
        for file in now.files.get(name, ()):
            source = self._sources.of(file)
            if source is not None and number.isdecimal():
                statement = source.statement_at(int(number))
                if statement is not None:
                    yield source, statement

    def _fix(self, candidate: Candidate, problem: str, before: StepStanding, after: StepStanding) -> Fix:
        first = min(candidate.edits)
        source = self._sources[first.file]
        changes = []
        for edit in candidate.edits:
            places = (*source.place_of_offset(edit.start), *source.place_of_offset(edit.end))
            changes.append(Change(from_repository(Path(edit.file)), *places, edit.text))
        return Fix(
            candidate.title,
            problem,
            from_repository(Path(first.file)),
            source.place_of_offset(first.start)[0],
            candidate.safety,
            (),
            (),
            AS_WRITTEN,
            before.loss,
            after.loss,
            1.0,
            1.0,
            unified_diff(self._sources.by_file, candidate.edits),
            tuple(changes),
        )


def is_repaired(before: StepStanding, after: StepStanding) -> bool:
    """Whether an edited step has fewer problems, none of them new, and trains at least as well, also in FP32."""
    if after.crash or not math.isfinite(after.fp32) or not after.fp32 <= before.fp32 + CLOSE * abs(before.fp32):
        return False
    known = {kind for kind, _, _ in before.problems}
    left = {kind for kind, _, _ in after.problems}
    if left - known:
        return False
    gap_before, gap_after = abs(before.loss - before.fp32), abs(after.loss - after.fp32)
    if left < known:
        return not gap_after > max(gap_before, CLOSE * abs(after.fp32) + 1e-6) or not math.isfinite(before.loss)
    return math.isfinite(after.loss) and (not math.isfinite(before.loss) or gap_after < CLOSER * gap_before)


# Repairs, by the kind of a problem. Each takes the source and the statement that the rehearsal names.

Repair = Callable[[Source, ast.stmt], Iterator[Candidate]]


def _calls_in(source: Source, around: ast.stmt, name: str) -> list[tuple[ast.stmt, ast.Call]]:
    """The statements of the function around a statement that call a method of this name, with the calls, in order."""
    function = source.function_of(around)
    found = []
    for node in ast.walk(function) if function is not None else ():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name:
            found.append((source.statement_of(node), node))
    return sorted(found, key=lambda pair: pair[0].lineno)


def _scaler_and_optimizer(source: Source, around: ast.stmt) -> tuple[str, str] | None:
    """The texts of the scaler and the optimizer of `scaler.step(optimizer)` near a statement, or of any scaler's call."""
    for _, call in _calls_in(source, around, "step"):
        if len(call.args) == 1 and isinstance(call.func, ast.Attribute):
            return source.segment(call.func.value), source.segment(call.args[0])
    scaled = [call.func.value for _, call in _calls_in(source, around, "scale") if isinstance(call.func, ast.Attribute)]
    stepped = [call.func.value for _, call in _calls_in(source, around, "step") if isinstance(call.func, ast.Attribute)]
    if scaled and stepped:
        return source.segment(scaled[0]), source.segment(stepped[0])
    return None


def _moved(source: Source, statement: ast.stmt, before: ast.stmt | None = None, after: ast.stmt | None = None) -> Edits:
    """The edits that move a statement before or after another one."""
    target = before or after
    assert target is not None
    text = source.segment(statement)
    return (*source.deletion(statement), source.line_insertion(target, text, below=before is None))


def _clip_before_unscale(source: Source, statement: ast.stmt) -> Iterator[Candidate]:
    named = _scaler_and_optimizer(source, statement)
    if named is None:
        return
    text = f"{named[0]}.unscale_({named[1]})"
    late = [one for one, _ in _calls_in(source, statement, "unscale_") if one.lineno > statement.lineno]
    if late:
        yield Candidate(
            "unscale the gradients before they are clipped", SAFE, (_moved(source, late[0], before=statement),)
        )
    yield Candidate("unscale the gradients before they are clipped", SAFE, ((source.line_insertion(statement, text),),))


def _clip_after_step(source: Source, statement: ast.stmt) -> Iterator[Candidate]:
    steps = [(one, call) for one, call in _calls_in(source, statement, "step") if one.lineno < statement.lineno]
    if not steps:
        return
    target, call = steps[0]
    moved = _moved(source, statement, before=target)
    if call.args and not _calls_in(source, statement, "unscale_") and isinstance(call.func, ast.Attribute):
        text = f"{source.segment(call.func.value)}.unscale_({source.segment(call.args[0])})"
        both = (source.line_insertion(target, text), *moved)
        yield Candidate("unscale and clip the gradients before the step", UNSAFE, (both,))
    yield Candidate("clip the gradients before the step", UNSAFE, (moved,))


def _unscale_twice(source: Source, statement: ast.stmt) -> Iterator[Candidate]:
    for one, _ in reversed(_calls_in(source, statement, "unscale_")):
        yield Candidate("unscale the gradients once", SAFE, (source.deletion(one),))


def _unscale_after_step(source: Source, statement: ast.stmt) -> Iterator[Candidate]:
    unscaling = [one for one, _ in _calls_in(source, statement, "unscale_")]
    stepping = [one for one, call in _calls_in(source, statement, "step") if call.args]
    if unscaling and stepping:
        moved = _moved(source, unscaling[-1], before=stepping[0])
        yield Candidate("unscale the gradients before the step", SAFE, (moved,))


def _backward_after_unscale(source: Source, statement: ast.stmt) -> Iterator[Candidate]:
    unscaling = [one for one, _ in _calls_in(source, statement, "unscale_")]
    backwards = [one for one, _ in _calls_in(source, statement, "backward")]
    if unscaling and backwards:
        moved = _moved(source, unscaling[0], after=backwards[-1])
        yield Candidate("unscale the gradients after the last backward pass", SAFE, (moved,))


def _scaled_update(source: Source, statement: ast.stmt) -> Iterator[Candidate]:
    scaled = [
        call.func.value for _, call in _calls_in(source, statement, "scale") if isinstance(call.func, ast.Attribute)
    ]
    for one, call in _calls_in(source, statement, "step"):
        if scaled and not call.args and isinstance(call.func, ast.Attribute) and one.lineno >= statement.lineno:
            scaler, optimizer = source.segment(scaled[0]), source.segment(call.func.value)
            edit = source.replacement(call, f"{scaler}.step({optimizer})")
            parts: list[Edits] = [(edit,)]
            if not _calls_in(source, statement, "update"):
                parts.append((source.line_insertion(one, f"{scaler}.update()", below=True),))
            yield Candidate("step by the scaler", SAFE, tuple(parts))
            return


def _no_update(source: Source, statement: ast.stmt) -> Iterator[Candidate]:
    """`scaler.update()` below the last `scaler.step(optimizer)`."""
    stepping = [(line, call) for line, call in _calls_in(source, statement, "step") if call.args]
    if not stepping:
        return
    last_line, last_call = stepping[-1]
    if isinstance(last_call.func, ast.Attribute):
        scaler = source.segment(last_call.func.value)
        edit = source.line_insertion(last_line, f"{scaler}.update()", below=True)
        yield Candidate("update the loss scale", SAFE, ((edit,),))


def _update_before_step(source: Source, statement: ast.stmt) -> Iterator[Candidate]:
    updates = [one for one, _ in _calls_in(source, statement, "update")]
    stepping = [one for one, call in _calls_in(source, statement, "step") if call.args]
    if updates and stepping:
        yield Candidate("update the loss scale after the step", SAFE, (_moved(source, updates[0], after=stepping[-1]),))


def _loss_not_scaled(source: Source, statement: ast.stmt) -> Iterator[Candidate]:
    named = _scaler_and_optimizer(source, statement)
    for _, call in _calls_in(source, statement, "backward"):
        if named is not None and isinstance(call.func, ast.Attribute) and not call.args:
            loss = source.segment(call.func.value)
            edit = source.replacement(call.func.value, f"{named[0]}.scale({loss})")
            yield Candidate("scale the loss", SAFE, ((edit,),))


def _gradients_zeroed(source: Source, statement: ast.stmt) -> Iterator[Candidate]:
    zeroing = [one for one, _ in _calls_in(source, statement, "zero_grad")]
    backwards = [one for one, _ in _calls_in(source, statement, "backward")]
    if zeroing and backwards:
        late = [one for one in zeroing if one.lineno > backwards[0].lineno] or zeroing
        yield Candidate(
            "zero the gradients before the backward pass", UNSAFE, (_moved(source, late[0], before=backwards[0]),)
        )


def _gradients_kept(source: Source, statement: ast.stmt) -> Iterator[Candidate]:
    backwards = [one for one, _ in _calls_in(source, statement, "backward")]
    named = _scaler_and_optimizer(source, statement)
    stepped = [
        call.func.value for _, call in _calls_in(source, statement, "step") if isinstance(call.func, ast.Attribute)
    ]
    optimizer = named[1] if named is not None else source.segment(stepped[0]) if stepped else ""
    if backwards and optimizer:
        edit = source.line_insertion(backwards[0], f"{optimizer}.zero_grad()")
        yield Candidate("zero the gradients before the backward pass", UNSAFE, ((edit,),))


def _backward_in_autocast(source: Source, statement: ast.stmt) -> Iterator[Candidate]:
    around = source.parent(statement)
    if isinstance(around, ast.With) and around.body[-1] is statement and len(around.body) > 1:
        yield Candidate(
            "leave the autocast region before the backward pass", SAFE, (_moved(source, statement, after=around),)
        )


def _schedule_before_step(source: Source, statement: ast.stmt) -> Iterator[Candidate]:
    steps = [one for one, _ in _calls_in(source, statement, "step") if one.lineno > statement.lineno]
    if steps:
        yield Candidate("step the schedule after the optimizer", UNSAFE, (_moved(source, statement, after=steps[0]),))


def _in_fp32(source: Source, statement: ast.stmt) -> Iterator[Candidate]:
    """Compute the values of a statement in FP32: every name that is no function, module or number may be a tensor."""
    value = getattr(statement, "value", None)
    function = source.function_of(statement)
    if value is None or function is None:
        return
    called = {id(node.func) for node in ast.walk(value) if isinstance(node, ast.Call)}
    names = [node for node in ast.walk(value) if isinstance(node, ast.Name) and id(node) not in called]
    assigned = {
        node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    assigned |= {one.arg for one in function.args.args}
    kinds = {(source.file, first_line(function), node.id): "float" for node in names if node.id in assigned}
    yield from Proposer(source, kinds).in_fp32(value)


REPAIRS: Mapping[str, Repair] = {
    "clip-before-unscale": _clip_before_unscale,
    "clip-after-step": _clip_after_step,
    "unscale-twice": _unscale_twice,
    "unscale-after-step": _unscale_after_step,
    "backward-after-unscale": _backward_after_unscale,
    "update-with-scaled-gradients": _scaled_update,
    "update-not-skipped": _scaled_update,
    "no-update": _no_update,
    "update-before-step": _update_before_step,
    "loss-not-scaled": _loss_not_scaled,
    "gradients-zeroed": _gradients_zeroed,
    "gradients-kept": _gradients_kept,
    "backward-in-autocast": _backward_in_autocast,
    "schedule-before-step": _schedule_before_step,
}
"""{kind of a rehearsal's finding: its repairs, the best first}."""
