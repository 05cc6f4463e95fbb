"""FP32 as the user has it set, and measured time and memory, in words."""

from __future__ import annotations

from dataclasses import dataclass

from ..devices import CPU
from ..records import Timed, Times, Today
from ..records.audit import Audit
from .words import compact, count, plan_title, ratio

SET = "FP32 as you have it set"
"""FP32 under the caller's own flags."""

UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


@dataclass(frozen=True)
class TimedRow:
    """One way to compute the model. cells: labels with what was measured."""

    title: str
    cells: tuple[tuple[str, str], ...]

    @property
    def line(self) -> str:
        """All of it in one line."""
        return f"{self.title}: " + "; ".join(f"{name} {text}".strip() for name, text in self.cells)


@dataclass(frozen=True)
class TimingView:
    """What was timed, and how. fp32: rows without a plan; plans: by name."""

    about: str
    fp32: tuple[TimedRow, ...]
    plans: dict[str, TimedRow]

    @property
    def rows(self) -> tuple[TimedRow, ...]:
        """All of them."""
        return (*self.fp32, *self.plans.values())


def timing_view(audit: Audit) -> TimingView | None:
    """Nothing where nothing was timed."""
    timing = audit.timing
    if timing is None:
        return None
    rows = [TimedRow("FP32", _cells(timing.fp32))]
    if timing.fp32_today is not None:
        rows.append(TimedRow(today_title(audit), _cells(timing.fp32_today)))
    plans = {name: TimedRow(plan_title(plan), _cells(plan.timed)) for name, plan in audit.plans.items() if plan.timed}
    return TimingView(_about(audit), tuple(rows), plans)


def today_title(audit: Audit) -> str:
    """`FP32 as you have it set (TF32)`."""
    found = audit.fp32_today.computed_in if audit.fp32_today else ()
    return f"{SET} ({', '.join(map(str.upper, found))})" if found else SET


def today_error(today: Today) -> str:
    """How far it is from FP32 in IEEE arithmetic."""
    return "fails to run" if today.failure else ratio(today.measured_error) if today.finite else "non-finite"


def times_in_words(times: Times) -> str:
    """`1.2 ms (1.1 to 1.4), 1.72x`."""
    size, unit = next(((size, unit) for size, unit in UNITS if times.median >= size), UNITS[-1])
    low, median, high = (_figures(value / size) for value in (times.low, times.median, times.high))
    return f"{median} {unit} ({low} to {high}){_faster(times)}"


def _figures(value: float) -> str:
    return f"{value:.3g}" if value < 999.5 else f"{value:.0f}"  # 1430 rather than 1.43e+03


def _faster(times: Times) -> str:
    if times.speedup is None or times.speedup_low is None or times.speedup_high is None:
        return ""
    same = ", not to be told from FP32" if times.speedup_low <= 1 <= times.speedup_high else ""
    return f", {times.speedup:.2f}x{same}"


def _about(audit: Audit) -> str:
    timing = audit.timing
    assert timing is not None
    cpu = timing.device == CPU
    where = f"this CPU, on {count(timing.threads, 'thread')}" if cpu else timing.device
    batch = "" if timing.batch is None else f", {count(timing.batch, 'entry', 'entries')} in the batch"
    decides = any(plan.timed and plan.timed.decides for plan in audit.plans.values())
    goes = (
        "the recommendation goes by the first of them"
        if decides
        else "they are the CPU's own, which says nothing of a GPU: the recommendation goes by predictions"
    )
    return f"One forward on {where}{batch}: median (quartiles), speed-up over FP32; {goes}."


def _cells(timed: Timed) -> tuple[tuple[str, str], ...]:
    ways = (("", timed.eager), ("compiled", timed.compiled), ("as a CUDA graph", timed.cuda_graph))
    cells = [(name, times_in_words(times)) for name, times in ways if times is not None]
    if timed.memory is not None:
        cells.append(("at most", f"{compact(timed.memory)}B"))
    reasons: dict[str, list[str]] = {}
    for name, why in timed.missing.items():
        reasons.setdefault(why, []).append(NAMES.get(name, name))
    return (*cells, *((f"not {' nor '.join(names)}:", why) for why, names in reasons.items()))


NAMES = {"eager": "run", "compiled": "compiled", "cuda_graph": "as a CUDA graph", "memory": "its memory"}
"""What is missing, in words."""
