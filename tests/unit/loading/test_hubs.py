"""`timm:` and `hf:` targets: built from the libraries or from local directories, with no request to anywhere."""

import json
import socket
import sys

import pytest
import torch

from auditor.cli import main
from auditor.errors import LoadError
from auditor.loading import cautions, load
from auditor.loading.doors import weights_of
from auditor.offload.limit import resident
from tests.support.refusing import refused
from tests.unit.loading.conftest import TINY


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """A directory as save_pretrained writes it, and the model that was saved."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**TINY)).eval()
    folder = tmp_path_factory.mktemp("hub") / "tiny-bert"
    model.save_pretrained(folder)
    return folder, model


def test_only_a_colon_makes_the_name_of_a_hub_one(here):
    (here / "hf.py").write_text("import torch\nmodel, example_inputs = torch.nn.Linear(2, 2), torch.ones(1, 2)\n")
    assert type(load("hf").model) is torch.nn.Linear


def test_timm_model_by_name():
    pytest.importorskip("timm")
    subject = load("timm:test_resnet")
    assert subject.name == "test_resnet"
    assert subject.random_weights
    assert subject.synthetic_inputs
    assert any("weights are RANDOM" in warning for warning in cautions(subject))
    size = subject.model.pretrained_cfg["input_size"]
    assert subject.batches[0][0][0].shape == (2, *size)
    assert (subject.origin.module, subject.origin.symbol, subject.origin.init_args) == (
        "timm",
        "create_model",
        ("test_resnet",),
    )


def test_hugging_face_directory_with_weights(bert):
    folder, model = bert
    subject = load(f"hf:{folder}")
    assert type(subject.model) is type(model)
    assert torch.equal(subject.model.state_dict()["classifier.weight"], model.state_dict()["classifier.weight"])
    assert not subject.random_weights
    assert subject.name == "tiny-bert"
    assert subject.batches[0][1]["input_ids"].shape == (2, 16)
    assert subject.origin.symbol == "BertForSequenceClassification.from_pretrained"


def test_a_config_alone_gives_random_weights_that_repeat_with_the_seed(bert, tmp_path):
    config = json.loads((bert[0] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    first, second, other = (load(f"hf:{tmp_path}", seed=seed) for seed in (1, 1, 2))
    assert first.random_weights
    assert any("weights are RANDOM" in warning for warning in cautions(first))
    assert first.origin is None  # no call with plain arguments makes this model again
    weight = first.model.state_dict()["classifier.weight"]
    assert weight.dtype == torch.float32
    assert torch.equal(weight, second.model.state_dict()["classifier.weight"])
    assert not torch.equal(weight, other.model.state_dict()["classifier.weight"])


@pytest.mark.parametrize(
    ("config", "architecture", "sizes", "shapes"),
    [
        (
            "T5Config",
            "T5ForConditionalGeneration",
            {"vocab_size": 64, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 1, "num_heads": 2},
            {"input_ids": (2, 16), "decoder_input_ids": (2, 16)},
        ),
        (
            "ViTConfig",
            "ViTForImageClassification",
            {key: TINY[key] for key in TINY if key != "vocab_size"} | {"image_size": 32, "patch_size": 8},
            {"pixel_values": (2, 3, 32, 32)},
        ),
    ],
)
def test_inputs_are_those_of_the_kind_of_model(config, architecture, sizes, shapes, tmp_path):
    made = getattr(pytest.importorskip("transformers"), config)(**sizes)
    made.architectures = [architecture]
    made.save_pretrained(tmp_path)
    assert {name: tuple(x.shape) for name, x in load(f"hf:{tmp_path}").batches[0][1].items()} == shapes


def test_a_cached_repository_is_found_by_its_name(bert, tmp_path, monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants")
    snapshot = tmp_path / "models--org--tiny" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for file in bert[0].iterdir():
        (snapshot / file.name).write_bytes(file.read_bytes())
    (tmp_path / "models--org--tiny" / "refs").mkdir()
    (tmp_path / "models--org--tiny" / "refs" / "main").write_text("abc")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    subject = load("hf:org/tiny@main")
    assert not subject.random_weights
    # what the file says holds on another machine that has it cached; a path into the cache would not
    assert (subject.origin.folder, subject.origin.init_args) == (None, ("org/tiny",))
    assert subject.origin.init_kwargs["revision"] == "main"


@pytest.mark.parametrize(
    ("target", "slug", "words"),
    [
        ("timm:", "bad-target", "names no model"),
        ("hf: ", "bad-target", "names no model"),
        ("timm:test_resnt", "no-symbol", "did you mean test_resnet"),
        ("timm:zzzzqqq", "no-symbol", "timm.list_models()"),
        ("timm:test_resnet(width=torch.pi)", "bad-target", "plain numbers"),
        ("timm:test_resnet(absent_argument=1)", "model-raises", "absent_argument"),
        ("hf:nobody/nothing-of-the-kind", "missing-target", "hf download nobody/nothing-of-the-kind"),
        ("hf:a name!/with/too/much", "missing-target", "is neither a directory nor in the local cache"),
        ("hf:.", "missing-target", "config.json"),
    ],
)
def test_bad_names_are_one_clear_line(target, slug, words, here):
    pytest.importorskip("timm")
    with refused(LoadError, slug, words):
        load(target)


@pytest.mark.parametrize(
    "text", ["{", "{}", '{"model_type": "no-such-type"}', '{"model_type": "bert", "hidden_size": 7}']
)
def test_a_broken_config_is_one_clear_line(text, tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(text)
    with refused(LoadError, "model-raises"):
        load(f"hf:{tmp_path}")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("raise ImportError", "`pip install timm`"),
        ("import package_of_timm.vision", "needs timm, and importing timm raised .*No module named 'package_of_timm'"),
        ("raise RuntimeError('built for another torch')", "built for another torch"),
    ],
)
def test_a_package_that_cannot_be_imported_is_named(source, said, monkeypatch, tmp_path):
    (tmp_path / "timm.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    with refused(LoadError, "missing-package", match=said):
        load("timm:resnet18")


def test_a_model_that_would_not_fit_is_limited_by_itself(bert, tmp_path, monkeypatch):
    folder, asked = bert[0], []
    monkeypatch.setattr("auditor.offload.limit_for", lambda weights: asked.append(weights) or resident() + (1 << 30))
    assert main([f"hf:{folder}", "--dry-run", "-q", "--device", "cpu", "--out", str(tmp_path / "out")]) == 0
    assert asked == [weights_of(f"hf:{folder}")]
