"""Trains the mixture of experts of `examples/05_tabular_experts.py`, with a loss that keeps the experts evenly used."""

import torch
from common import accuracy, load_example, save_samples, save_weights, seed_everything, split
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn

NAME = "05_tabular_experts"
EPOCHS, BATCH, LR, BALANCE = 60, 32, 3e-3, 0.02


def balance_loss(router: nn.Module, x: Tensor) -> Tensor:
    """Experts times the sum of each one's share of the samples times its mean probability (Switch Transformer)."""
    share = (router(x) > 0).float().mean(dim=0) / router.top_k
    return len(share) * (share * router.probabilities(x).mean(dim=0)).sum()


def train(model: nn.Module, x: Tensor, y: Tensor) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    routed: list[Tensor] = []
    model.moe.router.register_forward_pre_hook(lambda _, args: routed.append(args[0]))
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(x)).split(BATCH):
            routed.clear()
            loss = nn.functional.cross_entropy(model(x[batch]), y[batch], label_smoothing=0.05)
            loss = loss + BALANCE * balance_loss(model.moe.router, routed[0])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        schedule.step()


def main() -> None:
    seed_everything(0)
    bunch = load_breast_cancer()
    x_train, y_train, x_test, y_test = split(bunch.data, bunch.target, test_size=0.25)
    model = load_example(NAME).TabularExperts()
    model.standardize.fit(x_train)
    train(model, x_train, y_train)
    model.eval()
    print(f"{NAME}: held-out accuracy {accuracy(model, x_test, y_test):.4f} on {len(x_test)} patients")
    with torch.no_grad():
        used = (model.moe.router(model.norm(model.embed(model.standardize(x_test)))) > 0).float().mean(dim=0)
    print(f"share of patients each expert sees: {[round(share, 2) for share in used.tolist()]}")
    print(f"variances of the raw features: {model.standardize.var.min():.1e} to {model.standardize.var.max():.1e}")
    save_samples("breast_cancer", x_test, y_test)
    save_weights(NAME, model)


if __name__ == "__main__":
    main()
