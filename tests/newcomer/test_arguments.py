"""Arguments of a wrong type, and functions that raise or return what they must not, each end in one clear AuditorError."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor.errors import AuditorError
from tests.support.subjects import normal, seeded


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x)).exp()


def state_of(model: nn.Module) -> list[Any]:
    """What an audit must leave alone."""
    named = [(name, value.tolist()) for name, value in model.state_dict().items()]
    return [*named, *((path, module.training, sorted(vars(module))) for path, module in model.named_modules())]


def refused(**given: Any) -> AuditorError:
    """The error of an audit with these arguments, once the model was found as it was."""
    model = seeded(Net)
    before = state_of(model)
    quick = {"formats": "bf16", "strategies": "cast", "quick": True, "device": "cpu"}
    with pytest.raises(AuditorError) as caught:
        auditor.audit(model, given.pop("example_inputs", normal(4, 8)), **{**quick, **given})
    assert "\n" not in str(caught.value)
    assert state_of(model) == before
    return caught.value


@pytest.mark.parametrize(
    ("given", "slug", "said"),
    [
        ({"formats": None}, "bad-option", "nvfp4 or nvfp4_one_level, not None"),
        ({"formats": [["fp16"]]}, "bad-option", "not a value of type list"),
        ({"strategies": [None]}, "bad-option", "strategies takes autocast"),
        ({"max_error": "x"}, "bad-option", "max_error takes a positive number, not 'x'"),
        ({"seed": "x"}, "bad-option", "seed takes a whole number from 0 to 4294967295, not 'x'"),
        ({"seed": -1}, "bad-option", "seed"),
        ({"metric": 3}, "bad-option", "metric takes a function"),
        ({"progress": 3}, "bad-option", "progress takes True, False or a function"),
        ({"rules": 3}, "bad-option", "rules takes the path of a directory, not 3"),
        ({"criteria": 3}, "bad-criterion", "criteria are strings or a dict"),
        ({"objective": None}, "bad-option", "objective takes"),
        ({"kwargs": ["x"]}, "bad-option", "kwargs takes a dict"),
        ({"example_inputs": 3}, "bad-inputs", "got a int from example_inputs"),
        ({"example_inputs": iter([])}, "bad-inputs", "from example_inputs"),
        ({"example_inputs": (iter([1]),)}, "bad-inputs", "an iterator"),
        ({"loss_fn": 3, "mode": "training"}, "bad-option", "loss_fn takes a function"),
        ({"evaluate": 3}, "missing-score", "evaluate must be a function, func(model)"),
        ({"evaluate": lambda model: None}, "no-score", "is nothing"),
        ({"evaluate": len, "max_drop": "x"}, "bad-option", "max_drop takes a number from 0 on, not 'x'"),
        ({"evaluate": len, "better": 3}, "bad-option", "better takes higher or lower"),
        ({"memory": "x"}, "bad-option", "memory takes a size"),
        ({"quick": "no"}, "bad-option", "quick takes True or False, not 'no'"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_an_argument_of_a_wrong_type(given: dict[str, Any], slug: str, said: str) -> None:
    error = refused(**given)
    assert (error.slug, said in str(error)) == (slug, True), str(error)


def raising(*given: Any) -> Any:
    raise KeyError("mine")


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        (lambda r, c: None, "metric=<lambda> returned None: return one number"),
        (lambda r, c: "x", "returned a value of type str"),
        (lambda r, c: torch.ones(2), "returned a value of type Tensor"),
        (lambda r, c: [1.0], "returned a value of type list"),
        (lambda r: 1.0, "it is called as metric(reference, candidate)"),
        (raising, "metric=raising raised KeyError: 'mine' (test_arguments.py:"),
    ],
)
def test_a_metric_that_gives_no_number(metric: Callable[..., Any], said: str) -> None:
    error = refused(metric=metric)
    assert (error.slug, said in str(error)) == ("bad-callback", True), str(error)


def test_a_metric_that_raises_late_is_no_failure_of_a_plan() -> None:
    """In runs of plans what the model raises is a verdict; what the metric raises is not."""
    calls = itertools.count()

    def metric(reference: list[Tensor], candidate: list[Tensor]) -> float:
        if next(calls) >= 2:
            raise KeyError("mine")
        return float((reference[0] - candidate[0].float()).abs().max())

    assert refused(metric=metric, quick=False).slug == "bad-callback"


def test_a_metric_may_refuse_outputs_that_are_not_finite() -> None:
    """As scikit-learn's do: such outputs hold no budget, whatever it would have said of them."""

    def metric(reference: list[Tensor], candidate: list[Tensor]) -> float:
        if not bool(torch.isfinite(candidate[0]).all()):
            raise ValueError("Input contains infinity")
        return float((reference[0] - candidate[0].float()).norm() / reference[0].norm())

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    found = auditor.audit(model, 1e5 * normal(4, 8), metric=metric, formats="fp16", strategies="cast", quick=True)
    assert found.baselines["cast_fp16"].finite is False


class Cancelled(Exception):
    pass


@pytest.mark.parametrize("call", [0, 5])
def test_progress_that_raises_ends_the_audit_under_its_name(call: int) -> None:
    calls = itertools.count()

    def progress(stage: str, detail: str, done: int, total: int) -> None:
        if next(calls) == call:
            raise Cancelled("by the user")

    error = refused(progress=progress)
    assert error.slug == "bad-callback"
    assert str(error).startswith("progress raised Cancelled: by the user (test_arguments.py:")
    assert isinstance(error.__cause__, Cancelled)


@pytest.mark.parametrize("given", [3, None, ["x"], b"x"], ids=str)
def test_what_is_no_path_or_model_or_name(given: Any, tmp_path: Path) -> None:
    model, x = nn.Linear(4, 4), normal(2, 4)
    found = auditor.audit(model, x, formats="bf16", strategies="cast", quick=True)
    calls: list[Callable[[], Any]] = [
        lambda: auditor.load(given),
        lambda: auditor.load_plan(given),
        lambda: found.save(given),
        lambda: auditor.apply(given, found),
        lambda: auditor.apply(model, given),
        lambda: auditor.snippet(given, "hf"),
        lambda: auditor.snippet(found, given),
    ]
    if given is not None:
        calls += [lambda: auditor.apply(model, found, given), lambda: auditor.snippet(found, "hf", given)]
    for call in calls:
        with pytest.raises(AuditorError):
            call()


def test_a_selection_of_no_rule_is_refused_before_anything_is_recorded() -> None:
    with pytest.raises(AuditorError, match="no code begins with 'NMR'"):
        auditor.audit(nn.Linear(4, 4), normal(2, 4), select="SFT001,NMR")
