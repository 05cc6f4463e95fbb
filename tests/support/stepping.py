"""Small training steps, recorded and run in FP32, for the tests of what happens backwards."""

import torch
from torch import Tensor, nn

from auditor.features.training.objective import training_subject
from auditor.records import Subject
from auditor.training.replay import Step, bind_step, run_step
from auditor.training.step import capture_step, step_batches


class Scaled(nn.Module):
    """One weight times its input, and a function of that."""

    def __init__(self, weight: float = 1.0, after: object = None) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([weight]))
        self.after = after

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.w
        return self.after(y) if callable(self.after) else y


def weighted(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss whose gradient by each output is the number given as its target."""
    return (outputs * targets).sum()


def subject_on(model: nn.Module, x: Tensor, targets: Tensor) -> Subject:
    """The model in training mode, with a batch and the loss above."""
    return training_subject(model.train(), (x, targets), {}, weighted)


def stepped(model: nn.Module, x: Tensor, targets: Tensor, formats: tuple[str, ...] = ("fp16", "bf16")) -> Step:
    """Its FP32 step."""
    subject = subject_on(model, x, targets)
    captured = capture_step(subject, formats)
    return run_step(bind_step(captured, subject, step_batches(subject)[0], 0))
