"""Describes the accepted changes of a search for fixes: the rows of `Fixes`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...capture.places import from_repository
from ...records import Audit, Change, Finding, Fix, FixedText
from ...rulebook.inputs import INPUT_OP
from .candidates import Candidate
from .judge import Judge
from .places import Sources, Spot
from .records import Standing, Trial
from .source import Edit, Edits, Source, edited_texts, unified_diff


@dataclass(frozen=True)
class Accepted:
    """A candidate that lowered the penalty, with the trial before and after it."""

    spot: Spot
    candidate: Candidate
    before: Trial
    after: Trial


def edits_of(accepted: Sequence[Accepted]) -> Edits:
    """The edits of all candidates, each once."""
    return tuple(dict.fromkeys(edit for one in accepted for edit in one.candidate.edits))


@dataclass(frozen=True)
class Describer:
    """Describes candidates with the findings of the audit whose source they change."""

    audit: Audit
    sources: Sources
    judge: Judge

    def fixes(self, kept: Sequence[Accepted], standings: Sequence[Standing]) -> tuple[Fix, ...]:
        """A Fix for each accepted candidate. standings: of the source before the first, and after each."""
        pairs = zip(kept, standings, standings[1:], strict=False)
        return tuple(self.fix(one, before.speedup, after.speedup) for one, before, after in pairs)

    def fix(self, one: Accepted, before: float, after: float) -> Fix:
        """One accepted candidate, with the run that it improves most. before, after: speed-ups of the recommended plan."""
        run = max(one.after.runs, key=lambda name: self._improvement(one, name))
        edits = one.candidate.edits
        first = min(edits)
        source = self.sources[first.file]
        return Fix(
            title=one.candidate.title,
            problem=one.spot.problem,
            file=from_repository(Path(first.file)),
            line=source.place_of_offset(first.start)[0],
            safety=one.candidate.safety,
            causes=tuple(one.spot.causes) or self._causes_at(self._lines_of(one, source, first)),
            rules=tuple(one.spot.rules),
            run=run,
            before=one.before.runs[run].error,
            after=one.after.runs[run].error,
            speedup_before=before,
            speedup_after=after,
            diff=unified_diff(self.sources.by_file, edits),
            changes=tuple(self._change(edit) for edit in edits),
        )

    def _improvement(self, one: Accepted, run: str) -> float:
        return self.judge.penalty_of(one.before.runs[run]) - self.judge.penalty_of(one.after.runs[run])

    def _lines_of(self, one: Accepted, source: Source, edit: Edit) -> list[str]:
        """The line of an edit, and the lines that raised before it, as `file.py:line`."""
        lines = [f"{Path(source.file).name}:{source.place_of_offset(edit.start)[0]}"]
        for run in one.before.runs.values():
            lines.extend(f"{Path(span.file).name}:{span.line}" for span in run.place)
        return lines

    def _causes_at(self, lines: Collection[str]) -> tuple[str, ...]:
        """The causes of problems at some lines."""
        found = [one for one in self.audit.findings if one.cause and one.severity != "info"]
        return tuple(dict.fromkeys(one.cause for one in found if one.source in lines))

    def _change(self, edit: Edit) -> Change:
        source = self.sources[edit.file]
        start, end = source.place_of_offset(edit.start), source.place_of_offset(edit.end)
        return Change(from_repository(Path(edit.file)), *start, *end, edit.text)

    def texts(self, edits: Edits) -> tuple[FixedText, ...]:
        """The edited files, before and after."""
        after = edited_texts(self.sources.by_file, edits)
        return tuple(FixedText(file, self.sources[file].text, text) for file, text in sorted(after.items()))


def problems_of_inputs(findings: Sequence[Finding]) -> tuple[str, ...]:
    """A sentence for each input that does not fit a format, which no change of the source repairs."""
    remedy = "no change of your source repairs an input: pass it in FP32, or scale it before the model is called"
    serious = [one for one in findings if one.op == INPUT_OP and one.severity != "info"]
    return tuple(f"{one.message}; {remedy} ({one.rule})" for one in serious)
