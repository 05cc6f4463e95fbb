"""SmolLM2-135M with 6 prompts to plan for and 80 held-out prompts: openings of sentences and of Python's help topics.

SMOLLM2=DIRECTORY python -m auditor benchmarks/smollm2.py --generate 64 --formats fp16,bf16 --strategies autocast,cast

DIRECTORY: what examples/language/smollm2.py writes.
"""

from __future__ import annotations

import os
import pydoc_data.topics

from torch import Tensor, nn

PLANNED = (
    "The capital of France is",
    "Once upon a time there was a small",
    "In physics, energy is defined as",
    "To bake a loaf of bread you need",
    "The most important thing about learning is",
    "def fibonacci(n):\n    ",
)
OPENINGS = (
    "The largest planet in the solar system",
    "If you want to save money, you should",
    "A triangle with three equal sides is",
    "The river flows through the city of",
    "Yesterday I went to the market and",
    "The heart pumps blood through the body",
    "Python is a programming language that",
    "The old man sat by the fire and",
    "Climate change is caused by the",
    "To solve a quadratic equation, first",
    "The best way to cook rice is",
    "During the French Revolution, people",
    "A healthy breakfast should include",
    "The robot walked slowly across the",
    "Gravity is the force that pulls",
    "The book begins with a description of",
    "In order to start a business, you",
    "Electricity is produced in power plants by",
    "The cat jumped on the table because",
    "A poem about the sea begins with",
    "She opened the door and saw",
    "Water boils at a temperature of",
    "The three branches of government are",
    "A good night's sleep helps you to",
    "In 1969, astronauts landed on",
    "My favourite season is autumn because",
    "Machine learning models are trained by",
    "The recipe calls for two cups of",
    "When the train arrived at the station,",
    "Photosynthesis is the process by which",
    "The difference between a virus and bacteria",
    "He looked at the map and decided",
    "An index fund is a type of",
    "The story of the tortoise and the hare",
)
WORDS, LEAST, TOPICS, BATCH = 9, 31, 46, 20
"""Words of a help topic, minimum characters of them, number of topics, prompts per batch."""


def get_model() -> nn.Module:
    from transformers import AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_pretrained(os.environ["SMOLLM2"])
    return model.eval()


def get_inputs() -> dict[str, Tensor]:
    return _tokens(PLANNED)


def get_eval_inputs() -> list[dict[str, Tensor]]:
    topics = (text.split("\n\n", 1)[-1].split() for _, text in sorted(pydoc_data.topics.topics.items()))
    openings = (" ".join(words[:WORDS]) for words in topics)
    held_out = (*OPENINGS, *[text for text in openings if len(text) >= LEAST][:TOPICS])
    return [_tokens(held_out[i : i + BATCH]) for i in range(0, len(held_out), BATCH)]


def _tokens(texts: tuple[str, ...]) -> dict[str, Tensor]:
    """Token ids and mask; shorter texts are padded on the left."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(os.environ["SMOLLM2"], padding_side="left")
    tokenizer.pad_token = tokenizer.eos_token
    return dict(tokenizer(list(texts), return_tensors="pt", padding=True))
