"""What an audit would do, in words: which model was found and how, on which inputs, and what would be written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from ..assembly import shapes_of
from ..records import Batch, Subject
from ..records.audit import FILES
from ..report.words import count, printable
from ..settings import Settings


def described(subject: Subject, directory: Path, options: Settings) -> str:
    """One line per choice that discovery and the options made; the model has run in FP32, nothing was measured."""
    numbers = sum(parameter.numel() for parameter in subject.model.parameters())
    made = f", from {subject.origin.symbol}" if subject.origin else ""
    plans = ", ".join(f"{strategy}_{fmt}" for strategy in options.strategies for fmt in options.formats)
    apart = f", but for {'; '.join(map(str, options.limits))}" if options.limits else ""
    rows = {
        "Target": subject.target,
        "Model": f"{type(subject.model).__name__} with {numbers:,} parameters{made}",
        "Inputs": f"{_inputs(subject.batches)}, from {subject.inputs_source}",
        "Held out": _inputs(subject.held_out) or "none: plans are verified on the inputs above",
        "Weights": subject.weights_source,
        "Plans": f"{plans}; error budget {options.max_error:g}{apart}",
    }
    if (scoring := options.scoring) is not None:
        judged = "not judged" if scoring.max_drop is None else f"at most {scoring.max_drop:g} worse"
        rows["Score"] = f"{scoring.name} on FP32 and every verified plan; {scoring.better} is better; {judged}"
    rows["Device"] = "the GPU runs the formats" if options.native else "no GPU: a CPU imitates its arithmetic"
    rows["Files"] = f"{directory}/: {', '.join(FILES)}"
    lines = [f"{name:<9}{printable(text)}" for name, text in rows.items()]
    return "\n".join([*lines, "Nothing was measured or written: leave out --dry-run to audit."]) + "\n"


def _inputs(batches: Sequence[Batch]) -> str:
    kinds = Counter(", ".join(shapes_of(batch)) for batch in batches)
    return "; ".join(f"{count(number, 'batch', 'batches')} of {kind}" for kind, number in kinds.items())
