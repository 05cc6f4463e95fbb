"""The ledger as a table: the dtype of every weight and operation at each stage, and casts that nobody asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

from ...isolation.process import ON_A_CPU, ON_A_GPU
from ...records import Finding, Subject
from ...records.audit import Audit
from ...records.ledger import LedgerRow
from ...report.blocks import Block, Grid, Item, Prose
from ...report.kept import dtype_label
from ...report.words import count, fold, fold_paths, line, op, ratio, remedy, sentence
from ...rulebook.findings import SILENT
from ..page import Page

HEADS = ("Name", "Checkpoint", "As loaded", "Author", "Planned", "Executed")
DTYPES = attrgetter("checkpoint", "loaded", "author", "planned", "executed")
SETTINGS = "Predicted error of the outputs with only this setting on, in all products that it affects"
OF_HOPPER = ". FP8 sums in 14 bits: the arithmetic of Hopper GPUs"
"""What the caption of the settings adds in audits for CUDA."""
SHOWN = 60
"""Maximum lines of a table of dtypes in the report; measurements.json and `auditor ledger` have all lines."""
ABOUT = (
    "Checkpoint: the weight's dtype in the file that was read. As loaded: the dtype of the loaded weight, or of the operation's result. Author: the dtype that a "
    "cast, an autocast region, or a list such as `_keep_in_fp32_modules` in the model's code asks for. Planned: the dtype in which the plan stores the weight, or "
    "the precision that it gives the operation's module. Executed: the dtype in which operations read the weight, or in which the operation computes. Repeated blocks are merged."
)
REDUCED = "allow_fp16_accumulation", "allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction"


def overview(subject: Subject, rows: Sequence[LedgerRow], findings: Sequence[Finding]) -> list[Block]:
    """Blocks of the page that `auditor ledger` prints: casts, flags, and the dtypes of weights and operations."""
    kinds = [count(sum(row.kind == kind for row in rows), kind) for kind in ("parameter", "buffer", "operation")]
    title = Prose(f"Dtypes in {subject.name}", (", ".join(kinds),), "title")
    return [title, *_blocks(rows, findings, subject.flags, len(rows))]


def ledger_section(audit: Audit) -> list[Block]:
    """The report's section on dtypes; empty for an audit without a ledger."""
    costs = tuple((flag, ratio(share)) for flag, share in audit.flags.items())
    caption = SETTINGS + OF_HOPPER * (audit.cpu is None)
    table = Grid(("Setting", "Share of the error budget"), costs, caption=caption)
    return [*_blocks(audit.ledger, audit.findings, audit.environment.flags, SHOWN), table] if audit.ledger else []


def headline(findings: Sequence[Finding]) -> str:
    """The number of unintended casts to fewer bits, in words."""
    silent = [finding for finding in findings if finding.rule in SILENT.values()]
    return f"{count(len(silent), 'unintended cast')} to fewer bits" if silent else "No unintended cast to fewer bits"


def _blocks(rows: Sequence[LedgerRow], findings: Sequence[Finding], flags: Mapping[str, Any], most: int) -> list[Block]:
    page: list[Block] = [Prose("Casts", (sentence(headline(findings)),))]
    for finding in findings:
        if finding.rule in SILENT.values():
            where = line(finding.source, finding.called_from) or "unknown line"
            text = f"{where} {finding.rule} {sentence(finding.message)}"
            page.append(Item(text, (remedy(finding.advice),), finding.severity))
    page.append(Prose("Flags", (_flags(flags),)))
    page.append(Prose("", (ABOUT,), "about"))
    weights = [row for row in rows if row.kind != "operation"]
    operations = [row for row in rows if row.kind == "operation"]
    page += _grid("Parameters and buffers", weights, most)
    page += _grid("Operations", operations, most)
    return page


def _grid(caption: str, rows: Sequence[LedgerRow], most: int) -> list[Block]:
    """A table with a line for all rows that differ only in their names; at most `most` lines."""
    merged = fold(
        rows,
        lambda row: row.module if row.op else row.name,
        lambda row: (*DTYPES(row), row.kind, row.op, row.source),
    )
    cells = list[tuple[str, ...]]()
    for same in merged:
        dtypes = map(_dtype, DTYPES(same[0]))
        cells.append((_names(same), *dtypes))
    blocks: list[Block] = [Grid(HEADS, tuple(cells[:most]), caption=caption)]
    if len(cells) > most:
        more = count(len(cells) - most, "more line")
        blocks.append(Prose("", (f"and {more}, in measurements.json",)))
    return blocks


def _names(same: Sequence[LedgerRow]) -> str:
    """Several rows that differ only in their names, in words: `layers.*.q.weight x8`, `layers.* add x16 net.py:12`."""
    first = same[0]
    if first.kind != "operation":
        return fold_paths([row.name for row in same])
    modules = list(dict.fromkeys(row.module for row in same))
    words = f"{fold_paths(modules)} {op(first.op)}"
    if len(same) > len(modules):
        words += f" x{len(same)}"
    if first.source:
        words += f" {first.source}"
    return words


def _dtype(dtype: str | None) -> str:
    return " and ".join(map(dtype_label, dtype.split(" and "))) if dtype else "-"


def _flags(flags: Mapping[str, Any]) -> str:
    """A text on the active flags that let FP32 operations, or sums of low-precision values, use fewer bits."""
    loose = [f"{name}={flags[name]}" for name in ON_A_GPU + ON_A_CPU if flags.get(name) not in (None, "none", "ieee")]
    loose += [f"{name}=True" for name in REDUCED if flags.get(f"cuda.matmul.{name}") is True]
    allow = "These flags allow FP32 operations, or sums of low-precision values, to use fewer bits than FP32"
    return f"{allow}: {', '.join(loose)}." if loose else "No flag allows fewer bits than FP32."


PAGE = Page("Dtypes", "Dtypes, and what decided them", lambda audit: [headline(audit.findings)], ledger_section)
