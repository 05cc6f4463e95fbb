"""Every architecture of the zoo is audited once per session, with default options; the tests read what came out."""

from __future__ import annotations

import copy
import importlib
from dataclasses import dataclass
from typing import Any

import pytest
from torch import Tensor, nn

from auditor.api import audit as audit_model
from auditor.capture.capture import recorded
from auditor.records import Capture, ModelPath
from auditor.records.audit import Audit
from tests.architectures.zoo import ZOO, Specimen, specimen


@dataclass(frozen=True)
class Audited:
    """A specimen, its audit, the graph that was audited, and a copy of the model made before it."""

    name: str
    specimen: Specimen
    audit: Audit
    capture: Capture
    before: nn.Module

    @property
    def model(self) -> nn.Module:
        return self.specimen.model

    def fresh(self) -> nn.Module:
        """A copy that no plan has touched."""
        return copy.deepcopy(self.before)

    def outputs(self, model: nn.Module) -> list[Tensor]:
        """What a model of this architecture answers to the audited inputs, on this machine's own kernels."""
        return self.specimen.outputs(model)


@pytest.fixture(scope="session", params=ZOO)
def audited(request: pytest.FixtureRequest) -> Audited:
    subject = specimen(request.param)
    before = copy.deepcopy(subject.model)
    captures: list[Capture] = []

    def noted(*args: Any) -> ModelPath:
        recording = recorded(*args)
        captures.append(recording.capture)
        return recording

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.import_module("auditor.capture.several"), "recorded", noted)
        audit = audit_model(subject.model, subject.args, kwargs=subject.kwargs, device="cpu")
    return Audited(request.param, subject, audit, captures[0], before)
