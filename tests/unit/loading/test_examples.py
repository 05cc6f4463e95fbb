"""The tiny models of `examples/folders` are targets."""

import runpy
from pathlib import Path

import pytest

from auditor.loading import load
from auditor.loading.doors import parts_of


@pytest.fixture(scope="module")
def targets(root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """{end of a target: the target}"""
    script = runpy.run_path(str(root / "examples" / "folders" / "write.py"))
    written = script["write"](tmp_path_factory.mktemp("folders"))
    return {Path(target).name: target for target in written}


@pytest.mark.parametrize(
    ("name", "library"),
    [
        ("net.pt2", "torch"),
        ("repository:mlp", "torch"),
        ("autoencoder", "diffusers"),
        ("adapter", "peft"),
        ("sentences", "sentence_transformers"),
    ],
)
def test_a_target_of_each_library(name: str, library: str, targets: dict[str, str]) -> None:
    pytest.importorskip(library)
    assert load(targets[name]).batches


def test_a_pipeline(targets: dict[str, str]) -> None:
    pytest.importorskip("diffusers")
    parts = parts_of(targets["pipeline"], None, 0)
    assert list(parts) == ["unet"]
    assert len(load(parts["unet"]).batches) == 3
