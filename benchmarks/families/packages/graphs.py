"""Graph networks."""

from __future__ import annotations

import torch
from torch import nn

from .. import Built
from .subjects import SUBJECTS, Build, edges, integers, normal, subject


def _gnn(kind, *a, edge=None, **k) -> Build:
    def build() -> Built:
        import torch_geometric.nn as g

        model = getattr(g, kind)(*a, **k)
        return model, (normal(12, 16), edges()), {}

    return build


for kind in "GCNConv SAGEConv GATConv GATv2Conv GraphConv TAGConv ARMAConv SGConv ChebConv TransformerConv ClusterGCNConv FeaStConv LEConv FiLMConv SuperGATConv MFConv ResGatedGraphConv GENConv EGConv".split():
    extra = {"ChebConv": {"K": 3}}.get(kind, {})
    SUBJECTS[f"torch_geometric/{kind}"] = _gnn(kind, 16, 16, **extra)
SUBJECTS["torch_geometric/GCN"] = _gnn("GCN", 16, 32, 2, 4)
SUBJECTS["torch_geometric/GIN"] = _gnn("GIN", 16, 32, 2, 4)
SUBJECTS["torch_geometric/GraphSAGE"] = _gnn("GraphSAGE", 16, 32, 2, 4)
SUBJECTS["torch_geometric/PNA"] = _gnn(
    "PNA",
    16,
    32,
    2,
    4,
    aggregators=["mean", "max", "std"],
    scalers=["identity", "amplification"],
    deg=torch.tensor([0, 2, 5, 3, 2]),
)
SUBJECTS["torch_geometric/GAT"] = _gnn("GAT", 16, 32, 2, 4)
SUBJECTS["torch_geometric/GraphUNet"] = _gnn("GraphUNet", 16, 32, 4, 2)


@subject("torch_geometric/DeepGCN with pooling")
def _() -> Built:
    from torch_geometric.nn import GCNConv, TopKPooling, global_mean_pool

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = GCNConv(16, 32)
            self.p = TopKPooling(32, 0.5)
            self.b = GCNConv(32, 32)
            self.o = nn.Linear(32, 4)

        def forward(self, x, e, batch):
            x = self.a(x, e).relu()
            x, e, _, batch, _, _ = self.p(x, e, None, batch)
            return self.o(global_mean_pool(self.b(x, e), batch, 2))

    return Net(), (normal(12, 16), edges(), torch.arange(12) // 6), {}


@subject("torch_geometric/RGCNConv")
def _() -> Built:
    from torch_geometric.nn import RGCNConv

    return RGCNConv(16, 16, 3), (normal(12, 16), edges(), integers(3, 40)), {}


@subject("torch_geometric/HeteroConv")
def _() -> Built:
    from torch_geometric.nn import HeteroConv, SAGEConv

    m = HeteroConv({("a", "to", "b"): SAGEConv((16, 16), 16), ("b", "of", "a"): SAGEConv((16, 16), 16)})
    return m, ({"a": normal(12, 16), "b": normal(12, 16)}, {("a", "to", "b"): edges(), ("b", "of", "a"): edges()}), {}
