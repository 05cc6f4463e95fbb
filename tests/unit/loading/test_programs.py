"""Exported programs, TorchScript files, and repositories with a hubconf.py, as targets."""

import runpy
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor.cli import main
from auditor.errors import LoadError
from auditor.loading import load
from tests.support.refusing import refused

HUB = """
import torch
from torch import nn


def small(width=4):
    return nn.Sequential(nn.Linear(3, width), nn.Softmax(-1))
"""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x).relu()


@pytest.fixture
def program(here: Path) -> Path:
    torch.manual_seed(0)
    file = here / "net.pt2"
    torch.export.save(torch.export.export(Net().eval(), (torch.ones(2, 4),)), file)
    return file


def test_an_exported_program_brings_its_inputs(program: Path) -> None:
    subject = load(str(program))
    assert subject.name == "net"
    assert subject.inputs_source == "the example inputs in net.pt2"
    assert subject.weights_source == "stored in net.pt2"
    assert not subject.synthetic_inputs
    assert not subject.random_weights
    ((given,), _) = subject.batches[0]
    assert torch.equal(given, torch.ones(2, 4))


def test_inputs_for_an_exported_program(program: Path) -> None:
    torch.save(torch.zeros(2, 4), "x.pt")
    ((given,), _) = load(str(program), inputs="x.pt").batches[0]
    assert not given.any()


def test_the_patched_model_of_an_exported_program_loads_the_file(program: Path) -> None:
    assert main([program.name, "--quick", "-q", "--out", "out", "--fail-on", "never"]) == 0
    patched = runpy.run_path("out/patched_model.py")
    model = patched["build"]()
    expected = torch.export.load(program).module()(torch.ones(2, 4))
    assert torch.allclose(model(torch.ones(2, 4)).float(), expected, atol=1e-2)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 no archive", b"text"])
def test_a_file_that_is_no_program(content: bytes, here: Path) -> None:
    (here / "net.pt2").write_bytes(content)
    with refused(LoadError, "model-raises", "net.pt2 cannot be read as an exported program"):
        load("net.pt2")


def test_a_corrupt_program_logs_no_traceback(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    torch.save({"weight": torch.ones(1)}, "net.pt2")
    assert main(["net.pt2", "-q"]) == 2
    said = capfd.readouterr().err
    assert said.startswith("error: net.pt2 cannot be read")
    assert said.count("\n") == 2


def test_a_program_has_no_symbols(program: Path) -> None:
    with refused(LoadError, "bad-target", "has no symbols: write net.pt2"):
        load("net.pt2:Net")


class Pipeline:
    """As diffusers' pipelines are, no nn.Module, but with modules among its components."""

    components: ClassVar[dict[str, object]] = {"unet": nn.Linear(2, 2), "scheduler": object()}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_is_no_model_is_told_what_to_pass(program: Path) -> None:
    others = {
        r"python -m auditor hf:folder": "hf:folder",
        r"program.module\(\)": torch.export.load(program),
        r"several models \(unet\): pass one, as in auditor.audit\(pipe.unet": Pipeline(),
    }
    for said, value in others.items():
        with refused(LoadError, "not-a-model", match=said):
            auditor.audit(value, torch.ones(2, 4))  # type: ignore[arg-type]


def test_a_missing_program(here: Path) -> None:
    with refused(LoadError, "missing-target", "net.pt2 does not exist"):
        load("net.pt2")


@pytest.mark.parametrize("name", ["net.pt", "net.ts"])
@pytest.mark.parametrize("is_traced", [True, False])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_names_what_to_write(name: str, is_traced: bool, here: Path) -> None:
    script = torch.jit.trace(Net(), torch.ones(2, 4)) if is_traced else torch.jit.script(Net())
    torch.jit.save(script, name)
    with refused(
        LoadError, "bad-target", match=rf"TorchScript.*get_model\(\), which returns torch.jit.load\('{name}'\)"
    ):
        load(name)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_torchscript_file_is_audited_as_the_message_says(here: Path) -> None:
    torch.jit.save(torch.jit.script(Net().eval()), "net.pt")
    Path("model.py").write_text(
        "import torch\n\ndef get_model():\n    return torch.jit.load('net.pt')\n\n"
        "def get_inputs():\n    return torch.ones(2, 4)\n"
    )
    subject = load("model.py")
    assert [batch[0][0].shape for batch in subject.batches] == [(2, 4)]
    assert "random" not in subject.weights_source


def test_a_checkpoint_is_no_torchscript(here: Path) -> None:
    torch.save(Net().state_dict(), "net.pt")
    with refused(LoadError, "bad-target", "pass weights with --weights"):
        load("net.pt")


def test_a_directory_with_a_hubconf(here: Path) -> None:
    (here / "repo").mkdir()
    (here / "repo" / "hubconf.py").write_text(HUB)
    for target, width in (("repo", 4), ("repo:small", 4), ("repo:small(width=6)", 6)):
        assert load(target).model[0].out_features == width
    assert load("repo:small").name == "repo-small"


def test_entry_points_of_a_hubconf_are_listed(here: Path) -> None:
    (here / "hubconf.py").write_text(f"{HUB}\n\ndef large():\n    return small(64)\n")
    with refused(LoadError, "ambiguous-model", match="defines 2 entry points: name one, .*:small or .*:large"):
        load(".")
    with refused(LoadError, "no-symbol", "small, large"):
        load(".:tiny")
    (here / "hubconf.py").write_text("dependencies = ['torch']\n")
    with refused(LoadError, "no-model", "defines no entry point"):
        load(".")


@pytest.mark.parametrize("file", ["config.json", "model_index.json", "adapter_config.json", "modules.json"])
def test_a_model_directory_without_hf_names_it(file: str, here: Path) -> None:
    (here / "folder").mkdir()
    (here / "folder" / file).write_text("{}")
    with refused(LoadError, "directory-target", "write hf:folder"):
        load("folder")
