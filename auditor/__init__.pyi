"""What editors and type checkers see of the package. `make docs` writes it, from the settings."""

from collections.abc import Callable, Iterable
from os import PathLike
from typing import Any

import torch
from torch import nn

from .document.live import apply as apply
from .document.read import load_plan as load_plan
from .emulation.emulate import emulate as emulate
from .features.rehearsal.facade import rehearse as rehearse
from .results import Audit as Audit
from .results import load as load
from .snippets import snippet as snippet

__version__: str

def audit(
    model: nn.Module,
    example_inputs: Any,
    *,
    kwargs: dict[str, Any] | None = None,
    formats: str | torch.dtype | Iterable[str | torch.dtype] = ("fp16", "bf16"),
    strategies: str | Iterable[str] = ("autocast", "cast"),
    max_error: float = 0.01,
    criteria: Any = (),
    metric: Callable[..., Any] | None = None,
    device: Any = "auto",
    on: str = "cuda",
    gpu: str | None = None,
    mode: str = "inference",
    use: str = "",
    objective: str = "time",
    quick: bool = False,
    measure_time: bool | None = None,
    evaluate: Any = None,
    max_drop: float | None = None,
    better: str | None = None,
    generate: int | None = None,
    temperature: float = 0.0,
    loss_fn: Callable[..., Any] | None = None,
    rules: str | PathLike[str] | None = None,
    select: str | Iterable[str] = (),
    ignore: str | Iterable[str] = (),
    per_module_ignores: Iterable[dict[str, str]] = (),
    memory: str | int | None = None,
    seed: int = 0,
    timeout: float | None = None,
    progress: bool | Callable[..., Any] | None = None,
) -> Audit: ...
