"""The report's section on the error over the calls of repeated modules: a chart and a table, with the worst call."""

from __future__ import annotations

from ...artefact.strategies import plan_title
from ...records import Audit
from ...records.repeats import RepeatedCalls
from ...report.blocks import Block, Chart, Grid, Prose
from ...report.charts import line_chart
from ...report.words import ratio, sentence
from ..page import Page

MOST_ROWS = 40
"""Maximum number of rows of a table: the first, the last, and those with the largest errors."""

MOST_TICKS = 12


def repeats_section(audit: Audit) -> list[Block]:
    """The blocks of the section; none without a repeated part."""
    result = list[Block]()
    for one in audit.repeats:
        result.append(Prose("", (worst_line(audit, one),)))
        result += chart_of(one)
        result.append(table_of(one))
    return result


def repeats_lines(audit: Audit) -> list[str]:
    """A sentence on the worst call of each repeated part."""
    return [worst_line(audit, one) for one in audit.repeats]


def worst_line(audit: Audit, one: RepeatedCalls) -> str:
    """`Under autocast_fp16 the error of denoiser is largest in call 1: 0.0016; in the last call it is 0.0011.`"""
    worst, last = one.worst, len(one.errors) - 1
    plan = f"Under {plan_title(audit.plan)}, " if audit.plan is not None else ""
    line = f"{plan}the error of {part(one)} is largest in {one.names[worst]}: {text_of(one.errors[worst])}"
    if worst != last:
        line += f"; in {one.names[last]} it is {text_of(one.errors[last])}"
    return sentence(line)


def part(one: RepeatedCalls) -> str:
    """The repeated part in words: `denoiser`, `the layers of decoder.layers`, `the outputs`."""
    if one.kind == "batches":
        return "the outputs"
    return f"the modules in {one.module or 'the root'}" if one.kind == "layers" else one.module


def text_of(error: float | None) -> str:
    """An error in digits; `Inf or NaN` for None."""
    return "Inf or NaN" if error is None else ratio(error)


def chart_of(one: RepeatedCalls) -> list[Chart]:
    """The error of each call against its number, on a logarithmic scale."""
    count = len(one.errors)
    points = [(float(index), error) for index, error in enumerate(one.errors) if error]
    step = max(-(-count // MOST_TICKS), 1)
    ticks = [(float(index), f"{index + 1}") for index in range(0, count, step)]
    noun = {"calls": "call", "layers": "layer", "batches": "batch"}[one.kind]
    about = f"Error of each {noun} against FP32 under the recommended plan, on a logarithmic scale."
    curves = [("plan", "recommended plan", points)]
    return list(line_chart(f"Error by {noun}: {part(one)}", about, curves, count - 1, noun, ticks, -99))


def table_of(repeated: RepeatedCalls) -> Grid:
    """A row for each call; the worst is highlighted. A long table has only the worst calls, the first and the last."""
    errors = repeated.errors
    kept = list(range(len(errors)))
    if len(kept) > MOST_ROWS:
        by_size = sorted(kept, key=lambda index: -(errors[index] or float("inf")))
        kept = sorted({0, len(errors) - 1, *by_size[: MOST_ROWS - 2]})
    rows = tuple((repeated.names[index], text_of(errors[index])) for index in kept)
    nouns = {"batches": "Batch", "layers": "Module"}
    heads = (nouns.get(repeated.kind, "Call"), "Error")
    left = len(errors) - len(kept)
    caption = f"{left} more with smaller errors" if left else ""
    return Grid(heads, rows, bold=kept.index(repeated.worst), caption=caption)


PAGE = Page("Calls", "Error over repeated calls", lambda audit: repeats_lines(audit)[:1], repeats_section)
