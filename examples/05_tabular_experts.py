"""A mixture of four experts, of which a softmax router picks two, trained on the raw measurements of scikit-learn's
breast cancer data (areas in the thousands beside smoothness in the hundredths, standardised inside the model).

Held-out accuracy: 0.9650.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file, load_model
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent


class Standardize(nn.Module):
    """Raw features to zero mean and unit variance, with the statistics of the training set."""

    mean: Tensor
    var: Tensor

    def __init__(self, features: int, eps: float = 1e-8) -> None:
        super().__init__()
        self.eps = eps
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("var", torch.ones(features))

    @torch.no_grad()
    def fit(self, x: Tensor) -> None:
        self.mean.copy_(x.mean(dim=0))
        self.var.copy_(x.var(dim=0))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / torch.sqrt(self.var + self.eps)


class Router(nn.Module):
    """Weights of the experts [n, experts]: zero for all but the `top_k` likeliest, which sum to one."""

    def __init__(self, dim: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.gate = nn.Linear(dim, experts, bias=False)

    def probabilities(self, x: Tensor) -> Tensor:
        return torch.softmax(self.gate(x), dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        probabilities = self.probabilities(x)
        top, index = torch.topk(probabilities, self.top_k, dim=-1)
        top = top / top.sum(dim=-1, keepdim=True)
        return torch.zeros_like(probabilities).scatter(-1, index, top)


class Expert(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden)
        self.act = nn.SiLU()
        self.down = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class MixtureOfExperts(nn.Module):
    """Every expert sees every sample, so that no shape depends on the routing."""

    def __init__(self, dim: int, hidden: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.router = Router(dim, experts, top_k)
        self.experts = nn.ModuleList(Expert(dim, hidden) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x)  # [n, e]
        outputs = torch.stack([expert(x) for expert in self.experts], dim=1)  # [n, e, d]
        return torch.einsum("ne,ned->nd", weights, outputs)


class TabularExperts(nn.Module):
    """Raw features [n, 30] -> logits [n, 2]."""

    def __init__(self, features: int = 30, dim: int = 32, hidden: int = 48, classes: int = 2) -> None:
        super().__init__()
        self.standardize = Standardize(features)
        self.embed = nn.Linear(features, dim)
        self.norm = nn.LayerNorm(dim)
        self.moe = MixtureOfExperts(dim, hidden, experts=4, top_k=2)
        self.head = nn.Linear(dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(self.standardize(x))
        x = x + self.moe(self.norm(x))
        return self.head(x)


def get_model() -> nn.Module:
    model = TabularExperts()
    load_model(model, str(HERE / "weights" / "05_tabular_experts.safetensors"))
    return model.eval()


def get_inputs() -> tuple[Tensor, ...]:
    return (load_file(HERE / "data" / "breast_cancer.safetensors")["inputs"],)


def get_eval_inputs() -> list[tuple[Tensor, ...]]:
    return [(batch,) for batch in load_file(HERE / "data" / "breast_cancer.safetensors")["eval"].split(32)]


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits, labels)


def get_targets() -> tuple[Tensor, ...]:
    return (load_file(HERE / "data" / "breast_cancer.safetensors")["inputs_labels"],)
