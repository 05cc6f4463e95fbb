"""Trains the early-exit classifier of `examples/06_value_dependent.py`: both heads at once, through the iteration."""

from functools import partial

import torch
from common import accuracy, digits, load_example, save_weights, seed_everything, train_classifier
from torch import Tensor, nn

NAME = "06_value_dependent"


def both_heads_loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of the shallow and the deep head, whatever the confidence."""
    features = model.stem(images)
    shallow = nn.functional.cross_entropy(model.shallow_head(features), labels)
    deep = nn.functional.cross_entropy(model.deep_head(model.refine(features)), labels)
    return (shallow + deep) / 2


@torch.no_grad()
def exits(model: nn.Module, batch: Tensor) -> float:
    """The confidence that decides the branch for `batch`."""
    return model.shallow_head(model.stem(batch)).softmax(dim=-1).amax(dim=-1).min().item()


def main() -> None:
    seed_everything(0)
    x_train, y_train, x_test, y_test = digits()
    model = load_example(NAME).EarlyExitClassifier()
    nn.init.orthogonal_(model.refine.recur.weight, gain=0.5)
    train_classifier(model, x_train, y_train, epochs=60, lr=3e-3, loss=partial(both_heads_loss, model))
    print(f"{NAME}: held-out accuracy {accuracy(model, x_test, y_test):.4f} on {len(x_test)} digits")
    example = load_example(NAME)
    batches = [*example.get_inputs(), *(batch for (batch,) in example.get_eval_inputs())]
    print(f"least confidence by batch (inputs, then eval): {[round(exits(model, batch), 4) for batch in batches]}")
    print(f"spectral norm of the recurrence: {torch.linalg.matrix_norm(model.refine.recur.weight, ord=2):.3f}")
    save_weights(NAME, model)


if __name__ == "__main__":
    main()
