"""What is said of an error in the user's code."""

from __future__ import annotations

import pytest

from auditor.loading.sandbox import blame


def _imports() -> None:
    try:
        try:
            raise RuntimeError("operator torchvision::nms does not exist\nand more")
        except RuntimeError as error:
            raise ValueError("half way") from error
    except ValueError as error:
        raise ImportError("No BertModel.") from error


def _looks_up() -> None:
    try:
        {}["a"]
    except KeyError:
        raise KeyError("other") from None


def test_the_first_cause_is_named_behind_what_was_raised_from_it() -> None:
    with pytest.raises(ImportError) as raised:
        _imports()
    assert blame(raised.value).startswith(
        "ImportError: No BertModel, from RuntimeError: operator torchvision::nms does not exist (test_sandbox.py:"
    )


def test_an_error_without_a_cause_is_itself() -> None:
    with pytest.raises(KeyError) as raised:
        _looks_up()
    assert blame(raised.value).startswith("KeyError: 'other' (test_sandbox.py:")
