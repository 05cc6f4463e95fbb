"""What the training scripts share: finding the example, splitting the digits, and writing data and weights."""

import importlib.util
import random
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from safetensors.torch import save_file, save_model
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

EXAMPLES = Path(__file__).resolve().parent.parent
N_INPUTS = 16  # the samples `get_inputs()` returns
N_EVAL = 64  # the held-out samples `get_eval_inputs()` returns, all batches together


def load_example(name: str) -> ModuleType:
    """The module `examples/<name>.py` (a file name that starts with a digit can't be imported by statement)."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def seed_everything(seed: int) -> None:
    """Seeds Python, NumPy and torch, and keeps torch to one thread, so that a run repeats."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.set_num_threads(1)


def split(x: np.ndarray, y: np.ndarray, test_size: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Stratified `x_train, y_train, x_test, y_test` as FP32 features and int64 labels."""
    x_train, x_test, y_train, y_test = train_test_split(x, y, test_size=test_size, stratify=y, random_state=0)
    return (
        torch.tensor(x_train, dtype=torch.float32),
        torch.tensor(y_train, dtype=torch.int64),
        torch.tensor(x_test, dtype=torch.float32),
        torch.tensor(y_test, dtype=torch.int64),
    )


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The digits of scikit-learn, [n, 1, 8, 8] in 0..1, split 80:20; writes what is held out to `data/` on the way."""
    bunch = load_digits()
    x_train, y_train, x_test, y_test = split(bunch.images[:, None] / 16.0, bunch.target, test_size=0.2)
    save_samples("digits", x_test, y_test)
    whole = {"images": (16 * x_test).to(torch.uint8), "labels": y_test.to(torch.uint8)}
    save_file(whole, EXAMPLES / "data" / "digits_held_out.safetensors")
    return x_train, y_train, x_test, y_test


def save_samples(name: str, x_test: Tensor, y_test: Tensor, n_inputs: int = N_INPUTS, n_eval: int = N_EVAL) -> None:
    """Writes the first `n_inputs` test samples as example inputs and the next `n_eval` as evaluation inputs."""
    end = n_inputs + n_eval
    samples = {
        "inputs": x_test[:n_inputs],
        "inputs_labels": y_test[:n_inputs],
        "eval": x_test[n_inputs:end],
        "eval_labels": y_test[n_inputs:end],
    }
    path = EXAMPLES / "data" / f"{name}.safetensors"
    path.parent.mkdir(exist_ok=True)
    save_file({key: value.contiguous() for key, value in samples.items()}, path)


def save_weights(name: str, model: nn.Module) -> None:
    """Writes `weights/<name>.safetensors`."""
    path = EXAMPLES / "weights" / f"{name}.safetensors"
    path.parent.mkdir(exist_ok=True)
    save_model(model, str(path))


def shift(x: Tensor) -> Tensor:
    """`x` with every image moved by up to one pixel in each direction: the augmentation for 8x8 digits."""
    dy, dx = random.randint(-1, 1), random.randint(-1, 1)
    padded = nn.functional.pad(x, (1, 1, 1, 1))
    return padded[..., 1 + dy : 9 + dy, 1 + dx : 9 + dx]


def train_classifier(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    epochs: int,
    lr: float,
    batch_size: int = 64,
    loss: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> None:
    """Trains `model` on shifted images with AdamW and a one-cycle schedule, and leaves it in eval mode.

    `loss` takes images and labels; left out, it is the cross-entropy of the model's logits with label smoothing.
    """
    criterion = nn.CrossEntropyLoss(label_smoothing=0.05)
    steps = epochs * (len(x) // batch_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=lr, total_steps=steps)
    model.train()
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(batch_size)[: len(x) // batch_size]:
            images, labels = shift(x[batch]), y[batch]
            value = criterion(model(images), labels) if loss is None else loss(images, labels)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            schedule.step()
    model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Share of samples whose largest output is the label."""
    return (model(x).argmax(-1) == y).float().mean().item()
