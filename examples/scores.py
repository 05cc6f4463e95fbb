"""Scores of the examples, over what is held out; `--evaluate` calls them on FP32 and on every verified plan.

python -m auditor examples/01_digits_attention.py --evaluate examples/scores.py:accuracy --max-drop 0.01
python -m auditor examples/03_handwritten_transformer.py --evaluate examples/scores.py:perplexity --max-drop 0.05
"""

import math
from collections.abc import Iterator
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor, nn

DATA = Path(__file__).resolve().parent / "data"


def accuracy(model: nn.Module) -> Iterator[Tensor]:
    """For each of the 360 held-out digits, whether its largest output is its label."""
    held_out = load_file(DATA / "digits_held_out.safetensors")
    images, labels = held_out["images"].float() / 16, held_out["labels"].long()
    device = next(model.parameters()).device
    for some, right in zip(images.split(60), labels.split(60), strict=True):
        yield model(some.to(device)).argmax(-1).cpu() == right


def perplexity(model: nn.Module) -> Iterator[Tensor]:
    """For each of the 80 held-out windows of 128 characters, its mean loss in nats a character."""
    text = load_file(DATA / "help_text.safetensors")
    device = next(model.parameters()).device
    for name in ("inputs", "eval"):
        for some, following in zip(text[name].long().split(16), text[f"{name}_labels"].long().split(16), strict=True):
            logits = model(some.to(device)).float().cpu()
            losses = nn.functional.cross_entropy(logits.transpose(1, 2), following, reduction="none")
            yield losses.mean(dim=1)


perplexity.lower_is_better = True
perplexity.of_mean = math.exp
