"""The graph that an architecture is audited on answers what its model answers, bit for bit."""

from __future__ import annotations

from auditor.isolation.answer import answer
from tests.architectures.conftest import Audited
from tests.support.replaying import assert_same, replay


def test_the_graph_is_the_model(audited: Audited) -> None:
    batch = (audited.specimen.args, audited.specimen.kwargs)
    model = audited.fresh()
    assert_same(replay(audited.capture, model, batch), answer(model, batch))
