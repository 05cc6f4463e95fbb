"""What an audit can be asked, checked once, in one place, before anything is loaded or run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from auditor.asked import Command, validate
from auditor.errors import AuditorError
from auditor.settings import Settings, options_of, split_names


def options(**asked: Any) -> Settings:
    return validate(Settings, asked)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"formats": ("fp16", "int4")}, "formats takes fp16, bf16, fp8_e4m3 or fp8_e5m2, not int4"),
        ({"formats": ()}, "none"),
        ({"strategies": ("prune",)}, "strategies takes autocast, cast or graph, not prune"),
        ({"mode": "training", "formats": "fp8_e4m3"}, "a training step runs in fp16 or bf16, not in fp8_e4m3"),
        ({"max_error": 0.0}, "positive"),
        ({"max_error": math.nan}, "positive"),
        ({"gpu": "abacus"}, "gpu takes T4, A100"),
        ({"max_drop": 0.1}, "max_drop and better are about a score"),
        ({"select": ["norms"]}, "select takes codes such as NRM001, or the letters of a family, not 'norms'"),
        ({"max_eror": 1}, "there is no argument 'max_eror'"),
    ],
    ids=str,
)
def test_what_cannot_be_asked_is_said_in_one_line(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(AuditorError, match=words) as caught:
        options(**asked)
    assert caught.value.slug == "bad-option"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ("bf16", ("bf16",)),
        ("fp16, bf16,fp16", ("fp16", "bf16")),
        (("fp16", "bf16"), ("fp16", "bf16")),
        ([], ()),
        (iter(["cast"]), ("cast",)),
    ],
)
def test_names_are_given_one_by_one_or_together(given: Any, names: tuple[str, ...]) -> None:
    assert split_names(given) == names


def test_quick_takes_the_first_of_what_was_asked_for() -> None:
    found = options(formats=("bf16", "fp16"), strategies=("cast", "autocast"), quick=True)
    assert (found.formats, found.strategies) == (("bf16",), ("cast",))
    with pytest.raises(AuditorError, match="int4"):  # what is left aside is checked all the same
        options(formats=("bf16", "int4"), quick=True)


@pytest.mark.parametrize(
    ("text", "size"),
    [("4GB", 4 * 10**9), ("512MiB", 2**29), ("1.5g", 1_500_000_000), ("650 mb", 650_000_000), (10**9, 10**9)],
)
def test_memory_is_a_size_as_people_write_it(text: object, size: int) -> None:
    assert options(memory=text).memory == size


@pytest.mark.parametrize("text", ["", "0", "-1GB", "4 apples", "GB", "1e9"])
def test_what_is_no_size_is_one_line(text: object) -> None:
    with pytest.raises(AuditorError, match="memory takes a size such as 4GB or 512MiB, not"):
        options(memory=text)


def test_text_is_read_as_the_command_line_and_toml_have_it() -> None:
    found = validate(
        Command, {"max_error": "0.5", "seed": "7", "select": "NRM,SFT001", "mode": "training", "out": "a b"}
    )
    assert (found.max_error, found.seed, found.select, found.use) == (0.5, 7, ("NRM", "SFT001"), "training")
    assert found.out == Path("a b")


def test_every_option_says_what_it_takes() -> None:
    for name, option in options_of(Command).items():
        free = Command.model_fields[name].annotation in (str | None, Any)
        assert option.help
        assert option.takes or option.choices or free, name
