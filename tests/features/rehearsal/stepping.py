"""What steps as written share: the top of a training file, and a run of a step as it is."""

import inspect
from collections.abc import Callable
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from auditor.features.rehearsal.forked import call_forked
from auditor.features.rehearsal.rehearse import recipe_as_written
from auditor.features.rehearsal.result import RecipeRun
from auditor.features.rehearsal.session import Session
from tests.features.rehearsal.cases import classes, mlp

Step = Callable[..., Any]
STEPS = 3
"""Number of steps of a run."""
WRONG: dict[str, tuple[str, Step]] = {}
"""{name: (kind of its finding, step)}. The finding is of the line with the mark "# <-"."""
RIGHT: dict[str, Step] = {}


def wrong(kind: str) -> Callable[[Step], Step]:
    def keep(step: Step) -> Step:
        assert step.__name__ not in {*WRONG, *RIGHT}
        WRONG[step.__name__] = kind, step
        return step

    return keep


def right(step: Step) -> Step:
    assert step.__name__ not in {*WRONG, *RIGHT}
    RIGHT[step.__name__] = step
    return step


class Lookahead(torch.optim.Optimizer):
    """Runs another optimizer, and averages the weights every second time."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.base, self.count = base, 0
        self.slow = [p.detach().clone() for group in base.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step(closure)
        self.count += 1
        if self.count % 2 == 0:
            parameters = (p for group in self.param_groups for p in group["params"])
            for kept, p in zip(self.slow, parameters, strict=True):
                kept.lerp_(p, 0.5)
                p.copy_(kept)


class Dividing(torch.optim.Optimizer):
    """Divides the gradients by the factor of the loss in its own `step`, and then runs another optimizer."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.base = base

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            torch._foreach_div_([p.grad for p in group["params"]], 1024.0)
        self.base.step(closure)


class Signs(torch.optim.Optimizer):
    """The update of Lion: signs of an average of gradients."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                p.add_(average.lerp(p.grad, 0.1).sign(), alpha=-group["lr"])
                average.lerp_(p.grad, 0.01)


class Loop:
    """What a training file has at its top: two models, several optimizers, two scalers, and small functions."""

    def __init__(self) -> None:
        self.model, self.other = mlp(16, 8, 4), mlp(16, 8, 4)
        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.opt2 = torch.optim.SGD(self.other.parameters(), lr=0.1)
        self.scaler, self.scaler2 = torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu", init_scale=1024.0)
        self.copies = mlp(16, 8, 4).half()
        self.opt3 = torch.optim.SGD(self.copies.parameters(), lr=1e-5)
        # plain tensors, which no module has
        self.masters = [p.detach().float().requires_grad_() for p in self.copies.parameters()]
        self.opt4 = torch.optim.SGD(self.masters, lr=0.1)
        self.lookahead, self.signs = Lookahead(self.opt), Signs(self.model.parameters())
        self.dividing = Dividing(self.opt)
        self.calls = 0

    def loss(self, x: torch.Tensor, y: torch.Tensor, model: Any = None, dtype: Any = torch.float16) -> torch.Tensor:
        with torch.autocast("cuda", dtype=dtype):
            return F.cross_entropy((model or self.model)(x), y)

    def begin(self, *args: Any, **how: Any) -> torch.Tensor:
        """Zero the gradients, and run a scaled backward pass."""
        self.opt.zero_grad()
        loss = self.loss(*args, **how)
        self.scaler.scale(loss).backward()
        return loss.detach()

    def begin_other(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """The same for the other model, with the same scaler."""
        self.opt2.zero_grad()
        self.scaler.scale(self.loss(x, y, self.other)).backward()

    def end(self) -> None:
        self.scaler.step(self.opt)
        self.scaler.update()


def run_as_written(function: Step, half: bool = False) -> RecipeRun:
    loop = Loop()
    if half:
        loop.model.half()
    step = partial(function, loop)
    session = Session(lambda x, y: step(x, y), lambda: cycle(enumerate(classes(2))), 0)
    (recipe,) = recipe_as_written(session)
    result: RecipeRun = call_forked(partial(session.run, recipe, STEPS))
    return result


def marked_line(function: Step) -> str:
    """The line of the function with the mark "# <-", as `file.py:line`."""
    lines, first = inspect.getsourcelines(function)
    (line,) = [first + i for i, text in enumerate(lines) if text.rstrip().endswith("# <-")]
    return f"{Path(inspect.getfile(function)).name}:{line}"
