"""Every failing case is audited once per session; verdicts and repairs are read from the same audit."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from torch import nn

import auditor
from auditor.records.audit import Audit
from tests.corpus.case import Case


@dataclass(frozen=True)
class Audited:
    """The audit of a case, its inputs, and a copy of its model made before."""

    audit: Audit
    model: nn.Module
    inputs: tuple[Any, ...]


@pytest.fixture(scope="session")
def audited() -> Callable[[Case], Audited]:
    """Audit of a failing case with default options, in the formats it fails in."""

    @cache
    def audit_once(case: Case) -> Audited:
        model, inputs = case.build()
        before = copy.deepcopy(model)
        return Audited(auditor.audit(model, inputs, formats=case.formats, device="cpu"), before, inputs)

    return audit_once
