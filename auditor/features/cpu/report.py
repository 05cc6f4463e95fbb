"""The report's section on the CPU: its kernels, plans eager and compiled, and what differs from CUDA."""

from __future__ import annotations

from collections.abc import Iterator

from ...artefact.strategies import plan_title
from ...numerics.formats import FORMATS, label
from ...records import Audit, Plan, Times
from ...records.cpu import CpuRun, CpuTarget, ForBoth
from ...report.blocks import Block, Grid, Prose
from ...report.words import count, list_paths, ratio, sentence
from ...resources import table
from ...verify.running import FP32
from ..page import Page

MODULES_NAMED = 6
"""Number of modules, about, that a cell of the table names."""


def cpu_lines(audit: Audit) -> list[str]:
    """The CPU's kernels, then a line for each format that is slower than FP32 on it."""
    if audit.cpu is None:
        return []
    return [kernels_line(audit, audit.cpu), *slower_lines(audit, audit.cpu)]


def kernels_line(audit: Audit, cpu: CpuTarget) -> str:
    """`Intel Xeon, 2 threads: torch's own kernels use AVX512; oneDNN 3.12.0 uses Intel AVX10.1 and Intel AMX ...`."""
    line = f"{audit.environment.device}, {count(cpu.threads, 'thread')}: torch's own kernels use {cpu.capability}"
    if cpu.isa:
        version = audit.environment.libraries.get("onednn", "")
        line += f"; {' '.join(filter(None, ('oneDNN', version)))} uses {cpu.isa}"
    return sentence(line)


def slower_lines(audit: Audit, cpu: CpuTarget) -> Iterator[str]:
    """For each format whose plans are all measured to be slower than FP32: how much, and a reason."""
    for fmt in audit.formats:
        timed = [plan for plan in audit.plans.values() if plan.format == fmt and plan.measured_times and plan.has_low]
        slower = [plan for plan in timed if (plan.measured_times.speedup_high or 1.0) < 1]  # type: ignore[union-attr]
        if timed and len(slower) == len(timed):
            best = max(plan.speedup for plan in timed)
            yield f"{label(fmt)} is slower than FP32 on this CPU, {best:.2f}x at best: {_reason(cpu, fmt)}."


def _reason(cpu: CpuTarget, fmt: str) -> str:
    rates = table("plan/devices")[cpu.row]
    rate = rates.get(FORMATS[fmt].speed or "", 0.0)
    if not rate:
        return f"a {cpu.row} has no {label(fmt)} arithmetic, so its kernels convert to FP32 and back"
    if rate <= 2 * rates["fp32"]:
        return f"a {cpu.row} has no matrix unit for {label(fmt)}, and casts cost more than its products gain"
    return "the products are too small, so that casts and single calls cost more than its matrix unit gains"


def cpu_section(audit: Audit) -> list[Block]:
    """The blocks of the section; none if the audit is for CUDA."""
    cpu = audit.cpu
    if cpu is None:
        return []
    page: list[Block] = [Prose("", tuple(cpu_lines(audit)))]
    titles = {FP32: "FP32", **{name: plan_title(plan) for name, plan in audit.plans.items()}}
    rows = [(titles[name], *_way_cells(audit, name, one)) for name, one in cpu.runs.items() if name in titles]
    heads = ("Plan", "Error", "Time", "Speed-up", "Compiled: error", "Time", "Speed-up")
    page.append(Grid(heads, tuple(rows), caption="On this CPU, eager and compiled by torch.compile"))
    page += [Prose("", (f"Not compiled: {titles[name]}: {one.compiled_failure}",)) for name, one in _failures(cpu)]
    kernels = [
        (titles[name], kernel, str(calls))
        for name, one in cpu.runs.items()
        if name in titles
        for kernel, calls in one.kernels.items()
    ]
    page.append(Grid(("Plan", "Kernel of oneDNN", "Calls"), tuple(kernels), texts=2, caption="Kernels that ran"))
    unread = [(name, one.kernels_failure) for name, one in cpu.runs.items() if one.kernels_failure is not None]
    page += [Prose("", (f"Kernels not read: {titles.get(name, name)}: {why}",)) for name, why in unread]
    page += both_section(audit, cpu.for_both)
    return [block for block in page if block]


def _failures(cpu: CpuTarget) -> list[tuple[str, CpuRun]]:
    return [(name, one) for name, one in cpu.runs.items() if one.compiled_failure is not None]


def _way_cells(audit: Audit, name: str, one: CpuRun) -> tuple[str, ...]:
    """Error, time and speed-up of a plan, eager and compiled; `-` where nothing was measured."""
    plan = audit.plans.get(name)
    timed = plan.timed if plan is not None else None
    if name == FP32 and audit.timing is not None:
        timed = audit.timing.fp32
    eager = timed.eager if timed is not None else None
    compiled = timed.compiled if timed is not None else None
    error = _error(plan.measured_error) if plan is not None else "-"
    return (error, *_time_cells(eager), _error(one.compiled_error), *_time_cells(compiled))


def _error(error: float | None) -> str:
    return "-" if error is None else ratio(error)


def _time_cells(times: Times | None) -> tuple[str, str]:
    if times is None:
        return "-", "-"
    speedup = "-" if times.speedup is None else f"{times.speedup:.2f}x"
    return f"{times.median * 1e3:.3g} ms", speedup


def both_section(audit: Audit, for_both: tuple[ForBoth, ...]) -> list[Block]:
    """The table of what differs from CUDA, and a sentence on plans that hold on both."""
    if not for_both:
        return []
    heads = (
        "Plan",
        "FP32 on both",
        "Only on this CPU",
        "Only on CUDA",
        "Error here",
        "On CUDA",
        "Both: here",
        "On CUDA",
    )
    rows = tuple(_both_cells(audit.plans[one.plan], one) for one in for_both)
    good = [plan_title(audit.plans[one.plan]) for one in for_both if one.holds]
    words = f"With all these modules in FP32, one plan is within the error budget on both: {', '.join(good)}."
    if not good:
        words = "No plan that keeps all these modules in FP32 is within the error budget on both."
    caption = "What must stay in FP32 on this CPU and on CUDA"
    return [Grid(heads, rows, texts=4, caption=caption), Prose("", (words,))]


def _both_cells(plan: Plan, one: ForBoth) -> tuple[str, ...]:
    """A row of the table: the plan, the modules in FP32 on both, on this CPU alone and on CUDA alone, and four errors."""
    on_cpu, on_cuda = set(one.cpu), set(one.cuda)
    errors = (one.error_of_cpu, one.error_of_cuda, one.error_on_cpu, one.error_on_cuda)
    return (
        plan_title(plan),
        _modules_text(on_cpu & on_cuda),
        _modules_text(on_cpu - on_cuda),
        _modules_text(on_cuda - on_cpu),
        *map(_error, errors),
    )


def _modules_text(paths: set[str]) -> str:
    return list_paths(sorted(paths), MODULES_NAMED) if paths else "none"


PAGE = Page(
    "CPU",
    "On this CPU",
    lambda audit: cpu_lines(audit)[:1],
    cpu_section,
    label="CPU",
    lines=cpu_lines,
    always_shown=lambda audit: len(cpu_lines(audit)),
)
