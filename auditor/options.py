"""What an audit is asked to do: one record, checked once, for the public call and the command line alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .config import EVERYTHING, Selection
from .errors import AuditorError
from .formats.table import DEFAULT, auditable, runs
from .records import Distance, Progress
from .resources import table
from .rulebook import Rule
from .strategies import SHIPPED, names

MODES = ("inference", "training")
DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True)
class Options:
    """Raises: AuditorError(slug="bad-option" or "no-cuda") for what no audit can be asked.

    max_error: budget for the relative L2 error of the outputs, or for `metric(reference, candidate)`. device: where it
    runs. target: the device that times are predicted for, a row of plan/devices.toml. rules: those that are tried;
    selection: those of their findings that are wanted. command: what the user called, for the report.
    """

    rules: tuple[Rule, ...]
    command: str
    formats: tuple[str, ...] = DEFAULT
    strategies: tuple[str, ...] = SHIPPED
    max_error: float = 0.01
    metric: Distance | None = None
    device: str = "auto"
    target: str = "A100"
    mode: str = "inference"
    seed: int = 0
    selection: Selection = EVERYTHING
    progress: Progress | None = None

    def __post_init__(self) -> None:
        _of("formats", self.formats, auditable())
        _of("strategies", self.strategies, names())
        _of("modes", (self.mode,), MODES)
        if self.training:
            _of("formats that a training step runs in", self.formats, [name for name in auditable() if runs(name)])
        _of("devices", (self.device,), DEVICES)
        if not 0 < self.max_error < float("inf"):
            raise AuditorError(f"max_error is a positive number, not {self.max_error}", slug="bad-option")
        if self.target not in (known := table("plan/devices")):
            raise AuditorError(
                f"there are no figures for {self.target!r}: target is one of {', '.join(known)}", slug="bad-option"
            )
        if self.device == "cuda" and not torch.cuda.is_available():
            raise AuditorError("cuda was asked for, but torch sees no CUDA device: use cpu or auto", slug="no-cuda")

    @property
    def native(self) -> bool:
        """Whether a GPU runs the formats; a CPU imitates one otherwise."""
        return self.device == "cuda" or (self.device == "auto" and torch.cuda.is_available())

    @property
    def training(self) -> bool:
        """Whether a training step is audited too."""
        return self.mode == "training"


def _of(what: str, given: tuple[str, ...], known: Any) -> None:
    wrong = [name for name in given if name not in known]
    if wrong or not given:
        listed = " and ".join(filter(None, [", ".join([*known][:-1]), [*known][-1]]))
        raise AuditorError(f"{what} are {listed}, not {', '.join(wrong) or 'none'}", slug="bad-option")
