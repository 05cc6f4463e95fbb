"""Which model a TARGET means, by symbol and by each convention in turn."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from auditor.artefact.emit import emit
from auditor.errors import LoadError
from auditor.loading import load
from auditor.loading.target import parse
from tests.support.refusing import refused

NET = """
class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.head = nn.Linear(3, width)
    def forward(self, x):
        return self.head(x)
"""


def width(subject) -> int:
    return subject.model.head.out_features


def test_audit_spec_wins_over_everything_and_brings_inputs(write):
    subject = load(
        write(
            NET
            + """
def get_model(): return Net(5)
def audit_spec():
    return {"model": Net(9), "inputs": torch.ones(2, 3), "eval_inputs": [(torch.zeros(1, 3),)], "name": "nine"}
"""
        )
    )
    assert width(subject) == 9
    assert subject.name == "nine"
    assert subject.origin.kind == "spec"
    assert subject.batches[0][0][0].shape == (2, 3)
    assert subject.held_out[0][0][0].shape == (1, 3)


@pytest.mark.parametrize(
    ("init", "args", "kwargs"), [("[6]", (6,), {}), ("[[6], {}]", (6,), {}), ("[[], {'width': 6}]", (), {"width": 6})]
)
def test_class_model_with_init_inputs(write, init, args, kwargs):
    source = NET.replace("class Net", "class Model").replace("width=4", "width")
    tail = f"def get_init_inputs(): return {init}\ndef get_inputs(): return [torch.ones(2, 3)]\n"
    subject = load(write(source + tail))
    assert width(subject) == 6
    assert (subject.origin.init_args, dict(subject.origin.init_kwargs)) == (args, kwargs)
    assert subject.origin.kind == "class"


def test_a_script_gets_the_arguments_that_it_parses_on_import_also_in_a_fresh_process(write, tmp_path):
    parses = (
        "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--width', type=int, required=True)\n"
    )
    file = write(f"{parses}ARGS = parser.parse_args()\n" + NET.replace("width=4", "width=ARGS.width"))
    subject = load(f"{file} -- --width 7")
    assert width(subject) == 7
    (tmp_path / "patched_model.py").write_text(emit(subject.origin, 28, {}, None, tmp_path))
    code = "import patched_model; print(patched_model.original().head.out_features)"
    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert ran.stdout == "7\n"
    with refused(LoadError, "bad-target", match="No closing quotation"):
        load(f"{file} -- --width '7")


PART = "class Part(nn.Module):\n    def __init__(self, dim):\n        super().__init__()\n"
OUTER = """
class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net()
    def forward(self, x):
        return self.net(x)
"""


@pytest.mark.parametrize(
    ("source", "found"),
    [(PART + NET, "Net"), (NET + OUTER, "Outer"), (NET + "class Wide(Net):\n    pass\n", "Wide")],
    ids=["builds without arguments", "root of the composition", "not a base class"],
)
def test_of_several_classes_one_is_meant(write, source, found):
    subject = load(write(source))
    assert (subject.origin.kind, subject.origin.symbol) == ("class", found)


BLOCK_AND_GPT = """
class Activation(nn.Module):
    def forward(self, x):
        return x.relu()
ACTIVATIONS = {"relu": Activation}
def activation(name):
    return ACTIVATIONS[name]()
class GPT(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.act = activation("relu")
"""


def test_a_class_that_the_model_uses_inside_is_never_taken_for_the_model(write):
    with refused(LoadError, "needs-arguments", match=r"GPT\(\) in model.py needs arguments \(width\)"):
        load(write(BLOCK_AND_GPT))


def test_the_example_of_arguments_names_the_target_as_it_was_written(tmp_path, monkeypatch):
    package = tmp_path / "widenet"
    package.mkdir()
    (package / "__init__.py").write_text(f"import torch\nfrom torch import nn\n{BLOCK_AND_GPT}")
    monkeypatch.chdir(tmp_path)
    with refused(LoadError, "needs-arguments", match=r"give them as 'widenet:GPT\(width=\.\.\.\)'"):
        load("widenet:GPT")


CLONES = {
    "beside the package": ("net/audit_me.py", "net/net/__init__.py"),
    "in a folder beside the package": ("net/tools/audit_me.py", "net/net/__init__.py"),
    "beside a package without __init__": ("net/audit_me.py", "net/net/part.py"),
    "above src": ("net/audit_me.py", "net/src/net/__init__.py"),
}


@pytest.mark.parametrize(("script", "package"), CLONES.values(), ids=list(CLONES))
def test_a_clone_whose_folder_has_the_packages_name_is_not_the_package(script, package, tmp_path):
    file = tmp_path / script
    for path in (file, tmp_path / package):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("import net\n" if path == file else "")
    assert parse(str(file)).module == "audit_me"


def test_unrelated_classes_are_ambiguous(write):
    with refused(LoadError, "ambiguous-model", match=r"model.py:Net or model.py:Other"):
        load(write(NET + NET.replace("Net", "Other")))


LOSS = """
class Loss(nn.Module):
    def forward(self, logits, target):
        return nn.functional.cross_entropy(logits, target)
class Statistics(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
    def forward(self, x):
        return x - self.mean
"""


def test_a_loss_beside_the_model_is_not_taken_for_it(write):
    subject = load(write(LOSS + NET))
    assert width(subject) == 4
    assert "Audited is Net; model.py defines Loss and Statistics, too" in " ".join(subject.warnings)
    with refused(LoadError, "needs-arguments", match=r"Net\(\) in model.py needs arguments \(width\)"):
        load(write(LOSS.partition("class Statistics")[0] + NET.replace("width=4", "width")))
    assert type(load(write(LOSS + "def get_inputs(): return torch.zeros(2, 3)\n")).model).__name__ == "Statistics"


@pytest.mark.parametrize(
    ("symbol", "kind", "size"),
    [("Net", "class", 4), ("small", "instance", 2), ("make", "factory", 3), ("Net(width=11)", "class", 11)],
)
def test_symbol_names_class_instance_factory_or_call(write, symbol, kind, size):
    subject = load(write(NET + "small = Net(2)\ndef make(width=3): return Net(width)\n") + f":{symbol}")
    assert width(subject) == size
    assert subject.origin.kind == kind


def test_random_weights_repeat_with_the_seed_and_leave_the_generators_alone(write):
    target = write("torch.rand(5)\n" + NET)
    torch.manual_seed(123)
    expected = torch.rand(3)
    torch.manual_seed(123)
    first, second, other = load(target, seed=1), load(target, seed=1), load(target, seed=2)
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(first.model.head.weight, second.model.head.weight)
    assert not torch.equal(first.model.head.weight, other.model.head.weight)
    torch.manual_seed(1)
    assert torch.equal(first.model.head.weight, nn.Linear(3, 4).weight)


@pytest.mark.parametrize(
    ("source", "slug", "words"),
    [
        ("def f(:\n", "syntax-error", "model.py:3: syntax error"),
        ("import absent_package_xyz\n", "missing-package", "absent_package_xyz"),
        ("1 / 0\n", "import-raises", "ZeroDivisionError: division by zero (model.py:3)"),
        (
            "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise ModuleNotFoundError('lazy') from e\n",
            "import-raises",
            "ZeroDivisionError: division by zero (model.py:4)",
        ),
        ("raise SystemExit(3)\n", "import-raises", "SystemExit"),
        ("x = 1\n", "no-model", "get_model()"),
        (NET.replace("width=4", "width"), "needs-arguments", "Net(width=...)"),
        (NET + "def get_model(a, b): return Net()\n", "needs-arguments", "get_model(a=..., b=...)"),
        (NET + "def get_model(): raise KeyError('k')\n", "model-raises", "KeyError: 'k' (model.py:10)"),
        (NET.replace("super", "1/0; super"), "model-raises", "Net() in model.py raised ZeroDivisionError"),
        (NET + "def get_model(): return Net(), 1\n", "not-a-model", "returned a tuple"),
        (NET + "def get_model(): return Net\n", "not-a-model", "returned the class Net: call it"),
        (NET + "def audit_spec(): return {'model': Net()}\n", "bad-spec", "'inputs'"),
        (NET + "def audit_spec(): return {'model': Net(), 'inputs': 0, 'metric': 0}\n", "bad-spec", "['metric']"),
        (NET + "def get_model(): return Net().to('meta')\n", "meta-weights", "head.weight"),
    ],
)
def test_bad_files_give_one_clear_line(write, source, slug, words):
    with refused(LoadError, slug, words):
        load(write(source))


@pytest.mark.parametrize(
    ("suffix", "slug", "words"),
    [
        (":Absent", "no-symbol", "it defines Net"),
        (":limit", "not-a-model", "limit in model.py is a int"),
        (":Net(width=1 + limit)", "bad-target", "names of the file"),
        (":Net(width=torch.no_such)", "no-symbol", "no_such"),
    ],
)
def test_bad_symbols(write, suffix, slug, words):
    with refused(LoadError, slug, words):
        load(write(NET + "limit = 3\n") + suffix)


def test_bad_targets(write, tmp_path: Path):
    write(NET)
    (tmp_path / "weights.pt").touch()
    cases = {
        str(tmp_path): ("directory-target", "model.py"),
        str(tmp_path / "absent.py"): ("missing-target", "does not exist"),
        "no_such_module_xyz": ("missing-target", "no_such_module_xyz"),
        str(tmp_path / "weights.pt"): ("bad-target", "--weights"),
        "not a module!": ("bad-target", "model.py[:symbol]"),
    }
    for target, (slug, words) in cases.items():
        with refused(LoadError, slug, words):
            load(target)


LADDER = (
    ("audit_spec", "def audit_spec(): return {'model': Net(2), 'inputs': torch.ones(2, 3)}\n"),
    ("get_model", "def get_model(): return Net(2)\n"),
    ("build_model", "def build_model(): return Net(2)\n"),
    ("create_model", "def create_model(): return Net(2)\n"),
    ("load_model", "def load_model(): return Net(2)\n"),
    ("Model", "class Model(Net): pass\ndef get_init_inputs(): return [2]\n"),
    ("model", "model = Net(2)\n"),
    ("Net", ""),
)


@pytest.mark.parametrize("step", range(len(LADDER)), ids=[name for name, _ in LADDER])
def test_of_two_conventions_the_earlier_wins(write, step):
    """Each step stands with all that come after it, those written first so that order in the file does not decide."""
    source = NET + "".join(text for _, text in reversed(LADDER[step:]))
    assert load(write(source)).origin.symbol == LADDER[step][0]
