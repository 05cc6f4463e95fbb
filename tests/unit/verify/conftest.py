"""The real process: none is forked from the tests' template here."""

import pytest

from auditor.processes import Process
from auditor.verify import artefact


@pytest.fixture(autouse=True)
def _started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artefact, "Process", Process)
