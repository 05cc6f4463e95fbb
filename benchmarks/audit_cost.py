"""What an audit costs in forwards of the model, stage by stage, beside brute force; its memory beside a training step's."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass, field

import torch

import auditor
from auditor.loading import from_object, in_eval
from auditor.measure.attribute import attribute
from auditor.measure.measure import Measurement, measure
from auditor.records import Capture
from auditor.tape import capture
from benchmarks.harness import Row, forward_seconds, in_process_of_its_own, peak_mib, report, seconds
from benchmarks.subjects import MODELS, build
from tests.brute_force import true_isolated

FORMATS = ("fp16", "bf16")
SAMPLE = 5
"""Runs of brute force that are timed, spread over the graph; the rest would take as long each."""

COLUMNS = {
    "model": "",
    "nodes": "d",
    "forward s": ".3f",
    "measure x": ".1f",
    "attribute x": ".1f",
    "both x": ".1f",
    "brute force x": ".0f",
    "capture s": ".1f",
    "baseline s": ".1f",
    "plan s": ".1f",
    "peak MiB": ".0f",
    "training MiB": ".0f",
    "memory x": ".2f",
}


def core(name: str) -> Row:
    """Capture, measure and attribute, with a forward timed before and after them in the same process."""
    model, args = build(name)
    subject = from_object(model, args, name=name)
    before = forward_seconds(model, args)
    loaded = peak_mib()
    row: Row = {"model": name, "loaded MiB": loaded}
    with in_eval(model):
        captures: list[Capture] = []
        measured: list[Measurement] = []
        row["capture s"] = seconds(lambda: captures.append(capture(subject, FORMATS)))
        (captured,) = captures
        row["measure s"] = seconds(lambda: measured.append(measure(captured, model, subject.batches[0], FORMATS)))
        row["attribute s"] = seconds(lambda: attribute(measured[0]))
    row["peak MiB"] = peak_mib()
    row["forward s"] = (before + forward_seconds(model, args)) / 2
    floating = [node.name for node in captured.nodes.values() if node.floating]
    sample = floating[:: max(1, len(floating) // SAMPLE)]
    once = statistics.mean(seconds(lambda name=name: true_isolated(measured[0], name, "bf16")) for name in sample)
    row["brute force s"] = once * len(floating) * len(FORMATS)
    row["nodes"] = len(captured.nodes)
    return row


@dataclass
class StageClock:
    """A progress callback that adds up the processor time between the first words of two stages."""

    spent: dict[str, float] = field(default_factory=dict)
    stage: str = "load"
    since: float = field(default_factory=time.process_time)

    def __call__(self, stage: str, detail: str, done: int, total: int) -> None:
        now = time.process_time()
        self.spent[self.stage] = self.spent.get(self.stage, 0.0) + now - self.since
        self.stage, self.since = stage, now


def whole(name: str) -> Row:
    """All stages of `auditor.audit`, which also makes, patches and verifies four plans."""
    model, args = build(name)
    clock = StageClock()
    audit = auditor.audit(model, args, device="cpu", progress=clock)
    clock("end", "", 0, 0)
    return {"seconds": clock.spent, "recommended": audit.recommended, "peak MiB": peak_mib()}


def training(name: str) -> Row:
    """One step of plain SGD, the least that training can take."""
    model, args = build(name)
    model.train()
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        outputs = model(*args)
        outputs = outputs if isinstance(outputs, torch.Tensor) else outputs.logits
        outputs.float().square().mean().backward()
        optimiser.step()

    loaded = peak_mib()
    return {"loaded MiB": loaded, "step s": seconds(step), "peak MiB": peak_mib()}


def combined(name: str) -> Row:
    """The three measurements of one model, each from a process of its own."""
    row, everything, step = (
        in_process_of_its_own("benchmarks.audit_cost", "--measure", kind, name) for kind in MEASUREMENTS
    )
    forward = row["forward s"]
    return row | {
        "measure x": row["measure s"] / forward,
        "attribute x": row["attribute s"] / forward,
        "both x": (row["measure s"] + row["attribute s"]) / forward,
        "brute force x": row["brute force s"] / forward,
        "baseline s": everything["seconds"]["baseline"],
        "plan s": everything["seconds"]["plan"],
        "whole": everything,
        "training": step,
        "training MiB": step["peak MiB"],
        "memory x": row["peak MiB"] / step["peak MiB"],
        "memory x above the model": (row["peak MiB"] - row["loaded MiB"]) / (step["peak MiB"] - step["loaded MiB"]),
    }


MEASUREMENTS = {"core": core, "whole": whole, "training": training}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help="all of them if left out", default=list(MODELS))
    parser.add_argument("--measure", choices=MEASUREMENTS, help="one measurement of one model, as JSON")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(MEASUREMENTS[options.measure](options.models[0])))
    else:
        report("audit_cost", [combined(name) for name in options.models], COLUMNS)


if __name__ == "__main__":
    main()
