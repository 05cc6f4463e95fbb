"""The graph that an architecture is audited on answers what its model answers, bit for bit."""

from __future__ import annotations

import pytest

from auditor.running import answer
from tests.architectures.conftest import Audited
from tests.replaying import assert_same, replay

CHOOSING = frozenset({"bert"})
"""Architectures whose Python asks whether any token is padding."""


def test_the_graph_is_the_model(audited: Audited, request: pytest.FixtureRequest) -> None:
    name = request.node.callspec.params["audited"]
    batch = (audited.specimen.args, audited.specimen.kwargs)
    model = audited.fresh()
    assert_same(replay(audited.capture, model, batch), answer(model, batch))
    assert audited.capture.method == ("path" if name in CHOOSING else "run")
