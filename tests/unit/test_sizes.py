"""Sizes of memory, read and written."""

from __future__ import annotations

import pytest

from auditor.errors import AuditorError
from auditor.sizes import size_of, words


@pytest.mark.parametrize(
    ("text", "size"),
    [("4GB", 4 * 10**9), ("512MiB", 2**29), ("1.5g", 1_500_000_000), ("650 mb", 650_000_000), (10**9, 10**9)],
)
def test_sizes(text: object, size: int) -> None:
    assert size_of(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1GB", "4 apples", "GB", "1e9", None, "4PB"])
def test_what_is_no_size_is_one_line(text: object) -> None:
    with pytest.raises(AuditorError, match="memory is a size such as 4GB or 512MiB, not") as error:
        size_of(text)
    assert error.value.slug == "bad-option"


@pytest.mark.parametrize("size", [1, 123_456_789, 999_999_999, 10**9, 1_234_567_890, 7 * 10**10])
def test_a_size_in_words_is_enough_when_given_again(size: int) -> None:
    assert size <= size_of(words(size)) <= max(1.1 * size, 10**7)
