"""Trains the variational autoencoder of `examples/07_vae_decoder.py` on the evidence lower bound."""

import torch
from common import digits, load_example, save_weights, seed_everything
from torch import Tensor, nn

NAME = "07_vae_decoder"
EPOCHS, BATCH, LR = 150, 64, 4e-3
PIXEL_VARIANCE = 0.01  # of the Gaussian likelihood: how much a pixel's error weighs against the divergence


def negative_bound(model: nn.Module, x: Tensor) -> Tensor:
    """Minus the evidence lower bound per image, up to a constant."""
    mean, log_variance = model.encoder(x)
    latent = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
    error = (model.decoder(latent) - x).pow(2).sum(dim=(1, 2, 3)) / (2 * PIXEL_VARIANCE)
    divergence = 0.5 * (mean.pow(2) + log_variance.exp() - log_variance - 1).sum(dim=1)
    return (error + divergence).mean()


def main() -> None:
    seed_everything(0)
    x_train, _, x_test, _ = digits()
    model = load_example(NAME).DigitVAE()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(x_train)).split(BATCH):
            loss = negative_bound(model, x_train[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        schedule.step()
    model.eval()
    with torch.no_grad():
        error = (model(x_test) - x_test).pow(2).mean().item()
    explained = 1 - error / (x_test - x_train.mean(dim=0)).pow(2).mean().item()
    print(f"{NAME}: held-out RMSE {error**0.5:.4f} of a pixel, {explained:.3f} of the variance explained")
    save_weights(NAME, model)


if __name__ == "__main__":
    main()
