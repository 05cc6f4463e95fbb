"""Writes a user's file into a fresh directory; the sizes of the smallest models of transformers."""

from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

HEADER = "import torch\nfrom torch import nn\n"

TINY = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """write(source, name="model.py") -> the path as text; torch and nn are imported already."""

    def run(source: str, name: str = "model.py") -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(HEADER + dedent(source))
        return str(path)

    return run
