"""The function is called on the model, its numbers are taken as they come, and nothing of the model stays changed."""

import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from auditor.errors import AuditorError
from auditor.loading.target import parse
from auditor.score import NoScore, ScoreFunction, ScoreResult, call_scoring, compare_scores, find_function, fp32_score
from tests.support.refusing import refused
from tests.support.subjects import seeded

INPUTS = torch.linspace(-1, 1, 12).reshape(6, 2)


def net() -> nn.Linear:
    return seeded(lambda: nn.Linear(2, 2))


def scored(function: Any, model: nn.Module | None = None, **how: Any) -> ScoreResult:
    return call_scoring(ScoreFunction(function, "score"), model or net(), **how)


def test_an_iterable_is_a_number_for_each_sample_or_batch() -> None:
    def batches(model: nn.Module) -> Iterator[Tensor]:
        for x in INPUTS.split(2):
            yield model(x).sum()

    found = scored(batches)
    assert not found.single
    assert found.calls == 3
    assert found.values == tuple(net()(x).sum().item() for x in INPUTS.split(2))


@pytest.mark.parametrize(
    "value", [0.5, 1, True, torch.tensor(0.5), torch.tensor([[0.5]]), np.float64(0.5), np.array(0.5)]
)
def test_a_number_by_itself_is_one(value: Any) -> None:
    found = scored(lambda model: value)
    assert found.single
    assert found.values == (float(value),)
    assert found.calls == 0


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (None, "is nothing: a score must be a number"),
        ("0.5", "is a str"),
        ({"accuracy": 0.5}, "is a dict"),
        (float("nan"), "the function's result is nan: a score must be finite"),
        (torch.zeros(2, 2), "is a tensor of shape [2, 2]"),
        ([], "returned no number"),
        ([0.5, None], "number 1 is nothing"),
        ([torch.zeros(2), torch.tensor([0.0, float("nan")])], "number 3 is nan"),
        ([torch.zeros(1, 2)], "number 0 is a tensor of shape [1, 2]"),
    ],
)
def test_nonsense_is_said_to_be_none(value: Any, why: str) -> None:
    with pytest.raises(NoScore) as caught:
        scored(lambda model: value)
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_the_function_raises_is_one_line_with_its_place() -> None:
    def broken(model: nn.Module) -> float:
        raise KeyError("labels\nand more")

    def late(model: nn.Module) -> Iterator[float]:
        yield 1.0
        raise ValueError("no more")

    with pytest.raises(NoScore, match=r"^the function raised KeyError: .*\(test_calling.py:\d+\)$"):
        scored(broken)
    with pytest.raises(NoScore, match=r"^the function raised SystemExit: 3"):
        scored(lambda model: sys.exit(3))
    with pytest.raises(NoScore, match=r"^the function raised ValueError: no more"):
        scored(late)


def test_one_that_never_ends_is_ended_where_it_calls_the_model_or_gives_a_number() -> None:
    def endless(model: nn.Module) -> Iterator[float]:
        while True:
            yield 1.0

    def waiting(model: nn.Module) -> float:
        while True:
            model(INPUTS)

    for function in (endless, waiting):
        with pytest.raises(NoScore, match=r"no score within 0.2 seconds"):
            scored(function, limit=0.2)
    with pytest.raises(NoScore, match="returned more numbers than the 3 in FP32"):
        scored(endless, most=3)


class Counting(nn.Module):
    """A model that remembers its calls, in a buffer and beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("calls", torch.zeros(()))
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(float(self.calls))
        return x * self.weight + self.calls


def test_the_model_and_the_tensors_that_the_function_holds_come_back() -> None:
    model, metric = Counting(), {"total": torch.zeros(())}
    generator = torch.random.get_rng_state()

    def keeping(model: nn.Module) -> Iterator[float]:
        for x in INPUTS:
            metric["total"] += model(x).sum()
            yield metric["total"] + torch.rand(())

    first, second = scored(keeping, model), scored(keeping, model)
    assert first == second
    assert (float(model.calls), model.seen, float(metric["total"])) == (0.0, [], 0.0)
    torch.testing.assert_close(torch.random.get_rng_state(), generator, rtol=0, atol=0)


def two_layers() -> nn.Sequential:
    return seeded(lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)))


def halved(net: nn.Module) -> float:
    return float(net.half()(INPUTS.half()).sum())


def loaded(net: nn.Module) -> float:
    net.load_state_dict({name: torch.zeros_like(x) for name, x in net.state_dict().items()})
    return float(net(INPUTS).sum())


def replaced(net: Any) -> float:
    net[0] = nn.Identity()
    return float(net(INPUTS).sum())


@pytest.mark.parametrize("function", [halved, loaded, replaced])
def test_a_function_that_changes_the_model_is_found(function: Callable[[nn.Module], float]) -> None:
    net = two_layers()
    before = {name: x.clone() for name, x in net.state_dict().items()}
    with pytest.raises(NoScore, match=r"^the function changed the model \((parameter|module) '"):
        scored(function, net)
    if function is halved:
        return
    for name, x in net.state_dict().items():
        torch.testing.assert_close(x, before[name], rtol=0, atol=0)


# The function is found by its name, or taken from the hand, and anything else is refused in one line.

SOURCE = """
import math
from torch import nn

def accuracy(model, share=1.0):
    return share

def perplexity(model):
    return 3.0

perplexity.lower_is_better = True
perplexity.of_mean = math.exp

class Scores:
    @staticmethod
    def one(model):
        return 1.0

number = 3
layer = nn.Linear(1, 1)
"""


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    found = tmp_path / "own_scores.py"
    found.write_text(SOURCE)
    yield found
    for name in [name for name, module in sys.modules.items() if getattr(module, "__file__", None) == str(found)]:
        del sys.modules[name]


def test_a_function_of_a_file(file: Path) -> None:
    found = find_function(f"{file}:accuracy", max_drop=0.5)
    assert found.function(nn.Identity()) == 1.0
    assert (found.better, found.max_drop, found.of_mean) == ("higher", 0.5, None)
    assert found.place.text == f"{file}:accuracy"
    assert found.place.folders[0] == str(file.parent)


def test_the_function_says_how_it_is_meant_and_the_option_wins(file: Path) -> None:
    found = find_function(f"{file}:perplexity")
    assert found.better == "lower"
    assert found.of_mean(1.0) == math.e
    assert find_function(f"{file}:perplexity", better="higher").better == "higher"


def test_a_name_alone_is_one_of_the_targets_file(file: Path) -> None:
    assert find_function("perplexity", f"{file}:Net(width=3)").function(nn.Identity()) == 3.0
    place = find_function("perplexity", f"{file}:Net(width=3) -- --width 'a b'").place
    assert place is not None and place == parse(place.text) and place.words == ("--width", "a b")
    assert find_function("Scores.one", str(file)).function(nn.Identity()) == 1.0


@pytest.mark.parametrize(
    ("text", "target", "slug", "words"),
    [
        ("{}:nowhere", "", "missing-score", "own_scores.py has no 'nowhere'"),
        ("", "", "missing-score", "--evaluate needs a function: write --evaluate file.py:name"),
        ("{}:number", "", "missing-score", "is of type int: evaluate must be a function"),
        ("{}:layer", "", "missing-score", "is of type Linear"),
        (
            "accuracy",
            "timm:resnet18",
            "missing-score",
            "resnet18 is not a Python file: write --evaluate file.py:accuracy",
        ),
        ("nowhere.py:accuracy", "", "missing-target", "does not exist"),
    ],
)
def test_what_is_no_function_of_the_model_is_refused(file: Path, text: str, target: str, slug: str, words: str) -> None:
    with refused(AuditorError, slug, match=words):
        find_function(text.format(file), target)


# A score's difference and how well it is known: from pairs, by the jackknife, against hand-computed numbers.


def given(*values: float, single: bool = False) -> ScoreResult:
    return ScoreResult(values, single, len(values))


def scoring(**how: object) -> ScoreFunction:
    return ScoreFunction(lambda model: 0.0, "score", **how)


def test_the_score_is_the_mean_of_what_the_function_gave() -> None:
    found = fp32_score(scoring(max_drop=0.1), given(1.0, 0.0, 1.0, 1.0))
    assert (found.score, found.samples, found.calls) == (0.75, 4, 4)
    assert (found.function, found.better, found.max_drop) == ("score", "higher", 0.1)
    assert fp32_score(scoring(), given(0.5, single=True)).samples is None


def test_pairs_tell_how_well_the_difference_is_known() -> None:
    found = compare_scores(scoring(max_drop=0.3), given(1, 1, 1, 0), given(1, 0, 1, 0))
    assert (found.value, found.difference) == (0.5, -0.25)
    # differences 0, -1, 0, 0: mean -1/4, sum of squares 3/4, over 3 and 4: 1/16
    assert found.standard_error == pytest.approx(0.25)
    assert found.passed is True
    assert found.holds


def test_of_the_mean_is_the_users_own_number() -> None:
    perplexity = scoring(better="lower", of_mean=math.exp, max_drop=0.1)
    fp32, low = given(1.0, 2.0, 3.0), given(1.1, 2.1, 3.1)
    assert fp32_score(perplexity, fp32).score == pytest.approx(math.exp(2))
    assert fp32_score(perplexity, fp32).of_mean == "exp"
    found = compare_scores(perplexity, fp32, low)
    assert found.difference == pytest.approx(math.exp(2.1) - math.exp(2))
    assert found.passed is False
    # by the delta method: every difference is exp(m + 0.1) - exp(m), whose slope at m = 2 is the difference itself,
    # times the standard error of the mean, 1 / sqrt(3); the jackknife agrees to second order
    assert found.standard_error == pytest.approx((math.exp(2.1) - math.exp(2)) / math.sqrt(3), rel=0.2)


@pytest.mark.parametrize(
    ("better", "value", "passed"),
    [("higher", 0.89, False), ("higher", 0.95, True), ("lower", 0.89, True), ("lower", 1.02, False)],
)
def test_the_direction_says_what_a_drop_is(better: str, value: float, passed: bool) -> None:
    found = compare_scores(scoring(better=better, max_drop=0.1), given(1.0, single=True), given(value, single=True))
    assert found.passed is (passed or (better == "lower" and value < 1.1))
    assert found.standard_error is None


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (given(1.0, 1.0), "2 numbers, and 3 numbers in FP32"),
        (given(1.0, single=True), "a single number, and 3 numbers in FP32"),
        (given(1.0), "1 number, and 3 numbers in FP32"),
        ("it raised", "it raised"),
    ],
)
def test_what_makes_no_pairs_has_no_score(plan: ScoreResult | str, why: str) -> None:
    for limit, passed in ((None, None), (0.5, False)):
        found = compare_scores(scoring(max_drop=limit), given(1.0, 1.0, 1.0), plan)
        assert why in found.failure
        assert (found.value, found.difference, found.standard_error, found.passed) == (None, None, None, passed)
        assert not found.holds


def test_a_function_of_the_mean_that_fails_says_so() -> None:
    root = scoring(of_mean=math.sqrt)
    with pytest.raises(NoScore, match=r"of_mean\(-1\) raised ValueError"):
        fp32_score(root, given(-1.0))
    assert "of_mean(-1) raised" in str(compare_scores(root, given(1.0), given(-1.0)).failure)
    with pytest.raises(NoScore, match="is inf"):
        fp32_score(scoring(of_mean=lambda mean: math.inf), given(1.0))
