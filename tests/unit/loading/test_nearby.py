"""Errors of a first command name what lies near: a folder to run in, an imported class, a configuration with defaults."""

from pathlib import Path

import pytest

from auditor.errors import LoadError
from auditor.loading import load
from tests.support.refusing import refused

HEAD = "import torch\nfrom torch import nn\n"
NET = "class Net(nn.Linear):\n    def __init__(self, width=4):\n        super().__init__(width, 2)\n"
CONFIGURED = """
from dataclasses import dataclass

@dataclass
class Config:
    width: int = 4

class Net(nn.Linear):
    def __init__(self, config: {annotation}):
        super().__init__(config.width, 2)
"""


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path = path.with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_a_module_above_the_file_is_located(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, opts="WIDTH = 4\n", models__net=HEAD + "from opts import WIDTH\n" + NET)
    monkeypatch.chdir(tmp_path / "models")
    with refused(LoadError, "missing-package", f"it lies in {tmp_path}: run there, or put that folder on PYTHONPATH"):
        load("net.py")


def test_a_package_that_is_not_installed_is_located(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, src__fastnet__net=HEAD + NET)
    monkeypatch.chdir(tmp_path)
    with refused(LoadError, "missing-target", f"it lies in {tmp_path / 'src'}: run there"):
        load("fastnet.net")


def test_a_package_that_is_nowhere_has_to_be_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, net=HEAD + "import no_such_package\n" + NET)
    monkeypatch.chdir(tmp_path)
    with refused(LoadError, "missing-package", "install it in the environment"):
        load("net.py")


VERSION = "from importlib.metadata import version\n__version__ = version('fastnet')\n"


def test_a_clone_that_reads_its_own_version_has_to_be_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The missing name is the start of the module's, whose file exists."""
    write(tmp_path, src__fastnet__net=HEAD + NET)
    (tmp_path / "src" / "fastnet" / "__init__.py").write_text(VERSION)
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "fastnet"\n')
    monkeypatch.chdir(tmp_path)
    with refused(LoadError, "missing-package", "'fastnet', which is not installed", f"pip install -e {tmp_path}`"):
        load("src/fastnet/net.py")


def test_a_script_that_hides_the_package_of_its_name_is_to_be_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, fastnet__net=HEAD + NET, examples__fastnet="from fastnet.net import Net\n")
    monkeypatch.chdir(tmp_path)
    with refused(LoadError, "missing-package", "fastnet.py has the name of the package 'fastnet', and hides it"):
        load("examples/fastnet.py")


@pytest.mark.parametrize("symbol", ["Net(Config(", "TABLE['net'](4)", "3"])
def test_a_symbol_that_cannot_be_read_is_no_missing_file(
    symbol: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, models__net=HEAD + NET)
    monkeypatch.chdir(tmp_path)
    with refused(LoadError, "bad-target", f"cannot read the symbol {symbol!r} after models/net.py: write name"):
        load(f"models/net.py:{symbol}")


def test_a_file_that_only_imports_its_model_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, parts=HEAD + NET, train=HEAD + "from torch.nn import Linear\nfrom parts import Net\n")
    monkeypatch.chdir(tmp_path)
    with refused(LoadError, "no-model", "it imports Net: name one, as in train.py:Net"):
        load("train.py")
    assert load("train.py:Net").model.in_features == 4


@pytest.mark.parametrize("annotation", ["Config", '"Config"'])
def test_a_configuration_with_defaults_is_in_the_example(
    annotation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, net=HEAD + CONFIGURED.format(annotation=annotation))
    monkeypatch.chdir(tmp_path)
    with refused(LoadError, "needs-arguments", "net.py:Net(config=Config())"):
        load("net.py")
    assert load("net.py:Net(config=Config())").model.in_features == 4


def test_a_value_without_defaults_stays_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, net=HEAD + NET.replace("width=4", "width: int"))
    monkeypatch.chdir(tmp_path)
    with refused(LoadError, "needs-arguments", "Net(width=...)"):
        load("net.py")


def test_lines_of_a_notebook_are_to_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, export="get_ipython().run_line_magic('matplotlib', 'inline')\n" + HEAD + NET)
    monkeypatch.chdir(tmp_path)
    with refused(LoadError, "import-raises", "(export.py:1): remove the lines with get_ipython()"):
        load("export.py")


def test_a_notebook_is_to_be_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.ipynb").write_text("{}")
    monkeypatch.chdir(tmp_path)
    with refused(LoadError, "bad-target", "jupyter nbconvert --to script train.ipynb"):
        load("train.ipynb")


READS = "TEXT = open('conf/net.yaml').read()\n"


@pytest.mark.parametrize("where", ["import", "build"])
def test_a_relative_path_names_the_folder_to_run_in(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = "def get_model():\n    open('conf/net.yaml').close()\n    return Net()\n"
    write(tmp_path, repo__tools__net=HEAD + NET + (READS if where == "import" else build))
    (tmp_path / "repo" / "conf").mkdir()
    (tmp_path / "repo" / "conf" / "net.yaml").write_text("width: 4\n")
    monkeypatch.chdir(tmp_path)
    slug = {"import": "import-raises", "build": "model-raises"}[where]
    with refused(LoadError, slug, f": run in {tmp_path / 'repo'}, where conf/net.yaml exists"):
        load("repo/tools/net.py")
    monkeypatch.chdir(tmp_path / "repo")
    assert load("tools/net.py").model.in_features == 4


def test_a_path_that_is_nowhere_has_no_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, net=HEAD + READS + NET)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LoadError) as caught:
        load("net.py")
    assert "run in" not in str(caught.value)


PARSES = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, required=True)
WIDTH = parser.parse_args().width
"""


def test_a_script_that_wants_arguments_says_where_they_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, train=HEAD + PARSES + NET + "def get_model():\n    return Net(WIDTH)\n")
    monkeypatch.chdir(tmp_path)
    with refused(LoadError, "import-raises", 'give its arguments in the target, as "train.py -- --option value"'):
        load("train.py")
    with refused(LoadError, "bad-target", 'write "train.py -- --width 3"'):
        load("train.py --width 3")
    assert load("train.py -- --width 3", inputs=None).model.in_features == 3


def test_a_script_that_ends_by_itself_has_no_such_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, train="raise SystemExit(1)\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LoadError) as caught:
        load("train.py")
    assert "option" not in str(caught.value)
