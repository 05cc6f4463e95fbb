"""The user's own score of a model: locates the scoring function, calls it on a model, and compares its results."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from ..criteria.criterion import name_of
from ..errors import LoadError, describe, let_through
from ..isolation import isolate
from ..isolation.members import named_modules, named_parameters
from ..isolation.process import disable_compilers, disable_fused_path
from ..loading.importer import as_script
from ..loading.target import Target, blame, named_in, parse
from ..numerics.entries import tensors_in
from ..records.plan import DIRECTIONS, Evaluation, Score
from ..stages import beat

LOWER, OF_MEAN = "lower_is_better", "of_mean"
"""Optional attributes of the user's function: a bool, and a function that maps the mean to the score."""


@dataclass(frozen=True)
class ScoreFunction:
    """The user's function, and how its scores are judged.

    function(model) returns a number, or an iterable with a number for each sample or batch: the score is the mean, or
    `of_mean` of the mean. better: one of records.plan.DIRECTIONS. max_drop: how much worse a plan's score may be; None:
    no limit. place: where a fresh process can import the function; None if impossible.
    """

    function: Callable[[nn.Module], Any]
    name: str
    better: str = "higher"
    max_drop: float | None = None
    of_mean: Callable[[float], Any] | None = None
    place: Target | None = None


def find_function(
    text: str, target: str = "", *, better: str | None = None, max_drop: float | None = None, seed: int = 0
) -> ScoreFunction:
    """Import the function that is given as `file.py:name`, `package.module:name` or, in the target's file, `name`.

    Literal arguments after the name, as in `name(5)`, are passed after the model. Raises:
    LoadError(slug="missing-score"), and the errors of importing a target.
    """
    if not text.strip():
        raise LoadError("--evaluate needs a function: write --evaluate file.py:name", slug="missing-score")
    own = ":" not in text and not text.endswith(".py")
    of_target = parse(target) if own else None
    if of_target is not None and of_target.hub:
        raise LoadError(f"{target} is not a Python file: write --evaluate file.py:{text}", slug="missing-score")
    parsed = parse(text) if of_target is None else replace(parse(f"{of_target.script}:{text}"), words=of_target.words)
    if parsed.symbol is None or parsed.hub:
        raise LoadError(f"{text!r} does not name a function: write --evaluate file.py:name", slug="missing-score")
    result = named_in(parsed, "give --evaluate file.py:name of a function that takes the model", "missing-score", seed)
    given = [*map(repr, parsed.args), *(f"{name}={value!r}" for name, value in parsed.kwargs.items())]
    called = f"{parsed.symbol}({', '.join(given)})" if given else parsed.symbol
    words = f" -- {shlex.join(parsed.words)}" if parsed.words else ""
    place = replace(parsed, text=f"{parsed.script}:{called}{words}")
    scoring = in_hand(result, better=better, max_drop=max_drop, what=f"{parsed.symbol} in {parsed.label}")
    function = (lambda model: result(model, *parsed.args, **parsed.kwargs)) if given else result
    return replace(scoring, function=function, name=text, place=place)


def in_hand(
    function: Any, *, better: str | None = None, max_drop: float | None = None, what: str | None = None
) -> ScoreFunction:
    """A ScoreFunction from a function object. what: the name in errors. Raises: LoadError(slug="missing-score")."""
    name = name_of(function)
    if isinstance(function, type | nn.Module) or not callable(function):
        wanted = "evaluate must be a function, func(model) -> a number, or a number for each sample"
        raise LoadError(f"{what or f'evaluate={name}'} is of type {type(function).__name__}: {wanted}", "missing-score")
    own = DIRECTIONS[bool(getattr(function, LOWER, False))]
    return ScoreFunction(function, name, better or own, max_drop, getattr(function, OF_MEAN, None))


ALLOWED = "a score must be a number, or an iterable of numbers, one for each sample or batch"


class NoScore(Exception):
    """The scoring function gave no valid score; the message is the reason, in one line."""


@dataclass(frozen=True)
class ScoreResult:
    """Numbers that the function returned. single: one number, not an iterable. calls: number of calls of the model."""

    values: tuple[float, ...]
    single: bool
    calls: int

    @property
    def count_text(self) -> str:
        """The number of values, in words."""
        if self.single:
            return "a single number"
        return f"{len(self.values):,} number{'s' * (len(self.values) != 1)}"


def call_scoring(
    scoring: ScoreFunction,
    model: nn.Module,
    *,
    seed: int = 0,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    most: int | None = None,
    limit: float | None = None,
    plan: str = "",
) -> ScoreResult:
    """Call the scoring function on a model, in the context manager that `around()` returns. Gradients are off unless
    the function enables them.

    Random generators start from the seed; model, generators and the function's tensors are restored. most: maximum
    number of values to read. limit: seconds allowed. plan: the plan's name, for progress messages. Raises: NoScore.
    """
    deadline, calls = math.inf if limit is None else time.monotonic() + limit, 0

    def in_time(count: int | None = None) -> None:
        if count is not None:
            beat(f"{plan.replace('_', ' ')}: {count:,}{f' of {most:,}' if most and most > 1 else ''}")
        if time.monotonic() > deadline:
            raise NoScore(f"the function returned no score within {limit:g} seconds")

    def call_model(module: nn.Module, args: Any) -> None:
        nonlocal calls
        if module is model:
            calls += 1
            in_time()

    closure = getattr(scoring.function, "__closure__", None) or ()
    place, kept = scoring.place, tensors_in([cell.cell_contents for cell in closure])
    try:
        with (
            isolate(model, scoring.function, kept, seed=seed),
            disable_fused_path(),
            disable_compilers(),
            torch.no_grad(),
            around(),
            as_script([place.script, *place.words], place.folders) if place else nullcontext(),  # for its own imports
            register_module_forward_pre_hook(call_model),
        ):
            before = _made_of(model)
            values, single = _values(scoring.function(model), in_time, most)
            now = _made_of(model)
            changed = next((name for name in {**before, **now} if before.get(name) != now.get(name)), None)
            if changed is not None:
                why = "so the score is not the plan's: the function must only call the model"
                raise NoScore(f"the function changed the model ({changed}), {why}")
            return ScoreResult(values, single, calls)
    except NoScore:
        raise
    except (Exception, SystemExit) as error:
        let_through(error, memory=False)
        raise NoScore(f"the function raised {blame(error)}") from error


def _made_of(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    """Identities of a model's modules and weights, which show whether the scoring function changed the model."""
    identities = dict[str, tuple[Any, ...]]()
    for path, module in named_modules(model):
        own_forward = vars(module).get("forward")
        identities[f"module {path!r}"] = (id(module), id(own_forward))
    for name, x in named_parameters(model):
        writes = 0 if x.is_inference() else x._version  # inference tensors have no version counter
        identities[f"parameter {name!r}"] = (id(x), x.dtype, writes)
    return identities


def number(value: Any, what: str) -> float:
    """Convert a number to float. Raises: NoScore if it is not a finite number."""
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        if math.prod(value.shape) != 1:
            raise NoScore(f"{what} is a tensor of shape {list(value.shape)}: {ALLOWED}")
        value = value.item()
    if not isinstance(value, bool | int | float):
        given = "nothing" if value is None else f"a {type(value).__name__}"
        raise NoScore(f"{what} is {given}: {ALLOWED}")
    if not math.isfinite(result := float(value)):
        raise NoScore(f"{what} is {result}: a score must be finite")
    return result


def _values(given: Any, in_time: Callable[[int], None], most: int | None) -> tuple[tuple[float, ...], bool]:
    """The numbers that the function returned, and whether it returned a single number."""
    if isinstance(given, torch.Tensor | np.ndarray) and given.ndim == 1:
        given = [given]
    elif isinstance(given, str | bytes | Mapping | Set | torch.Tensor | np.ndarray) or not isinstance(given, Iterable):
        return (number(given, "the function's result"),), True
    values: list[float] = []
    for item in given:
        flat = isinstance(item, torch.Tensor | np.ndarray) and item.ndim == 1  # one number for each sample of a batch
        for value in item.tolist() if flat else [item]:
            values.append(number(value, f"number {len(values)}"))
        in_time(len(values))
        if most is not None and len(values) > most:
            counts = f"more numbers than the {most:,} in FP32"
            raise NoScore(f"the function returned {counts}: the scores cannot be paired")
    if not values:
        raise NoScore(f"the function returned no number: {ALLOWED}")
    return tuple(values), False


ROUNDING = 1e-9
"""Relative tolerance in comparisons with `max_drop`: 0.99 - 0.98 is more than 0.01 in binary."""


def fp32_score(scoring: ScoreFunction, given: ScoreResult) -> Evaluation:
    """The Evaluation of the FP32 model, from the numbers that the scoring function returned. Raises: NoScore."""
    value = _value(scoring, given.values)
    samples = None if given.single else len(given.values)
    formula = None if scoring.of_mean is None else name_of(scoring.of_mean)
    return Evaluation(scoring.name, scoring.better, scoring.max_drop, value, samples, formula, given.calls)


def compare_scores(scoring: ScoreFunction, fp32: ScoreResult, plan: ScoreResult | str) -> Score:
    """A plan's score compared with the FP32 model's, or why there is no score. plan: the score function's numbers, or
    why they are missing."""
    try:
        if isinstance(plan, str):
            raise NoScore(plan)
        if (plan.single, len(plan.values)) != (fp32.single, len(fp32.values)):
            counts = f"{plan.count_text}, and {fp32.count_text} in FP32"
            raise NoScore(f"the function returned {counts}: the scores cannot be paired")
        value, reference = _value(scoring, plan.values), _value(scoring, fp32.values)
    except NoScore as error:
        return Score(None, passed=None if scoring.max_drop is None else False, failure=str(error))
    known = None if plan.single else standard_error(fp32.values, plan.values, scoring.of_mean or float)
    difference, passed = value - reference, None
    if scoring.max_drop is not None:
        drop = -difference if scoring.better == "higher" else difference
        passed = drop <= scoring.max_drop or math.isclose(drop, scoring.max_drop, rel_tol=ROUNDING)
    return Score(value, difference, known, passed)


def standard_error(
    reference: Sequence[float], candidate: Sequence[float], of_mean: Callable[[float], float]
) -> float | None:
    """Standard error of of_mean(mean of candidate) - of_mean(mean of reference); entries i of both are paired.

    Jackknife: each pair is left out once. For plain means, the result is the standard deviation of the differences
    (with n - 1) over the root of n. None for fewer than two pairs, or if `of_mean` fails near the mean. Source: Efron
    and Tibshirani, An Introduction to the Bootstrap, section 11.5.
    """
    n = len(reference)
    if n < 2:
        return None
    sums = math.fsum(reference), math.fsum(candidate)
    try:
        left_out = [
            float(of_mean((sums[1] - c) / (n - 1))) - float(of_mean((sums[0] - r) / (n - 1)))
            for r, c in zip(reference, candidate, strict=True)
        ]
    except Exception:  # the user's `of_mean` raised, although it accepted the mean
        return None
    centre = math.fsum(left_out) / n
    result = math.sqrt((n - 1) / n * math.fsum((x - centre) ** 2 for x in left_out))
    return result if math.isfinite(result) else None


def _value(scoring: ScoreFunction, values: Sequence[float]) -> float:
    """The score: the mean of the values, or `of_mean` of the mean. Raises: NoScore."""
    mean = math.fsum(values) / len(values)
    if scoring.of_mean is None:
        return mean
    try:
        return number(scoring.of_mean(mean), f"of_mean({mean:.6g})")
    except NoScore:
        raise
    except Exception as error:
        raise NoScore(f"of_mean({mean:.6g}) raised {describe(error, None)}") from error
