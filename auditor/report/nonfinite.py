"""Runs whose outputs are Inf or NaN, in words: the first operation that makes them so, and where the cause begins."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..artefact.strategies import strategy_of
from ..records import NonFinite
from ..records.audit import Audit
from .words import label, line, op, plan_title, scope


@dataclass(frozen=True)
class Run:
    """Runs in one format that turn non-finite at the same operation. first: None where the recorded graph stays finite.

    title: `FP16 under autocast, without a plan`, or `The plan FP16 under autocast`.
    """

    format: str
    title: str
    first: NonFinite | None

    @property
    def sentences(self) -> tuple[str, ...]:
        """What turns non-finite and where, then why."""
        first = self.first
        if first is None:
            return f"{self.title}: outputs turn Inf or NaN.", "The recorded graph does not show at which operation."
        return f"{self.title}: outputs turn {first.value} at {at(first)}.", cause(first)


def at(first: NonFinite) -> str:
    """The operation that turns non-finite: `sqrt in blocks.0.norm (unet.py:28)`."""
    batch = "" if first.batch == 1 else f", in batch {first.batch}"
    return _place(first.op, first.owner, first.source) + batch


def cause(first: NonFinite) -> str:
    """Why it does, in a sentence."""
    fired = f"; see {', '.join(first.rules)}" if first.rules else ""
    if first.begins == first.node:
        return f"The cause is {first.cause} of that operation{fired}."
    return f"The cause is {first.cause} at {_place(first.begins_op, first.begins_owner, first.begins_source)}{fired}."


def _place(name: str, owner: str, source: str | None) -> str:
    where = f" ({line(source, None)})" if source else ""
    return f"{op(name).partition('.')[0]} in {scope(owner)}{where}"


def nonfinite_runs(audit: Audit) -> tuple[Run, ...]:
    """Baselines, then plans, that turn non-finite; those of one format with one cause together."""
    groups: dict[tuple[str, NonFinite | None], list[str]] = {}
    for name, first in _baselines(audit):
        strategy, _, fmt = name.partition("_")
        groups.setdefault((fmt, first), []).append(strategy_of(strategy).title)
    found = [
        Run(fmt, f"{label(fmt)} {' and '.join(titles)}, without a plan", first)
        for (fmt, first), titles in groups.items()
    ]
    for plan in audit.plans.values():
        ran = plan.verification
        if ran is not None and not ran.finite and not ran.failure:
            found.append(Run(plan.format, f"The plan {plan_title(plan)}", ran.nonfinite))
    return tuple(found)


def _baselines(audit: Audit) -> Iterator[tuple[str, NonFinite | None]]:
    return ((n, base.nonfinite) for n, base in audit.baselines.items() if not base.finite and not base.failure)
