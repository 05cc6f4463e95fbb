"""A GRU that reads a digit row by row, under a Gaussian head (class means and one shared covariance of the features, as
in Lee et al. 2018) that answers with log-probabilities; trained on scikit-learn's 8x8 digits.

Held-out accuracy: 0.9750.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file, load_model
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent


class GaussianHead(nn.Module):
    """Log-posterior of the classes under one Gaussian each, all with the same covariance."""

    means: Tensor
    covariance: Tensor

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.register_buffer("means", torch.zeros(classes, features))
        self.register_buffer("covariance", torch.eye(features))

    @torch.no_grad()
    def fit(self, features: Tensor, labels: Tensor, shrinkage: float = 1e-3) -> None:
        """Sets the means and the pooled covariance from `features` [n, f]."""
        n, f = features.shape
        means = torch.stack([features[labels == c].mean(dim=0) for c in range(len(self.means))])
        centred = features - means[labels]
        pooled = centred.T @ centred / (n - len(means))
        target = pooled.diagonal().mean() * torch.eye(f)
        self.means.copy_(means)
        self.covariance.copy_((1 - shrinkage) * pooled + shrinkage * target)

    def forward(self, features: Tensor) -> Tensor:
        diff = features[:, None, :] - self.means  # [n, c, f]
        factor = torch.linalg.cholesky(self.covariance)  # [f, f]
        whitened = torch.linalg.solve_triangular(factor, diff.transpose(1, 2), upper=False)  # [n, f, c]
        squared_distance = whitened.pow(2).sum(dim=1)  # [n, c]
        return torch.log_softmax(-0.5 * squared_distance, dim=-1)


class RowReader(nn.Module):
    """Images [n, 8 rows, 8 pixels] in 0..1 -> log-probabilities [n, 10]."""

    def __init__(self, pixels: int = 8, hidden: int = 64, features: int = 24, classes: int = 10) -> None:
        super().__init__()
        self.gru = nn.GRU(pixels, hidden, num_layers=1, batch_first=True)
        self.project = nn.Linear(hidden, features)
        self.head = GaussianHead(features, classes)

    def features(self, rows: Tensor) -> Tensor:
        _, last = self.gru(rows)  # last: [layers, n, hidden]
        return self.project(last[-1])

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(self.features(rows))


def get_model() -> nn.Module:
    model = RowReader()
    load_model(model, str(HERE / "weights" / "02_digits_recurrent.safetensors"))
    return model.eval()


def get_inputs() -> tuple[Tensor, ...]:
    return (load_file(HERE / "data" / "digits.safetensors")["inputs"].squeeze(1),)


def get_eval_inputs() -> list[tuple[Tensor, ...]]:
    return [(batch.squeeze(1),) for batch in load_file(HERE / "data" / "digits.safetensors")["eval"].split(32)]
