"""Every example of the repository replays bit for bit, on the inputs that it comes with."""

from __future__ import annotations

from pathlib import Path

import pytest

from auditor.capture.capture import capture
from auditor.isolation.answer import answer
from auditor.loading import in_eval, load
from tests.support.replaying import FORMATS, assert_same, replay

EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("[0-9]*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_replay(path: Path) -> None:
    subject = load(str(path))
    with in_eval(subject.model):
        found = capture(subject, FORMATS)
        assert_same(replay(found, subject.model, subject.batches[0]), answer(subject.model, subject.batches[0]))
    assert found.method == ("path" if path.stem == "06_value_dependent" else "run")
    assert all(node.source and node.source.startswith(path.name) for node in found.nodes.values())
    assert {node.owner for node in found.nodes.values()} <= dict(subject.model.named_modules()).keys()
