"""The public entry for a model in hand; the command line comes in through `flow.run`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from torch import nn

from .artefact.strategies import SHIPPED
from .criteria import criteria_of
from .errors import AuditorError, CallbackError
from .flow import run
from .loading import from_object
from .loading.sandbox import blame
from .numerics.formats import DEFAULT
from .offload import limited
from .options import Options, check_types, named
from .progress.cell import Cell, in_notebook
from .progress.shown import reporter
from .raised import let_through
from .records import Distance, Progress, Subject
from .records.audit import Audit
from .resources import resource_dir
from .rulebook.load import load_rules
from .rulebook.rule import Rule
from .score import Scoring, in_hand
from .training.objective import training_subject


def audit(
    model: nn.Module,
    example_inputs: Any,
    *,
    kwargs: dict[str, Any] | None = None,
    formats: str | Sequence[str] = DEFAULT,
    max_error: float = 0.01,
    device: str = "auto",
    strategies: str | Sequence[str] = SHIPPED,
    mode: str = "inference",
    objective: str = "time",
    use: str | None = None,
    loss_fn: Callable[..., Any] | None = None,
    metric: Distance | None = None,
    criteria: Any = None,
    rules: str | Path | None = None,
    seed: int = 0,
    progress: Progress | bool | None = None,
    gpu: str | None = None,
    evaluate: Callable[[nn.Module], Any] | None = None,
    max_drop: float | None = None,
    better: str | None = None,
    quick: bool = False,
    measure_time: bool | None = None,
    memory: int | str | None = None,
) -> Audit:
    """Audit a model on example inputs; the model comes back bit for bit as it was. Raises: AuditorError.

    example_inputs: a tensor, a tuple of arguments, or a list of such tuples (batches); kwargs: keyword arguments of each. max_error: budget for the relative L2 error of the
    outputs, or for `metric(reference, candidate)` of two lists. criteria: what single outputs are held to, as "logits: kl <= 0.01" or {output: "max_abs <= 0.5", or (function,
    limit), or a list}. gpu: the one that times are predicted for, else that in use. rules: a directory of your own. objective: what plans save, "time", "memory" or "flops".
    use: "inference" or "training", by default the mode. quick: one format and strategy, no search. measure_time: whether forwards are
    timed, on a GPU unless False. memory: what this process may hold, as "4GB". mode="training" also audits a step: loss_fn(outputs, *targets) -> scalar, its targets the last of
    every batch, or those called like its parameters. evaluate(model) -> your own score, or scores; max_drop: how much worse a plan's may be. progress: hears of stages, or True.
    """
    check_types(locals())
    with _shown(progress) as told:
        options = Options(
            rules=_rules(rules),
            command="auditor.audit(model, example_inputs)",
            formats=named(formats),
            strategies=named(strategies),
            max_error=max_error,
            metric=metric,
            criteria=criteria_of(criteria),
            device=device,
            gpu=gpu,
            mode=mode,
            objective=objective,
            wanted_for=use,
            seed=int(seed),
            scoring=_scoring(evaluate, max_drop, better),
            quick=quick,
            measure_time=measure_time,
            memory=memory,
            progress=told,
        )
        return _within(options, model, example_inputs, kwargs or {}, loss_fn)


def _within(options: Options, *given: Any) -> Audit:
    with limited(options.most_resident):
        return run(_subject(options, *given), options)


def _shown(progress: Progress | bool | None) -> AbstractContextManager[Progress | None]:
    """What hears of the stages: the caller's own, or a line that is shown for as long as the audit takes."""
    if callable(progress):
        return nullcontext(_guarded(progress))
    if progress is None and not in_notebook():
        return nullcontext()
    if progress is False:
        return nullcontext()
    return Cell() if in_notebook() else reporter()


def _guarded(progress: Progress) -> Progress:
    """The caller's own function, whose errors end the audit under its name."""

    def guarded(stage: str, detail: str, done: int, total: int) -> None:
        try:
            progress(stage, detail, done, total)
        except Exception as error:
            let_through(error)
            raise CallbackError(
                f"progress raised {blame(error)}: it is called as progress(stage, detail, done, total)", "bad-callback"
            ) from error

    return guarded


def _scoring(evaluate: object, max_drop: float | None, better: str | None) -> Scoring | None:
    if evaluate is not None:
        return in_hand(evaluate, better=better, max_drop=max_drop)
    if max_drop is not None or better is not None:
        raise AuditorError("max_drop and better are about a score: pass evaluate as well", slug="bad-option")
    return None


def _rules(directory: str | Path | None) -> tuple[Rule, ...]:
    return tuple(load_rules([resource_dir("rules"), *([Path(directory)] if directory else [])]))


def _subject(
    options: Options, model: nn.Module, inputs: Any, kwargs: dict[str, Any], loss_fn: Callable[..., Any] | None
) -> Subject:
    if options.training:
        return training_subject(model, inputs, kwargs, loss_fn)
    if loss_fn is not None:
        raise AuditorError("loss_fn is for mode='training': pass both, or neither", slug="bad-option")
    return from_object(model, inputs, kwargs)
