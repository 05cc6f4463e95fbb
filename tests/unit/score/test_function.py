"""The function is found by its name, or taken from the hand, and anything else is refused in one line."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

from auditor.errors import AuditorError
from auditor.score import find_function

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
    assert find_function("Scores.one", str(file)).function(nn.Identity()) == 1.0


@pytest.mark.parametrize(
    ("text", "target", "slug", "words"),
    [
        ("{}:nowhere", "", "missing-score", "own_scores.py has no 'nowhere'"),
        ("", "", "missing-score", "--evaluate names no function: write --evaluate file.py:name"),
        ("{}:number", "", "missing-score", "is of type int: a score is a function of the model"),
        ("{}:layer", "", "missing-score", "is of type Linear"),
        ("accuracy", "timm:resnet18", "missing-score", "has no file to look in"),
        ("nowhere.py:accuracy", "", "missing-target", "does not exist"),
    ],
)
def test_what_is_no_function_of_the_model_is_refused(file: Path, text: str, target: str, slug: str, words: str) -> None:
    with pytest.raises(AuditorError, match=words) as caught:
        find_function(text.format(file), target)
    assert caught.value.slug == slug
