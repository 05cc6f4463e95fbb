"""Why a plan has no answer, in one line."""

from __future__ import annotations

from auditor.numerics.kernels import UnsupportedInFormat
from auditor.verify import failure_of


def test_what_an_operation_refuses_is_said_without_the_name_of_a_class() -> None:
    refused = UnsupportedInFormat("linear got float16 and float32 together")
    assert failure_of(refused) == "linear got float16 and float32 together"
    assert failure_of(ValueError("no")) == "ValueError: no"
    assert failure_of(KeyError()) == "KeyError"
