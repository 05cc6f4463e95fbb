"""What the verb `audit` does with the process that it has to itself."""

from __future__ import annotations

import argparse
from contextlib import ExitStack, nullcontext

import pytest

from auditor.cli import audit, guard
from auditor.mapped import freeing
from auditor.options import Options
from auditor.verify import lifetime


@pytest.mark.parametrize(("watched", "limited", "kept"), [(True, None, 1), (False, None, 0), (True, 1 << 40, 0)])
def test_a_process_of_the_commands_own_keeps_what_is_freed_unless_its_memory_is_limited(
    monkeypatch: pytest.MonkeyPatch, watched: bool, limited: int | None, kept: int
) -> None:
    calls: list[bool] = []
    monkeypatch.setattr(guard, "is_watched", lambda: watched)
    monkeypatch.setattr(audit, "_automatic", lambda args, options: limited)
    monkeypatch.setattr(lifetime, "standby", nullcontext)
    monkeypatch.setattr(freeing, "keep_freed", lambda: calls.append(True))
    with ExitStack() as held:
        audit._set_aside(argparse.Namespace(dry_run=False, device="cpu"), Options(rules=(), command=""), held)
    assert len(calls) == kept
