"""A convolutional variational autoencoder with group normalization and an up-sampling decoder, which returns the
reconstruction; trained on scikit-learn's 8x8 digits.

Held-out RMSE: 0.0727 of a pixel; 0.929 of the variance explained.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file, load_model
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent


def conv_norm(in_channels: int, out_channels: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, kernel_size=3, stride=stride, padding=1, bias=False),
        nn.GroupNorm(4, out_channels),
        nn.SiLU(),
    )


class Encoder(nn.Module):
    """Images [n, 1, 8, 8] -> mean and log-variance of the latent, [n, latent] each."""

    def __init__(self, width: int, latent: int) -> None:
        super().__init__()
        self.body = nn.Sequential(conv_norm(1, width), conv_norm(width, 2 * width, stride=2), nn.Flatten())
        self.mean = nn.Linear(2 * width * 16, latent)
        self.log_variance = nn.Linear(2 * width * 16, latent)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(images)
        return self.mean(features), self.log_variance(features)


class Decoder(nn.Module):
    """Latent [n, latent] -> images [n, 1, 8, 8] in 0..1."""

    def __init__(self, width: int, latent: int) -> None:
        super().__init__()
        self.expand = nn.Linear(latent, 2 * width * 4)
        self.body = nn.Sequential(
            nn.Unflatten(1, (2 * width, 2, 2)),
            nn.Upsample(scale_factor=2, mode="nearest"),
            conv_norm(2 * width, 2 * width),
            nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False),
            conv_norm(2 * width, width),
            nn.Conv2d(width, 1, kernel_size=3, padding=1),
            nn.Sigmoid(),
        )

    def forward(self, latent: Tensor) -> Tensor:
        return self.body(self.expand(latent))


class DigitVAE(nn.Module):
    """Images [n, 1, 8, 8] in 0..1 -> their reconstruction; sampled in training, from the mean in evaluation."""

    def __init__(self, width: int = 16, latent: int = 16) -> None:
        super().__init__()
        self.encoder = Encoder(width, latent)
        self.decoder = Decoder(width, latent)

    def forward(self, images: Tensor) -> Tensor:
        mean, log_variance = self.encoder(images)
        latent = mean
        if self.training:
            latent = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        return self.decoder(latent)


def get_model() -> nn.Module:
    model = DigitVAE()
    load_model(model, str(HERE / "weights" / "07_vae_decoder.safetensors"))
    return model.eval()


def get_inputs() -> tuple[Tensor, ...]:
    return (load_file(HERE / "data" / "digits.safetensors")["inputs"],)


def get_eval_inputs() -> list[tuple[Tensor, ...]]:
    return [(batch,) for batch in load_file(HERE / "data" / "digits.safetensors")["eval"].split(32)]
