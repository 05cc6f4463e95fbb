"""Models in hand become subjects, captures and measurements; shared by the tests of the core."""

from typing import Any

import torch
from torch import nn

from auditor.capture.capture import capture
from auditor.measure.attribute import first_order
from auditor.measure.measure import Measurement, measure
from auditor.measure.rerun import PLAIN, OutputMetric
from auditor.measure.uncertain import measure_uncertain
from auditor.records import Capture, Contribution, Node, Subject

FORMATS = ("fp16", "bf16")
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def subject_of(model: nn.Module, *args: Any, **kwargs: Any) -> Subject:
    """The model in eval mode, with one batch."""
    return Subject(model.eval(), ((args, kwargs),), "toy", "toy.py", "toy", "toy")


def capture_of(model: nn.Module, *args: Any, **kwargs: Any) -> Capture:
    """What the stage makes of a model on one batch."""
    return capture(subject_of(model, *args, **kwargs), FORMATS)


def measurement_of(model: nn.Module, *args: Any, **kwargs: Any) -> Measurement:
    """The model, captured and measured on one batch in both formats."""
    subject = subject_of(model, *args, **kwargs)
    return measure(capture(subject, FORMATS), subject.model, subject.batches[0], FORMATS)


def effects_of(
    measured: Measurement, seed: int = 0, output_metric: OutputMetric = PLAIN
) -> dict[str, dict[str, Contribution]]:
    """What every node does to the outputs, predicted or run."""
    return measure_uncertain(measured, first_order(measured, seed, output_metric), output_metric)[0]


def nodes_by_op(capture: Capture, packet: str) -> list[Node]:
    """Nodes of one operation, `linear` or `to`, in execution order."""
    return [node for node in capture.nodes.values() if node.op.removeprefix("aten.").split(".")[0] == packet]


def only(capture: Capture, packet: str) -> Node:
    """The one node of an operation."""
    (node,) = nodes_by_op(capture, packet)
    return node


def seeded(model_class: type[nn.Module], seed: int = 0) -> nn.Module:
    """A model with the same weights every time; the generator comes back as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # `torch.manual_seed` takes milliseconds: see tests/conftest.py
        return model_class().eval()


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal deviates from a generator of their own."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
