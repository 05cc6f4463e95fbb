"""Texts and chat messages as inputs: converts them to token ids with the tokenizer of the model's weights."""

from __future__ import annotations

import importlib
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import LoadError, describe
from .sentence_inputs import features_of, is_sentence_model
from .target import arguments_of

LINES, ROWS = ".txt", ".jsonl"
"""File suffixes: one text per line; one JSON string, or row with a text or a chat, per line."""

MOST_ROWS = 32
"""Maximum number of rows taken from a data set."""

CHATS, TEXTS = ("messages", "conversation"), ("prompt", "text")
"""Names of a row's entry with a chat or with a text, as data sets for language models have them."""

Chat = list[Mapping[str, Any]]
"""Messages with a role and a content."""


def read_texts(path: Path) -> list[Any]:
    """The texts and chats of a `.txt` or `.jsonl` file.

    Raises: LoadError(slug="bad-inputs") for a line that is no JSON, for a file without lines, and for one that is no UTF-8.
    """
    try:
        content = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise LoadError(f"{path.name} is no UTF-8 text ({error}): save it as UTF-8", slug="bad-inputs") from error
    # not `splitlines`, which also splits at separators that a JSON string may contain
    lines = [(number, line) for number, line in enumerate(content.split("\n"), 1) if line.strip()]
    if not lines:
        raise LoadError(f"{path.name} has no text: write one text per line", slug="bad-inputs")
    if path.suffix == LINES:
        return [line for _, line in lines]
    result = []
    for number, line in lines:
        try:
            result.append(json.loads(line))
        except ValueError as error:
            message = (
                f"line {number} of {path.name} is no JSON ({error}): write a JSON string, or an object with `messages`"
            )
            raise LoadError(message, slug="bad-inputs") from error
    return result


def tokenize(model: Any, value: Any) -> Any:
    """Convert texts and chats to token ids with the model's tokenizer, padded on the left; return other values unchanged.

    value: a text, a chat (a list of messages), a row of a data set with one of these, a list of them, or a data set.
    A chat is formatted by the tokenizer's chat template, and the model's turn follows the last message of a user.
    Raises: LoadError(slug="bad-inputs") if the model has no tokenizer, or its tokenizer no chat template, and for a
    message without a role or a text.
    """
    names = arguments_of(model.forward)
    rows = _rows(value, names)
    if rows is None:
        return value
    for number, row in enumerate(rows, 1):
        if not isinstance(row, str):
            _require_messages(row, f"chat {number}" if len(rows) > 1 else "the chat")
    if is_sentence_model(model) and all(isinstance(row, str) for row in rows):
        return features_of(model, rows)
    where = str(getattr(model, "name_or_path", "") or "")
    if not where:
        problem = "text inputs need a tokenizer, and the model was loaded from no folder that has one: load the model with from_pretrained, or give token ids"
        raise LoadError(problem, "bad-inputs")
    try:
        transformers: Any = importlib.import_module("transformers")
        tokenizer = transformers.AutoTokenizer.from_pretrained(where, padding_side="left", local_files_only=True)
    except Exception as error:
        problem = (
            f"text inputs need a tokenizer in the folder of the model's weights ({describe(error)}): give token ids"
        )
        raise LoadError(problem, "bad-inputs") from error
    chats = [row for row in rows if not isinstance(row, str)]
    if chats and len(chats) < len(rows):
        raise LoadError("the inputs mix texts and chats: give one of both", slug="bad-inputs")
    if chats and not getattr(tokenizer, "chat_template", None):
        problem = f"the inputs are chat messages, and the tokenizer in {where} has no chat template: give texts"
        raise LoadError(problem, slug="bad-inputs")
    has_tool_calls = any(message.get("tool_calls") for chat in chats for message in chat)
    if has_tool_calls and "tool_calls" not in str(tokenizer.chat_template):
        problem = f"the inputs have tool calls, which the chat template of the tokenizer in {where} leaves out: write them as content"
        raise LoadError(problem, slug="bad-inputs")
    try:
        texts = [_format(tokenizer, chat) for chat in chats] or rows
        if len(texts) > 1:
            tokenizer.pad_token = _padding_token(tokenizer)
        # a chat template writes the special tokens itself
        given = tokenizer(texts, return_tensors="pt", padding=len(texts) > 1, add_special_tokens=not chats)
    except Exception as error:
        raise LoadError(f"the tokenizer in {where} refused the inputs ({describe(error)})", "bad-inputs") from error
    return {name: x for name, x in given.items() if name in names}


def _rows(value: Any, names: Mapping[str, Any]) -> list[Any] | None:
    """The texts and chats in a value; None if it contains others. names: arguments of forward, which entries keep."""
    if isinstance(value, str) or _is_chat(value, names):
        return [value]
    if isinstance(value, Mapping):
        row = _of_row(value, names)
        if row is None:
            return None
        is_texts = isinstance(row, list) and not _is_chat(row, names)
        return row if is_texts else [row]
    if hasattr(value, "column_names"):  # a data set of the package `datasets`
        value = list(itertools.islice(value, MOST_ROWS))
    if not isinstance(value, list | tuple) or not value:
        return None
    rows = list[Any]()
    for item in value:
        row = _of_row(item, names) if isinstance(item, Mapping) else item
        if not isinstance(row, str) and not _is_chat(row, names):
            return None
        rows.append(row)
    return rows


def _of_row(row: Mapping[str, Any], names: Mapping[str, Any]) -> Any:
    """The chat or the text of a row, or the list of its texts; None if the row has neither."""
    for name in (*CHATS, *TEXTS):
        entry = row.get(name)
        is_list = isinstance(entry, list) and bool(entry) and all(isinstance(each, str) for each in entry)
        if name not in names and (isinstance(entry, str) or is_list or _is_chat(entry, names)):
            return entry
    return None


def _is_chat(value: Any, names: Mapping[str, Any]) -> bool:
    """Whether a value is a list of messages, which may lack a role or a content. names: arguments of forward."""
    is_list = isinstance(value, list | tuple) and bool(value) and all(isinstance(each, Mapping) for each in value)
    return is_list and any(_is_message(each, names) for each in value)


def _is_message(value: Mapping[str, Any], names: Mapping[str, Any]) -> bool:
    """Whether a dict is a message, and neither a row of a data set nor keyword arguments of forward."""
    if value.keys() & {*CHATS, *TEXTS, *names}:
        return False
    has_words = any(isinstance(value.get(name), str) for name in ("role", "content"))
    return has_words or value.keys() >= {"from", "value"}  # the second: messages of ShareGPT


def _require_messages(chat: Chat, what: str) -> None:
    """Raises: LoadError(slug="bad-inputs") for a message that no template can format as text."""
    for number, message in enumerate(chat, 1):
        problem = _problem_of(message)
        if problem:
            raise LoadError(f"message {number} of {what} {problem}", slug="bad-inputs")


def _problem_of(message: Mapping[str, Any]) -> str:
    """What keeps a message from being formatted as text, and what to do; "" for a good one."""
    content = message.get("content")
    if not isinstance(message.get("role"), str):
        return "has no role: write `role`, such as user, and `content`"
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return ""
    if content is None:
        return "has no content: give it a text"
    if not isinstance(content, list | tuple):
        return f"has a content of type {type(content).__name__}: give it a text"
    if not all(map(_is_text, content)):
        return "has parts other than text: give what the model's processor returns"
    return ""


def _is_text(part: Any) -> bool:
    """Whether a part of a content is a text."""
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _format(tokenizer: Any, chat: Chat) -> str:
    """A chat as the model reads it, up to the model's turn if a user spoke last.

    Most templates read a content as one text, and would write a list of parts as Python prints it; others read parts alone.
    """
    messages = [{**message, "content": _text_of(message)} for message in chat]
    how = {"tokenize": False, "add_generation_prompt": chat[-1]["role"] != "assistant"}
    has_parts = any(isinstance(message.get("content"), list | tuple) for message in chat)
    try:
        result = str(tokenizer.apply_chat_template(messages, **how))
    except Exception:
        if not has_parts:
            raise
        return str(tokenizer.apply_chat_template(list(chat), **how))
    if has_parts and messages[-1]["content"].strip() not in result:
        return str(tokenizer.apply_chat_template(list(chat), **how))
    return result


def _text_of(message: Mapping[str, Any]) -> str:
    """The content of a message as one text: a part per line; "" for a message that has only tool calls."""
    content = message.get("content")
    if isinstance(content, list | tuple):
        return "\n".join(part["text"] for part in content)
    return content or ""


def _padding_token(tokenizer: Any) -> str:
    """The tokenizer's padding token; base models such as GPT-2 have none, and then any token will do, since the attention
    mask hides it."""
    special = (tokenizer.pad_token, tokenizer.eos_token, tokenizer.bos_token, tokenizer.unk_token)
    return next((str(token) for token in special if token), "") or str(tokenizer.convert_ids_to_tokens(0))
