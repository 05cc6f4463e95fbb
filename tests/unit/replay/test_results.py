"""Results on the host come back as they were; a hollow tensor keeps its place in autograd's graph and nothing else."""

from __future__ import annotations

import torch

from auditor.formats.carried import carried_in, in_format
from auditor.formats.table import FORMATS
from auditor.replay.results import OnHost, hollow, put, results, waiting
from auditor.sparing import Sparing, sparing


def test_where_they_are_kept_is_as_sparing_as_the_audit() -> None:
    assert type(results()) is dict
    with sparing(Sparing(host=True)):
        assert isinstance(results(), OnHost)


def test_results_come_back_as_they_were() -> None:
    kept: OnHost[str] = OnHost()
    x, y = torch.arange(6.0).view(2, 3), torch.tensor([1, 2])
    put(kept, "pair", (x, [y, 3]), stays=False)
    put(kept, "number", 5, stays=False)
    first, (second, third) = kept["pair"]
    assert torch.equal(first, x) and torch.equal(second, y) and third == 3 and kept["number"] == 5
    assert list(kept) == ["pair", "number"] and len(kept) == 2 and kept.get("other") is None
    del kept["pair"]
    assert "pair" not in kept


def test_a_weight_stays_where_it_is() -> None:
    kept: OnHost[str] = OnHost()
    weight = torch.ones(2)
    put(kept, "weight", weight, stays=True)
    assert kept["weight"] is weight
    plain: dict[str, object] = {}
    put(plain, "weight", weight, stays=True)
    assert plain["weight"] is weight


def test_a_format_of_its_own_is_not_lost_on_the_way() -> None:
    x = in_format(torch.ones(2), next(row for row in FORMATS.values() if not row.native))
    with sparing(Sparing(host=True)):
        assert carried_in(waiting(x)) is carried_in(x) is not None


def test_a_hollow_tensor_has_its_gradient_and_no_memory() -> None:
    x = torch.ones(8, requires_grad=True)
    seen: list[torch.Tensor] = []
    y = x * 3
    y.register_hook(seen.append)
    total = (y * 2).sum()
    hollow(y)
    assert y.shape == (8,) and y.untyped_storage().nbytes() == 4
    total.backward()
    assert seen[0].tolist() == [2.0] * 8 and x.grad is not None and x.grad.tolist() == [6.0] * 8
