"""What holds while a model runs as it was written: unfused, uncompiled, and neither afterwards."""

from __future__ import annotations

import pytest
import torch

from auditor.isolation.eager import uncompiled, unfused


@pytest.mark.parametrize("before", [True, False])
def test_the_fused_path_is_off_and_then_as_it_was(before: bool) -> None:
    kept = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(before)
    try:
        with unfused():
            assert not torch.backends.mha.get_fastpath_enabled()
        assert torch.backends.mha.get_fastpath_enabled() is before
    finally:
        torch.backends.mha.set_fastpath_enabled(kept)


def test_the_fused_path_is_open_again_after_bodies_that_overlap() -> None:
    first, second = unfused(), unfused()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not torch.backends.mha.get_fastpath_enabled()
    second.__exit__(None, None, None)
    assert torch.backends.mha.get_fastpath_enabled()


def test_compiled_functions_run_as_they_were_written() -> None:
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    compiled = torch.compile(lambda x: x + 1, backend=backend)
    with uncompiled():
        assert compiled(torch.ones(1)).item() == 2.0
    assert graphs == []
    assert compiled(torch.ones(1)).item() == 2.0
    assert len(graphs) == 1
