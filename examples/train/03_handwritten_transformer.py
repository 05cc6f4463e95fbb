"""Trains the character model of `examples/03_handwritten_transformer.py`; its text differs a little between versions of
Python and scikit-learn.
"""

import math
import pydoc_data.topics
from importlib.resources import files

import torch
from common import load_example, save_samples, save_weights, seed_everything
from torch import Tensor, nn

NAME = "03_handwritten_transformer"
LENGTH, BATCH, STEPS, LR = 128, 16, 1400, 4e-3
OVERLAP = 40  # characters in common with the training text that make a window of the test text unfit


def documents(vocabulary: str) -> list[str]:
    """Python's help topics and scikit-learn's dataset descriptions in a fixed order, within the vocabulary."""
    descriptions = sorted(files("sklearn.datasets.descr").iterdir(), key=lambda path: path.name)
    topics = sorted(pydoc_data.topics.topics.items())
    texts = [text for _, text in topics]
    texts += [path.read_text(encoding="utf-8") for path in descriptions if path.name.endswith(".rst")]
    return ["".join(c for c in text if c in vocabulary) for text in texts]


def fresh_windows(test_text: str, train_text: str) -> list[str]:
    """The windows of `test_text` that share no run of `OVERLAP` characters with `train_text` (the topics repeat)."""
    seen = {train_text[i : i + OVERLAP] for i in range(len(train_text) - OVERLAP + 1)}
    windows = (test_text[i : i + LENGTH + 1] for i in range(0, len(test_text) - LENGTH, LENGTH + 1))
    return [text for text in windows if not any(text[i : i + OVERLAP] in seen for i in range(LENGTH + 2 - OVERLAP))]


def next_token_loss(model: nn.Module, windows: Tensor) -> Tensor:
    """Cross-entropy, in nats per character, of windows [n, LENGTH + 1]."""
    return nn.functional.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def learning_rate(step: int) -> float:
    """Linear warm-up, then a cosine to zero."""
    return min((step + 1) / 50, 0.5 * (1 + math.cos(math.pi * step / STEPS)))


def train(model: nn.Module, text: Tensor) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate)
    for step in range(STEPS):
        starts = torch.randint(len(text) - LENGTH, (BATCH, 1))
        loss = next_token_loss(model, text[starts + torch.arange(LENGTH + 1)])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 200 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)


@torch.no_grad()
def generate(model: nn.Module, prompt: Tensor, count: int) -> Tensor:
    """`prompt` [t] continued greedily by `count` tokens."""
    tokens = prompt
    for _ in range(count):
        tokens = torch.cat((tokens, model(tokens[None, -LENGTH:])[0, -1].argmax().view(1)))
    return tokens


def main() -> None:
    seed_everything(0)
    example = load_example(NAME)
    corpus = documents(example.VOCABULARY)
    train_text = "\n\n".join(text for i, text in enumerate(corpus) if i % 12 != 0)
    test_text = "\n\n".join(text for i, text in enumerate(corpus) if i % 12 == 0)
    windows = torch.stack([example.encode(text) for text in fresh_windows(test_text, train_text)])
    windows = windows[torch.randperm(len(windows))]
    model = example.CharacterLM()
    train(model, example.encode(train_text))
    model.eval()
    with torch.no_grad():
        bits = next_token_loss(model, windows).item() / math.log(2)
        hits = (model(windows[:, :-1]).argmax(-1) == windows[:, 1:]).float().mean().item()
    print(f"{NAME}: held-out {bits:.2f} bits per character, next-character accuracy {hits:.3f}, {len(windows)} windows")
    print(example.decode(generate(model, example.encode("The function "), 100)))
    save_samples("help_text", windows[:, :-1].to(torch.uint8), windows[:, 1:].to(torch.uint8))
    save_weights(NAME, model)


if __name__ == "__main__":
    main()
