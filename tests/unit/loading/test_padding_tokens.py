"""Prompts of unequal lengths, with tokenizers that have no padding token, as those of most base models."""

from pathlib import Path

import pytest
import torch
from torch import nn

from auditor.loading.texts import tokenize

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")


class Reads(nn.Module):
    """What `tokenize` looks at: the folder, and what forward takes."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.name_or_path = str(folder)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return input_ids * attention_mask


@pytest.mark.parametrize("special", [{}, {"eos_token": "end"}, {"bos_token": "end"}, {"pad_token": "end"}])
def test_unequal_prompts_are_padded_on_the_left_and_masked(special: dict[str, str], tmp_path: Path) -> None:
    words = tokenizers.models.WordLevel({"a": 0, "b": 1, "end": 2}, unk_token="a")
    made = tokenizers.Tokenizer(words)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special).save_pretrained(tmp_path)
    given = tokenize(Reads(tmp_path), ["b b b", "b"])
    assert given["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]
    assert given["input_ids"][1, -1] == 1
    one = tokenize(Reads(tmp_path), "b b")
    assert one["input_ids"].tolist() == [[1, 1]]
