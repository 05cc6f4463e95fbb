"""Folders of sentence-transformers."""

import json
import runpy
import string
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import auditor
from auditor.cli import main
from auditor.errors import LoadError
from auditor.loading import load
from tests.support.refusing import refused

WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    *string.ascii_lowercase,
    *(f"##{c}" for c in string.ascii_lowercase),
]
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture
def folder(here: Path) -> Path:
    library: Any = pytest.importorskip("sentence_transformers")
    models: Any = pytest.importorskip("sentence_transformers.models")
    transformers: Any = pytest.importorskip("transformers")
    torch.manual_seed(0)
    bert = here / "bert"
    bert.mkdir()
    (bert / "vocab.txt").write_text("\n".join(WORDS))
    transformers.BertTokenizer(str(bert / "vocab.txt")).save_pretrained(bert)
    transformers.BertModel(transformers.BertConfig(vocab_size=len(WORDS), **SIZES)).save_pretrained(bert)
    parts = [models.Transformer(str(bert)), models.Pooling(16, "mean"), models.Dense(16, 8), models.Normalize()]
    library.SentenceTransformer(modules=parts, device="cpu").save_pretrained(str(here / "tiny"))
    return here / "tiny"


def test_the_whole_model_is_built(folder: Path) -> None:
    subject = load("hf:tiny")
    assert type(subject.model).__name__ == "SentenceTransformer"
    assert len(subject.model) == 4
    assert not subject.random_weights
    (features,), _ = subject.batches[0]
    assert len(features["input_ids"]) == 2
    assert (features["attention_mask"] == 0).any()
    embedding = subject.model(features)["sentence_embedding"]
    assert embedding.shape == (2, 8)


def test_texts_are_inputs(folder: Path) -> None:
    (folder.parent / "prompts.txt").write_text("one\ntwo words\nthree more words\n")
    (features,), _ = load("hf:tiny", inputs="prompts.txt").batches[0]
    assert len(features["input_ids"]) == 3


def test_a_live_model_takes_texts(folder: Path) -> None:
    model = load("hf:tiny").model
    audit = auditor.audit(model, ["a text", "b"], formats="bf16", strategies="autocast", device="cpu")
    assert audit.recommended == "autocast_bf16"


def test_the_patched_model_loads_the_folder(folder: Path) -> None:
    assert main(["hf:tiny", "--quick", "-q", "--out", "out", "--fail-on", "never"]) == 0
    model = runpy.run_path("out/patched_model.py")["build"]()
    assert model.encode(["hello"]).shape == (1, 8)


def test_without_the_library_the_transformer_inside_is_audited(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    subject = load("hf:tiny")
    assert type(subject.model).__name__ == "BertModel"
    assert any("`pip install sentence-transformers`" in warning for warning in subject.warnings)


def test_without_a_transformer_inside_the_library_is_needed(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "modules.json").write_text("[]")
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with refused(LoadError, "missing-package", "`pip install sentence-transformers`"):
        load("hf:.")


@pytest.mark.parametrize(
    ("file", "text"), [("modules.json", "{"), ("config.json", "{"), ("config_sentence_transformers.json", "[")]
)
def test_a_corrupt_file_is_one_line(file: str, text: str, folder: Path) -> None:
    (folder / file).write_text(text)
    with refused(LoadError, "model-raises", "tiny"):
        load("hf:tiny")


def test_code_of_a_module_is_never_run(folder: Path) -> None:
    (folder / "own.py").write_text("raise SystemExit('the code was run')\n")
    modules = json.loads((folder / "modules.json").read_text())
    modules[-1]["type"] = "own.Normalize"
    (folder / "modules.json").write_text(json.dumps(modules))
    with refused(LoadError, "remote-code", "the module own.Normalize"):
        load("hf:tiny")


def test_missing_weights_are_one_line(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with refused(LoadError, "model-raises", "SentenceTransformer from tiny raised"):
        load("hf:tiny")


def test_an_unknown_class_is_one_line(folder: Path) -> None:
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"model_type": "NoSuchModel"}))
    with refused(LoadError, "model-raises", "names the class NoSuchModel"):
        load("hf:tiny")
