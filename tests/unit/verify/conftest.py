"""The real process, where a test asks for it: elsewhere one is forked from the tests' template."""

import pytest

from auditor.processes import Process
from auditor.verify import artefact


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artefact, "Process", Process)
