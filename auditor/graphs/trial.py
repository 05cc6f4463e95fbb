"""Choices tried: the graph that a plan would be, run in this process as a GPU would run it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import fx, nn
from torch.utils import _pytree as pytree

from ..capture.imitation import as_on
from ..errors import MeasureError
from ..execution.execute import Executor
from ..isolation.answer import answer
from ..plan.workbench import Workbench
from ..raised import let_through
from ..records import Batch
from .exported import Exported
from .lowered import COPIED, lowered
from .operations import Table

AGREES = 0.02
"""Share of the budget that the exported graph may be from the model in FP32: it may sum in another order."""


class Refused(Exception):
    """An operation raised in a run; name: which."""

    def __init__(self, name: str, said: BaseException) -> None:
        super().__init__(str(said))
        self.name, self.said = name, said


@dataclass
class Trial:
    """One exported model and the batches that choices are tried on."""

    exported: Exported
    bench: Workbench
    batches: Sequence[Batch]

    def error(self, table: Table, low: frozenset[str], enough: float = math.inf) -> float:
        """Error of the outputs with these operations low: the worst batch's, or the first beyond `enough`.

        Raises: Refused where an operation raises.
        """
        module, worst = lowered(self.exported, table, low), 0.0
        for batch in self.batches:
            worst = max(worst, found) if (found := self.distance(module, batch)) == found else math.inf
            if worst > enough:
                break
        return worst

    def distance(self, module: fx.GraphModule, batch: Batch) -> float:
        """Error of one run; inf for one that gives outputs of another kind."""
        run = _Stepwise(module, list(self.exported.example[1]))
        around = partial(as_on, self.bench.device, self.bench.most)
        outputs = answer(run, batch, seed=self.bench.seed, around=around)
        try:
            return self.bench.distance(self.bench.reference(batch), outputs)
        except MeasureError:
            return math.inf


def fitting(exported: Exported, bench: Workbench, batches: Sequence[Batch]) -> list[Batch]:
    """Those of some batches for which the exported graph in FP32 answers as the model does."""
    trial, found = Trial(exported, bench, batches), []
    for batch in batches:
        try:
            off = trial.distance(exported.graph_module, batch)
        except Exception as error:
            let_through(error)
            continue
        if off <= AGREES * bench.max_error or off <= bench.floor.error:
            found.append(batch)
    return found


class _Stepwise(nn.Module):
    """A graph run node by node, so that what an operation raises has its name. order: of keyword arguments."""

    def __init__(self, module: fx.GraphModule, order: list[str]) -> None:
        super().__init__()
        self.module, self.order = module, order

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The outputs, in a list. Raises: Refused."""
        given = {name: kwargs[name] for name in self.order}
        leaves = pytree.tree_leaves((args, given))
        executor = Executor(self.module)
        try:
            return executor.run(*leaves)
        except Exception as error:
            let_through(error)
            assert executor.at is not None
            raise Refused(executor.at.meta.get(COPIED, executor.at.name), error) from error
