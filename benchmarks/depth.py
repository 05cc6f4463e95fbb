"""Time and memory of an audit's core against depth, beside brute force: one forward per node and format."""

from __future__ import annotations

import argparse
import json
import math
import statistics

from auditor.capture.capture import capture
from auditor.isolation import in_eval
from auditor.loading import from_object
from auditor.measure.attribute import first_order
from auditor.measure.measure import Measurement, measure
from auditor.measure.uncertain import measure_uncertain
from benchmarks.harness import Row, forward_seconds, in_process_of_its_own, peak_mib, report, seconds
from benchmarks.subjects import gpt
from tests.support.brute_force import true_isolated

FORMATS = ("fp16", "bf16")
LAYERS = (2, 4, 8, 16, 32, 64)
SAMPLE = 20
"""Runs of brute force that are timed, spread over the graph; the rest would take as long each."""

COLUMNS = {
    "layers": "d",
    "nodes": "d",
    "forward s": ".4f",
    "capture s": ".2f",
    "core s": ".2f",
    "core x": ".1f",
    "ms per node": ".2f",
    "brute force s": ".1f",
    "brute force / core": ".0f",
    "peak MiB above the model": ".0f",
}


def at_depth(layers: int) -> Row:
    """The core stages of one model, then a sample of brute force in the same process."""
    model, args = gpt(layers)
    subject = from_object(model, args)
    forward = forward_seconds(model, args)
    _once(2)  # what torch loads on its first capture is no part of the model's memory
    loaded = peak_mib()
    kept: list[Measurement] = []
    with in_eval(model):
        captures = []
        capturing = seconds(lambda: captures.append(capture(subject, FORMATS)))
        measuring = seconds(lambda: kept.append(measure(captures[0], model, subject.batches[0], FORMATS)))
        attributing = seconds(lambda: measure_uncertain(kept[0], first_order(kept[0])))
    peak = peak_mib()
    nodes = [node.name for node in captures[0].nodes.values() if node.floating]
    sample = nodes[:: max(1, len(nodes) // SAMPLE)]
    once = statistics.mean(seconds(lambda name=name: true_isolated(kept[0], name, "bf16")) for name in sample)
    core = measuring + attributing
    return {
        "layers": layers,
        "nodes": len(captures[0].nodes),
        "forward s": forward,
        "capture s": capturing,
        "measure s": measuring,
        "attribute s": attributing,
        "core s": core,
        "core x": core / forward,
        "ms per node": 1000 * core / len(nodes),
        "brute force s": once * len(nodes) * len(FORMATS),
        "brute force / core": once * len(nodes) * len(FORMATS) / core,
        "peak MiB above the model": peak - loaded,
    }


def _once(layers: int) -> None:
    model, args = gpt(layers)
    subject = from_object(model, args)
    measured = measure(capture(subject, FORMATS), model, subject.batches[0], FORMATS)
    measure_uncertain(measured, first_order(measured))


def growth(rows: list[Row], key: str) -> float:
    """Exponent p of `key` ~ nodes^p between the last two rows; 1 is linear."""
    before, after = rows[-2:]
    return math.log(after[key] / before[key]) / math.log(after["nodes"] / before["nodes"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", type=int, metavar="LAYERS", help="one depth, as JSON")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(at_depth(options.measure)))
        return
    rows = [in_process_of_its_own("benchmarks.depth", "--measure", str(layers)) for layers in LAYERS]
    exponents = {key: growth(rows, key) for key in ("core s", "peak MiB above the model", "brute force s")}
    report("depth", rows, COLUMNS, {"growth": exponents})
    print("\nexponent of the growth with nodes, last two rows: ", end="")
    print(", ".join(f"{key} {value:.2f}" for key, value in exponents.items()))


if __name__ == "__main__":
    main()
