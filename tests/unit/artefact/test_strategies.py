"""What each strategy does: boundaries, what is stored low, a scope's call; plans as plain data."""

from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

from auditor.artefact.applying import apply_plan
from auditor.artefact.base import Strategy
from auditor.artefact.runtime import Runtime
from auditor.artefact.source import make_original
from auditor.artefact.strategies import (
    GRAPHS,
    SHIPPED,
    STRATEGIES,
    strategy_of,
)
from auditor.records import Plan


class Mine(Strategy):
    name = "mine"
    title = "as I like it"
    runtime = Runtime


@pytest.mark.parametrize(("share", "expected"), [(0.0, False), (0.1, True)])
def test_a_plan_gains_where_some_of_it_is_low(share: float, expected: bool) -> None:
    plan = Plan("mine_fp16", "mine", "fp16", {}, 0.0, 1.0, 0.0)
    assert Mine().gains(replace(plan, low_precision_flops=share)) is expected


# The original model as a patched_model.py makes it: with the weights that the audit read, and one line otherwise.


def test_a_symbol_that_is_gone_is_named(tmp_path: Path) -> None:
    (tmp_path / "renamed_net.py").write_text("class Other: pass\n")
    source = {"path": "renamed_net.py", "digest": None, "module": "renamed_net", "working_directory": None}
    source |= {"symbol": "Net", "kind": "class", "weights": None}
    with pytest.raises(ValueError, match=r"renamed_net\.py no longer defines 'Net': audit the model again"):
        make_original(source, str(tmp_path / "patched_model.py"), (), {})


# The strategy whose plans are programs: known where it is asked for, and no change to a live module.


def test_it_is_known_and_not_planned_by_default() -> None:
    assert GRAPHS == ("graph",)
    assert (*SHIPPED, *GRAPHS) == STRATEGIES
    assert not strategy_of("graph").trains


def test_a_live_module_is_told_where_the_program_is() -> None:
    model = nn.Linear(2, 2)
    plan = {"strategy": "graph", "format": "fp16", "scopes": {"": {"precision": "fp16"}}}
    with pytest.raises(ValueError, match=r"torch\.export\.load"):
        apply_plan(model, plan)
    assert "forward" not in vars(model)
