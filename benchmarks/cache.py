"""What an audit costs that finds its measurements in a cache, over one that does not, by what the second is asked."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import auditor
from auditor.document.contents import steady
from benchmarks.harness import Row, in_process_of_its_own, report, seconds
from benchmarks.subjects import build

SUBJECTS = ("vit_base_patch16_224", "resnet50", "gpt2")
QUESTIONS: dict[str, dict[str, Any]] = {
    "the same": {},
    "budget 0.001": {"max_error": 0.001},
    "memory": {"objective": "memory"},
    "criterion": {"criteria": "*: cosine >= 0.9999"},
}
COLUMNS = {
    "model": "",
    "asked": "",
    "without s": ".1f",
    "with s": ".1f",
    "ratio": ".2f",
    "measuring": ".2f",
    "entries kB": ".0f",
}


def asked(name: str, question: str) -> Row:
    """An audit without a cache, and one after another audit, of the question and of the usual one, filled it."""
    model, args = build(name)
    folder = tempfile.mkdtemp()
    try:
        auditor.audit(model, args, cache=folder, device="cpu")
        kept = sum(len(file) for file in _files(folder))
        found: list[Any] = []
        spent = [
            seconds(lambda cache=cache: found.append(auditor.audit(model, args, cache=cache, **QUESTIONS[question])))
            for cache in (None, folder)
        ]
    finally:
        shutil.rmtree(folder)
    assert json.dumps(steady(found[0].to_json())) == json.dumps(steady(found[1].to_json()))
    measuring = found[1].seconds["measure"] / found[0].seconds["measure"]
    row = {"model": name, "asked": question, "without s": spent[0], "with s": spent[1], "ratio": spent[1] / spent[0]}
    return {**row, "measuring": measuring, "entries kB": kept / 1e3, "reused": found[1].environment.reused}


def _files(folder: str) -> list[bytes]:
    return [file.read_bytes() for file in Path(folder).iterdir()]


def main(names: list[str]) -> None:
    pairs = [(name, question) for name in names or SUBJECTS for question in QUESTIONS]
    report("cache", [in_process_of_its_own("benchmarks.cache", "--one", *pair) for pair in pairs], COLUMNS)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(asked(*sys.argv[2:])))
    else:
        main(sys.argv[1:])
