"""Checkpoints of Hugging Face directories: formats, names and shapes, and the memory that reading them takes."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from auditor.errors import LoadError
from auditor.loading import load
from tests.support.refusing import refused
from tests.unit.loading.conftest import TINY

transformers = pytest.importorskip("transformers")

WEIGHTS = "model.safetensors"


def llama(**config: Any) -> Any:
    torch.manual_seed(3)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**TINY, **config})).eval()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "tiny"
    llama().save_pretrained(folder)
    return folder


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "tiny"))


def write(model: Any, folder: Path, how: str, shard: str) -> None:
    model.save_pretrained(folder, max_shard_size=shard if how == "shards" else "9GB")
    if how == "torch file":
        (folder / WEIGHTS).unlink()
        torch.save(model.state_dict(), folder / "pytorch_model.bin")


def with_config(folder: Path, **entries: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))


def with_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    state = load_file(folder / WEIGHTS)
    change(state)
    save_file(state, folder / WEIGHTS, metadata={"format": "pt"})


def numbers(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("how", ["one file", "shards", "torch file", "tied"])
def test_a_checkpoint_stored_low_is_read_as_its_values_in_fp32(dtype: torch.dtype, how: str, tmp_path: Path) -> None:
    model = llama(tie_word_embeddings=how == "tied").to(dtype)
    write(model, tmp_path, how, "3KB")
    found = load(f"hf:{tmp_path}")
    for name, value in found.model.state_dict().items():
        assert value.dtype is torch.float32
        assert torch.equal(value, model.state_dict()[name].float())
    name = str(dtype).removeprefix("torch.")
    assert (found.upcast, found.stored_low) == ("weights", {name: numbers(model)})
    assert found.warnings == (
        f"the checkpoint stores all of {numbers(model):,} weights in {name}: the reference uses these values in FP32, "
        f"so errors exclude the earlier rounding to {name}",
    )


def test_weights_of_ones_own_say_nothing_of_those_of_the_directory(tmp_path: Path) -> None:
    llama().bfloat16().save_pretrained(tmp_path)
    torch.save(llama().state_dict(), tmp_path / "own.pt")
    found = load(f"hf:{tmp_path}", weights=str(tmp_path / "own.pt"))
    assert (found.upcast, found.stored_low, found.warnings) == ("none", {}, ())


def test_what_the_checkpoint_lacks_is_told_as_random(copy: Path) -> None:
    with_weights(copy, lambda state: state.pop("lm_head.weight"))
    found = load(f"hf:{copy}")
    assert "weights missing from the checkpoint are RANDOM (1: lm_head.weight):" in found.warnings[0]
    assert torch.equal(load(f"hf:{copy}").model.lm_head.weight, found.model.lm_head.weight)
    assert not torch.equal(load(f"hf:{copy}", seed=1).model.lm_head.weight, found.model.lm_head.weight)


def test_what_the_model_has_no_place_for_is_told(copy: Path) -> None:
    with_weights(copy, lambda state: state.update(one=torch.ones(2), two=torch.ones(2)))
    (note,) = load(f"hf:{copy}").warnings
    assert note == "weights of the checkpoint that the model lacks are ignored (2: one, two)"


def test_a_class_that_transformers_does_not_have_is_told(copy: Path) -> None:
    with_config(copy, architectures=["LlamaWithAHead"])
    found = load(f"hf:{copy}")
    assert type(found.model).__name__ == "LlamaModel"
    assert "names the class LlamaWithAHead, which transformers does not have" in found.warnings[0]
    assert "lm_head.weight" in found.warnings[1]


def lose_a_shard(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    llama().save_pretrained(folder, max_shard_size="3KB")
    sorted(folder.glob("model-*"))[1].unlink()


def spoil_the_index(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / f"{WEIGHTS}.index.json").write_text("{")


def cut(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-8])


def with_code(folder: Path) -> None:
    with_config(folder, model_type="unheard_of", auto_map={"AutoConfig": "own.Config"})
    (folder / "own.py").write_text("raise SystemExit('this is never run')")


def as_torch_file(folder: Path, content: bytes) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(content)


BROKEN: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "a shard is missing": (lose_a_shard, "missing-weights", ".safetensors does not exist: complete the checkpoint"),
    "the index is none": (spoil_the_index, "bad-weights", "no weight_map"),
    "a file is cut": (cut, "bad-weights", "cannot be read as a safetensors file"),
    "a torch file is none": (lambda f: as_torch_file(f, b"x" * 99), "bad-weights", "without running code"),
    "shapes are another config's": (
        lambda f: with_config(f, vocab_size=65),
        "weights-mismatch",
        "lm_head.weight has the shape [64, 16] in the checkpoint and [65, 16] in LlamaForCausalLM, and 1 more",
    ),
    "the weights are another model's": (
        lambda f: save_file({"a": torch.ones(2)}, f / WEIGHTS, metadata={"format": "pt"}),
        "weights-mismatch",
        "has no weight of LlamaForCausalLM (the checkpoint has a,",
    ),
    "the dtype is none": (lambda f: with_config(f, dtype="bloat16"), "model-raises", "bloat16"),
    "it is quantized": (
        lambda f: with_config(f, quantization_config={"quant_method": "gptq", "bits": 4}),
        "quantized-model",
        "is quantized (gptq)",
    ),
    "its code is its own": (with_code, "remote-code", "trust_remote_code=True"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_cannot_be_read_is_one_clear_line(case: str, copy: Path, capfd: pytest.CaptureFixture[str]) -> None:
    spoil, slug, words = BROKEN[case]
    spoil(copy)
    capfd.readouterr()
    with refused(LoadError, slug, words):
        load(f"hf:{copy}")
    assert capfd.readouterr().out == ""
