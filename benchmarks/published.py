"""The emulation against results of real GPUs that others published: `python -m benchmarks.published [--device cuda]`.

Writes results/published.md. With a device, the page also has what this device gives.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from benchmarks.harness import RESULTS, described, machine
from tests.emulation.published import ROWS, UNKNOWABLE, Result, emulated_result, matches, native_result, short
from tests.emulation.published_row import PublishedResult

PAGE = RESULTS / "published.md"
FACTS = ("processor", "instructions", "threads", "python", "torch")

HEAD = """\
# Results that GPUs printed, and the emulation

Written by [`python -m benchmarks.published`](../README.md). Each row is a call whose result on a CUDA GPU was published: in a GitHub
thread, or as a fact that a test of PyTorch asserts on CUDA. The inputs can be rebuilt exactly; they are in `tests/emulation`. The
same call then runs in `auditor.emulate("cuda")`, and plainly on this CPU; autocast regions are those of CUDA and of the CPU.

*CUDA*: what the GPU printed. A result matches if it rounds to the printed digits, or is equal where all digits are known. Two rows
compare the size of an error: `cumsum` matches within a factor of 1.5, `cumprod` within 0.001 %. *right*: who gives what CUDA printed.
Sources without a link are tests of pytorch/pytorch (`test_FILE.test_NAME`) or named pages. Some of the threads are also sources of
the emulation's own tables.
"""

HEADINGS = {
    "dtype": "Dtypes of results",
    "error": "Calls that raise",
    "kernels": "Present and missing kernels",
    "NaN and inf": "NaN and inf",
}
"""{kind: heading}, where the heading is not the capitalized kind."""


@dataclass(frozen=True)
class Outcome:
    """A row, what the emulation and this CPU's own kernels give, and what a device gives; None without one."""

    row: PublishedResult
    emulated: Result
    cpu: Result
    native: Result | None

    @property
    def emulation_is_right(self) -> bool:
        return matches(self.row, self.emulated)

    @property
    def cpu_is_right(self) -> bool:
        return matches(self.row, self.cpu)

    @property
    def native_is_right(self) -> bool:
        return self.native is not None and matches(self.row, self.native)

    @property
    def verdict(self) -> str:
        """Which of the two gives what CUDA printed."""
        if self.emulation_is_right:
            return "both" if self.cpu_is_right else "emulation"
        return "CPU" if self.cpu_is_right else "neither"


def outcome(row: PublishedResult, device: str | None) -> Outcome:
    """Run a row in all ways."""
    native = native_result(row, device) if device else None
    return Outcome(row, emulated_result(row), native_result(row), native)


def page(outcomes: Sequence[Outcome], device: str | None) -> str:
    """The document."""
    facts = machine()
    here = described({name: facts[name] for name in FACTS})
    lines = [HEAD, f"Machine: {here}.", *_device_line(device), "", *_summary(outcomes, device)]
    for kind in _kinds(outcomes):
        lines += ["", f"## {_heading(kind)}", "", *_table(_of_kind(outcomes, kind), device)]
    return "\n".join(lines) + "\n"


def _device_line(device: str | None) -> Iterator[str]:
    if device:
        name = torch.get_device_module(device).get_device_name()
        yield f"*{device}*: what {name} gives, with CUDA {torch.version.cuda}."


def _kinds(outcomes: Sequence[Outcome]) -> list[str]:
    return list(dict.fromkeys(each.row.kind for each in outcomes))


def _of_kind(outcomes: Sequence[Outcome], kind: str) -> list[Outcome]:
    return [each for each in outcomes if each.row.kind == kind]


def _heading(kind: str) -> str:
    return HEADINGS.get(kind, kind.capitalize())


def _summary(outcomes: Sequence[Outcome], device: str | None) -> Iterator[str]:
    """Counts, and the rows that the emulation gets wrong."""
    wrong_on_cpu = [each for each in outcomes if not each.cpu_is_right]
    repaired = sum(each.emulation_is_right for each in wrong_on_cpu)
    right = sum(each.emulation_is_right for each in outcomes)
    yield f"Of {len(outcomes)} published results, the emulation gives {right}."
    yield f"This CPU's own kernels are wrong in {len(wrong_on_cpu)}. In {repaired} of these, the emulation is right."
    if device:
        yield f"{device} gives {sum(each.native_is_right for each in outcomes)}."
    for each in outcomes:
        if not each.emulation_is_right:
            reason = UNKNOWABLE.get(each.row.id, "not known")
            yield f"Wrong: {_source(each.row)}, {each.row.call}. Reason: {reason}."
    columns = ["kind", "results", "emulation right", "CPU right"]
    columns += [f"{device} right"] if device else []
    yield ""
    yield from _head(columns)
    for kind in _kinds(outcomes):
        group = _of_kind(outcomes, kind)
        counts = [len(group), sum(each.emulation_is_right for each in group), sum(each.cpu_is_right for each in group)]
        counts += [sum(each.native_is_right for each in group)] if device else []
        yield _line([_heading(kind), *map(str, counts)])


def _table(outcomes: Sequence[Outcome], device: str | None) -> Iterator[str]:
    """All rows of one kind."""
    columns = ["source", "call", "format", "versions", "CUDA", "emulated", "CPU"]
    columns += [device] if device else []
    yield from _head([*columns, "right", "note"])
    for each in outcomes:
        row = each.row
        results = [row.printed, each.emulated, each.cpu]
        results += [each.native] if each.native is not None else []
        numbers = [short(result) for result in results]
        yield _line([_source(row), row.call, row.format, row.versions, *numbers, each.verdict, row.note])


def _head(columns: Sequence[str]) -> Iterator[str]:
    yield _line(columns)
    yield "|" + "---|" * len(columns)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _source(row: PublishedResult) -> str:
    """The id, as a link if it is a GitHub thread."""
    thread = re.match(r"([\w.-]+/[\w.-]+)#(\d+)", row.id)
    if thread is None:
        return row.id
    repository, number = thread.groups()
    return f"[{thread[0]}](https://github.com/{repository}/issues/{number}){row.id[thread.end() :]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="a device that also runs every row, as cuda")
    device = parser.parse_args().device
    outcomes = [outcome(row, device) for row in ROWS]
    PAGE.write_text(page(outcomes, device), encoding="utf-8")
    print("\n".join(_summary(outcomes, device)))
    print(PAGE)


if __name__ == "__main__":
    main()
