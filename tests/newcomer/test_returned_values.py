"""Models that return what they compute in FP32 inside a module that is low, and models whose sizes depend on values."""

from typing import Any

import torch
from torch import nn

import auditor
from tests.support.replaying import Model


def cached_attention(m: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns its rotated key beside the answer, as decoders do that keep a cache; the angles are FP32."""
    position = torch.arange(x.shape[1]).float()[:, None]
    k = m.k(x) * position.cos()
    y = (m.q(x) @ k.transpose(-1, -2)).softmax(-1).to(x.dtype) @ m.v(x)
    return m.o(y), k


def test_what_a_low_module_returns_in_fp32_is_planned() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Model(cached_attention, **{name: nn.Linear(8, 8) for name in "qkvo"}))
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.3)
    found = auditor.audit(model, (torch.randn(2, 4, 8),), formats="fp16", progress=False)
    for plan in found.plans.values():
        assert plan.is_verified, plan.verification
        assert 0.3 * plan.measured_error < plan.predicted_error < 3 * plan.measured_error


class PooledGraph(nn.Module):
    """Convolves a graph, squares its adjacency as a sparse matrix, and keeps the nodes with the highest scores.

    What the sparse matrix is made from nobody else reads: it is the matrix's memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.score, self.last = nn.Linear(6, 8), nn.Linear(8, 1), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        nodes = x.shape[0]
        weights = torch.zeros(edges.shape[1]).index_add(0, torch.arange(edges.shape[1]), x.new_ones(edges.shape[1]))
        starts = torch._convert_indices_from_coo_to_csr(edges[0], nodes)
        adjacency = torch.sparse_csr_tensor(starts, edges[1], weights.float(), (nodes, nodes))
        squared = (adjacency @ adjacency).to_sparse_coo()
        x = x.new_zeros(nodes, 8).index_add(0, edges[0], self.first(x)[edges[1]])
        score = self.score(x.relu()).tanh().squeeze(1)
        kept = score.topk(nodes // 2).indices
        place = kept.new_full((nodes,), -1)
        place[kept] = torch.arange(nodes // 2)
        row, column = place[squared.indices()[0]], place[squared.indices()[1]]
        both = (row >= 0) & (column >= 0)
        messages = (x[kept] * score[kept, None])[column[both]] * squared.values()[both, None]
        pooled = messages.new_zeros(nodes // 2, 8).index_add(0, row[both], messages)
        return self.last(pooled.relu())


def test_the_memory_of_a_sparse_matrix_stays_while_it_is_measured() -> None:
    torch.manual_seed(0)
    model, ring = PooledGraph(), sum(torch.eye(20).roll(shift, 1) for shift in (1, 2, 3))
    found = auditor.audit(model, (torch.randn(20, 6), ring.nonzero().T.contiguous()), progress=False)
    values = next(report for report in found.nodes if report.node.op == "aten.values.default")
    assert values.range.max_abs == 3  # from i to i + 4 in two steps: 1 + 3, 2 + 2, 3 + 1
    assert all(plan.is_verified for plan in found.plans.values())
