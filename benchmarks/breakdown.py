"""Where the time of measuring and attributing goes, part by part, in forwards of the model."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

from auditor.capture.capture import capture
from auditor.isolation import in_eval
from auditor.loading import from_object
from auditor.measure import alone, attribute, measure, reference
from auditor.measure.attribute import first_order
from auditor.measure.uncertain import measure_uncertain
from benchmarks.harness import Row, forward_seconds, in_process_of_its_own, report, seconds
from benchmarks.subjects import MODELS, build

FORMATS = ("fp16", "bf16")
PARTS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "reference": (reference.Reference, ("compute",)),
    "magnitudes": (measure.Measurement, ("keep",)),
    "rounding": (alone.LowPrecisionProbe, ("_rounded_value",)),
    "alone": (alone.LowPrecisionProbe, ("run",)),
    "low from the start": (alone.LowPrecisionProbe, ("advance",)),
    "errors": (alone.LowPrecisionProbe, ("_error",)),
    "inner products": (attribute._Hook, ("__call__",)),
}
"""{part: where its functions stand, and their names}; a part inside another is not counted twice."""

COLUMNS = {"model": "", **dict.fromkeys((*PARTS, "backward passes", "both"), ".1f")}


class Stopwatch:
    """Exclusive processor time of functions that are wrapped in place."""

    def __init__(self) -> None:
        self.spent = dict.fromkeys(PARTS, 0.0)
        self.inner = [0.0]

    def wrap(self, part: str, holder: Any, name: str) -> None:
        """Time every call of `holder.name` under the name of the part."""
        function: Callable[..., Any] = getattr(holder, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self.inner.append(0.0)
            start = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                elapsed = time.process_time() - start
                self.spent[part] += elapsed - self.inner.pop()
                self.inner[-1] += elapsed

        setattr(holder, name, timed)


def parts(name: str) -> Row:
    """Seconds of every part for one model, and of both stages together."""
    model, args = build(name)
    subject = from_object(model, args)
    forward = forward_seconds(model, args)
    watch = Stopwatch()
    for part, (holder, functions) in PARTS.items():
        for function in functions:
            watch.wrap(part, holder, function)
    with in_eval(model):
        captured = capture(subject, FORMATS)
        found: list[measure.Measurement] = []
        both = seconds(lambda: found.append(measure.measure(captured, model, subject.batches[0], FORMATS)))
        attributing = seconds(lambda: measure_uncertain(found[0], first_order(found[0])))
    both += attributing
    forward = (forward + forward_seconds(model, args)) / 2
    spent = watch.spent | {"backward passes": attributing - watch.spent["inner products"], "both": both}
    return {"model": name, "forward s": forward, **{part: value / forward for part, value in spent.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help="all of them if left out", default=list(MODELS))
    parser.add_argument("--one", help="one model, as JSON", metavar="MODEL")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(parts(options.one)))
    else:
        rows = [in_process_of_its_own("benchmarks.breakdown", "--one", name) for name in options.models]
        report("breakdown", rows, COLUMNS)


if __name__ == "__main__":
    main()
