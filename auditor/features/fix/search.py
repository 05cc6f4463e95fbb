"""From an audit to verified changes of the source: candidates, trials, and the audit of the edited source."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from ...errors import AuditorError
from ...records import Audit, Fixes, Span
from ...rulebook.load import load_rules
from ...rulebook.rule import Rule
from ...settings import Settings
from .algebra import Rewriter, is_display
from .candidates import SAFE, Candidate, Proposer
from .describe import Accepted, Describer, edits_of, problems_of_inputs
from .judge import GAIN, Judge, moved
from .places import Sources, Spot, promotions, raised_spots, spots_of
from .records import Baseline, Run, Standing, Trial
from .source import Edits, Source, clash, edited_texts, expression_before, unified_diff
from .worker import standing_of
from .workshop import Workshop, open_workshop

MOST_TRIALS = 80
"""Maximum number of runs of edited sources; an audit is not a trial."""
MOST_AUDITS = 9
"""Maximum number of audits of edited sources."""
MOST_SPOTS = 14
"""Maximum number of expressions at which candidates are tried."""
TRIED = 12
"""Maximum number of candidates for one expression."""
TRIED_AFTER_RAISING = 16
"""The same where a run raised: what converts too few or too many operands raises again."""
AFTER_SUCCESS = 3
"""Maximum number of further candidates once one has lowered the penalty: another may be faster."""
MOST_BACK = 3
"""Maximum number of places at which values are cast back after all candidates are accepted."""
FOLLOWED = 6
"""Maximum number of conversions tried where a candidate itself made a run raise."""
SECONDS = 900.0
"""Seconds after which no new trial starts."""
DTYPES_DIFFER = re.compile(r"dtype|float != |should be the same|expected scalar type|must match|Half|BFloat16")
"""What messages of torch have that say that operands have two dtypes."""


def find_fixes(
    audit: Audit,
    settings: Settings,
    *,
    only_safe: bool = False,
    tell: Callable[[str], object] = str,
) -> Fixes:
    """Search for changes of the user's source that repair the problems of an audit, run and audit each of them, and return
    those after which the recommended plan is faster, or a run that raised passes.

    audit: with its live model. only_safe: leave out changes of the algebra. tell: called with what is being tried. No file
    is changed. Raises: AuditorError(slug="not-rebuilt") if a fresh process cannot build the model, "loaded-audit" if the audit
    was loaded from files.
    """
    if audit.live is None:
        raise AuditorError(
            "the audit was loaded from files, without its model: run `auditor fix TARGET`", "loaded-audit"
        )
    with open_workshop(audit.live, settings) as workshop:
        return Search(audit, settings, workshop, only_safe, tell).run()


class Search:
    """One search for fixes. See `find_fixes`."""

    def __init__(
        self, audit: Audit, settings: Settings, workshop: Workshop, only_safe: bool, tell: Callable[[str], object]
    ) -> None:
        self._audit, self._settings, self._workshop = audit, settings, workshop
        self._only_safe, self._tell = only_safe, tell
        self._sources = Sources()
        self._rules = {rule.code: rule for rule in load_rules()}
        self._until = time.monotonic() + SECONDS
        self._baseline: Baseline
        self._judge: Judge
        self._rejected: dict[str, None] = {}
        self._sizes = sizes_of(audit)

    def run(self) -> Fixes:
        """Search, verify, and describe the result."""
        before = standing_of(self._audit)
        spots = spots_of(self._audit, self._sources)[:MOST_SPOTS]
        self._tell("run the source as it is")
        self._baseline = self._workshop.baseline()
        self._judge = Judge(self._audit.max_error, self._baseline)
        shown = self._only_shown(spots)
        if not spots and not raised_spots(self._baseline.trial, self._sources):
            return self._described([], [before], shown)
        accepted = self._climb(spots)
        accepted = self._cast_back(accepted)
        accepted = self._minimised(accepted)
        kept, standings = self._gated(accepted, before)
        return self._described(kept, standings, shown)

    # candidates

    def _climb(self, spots: Sequence[Spot]) -> list[Accepted]:
        """Accept candidates, at one expression after the other, as long as they lower the penalty of the runs."""
        accepted: list[Accepted] = []
        now = self._baseline.trial
        done: set[tuple[int, str]] = set()
        for _ in range(MOST_SPOTS):
            spot = next(iter(self._waiting(spots, now, accepted, done)), None)
            if spot is None or self._is_over():
                break
            done.add((id(spot.node), spot.problem))
            better = self._best_at(spot, now, accepted)
            if better is not None:
                accepted.append(better)
                now = better.after
        return accepted

    def _waiting(
        self, spots: Sequence[Spot], now: Trial, accepted: Sequence[Accepted], done: set[tuple[int, str]]
    ) -> Iterator[Spot]:
        """The expressions to try next: where runs raise, then those with large effects, unless nothing is left to gain."""
        raising = raised_spots(now, self._sources, edits_of(accepted))
        yield from (spot for spot in raising if (id(spot.node), spot.problem) not in done)
        if self._judge.penalty(now) >= GAIN or not self._judge.is_all_low(now):
            yield from (spot for spot in spots if (id(spot.node), spot.problem) not in done)

    def _best_at(self, spot: Spot, now: Trial, accepted: Sequence[Accepted]) -> Accepted | None:
        """The candidate for one expression that lowers the penalty most, and of equal ones the fastest."""
        best: Accepted | None = None
        taken = edits_of(accepted)
        most = TRIED_AFTER_RAISING if spot.raises else TRIED
        tried = 0
        for proposed in self._candidates(spot, now, taken):
            if tried == most or self._is_over():
                break
            candidate = without_casts_made(proposed, taken)
            if clash(candidate.edits, taken) or set(candidate.edits) <= set(taken):
                continue
            tried += 1
            found = self._tried(spot, candidate, now, taken)
            if found is not None and (best is None or self._judge.rank(found.after) < self._judge.rank(best.after)):
                best = found
                most = min(most, tried + AFTER_SUCCESS)
        return best

    def _candidates(self, spot: Spot, now: Trial, taken: Edits) -> Iterator[Candidate]:
        """The candidates for an expression, the most promising first, each once."""
        seen: set[Edits] = set()
        for candidate in self._proposed(spot, now, taken):
            if is_display(candidate) or (self._only_safe and candidate.safety != SAFE) or not candidate.edits:
                continue
            key = tuple(sorted(candidate.edits))
            if key not in seen:
                seen.add(key)
                yield candidate

    def _proposed(self, spot: Spot, now: Trial, taken: Edits) -> Iterator[Candidate]:
        proposer = self._proposer(spot.source)
        rewriter = Rewriter(spot.source, proposer)
        if spot.raises and is_about_dtypes(spot.problem):
            for source, promotion in promotions(now, self._sources, taken):
                yield from self._proposer(source).at_promotion(promotion)
            yield from proposer.of_one_dtype(spot.node)
        yield from rewriter.candidates(spot.node, self._rules_at(spot))
        yield from rewriter.without_rule(spot.node)
        yield from proposer.in_fp32(spot.node, spot.last)
        if spot.raises:
            yield from proposer.of_one_dtype(spot.node)

    def _proposer(self, source: Source) -> Proposer:
        return Proposer(source, self._baseline.kinds, self._sizes)

    def _rules_at(self, spot: Spot) -> list[Rule]:
        """The rules that found a problem in the function of a spot; without one, or for a measured problem, all."""
        function = spot.source.function_of(spot.node)
        named = dict.fromkeys(spot.rules)
        for other in spots_of(self._audit, self._sources):
            if other.source is spot.source and spot.source.function_of(other.node) is function:
                named |= dict.fromkeys(other.rules)
        own = [self._rules[code] for code in named if code in self._rules and self._rules[code].fixes]
        rest = [rule for code, rule in self._rules.items() if rule.fixes and code not in named]
        return [*own, *rest]

    # trials

    def _tried(self, spot: Spot, candidate: Candidate, now: Trial, taken: Edits) -> Accepted | None:
        """The candidate, possibly with a conversion where it made a run raise, if it lowers the penalty."""
        trial = self._trial((*taken, *candidate.edits), now)
        if trial is None:
            return None
        if self._judge.is_progress(trial, now):
            return Accepted(spot, candidate, now, trial)
        return self._followed(spot, candidate, now, trial, taken)

    def _followed(self, spot: Spot, candidate: Candidate, now: Trial, trial: Trial, taken: Edits) -> Accepted | None:
        """The candidate with one conversion more, at the expression that raises because of it."""
        raising = [run for name, run in trial.runs.items() if run.error is None and moved(now.runs.get(name), run)]
        for run in raising[:1]:
            edits = (*taken, *candidate.edits)
            for further in self._conversions_at(run, edits):
                both = replace(candidate, parts=(*candidate.parts, *further.parts))
                if clash(further.edits, edits) or self._is_over():
                    continue
                result = self._trial((*taken, *both.edits), now)
                if result is not None and self._judge.is_progress(result, now):
                    return Accepted(spot, both, now, result)
        return None

    def _conversions_at(self, run: Run, edits: Edits) -> list[Candidate]:
        """Conversions of operands of the expression that raised in an edited source, as edits of the original."""
        for span in run.place[:2]:
            source = self._sources.of(span.file)
            if source is None:
                continue
            own = [edit for edit in edits if edit.file == span.file]
            node = expression_before(source, own, span)
            if node is not None:
                return list(self._proposer(source).of_one_dtype(node))[:FOLLOWED]
        return []

    def _trial(self, edits: Edits, now: Trial | None = None) -> Trial | None:
        """The trial of edits; None if the source cannot be made or run, or computes something else in FP32.

        now: the trial to improve: the run with its largest penalty comes first, and ends the trial if it is no better.
        """
        try:
            texts = edited_texts(self._sources.by_file, edits)
            for text in texts.values():
                compile(text.encode(), "edited", "exec", dont_inherit=True)
        except (ValueError, SyntaxError):
            return None
        self._tell(f"trial {self._workshop.trials + 1}")
        runs = now.runs.items() if now is not None else ()
        known = dict(sorted(runs, key=lambda pair: -self._judge.penalty_of(pair[1])))
        trial = self._workshop.trial(texts, known)
        if trial.crash or not self._judge.is_equal(trial.distance):
            return None
        return trial

    def _is_over(self) -> bool:
        return self._workshop.trials >= MOST_TRIALS or time.monotonic() > self._until

    # what remains

    def _cast_back(self, accepted: list[Accepted]) -> list[Accepted]:
        """The accepted candidates, the last with casts back to low precision wherever these save time: a region in FP32
        ends in the function that called, too."""
        tried: set[Edits] = set()
        result = list(accepted)
        for _ in range(MOST_BACK if result else 0):
            last, now, edits = result[-1], result[-1].after, edits_of(result)
            better: Accepted | None = None
            for candidate in self._casts_back(now, edits):
                if candidate.edits in tried or clash(candidate.edits, edits) or len(tried) >= TRIED or self._is_over():
                    continue
                tried.add(candidate.edits)
                trial = self._trial((*edits, *candidate.edits))
                is_whole = trial is not None and trial.runs.keys() == now.runs.keys()
                if trial is not None and is_whole and self._judge.saves_time(trial, now):
                    both = replace(last.candidate, parts=(*last.candidate.parts, *candidate.parts))
                    better = replace(last, candidate=both, after=trial)
                    break
            if better is None:
                break
            result[-1] = better
        return result

    def _casts_back(self, now: Trial, edits: Edits) -> Iterator[Candidate]:
        for source, promotion in promotions(now, self._sources, edits, raised=False):
            yield from self._proposer(source).at_promotion(promotion)

    def _minimised(self, accepted: list[Accepted]) -> list[Accepted]:
        """The accepted candidates without the parts that neither lower the penalty nor save time."""
        result = list(accepted)
        if not result:
            return result
        now = result[-1].after
        for number, one in enumerate(result):
            parts = list(one.candidate.parts)
            for part in one.candidate.parts if len(one.candidate.parts) > 1 else ():
                fewer = [other for other in parts if other is not part]
                smaller = replace(one, candidate=replace(one.candidate, parts=tuple(fewer)))
                if not fewer or self._is_over():
                    continue
                trial = self._trial(edits_of([*result[:number], smaller, *result[number + 1 :]]))
                if trial is not None and self._judge.rank(trial) <= self._judge.rank(now):
                    parts, now = fewer, trial
                    result[number] = smaller
        return result

    def _gated(self, accepted: Sequence[Accepted], before: Standing) -> tuple[list[Accepted], list[Standing]]:
        """The first accepted candidates after which an audit of the edited source gives the fastest plan, or else single
        ones that audits confirm; and what audits say of the source before the first, and after each."""
        if not accepted:
            return [], [before]
        self._tell("audit the edited source")
        standings = [before]
        for number in range(1, len(accepted) + 1):
            if self._workshop.audits < MOST_AUDITS:
                standings.append(self._standing(accepted[:number]))
        best = 0
        for number, after in enumerate(standings):
            if self._judge.is_better(after, before) and (not best or self._judge.is_better(after, standings[best])):
                best = number
        if best:
            return list(accepted[:best]), standings[: best + 1]
        for after in standings[1:]:
            self._rejected[self._judge.objection(after, before)] = None
        return self._singly(accepted[1:], before)

    def _singly(self, accepted: Sequence[Accepted], before: Standing) -> tuple[list[Accepted], list[Standing]]:
        """The candidates that audits confirm, each together with those confirmed before it; and what the audits say."""
        kept: list[Accepted] = []
        standings = [before]
        for one in accepted:
            if self._workshop.audits >= MOST_AUDITS:
                break
            after = self._standing([*kept, one])
            if self._judge.is_better(after, standings[-1]):
                kept.append(one)
                standings.append(after)
        return kept, standings

    def _standing(self, accepted: Sequence[Accepted]) -> Standing:
        return self._workshop.audit(edited_texts(self._sources.by_file, edits_of(accepted)))

    # the result

    def _only_shown(self, spots: Sequence[Spot]) -> list[Accepted]:
        """The changes by rules that would give other results: they are described, and never run."""
        result: dict[Edits, Accepted] = {}
        trial = self._baseline.trial
        for spot in spots:
            rules = [self._rules[code] for code in spot.rules if code in self._rules]
            rewriter = Rewriter(spot.source, self._proposer(spot.source))
            for candidate in rewriter.candidates(spot.node, rules):
                if is_display(candidate):
                    result.setdefault(candidate.edits, Accepted(spot, candidate, trial, trial))
        return list(result.values())

    def _described(self, kept: Sequence[Accepted], standings: Sequence[Standing], shown: Sequence[Accepted]) -> Fixes:
        describer = Describer(self._audit, self._sources, self._judge)
        before, after = standings[0], standings[-1]
        edits = edits_of(kept)
        return Fixes(
            describer.fixes(kept, standings),
            unified_diff(self._sources.by_file, edits),
            before.plan,
            after.plan,
            before.speedup,
            after.speedup,
            before.error,
            after.error,
            tuple(sorted(before.failing)),
            tuple(sorted(after.failing)),
            tuple(describer.fix(one, 1.0, 1.0) for one in shown),
            tuple(self._rejected),
            problems_of_inputs(self._audit.findings),
            self._workshop.trials,
            self._workshop.audits,
            describer.texts(edits),
        )


def sizes_of(audit: Audit) -> dict[Span, float]:
    """{expression: the largest magnitude of the operation that it ends with}."""
    result: dict[Span, float] = {}
    for report in audit.nodes:
        if report.range is not None and report.node.expressions:
            result[report.node.expressions[0]] = report.range.max_abs
    return result


def without_casts_made(candidate: Candidate, taken: Edits) -> Candidate:
    """The candidate without conversions of values that accepted edits convert already: a region in FP32 may end there."""
    converted = _places_of_conversions(taken)
    parts = tuple(part for part in candidate.parts if converted.isdisjoint(_places_of_conversions(part)))
    return replace(candidate, parts=parts) if parts else candidate


def _places_of_conversions(edits: Edits) -> set[tuple[str, int]]:
    """(file, offset) of the edits that insert a conversion."""
    return {(edit.file, edit.start) for edit in edits if ".to(" in edit.text}


def is_about_dtypes(problem: str) -> bool:
    """Whether a message says that operands have two dtypes."""
    return DTYPES_DIFFER.search(problem) is not None
