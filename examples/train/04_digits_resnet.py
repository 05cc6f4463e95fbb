"""Trains the residual network of `examples/04_digits_resnet.py`."""

from common import accuracy, digits, load_example, save_weights, seed_everything, train_classifier

NAME = "04_digits_resnet"


def main() -> None:
    seed_everything(0)
    x_train, y_train, x_test, y_test = digits()
    model = load_example(NAME).ResNet()
    train_classifier(model, x_train, y_train, epochs=50, lr=3e-3)
    print(f"{NAME}: held-out accuracy {accuracy(model, x_test, y_test):.4f} on {len(x_test)} digits")
    save_weights(NAME, model)


if __name__ == "__main__":
    main()
