"""The results as Markdown: emulated beside native, and what a reader should know of the rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Result = Mapping[str, Any]

AUDITS = ("examples", "one_thread", "architectures")
RATIOS = ("ratios", "ratios_without_tf32")


def summary(machine: Mapping[str, str], results: Mapping[str, Result | None]) -> str:
    """Tables that documents can include."""
    of = ", ".join(f"{name} {value}" for name, value in machine.items() if value)
    parts = [f"Measured on {of}.", "", *_steps(results), "", *_published(results.get("published"))]
    parts += ["", *_compared(results), "", *_plans(results)]
    parts += [
        "",
        *_corpus(results.get("corpus")),
        "",
        *_operations(results.get("operations")),
        "",
        *_speed(results.get("speed")),
    ]
    return "\n".join(parts).rstrip() + "\n"


def _rows(result: Result | None) -> Iterable[tuple[str, Mapping[str, Any]]]:
    return result["rows"].items() if result else ()


def _table(head: tuple[str, ...], rows: list[tuple[object, ...]]) -> list[str]:
    lines = [head, tuple("---" for _ in head), *rows]
    return ["| " + " | ".join(map(str, line)) + " |" for line in lines] if rows else []


def _steps(results: Mapping[str, Result | None]) -> list[str]:
    rows: list[tuple[object, ...]] = []
    for name, result in results.items():
        if result is None:
            rows.append((name, "not run", "", "", ""))
            continue
        broken = [key for key, row in _rows(result) if "error" in row or row.get("failed") or row.get("code")]
        rows.append(
            (name, result["status"], len(result["rows"]), f"{result['seconds']:.0f} s", ", ".join(broken)[:200])
        )
    return _table(("step", "status", "rows", "time", "rows that failed"), rows)


def _published(result: Result | None) -> list[str]:
    """Published results of other GPUs that this one does not give, or that the emulation does not."""
    rows = [(name, row) for name, row in _rows(result) if "published" in row]
    if not rows:
        return []
    as_published = sum(row["native equals published"] for _, row in rows)
    as_emulated = sum(row["native equals emulated"] for _, row in rows)
    said = f"Published results: {as_published} of {len(rows)} are the same natively; {as_emulated} are emulated as they are natively."
    different: list[tuple[object, ...]] = [
        (name, row["published"], row["native"], row["emulated"])
        for name, row in rows
        if not (row["native equals published"] and row["native equals emulated"])
    ]
    return [said, "", *_table(("result", "published", "native", "emulated"), different)]


def _compared(results: Mapping[str, Result | None]) -> list[str]:
    """Emulated over native local error of operations, and verdicts that are others."""
    rows: list[tuple[object, ...]] = []
    for step in (*RATIOS, *AUDITS):
        for name, row in _rows(results.get(step)):
            for fmt, found in row.get("ratios", {}).items():
                changed = [text for text in row.get("verdicts", ()) if f" in {fmt}:" in text]
                verdicts = len(changed) if "verdicts" in row else ""
                rows.append((step, name, fmt, found["count"], _number(found["median"]), _span(found), verdicts))
    return _table(("step", "model", "format", "operations", "median", "5 % to 95 %", "verdicts that change"), rows)


def _plans(results: Mapping[str, Result | None]) -> list[str]:
    rows: list[tuple[object, ...]] = []
    for step in AUDITS:
        for name, row in _rows(results.get(step)):
            for plan, found in row.get("plans", {}).items():
                ours, theirs = found["error"]
                verified = " / ".join("yes" if held else "no" for held in found["verified"])
                rows.append((name, plan, _error(ours), _error(theirs), verified, found["failure"] or ""))
    return _table(("model", "plan", "error emulated", "error native", "verified emulated / native", "failure"), rows)


def _corpus(result: Result | None) -> list[str]:
    rows = [row for _, row in _rows(result) if "holds" in row]
    if not rows:
        return []
    failing = sum(row["holds"] is not True for row in rows)
    alarms = sum(row["twin holds"] is not True for row in rows)
    return [f"Known failures: {failing} of {len(rows)} happen natively; {alarms} of their twins fail."]


def _operations(result: Result | None) -> list[str]:
    rows = [(name, row) for name, row in _rows(result) if "agree" in row]
    if not rows:
        return []
    apart = [(name, *row["native, emulated"]) for name, row in rows if not row["agree"]]
    said = f"Operations of OpInfo: {len(rows) - len(apart)} of {len(rows)} run, or are refused, natively as they are emulated."
    listed = [(name, native or "runs", emulated or "runs") for name, native, emulated in apart[:40]]
    return [said, "", *_table(("operation", "native", "emulated"), list(listed))]


def _speed(result: Result | None) -> list[str]:
    rows: list[tuple[object, ...]] = []
    for name, row in _rows(result):
        for plan, found in row.get("plans", {}).items():
            measured = (found["measured"] or {}).get("eager") or {}
            rows.append((name, plan, _number(found["predicted"]), _number(measured.get("speedup"))))
    return _table(("model", "plan", "predicted speed-up", "measured, eager"), rows)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _error(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _span(found: Mapping[str, Any]) -> str:
    return "" if found["low"] is None else f"{found['low']:.2f} to {found['high']:.2f}"
