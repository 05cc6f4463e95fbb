"""What the rows add up to: results/families.json, and results/models.md from it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from . import LIBRARIES, library
from .harness import RESULTS, machine
from .one import LOW, Row

PAGE = Path(__file__).resolve().parents[1] / "results" / "models.md"
COLUMNS = (
    *("library", "model", "outcome", "class", "nodes", "measured", "plans", "verified", "low_flops", "autocast_holds"),
    *("autocast_error", "recommended", "forward_seconds", "cpu_seconds", "peak_mib", "reason", "failed"),
)
HEAD = """# Models

One small model of every family that four libraries ship, and models of further packages that people use, with random weights and made-up inputs, audited as
`auditor.audit(model, args)` does it by default: FP16 and BF16, autocast and cast, a budget of 0.01. Nothing was tuned for any of
them, and none is left out because it fails. Written by [`python -m benchmarks.families`](../README.md), which gives each
model a process of its own, 240 seconds of processor time and 8 GiB; all that was measured is in
[`benchmarks/results/families.json`](families.json).

*Run*: built from a config made small by the names of its fields, and its FP32 forward answers a call made up by the names of its
arguments; where that fails, the config or the call does not fit, and nothing can be said about the audit. *Captured*: the audit
ends in a report. *Measured*: every operation was run low, or says why it cannot be. *Verified*: all plans hold, run as the artefact a user
gets. *Holds*: plain autocast errs by 0.01 at most in one of the formats. *Low*: of these, models with a verified plan that runs 95 % of
the FLOPs low.
"""


def write(rows: list[Row]) -> None:
    """Both files. rows: the last of every model."""
    rows = sorted(rows, key=lambda row: (LIBRARIES.index(row["library"]), row["model"]))
    versions = _versions(rows)
    lines = [json.dumps([row.get(column) for column in COLUMNS]) for row in rows]
    head = json.dumps(
        {
            "machine": f"{machine()['cores']}-core CPU",
            "torch": machine()["torch"],
            "versions": versions,
            "columns": COLUMNS,
        }
    )
    body = ",\n".join(lines)
    (RESULTS / "families.json").write_text(f'{head[:-1]}, "rows": [\n{body}\n]}}\n', encoding="utf-8")
    PAGE.write_text("\n".join(_page(rows, versions)) + "\n", encoding="utf-8")


def _versions(rows: list[Row]) -> dict[str, str]:
    """The version of every package that a model with a row comes from, where it is installed."""
    names = [row["library"] if row["library"] != "packages" else row["model"].partition("/")[0] for row in rows]
    return {name: version(name) for name in dict.fromkeys(names) if _installed(name)}


def _installed(name: str) -> bool:
    with suppress(PackageNotFoundError):
        return bool(version(name))
    return False


def ran(row: Row) -> bool:
    return bool(row["outcome"] != "unbuilt")


def captured(row: Row) -> bool:
    return bool(row["outcome"] == "audited")


def measured(row: Row) -> bool:
    return captured(row) and bool(row["nodes"]) and row["measured"] == row["nodes"]


def verified(row: Row) -> bool:
    return captured(row) and bool(row["plans"]) and row["verified"] == row["plans"]


def holds(row: Row) -> bool:
    return captured(row) and bool(row["autocast_holds"])


def low(row: Row) -> bool:
    return holds(row) and row["low_flops"] is not None and row["low_flops"] >= LOW


def failed(row: Row) -> bool:
    return ran(row) and not (measured(row) and verified(row))


def _page(rows: list[Row], versions: dict[str, str]) -> Iterator[str]:
    yield HEAD
    libraries = ", ".join(f"{name} {number}" for name, number in versions.items())
    facts = machine()
    yield f"Measured on a {facts['cores']}-core CPU with torch {facts['torch']}; {libraries}; written at commit {_commit()}.\n"
    libraries_there = list(dict.fromkeys(row["library"] for row in rows))
    if left := _left(rows, libraries_there):
        yield f"Not tried yet: {left}.\n"
    yield "| library | models | run | captured | measured | verified | holds | low |"
    yield "|---|---:|---:|---:|---:|---:|---:|---:|"
    for name in libraries_there:
        yield _counts(name, [row for row in rows if row["library"] == name])
    yield _counts("**all**", rows)
    yield from _list("Not captured, not measured or not verified", rows, failed, _why)
    yield from _list("Plain autocast holds, and no plan has 95 % low", rows, lambda r: holds(r) and not low(r), _share)
    yield from _list("Not run", rows, lambda r: not ran(r), _why)
    yield "\n## Every model that was captured\n"
    yield "Operations; verified plans of all; the FLOPs low in the best of them; the error of plain autocast; seconds.\n"
    yield "| model | class | operations | verified | low | autocast | s |"
    yield "|---|---|---:|---:|---:|---:|---:|"
    yield from (_line(row) for row in rows if captured(row))


def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=PAGE.parent, capture_output=True, text=True, check=True).stdout.strip()


def _left(rows: list[Row], libraries: Iterable[str]) -> str:
    """How many models of each library have no row."""
    there = {(row["library"], row["model"]) for row in rows}
    counts = dict[str, int]()
    for name in libraries:
        with suppress(ImportError):  # then its rows were made elsewhere
            counts[name] = sum((name, model) not in there for model in library(name).names())
    return ", ".join(f"{count} of {name}" for name, count in counts.items() if count)


def _counts(name: str, rows: list[Row]) -> str:
    tests = (ran, captured, measured, verified, holds, low)
    return f"| {name} | {len(rows)} | " + " | ".join(str(sum(map(test, rows))) for test in tests) + " |"


def _list(title: str, rows: list[Row], wanted: Callable[[Row], bool], words: Callable[[Row], str]) -> Iterator[str]:
    chosen = [row for row in rows if wanted(row)]
    yield f"\n## {title}\n"
    yield from (f"- {row['library']}:{row['model']}: {words(row)}" for row in chosen)
    if not chosen:
        yield "None."


def _why(row: Row) -> str:
    if captured(row):
        return _plain("; ".join(row["failed"]) or f"{row['nodes'] - row['measured']} operations are not measured")
    return _plain(f"{row['outcome']}: {row.get('reason', '')}" if ran(row) else str(row.get("reason", "")))


def _share(row: Row) -> str:
    share = row["low_flops"]
    return f"autocast {row['autocast_error']:.2g}; " + ("no verified plan" if share is None else f"{share:.0%} low")


def _plain(text: str) -> str:
    """No markup, and no more of it than tells the cause."""
    return "`" + text.replace("`", "'").replace("|", "/")[:160] + "`"


def _line(row: Row) -> str:
    error, share = row["autocast_error"], row["low_flops"]
    return (
        f"| {row['library']}:{row['model']} | {row['class']} | {row['nodes']} | {row['verified']}/{row['plans']} | "
        f"{'' if share is None else format(share, '.0%')} | {'' if error is None else format(error, '.1e')} | {row['cpu_seconds']:.0f} |"
    )
