"""Trains the row reader of `examples/02_digits_recurrent.py`: the GRU under a linear classifier, then the head."""

import torch
from common import accuracy, digits, load_example, save_weights, seed_everything, train_classifier
from torch import Tensor, nn

NAME = "02_digits_recurrent"


class Pretraining(nn.Module):
    """The recurrent features under a throw-away linear classifier."""

    def __init__(self, reader: nn.Module) -> None:
        super().__init__()
        self.reader = reader
        self.classifier = nn.Linear(reader.project.out_features, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.reader.features(images.squeeze(1)))


def main() -> None:
    seed_everything(0)
    x_train, y_train, x_test, y_test = digits()
    model = load_example(NAME).RowReader()
    train_classifier(Pretraining(model), x_train, y_train, epochs=80, lr=5e-3)
    with torch.no_grad():
        model.head.fit(model.features(x_train.squeeze(1)), y_train)
    print(f"{NAME}: held-out accuracy {accuracy(model, x_test.squeeze(1), y_test):.4f} on {len(x_test)} digits")
    print(f"condition number of the covariance: {torch.linalg.cond(model.head.covariance):.0f}")
    save_weights(NAME, model)


if __name__ == "__main__":
    main()
