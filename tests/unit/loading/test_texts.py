"""Texts and chats from every place that inputs come from, as the tokenizer's chat template formats them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from auditor.errors import LoadError
from auditor.loading.inputs import from_argument
from auditor.loading.subject import from_object, load
from auditor.loading.texts import tokenize
from tests.support.refusing import refused

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

WORDS = ("<pad>", "<user>", "<model>", "hi", "there", "you")
TEMPLATE = "{% for m in messages %}<{{ 'user' if m['role'] == 'user' else 'model' }}> {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}<model>{% endif %}"
CHAT = [{"role": "user", "content": "hi there"}]
ASKED = [1, 3, 4, 2]
"""CHAT as token ids: <user> hi there <model>."""
ANSWERED = [*CHAT, {"role": "assistant", "content": "you"}]


class Reads(nn.Module):
    """A model that `tokenize` can find a tokenizer for."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.name_or_path = str(folder)
        self.table = nn.Embedding(len(WORDS), 2)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.table(input_ids) * attention_mask[..., None]


def write_tokenizer(folder: Path, template: str | None = TEMPLATE) -> None:
    words = tokenizers.models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<pad>")
    made = tokenizers.Tokenizer(words)
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)


class Rows(list[Any]):
    """What a data set of the package `datasets` has: rows, and the names of its columns."""

    column_names = ("messages",)

    def __iter__(self) -> Any:
        return (dict(row) for row in list.copy(self))


@pytest.mark.parametrize(
    "value",
    [CHAT, [CHAT], {"messages": CHAT}, [{"messages": CHAT}], (CHAT,), Rows([{"messages": CHAT}])],
)
def test_a_chat_is_formatted_by_the_template(value: Any, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    assert tokenize(Reads(tmp_path), value)["input_ids"].tolist() == [ASKED]


IN_PARTS = [{"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "text", "text": "there"}]}]
READS_PARTS = "{% for m in messages %}<{{ m['role'] }}> {% for part in m['content'] if part['type'] == 'text' %}{{ part['text'] }} {% endfor %}{% endfor %}<model>"
"""A template for contents of parts alone; of a text it would write nothing."""


@pytest.mark.parametrize("template", [TEMPLATE, READS_PARTS])
def test_a_content_of_parts_is_its_texts_whatever_the_template_reads(template: str, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, template)
    assert tokenize(Reads(tmp_path), IN_PARTS)["input_ids"].tolist() == [ASKED]


CALL = {"type": "function", "function": {"name": "you", "arguments": {}}}
USES_A_TOOL = [*CHAT, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "you"}]
READS_CALLS = "{% for m in messages %}<{{ 'user' if m['role'] == 'user' else 'model' }}> {% for c in m['tool_calls'] %}{{ c['function']['name'] }} {% endfor %}{{ m['content'] }} {% endfor %}"


@pytest.mark.parametrize("more", [{}, {"content": None}])
def test_a_message_of_tool_calls_has_no_content(more: dict[str, None], tmp_path: Path) -> None:
    write_tokenizer(tmp_path, READS_CALLS)
    asked, answered, result = USES_A_TOOL
    given = tokenize(Reads(tmp_path), [asked, {**answered, **more}, result])
    assert given["input_ids"].tolist() == [[1, 3, 4, 2, 5, 2, 5]]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([{"role": "user"}], "message 1 of the chat has no content: give it a text"),
        ([CHAT, [*CHAT, {"role": "user", "content": None}]], "message 2 of chat 2 has no content"),
        ([*CHAT, {"role": "user", "contents": "hi"}], "message 2 of the chat has no content"),
        ([{"content": "hi"}], "message 1 of the chat has no role"),
        ([{"from": "human", "value": "hi"}], "message 1 of the chat has no role"),
        ([{"role": "user", "content": 3}], "has a content of type int: give it a text"),
        ([{"role": "user", "content": [{"type": "image"}]}], "has parts other than text"),
        ({"messages": [{"role": "user"}]}, "message 1 of the chat has no content"),
        (USES_A_TOOL, "have tool calls, which the chat template .* leaves out"),
    ],
)
def test_a_message_that_no_template_can_format_is_named(value: Any, said: str, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    with refused(LoadError, "bad-inputs", match=said):
        tokenize(Reads(tmp_path), value)


def test_keyword_arguments_named_as_a_messages_are_no_chat() -> None:
    class TakesContent(nn.Module):
        def forward(self, content: str, role: torch.Tensor) -> torch.Tensor:
            return role

    value = [{"content": "hi", "role": torch.ones(1)}]
    assert tokenize(TakesContent(), value) is value


def test_chats_of_unequal_length_are_padded_on_the_left_and_an_answered_one_ends(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    given = tokenize(Reads(tmp_path), [CHAT, ANSWERED])
    assert given["input_ids"].tolist() == [[0, *ASKED], [1, 3, 4, 2, 5]]
    assert given["attention_mask"].tolist() == [[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]]


@pytest.mark.parametrize("rows", [[{"text": "hi"}], {"prompt": "hi"}, {"text": ["hi"], "label": [1]}])
def test_rows_with_texts_are_texts(rows: Any, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    assert tokenize(Reads(tmp_path), rows)["input_ids"].tolist() == [[3]]


def test_a_text_that_forward_takes_stays_and_so_do_tensors(tmp_path: Path) -> None:
    class TakesText(nn.Module):
        def forward(self, text: list[str]) -> torch.Tensor:
            return torch.ones(len(text))

    for value in ({"text": ["hi"]}, {"input_ids": torch.ones(1, 2)}, torch.ones(2), [{"x": torch.ones(1)}], []):
        assert tokenize(TakesText(), value) is value


def test_what_cannot_be_formatted_says_why(tmp_path: Path) -> None:
    with refused(LoadError, "bad-inputs", match="need a tokenizer in the folder"):
        tokenize(Reads(tmp_path / "none"), "hi")
    homeless = Reads(tmp_path)
    homeless.name_or_path = ""
    with refused(
        LoadError, "bad-inputs", match="loaded from no folder that has one: load the model with from_pretrained"
    ):
        tokenize(homeless, "hi")
    write_tokenizer(tmp_path, None)
    with refused(LoadError, "bad-inputs", match="has no chat template: give texts"):
        tokenize(Reads(tmp_path), CHAT)
    with refused(LoadError, "bad-inputs", match="mix texts and chats"):
        tokenize(Reads(tmp_path), ["hi", CHAT])


def test_files_of_chats_and_texts(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": CHAT}) + "\n\n" + json.dumps(ANSWERED) + "\n", encoding="utf-8")
    (((), given),) = from_argument(str(path), Reads(tmp_path), 0).batches
    assert given["input_ids"].shape == (2, 5)
    path.write_text('"hi"\n{"prompt": "there"}\n', encoding="utf-8")
    (((), given),) = from_argument(str(path), Reads(tmp_path), 0).batches
    assert given["input_ids"].tolist() == [[3], [4]]
    path.write_text('"hi"\nnot JSON\n', encoding="utf-8")
    with refused(LoadError, "bad-inputs", match="line 2 of chats.jsonl is no JSON"):
        from_argument(str(path), Reads(tmp_path), 0)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("prompts.txt", "hi caf\xe9".encode("latin-1"), "prompts.txt is no UTF-8 text .* save it as UTF-8"),
        ("prompts.txt", b" \n\n", "prompts.txt has no text"),
        ("rows.jsonl", b'{"words": "hi"}', "rows.jsonl has rows without a text"),
        ("rows.jsonl", b"[3, 4]", "rows.jsonl has rows without a text"),
    ],
)
def test_a_file_without_readable_texts_says_what_to_write(name: str, content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with refused(LoadError, "bad-inputs", match=said):
        from_argument(str(path), Reads(tmp_path), 0)


def test_only_line_ends_separate_texts_and_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    """JSON strings may contain the separators U+2028 and U+0085."""
    write_tokenizer(tmp_path)
    path = tmp_path / "rows.jsonl"
    path.write_bytes('\ufeff"hi\u2028there"\r\n"you\x85hi"\n'.encode())
    (((), given),) = from_argument(str(path), Reads(tmp_path), 0).batches
    assert given["input_ids"].tolist() == [[3, 4], [5, 3]]


FILE = """
from pathlib import Path
from tests.unit.loading.test_texts import CHAT, Reads

def get_model():
    return Reads(Path({folder!r}))

{inputs}
"""


@pytest.mark.parametrize(
    "inputs",
    [
        "def get_inputs():\n    return CHAT",
        "example_inputs = [CHAT]",
        "def audit_spec():\n    return {'model': get_model(), 'inputs': 'hi there'}",
        "def get_inputs():\n    return ['hi there', 'hi']\n\ndef get_eval_inputs():\n    return 'you'",
    ],
)
def test_the_users_file_may_return_texts_and_chats(inputs: str, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "model.py").write_text(FILE.format(folder=str(tmp_path), inputs=inputs), encoding="utf-8")
    subject = load(str(tmp_path / "model.py"))
    assert subject.batches[0][1]["input_ids"][0].tolist() in (ASKED, [3, 4])
    assert len(subject.held_out) == ("eval" in inputs)


def test_a_call_takes_chats(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    assert from_object(Reads(tmp_path), [CHAT]).batches[0][1]["input_ids"].tolist() == [ASKED]
