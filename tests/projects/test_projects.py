"""Where a model's code lies, how the user's Python finds it, and what it expects around it: the verdict is the same, and the
emitted file works."""

import ast
import os
import pickle
import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import auditor
from auditor.errors import AuditorError
from auditor.loading import load
from tests.projects.project import (
    BUILD,
    FP32,
    HEAD,
    HERE,
    INPUTS,
    MODEL,
    NET,
    PARTS,
    RANDOM,
    Case,
    audit_project,
    check_error,
    check_refused,
    check_verdict,
    first,
    package,
    run_again,
    run_command,
    run_here,
    state,
    using,
    write_project,
)
from tests.support.refusing import refused

CONSOLE = (str(Path(sys.executable).with_name("auditor")),)
REGISTRY = """
TABLE = {}

def register(cls):
    if cls.__name__ in TABLE:
        raise KeyError(f"{cls.__name__} is registered already")
    TABLE[cls.__name__] = cls
    return cls
"""
WRAPPED = BUILD.replace("return Net()", "from {module} import wrap; return wrap(Net())")
REGISTERED = HEAD + "from pkg.registry import TABLE, register\n@register" + NET
SCORE = """
from pkg.parts import Net

def score(model):
    assert isinstance(model, Net), type(model)
    return 1.0
"""
DISPATCH = """
from {module} import Net

def wrap(net):
    if not isinstance(net, Net):
        raise TypeError(f"a {{type(net).__module__}}.Net is no {module}.Net")
    return net
"""
LAZY = first("from pkg.parts import Net", HEAD + BUILD + INPUTS)
HYDRA = first('import importlib; Net = getattr(importlib.import_module("pkg.parts"), "Net")', HEAD + BUILD + INPUTS)
IN_FORWARD = NET.replace("        return self.down(", "        {statement}\n        return self.down(")
IMPORTING = IN_FORWARD.format(statement="import tools, importlib; importlib.import_module('pkg.parts')")
RESOURCE = """
import importlib.resources, json
WIDTH = json.loads((importlib.resources.files("pkg") / "net.json").read_text())["width"]
assert WIDTH == 32
"""
ANOTHER_PATH = """
import sys
from pathlib import Path
sys.path = [str(Path(__file__).parent / "lib"), *[path for path in sys.path if "project" not in path]]
"""
PICKLED = "def build():\n    return torch.load(Path(__file__).with_name('net.pt'), weights_only=False)\n\n"


def pickle_model(root: Path) -> None:
    code = "import torch; from pkg.model import make; torch.save(make(), 'pkg/net.pt')"
    run_command(sys.executable, "-c", code, cwd=root, env={"PYTHONDONTWRITEBYTECODE": "1"})


def in_src(files: dict[str, str]) -> dict[str, str]:
    return {f"src/{name}": text for name, text in files.items()}


RESOURCES = {**package(model=using(".parts") + RESOURCE), "pkg/net.json": '{"width": 32}'}
ABSOLUTE = package(model=using("pkg.parts"))
PACKAGED = package(__init__="from .model import build, get_inputs\n")
SPACE = {name: text for name, text in package().items() if "__init__" not in name}
NAMESPACE = {f"space/{name}": text for name, text in SPACE.items()}

CASES = {
    "relative imports, from the root": Case(package(), "pkg/model.py:build"),
    "relative imports, from inside": Case(package(), "model.py:build", "pkg"),
    "relative imports, from elsewhere": Case(package(), "../project/pkg/model.py:build", "../elsewhere"),
    "its own package by name, by the console script": Case(ABSOLUTE, "pkg/model.py:build", program=CONSOLE),
    "a module": Case(package(), "pkg.model:build"),
    "src": Case(in_src(package()), "pkg.model:build", env={"PYTHONPATH": "src"}),
    "a script beside src": Case(
        {**in_src(package()), "bin/run.py": using("pkg.parts")}, "run.py:build", "bin", env={"PYTHONPATH": "../src"}
    ),
    "a namespace package": Case(NAMESPACE, "space.pkg.model:build"),
    "a namespace package on PYTHONPATH, a file of it": Case(
        {**NAMESPACE, "space/pkg/model.py": ABSOLUTE["pkg/model.py"].replace("pkg.parts", "space.pkg.parts")},
        "space/pkg/model.py:build",
        env={"PYTHONPATH": "."},
    ),
    "the package's own file": Case(PACKAGED, "pkg/__init__.py:build"),
    "a package beside its folder": Case(PACKAGED, "pkg:build"),
    "imports inside the factory": Case(
        {**package(), "hubconf.py": LAZY}, "../project/hubconf.py:build", "../elsewhere"
    ),
    "imports by importlib": Case({**package(), "train.py": HYDRA}, "../project/train.py:build", "../elsewhere"),
    "imports inside forward": Case(
        {**package(), "tools.py": "", "model.py": HEAD + IMPORTING + BUILD + INPUTS},
        "../project/model.py:build",
        "../elsewhere",
    ),
    "relative imports inside forward": Case(
        package(tools="", parts=HEAD + IN_FORWARD.format(statement="from . import tools")), "pkg/model.py:build"
    ),
    "importlib.resources": Case(RESOURCES, "pkg/model.py:build"),
    "a registry that refuses doubles": Case(
        package(registry=REGISTRY, model=REGISTERED + BUILD + INPUTS, __init__="from . import model\n"),
        "pkg/model.py:build",
    ),
    "a registry that refuses doubles, in plain files": Case(
        {
            "registry.py": REGISTRY,
            "model.py": REGISTERED.replace("pkg.registry", "registry") + WRAPPED.format(module="heads") + INPUTS,
            "heads.py": DISPATCH.format(module="model"),
        }
    ),
    "isinstance dispatch": Case(
        package(model=PARTS + WRAPPED.format(module="pkg.heads") + INPUTS, heads=DISPATCH.format(module="pkg.model")),
        "model.py:build",
        "pkg",
    ),
    "a pickled model": Case(
        package(model=PARTS + "from pathlib import Path\n" + BUILD.replace("build", "make") + PICKLED + INPUTS),
        "pkg/model.py:build",
        prepare=pickle_model,
    ),
    "types.py": Case({"types.py": MODEL}, "project/types.py:build", ".."),
    "utils.py beside another": Case(
        {"utils.py": "raise ImportError\n", "net/utils.py": PARTS, "net/model.py": using("utils")}, "net/model.py:build"
    ),
    "sys.path is another list": Case(
        {"lib/parts.py": PARTS, "model.py": ANOTHER_PATH + using("parts")}, "project/model.py:build", ".."
    ),
    "sys.path.append('..')": Case(
        {**package(), "bin/run.py": "import sys\nsys.path.append('..')\n" + using("pkg.parts")}, "run.py:build", "bin"
    ),
}

# What a model's code expects around it, such as its working directory, its arguments, files and inputs of its own.

CONFIG = {"net.json": '{"width": 32}', "configs/net.yaml": "width: 32\n"}
NOISY = """
import signal, threading, warnings
from tqdm import tqdm
warnings.simplefilter("error")
signal.signal(signal.SIGTERM, lambda *_: None)
threading.Thread(target=lambda: None).start()
for number in tqdm(range(20_000)):
    print(number)
"""
BATCH = """
from typing import NamedTuple

from torch import Tensor

class Batch(NamedTuple):
    x: Tensor
"""
OF_BATCH = NET.replace("self.up(x)", "self.up(x.x)")
OF_FUNCTION = NET.replace("self.act(self.up(x))", "f(self.up(x))").replace("forward(self, x)", "forward(self, x, f)")
BATCHES = "def get_inputs():\n    torch.manual_seed(1)\n    return (Batch(torch.randn(8, 16)),)\n"
CLOSED = "def get_inputs():\n    torch.manual_seed(1)\n    return torch.randn(8, 16), lambda x: nn.functional.gelu(x)\n"


def save_inputs(root: Path) -> None:
    (root / "data").mkdir()
    torch.save(torch.randn(8, 16, generator=torch.Generator().manual_seed(1)), root / "data" / "x.pt")


def save_weights(root: Path) -> None:
    (root / "weights").mkdir()
    torch.save(state(), root / "weights" / "net.pt")


READING = f"""
import argparse, json, os, sys, time, yaml
from pathlib import Path
parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=32)
ARGS = parser.parse_args()
{PARTS.replace("32", "ARGS.width")}
def build():
    assert yaml.safe_load(open("configs/net.yaml")) == {{"width": 32}}
    assert json.load(open(os.path.join(os.path.dirname(sys.argv[0]), "net.json"))) == {{"width": 32}}
    assert json.loads(Path(__file__).with_name("net.json").read_text()) == {{"width": 32}}
    os.makedirs("runs/a", exist_ok=True)
    torch.manual_seed(0)
    net = Net()
    net.originates_here = time.time_ns()
    return net

def get_inputs():
    return torch.load("data/x.pt")
"""
MOVING = """
import json, os
os.chdir(os.path.dirname(os.path.abspath(__file__)))
"""
FOUND = MOVING + first("assert json.load(open('net.json')) == {'width': 32}; os.chdir('/')")

AROUND = {
    "files, arguments and the clock": Case({**CONFIG, "model.py": READING}, prepare=save_inputs),
    "os.chdir at import and in the factory": Case(
        {**CONFIG, "model.py": FOUND}, "../project/model.py:build", "../elsewhere"
    ),
    "inputs of the package's classes": Case(
        package(data=BATCH, parts=HEAD + OF_BATCH, model=HEAD + "from .data import Batch\nfrom .parts import Net\n" + BUILD + BATCHES),
        "pkg/model.py:build",
        call="sys.modules['pkg.data'].Batch(x)"
    ),
    "a folder that is a symlink, with spaces and other alphabets": Case(
        {"releases/v 2/parts.py": PARTS, "releases/v 2/modèle 模型.py": using("parts")},
        "mon projet é/modèle 模型.py:build",
        prepare=lambda root: (root / "mon projet é").symlink_to("releases/v 2")
    ),
    "a file that is a symlink": Case(
        {"lib/parts.py": PARTS, "lib/model.py": using("parts"), "bin/README": ""},
        "bin/model.py:build",
        prepare=lambda root: (root / "bin" / "model.py").symlink_to("../lib/model.py")
    ),
    "relative weights, an environment of nothing": Case(
        {"model.py": RANDOM},
        "../model.py:build",
        "tools",
        options=("--weights", "../weights/net.pt"),
        env=dict.fromkeys(os.environ),
        prepare=save_weights
    ),
    "prints, threads, handlers and warnings as errors": Case(
        {"model.py": NOISY + MODEL}, program=(sys.executable, "-O", "-W", "error", "-m", "auditor")
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", (CASES | AROUND).values(), ids=CASES | AROUND)
def test_verdict_and_emitted_file(case: Case, tmp_path: Path) -> None:
    audited = audit_project(tmp_path / "project", case)
    check_verdict(audited)
    check_error(audited)


SEEN = """import os, sys
    with open(os.environ["LOG"], "a") as log:
        paths = [os.path.abspath(path) for path in os.environ["PYTHONPATH"].split(os.pathsep)]
        print([os.getpid(), os.getcwd(), sys.argv, paths[0], Net.__module__, os.environ["MINE"]], file=log)"""


@pytest.fixture(scope="module")
def usual(tmp_path_factory):
    """A project of the usual layout, with a score and weights of its own; whoever builds its model says where that is."""
    folder = tmp_path_factory.mktemp("usual")
    model = using("pkg.parts").replace("    torch.manual_seed(0)\n", "")
    case = Case(
        {**in_src(package(model=first(SEEN, model))), "tools/score.py": SCORE},
        "src/pkg/model.py:build",
        options=("--evaluate", "tools/score.py:score", "--weights", "weights/net.pt"),
        env={"LOG": str(folder / "log"), "MINE": "kept", "PYTHONPATH": "src"},
        prepare=save_weights,
    )
    audited = audit_project(folder / "project", case)
    check_verdict(audited)
    return audited


def test_the_fresh_process_is_where_the_user_is(usual) -> None:
    lines = (usual.root.parent / "log").read_text().splitlines()
    processes, *seen = zip(*map(ast.literal_eval, lines), strict=True)
    assert len(set(processes)) > 1
    assert [len({str(value) for value in values}) for values in seen] == [1] * 5
    assert seen[0][0] == str(usual.cwd)
    assert seen[2][0] == str(usual.root / "src")


def test_a_project_that_has_moved(usual, tmp_path: Path) -> None:
    """To another folder, as to another machine."""
    moved = tmp_path / "another machine" / "home"
    name = usual.folder.name
    shutil.move(usual.root, moved)
    check_error(usual, moved / "audits" / name, moved)


def test_two_files_of_one_name_in_one_process(tmp_path: Path) -> None:
    """A class is what its pickles name, also once another file of that name was loaded."""
    write_project(tmp_path / "a", Case({"model.py": MODEL}))
    write_project(tmp_path / "b", Case({"model.py": MODEL.replace("nn.GELU()", "nn.SiLU()")}))
    first, second = (load(str(tmp_path / name / "model.py:build")).model for name in "ab")
    assert type(first) is not type(second)
    for model in (first, second):
        again = pickle.loads(pickle.dumps(model))
        assert type(again) is type(model)
        assert type(again.act) is type(model.act)


@pytest.mark.slow
def test_two_files_of_one_name_from_one_folder(tmp_path: Path) -> None:
    root = tmp_path / "project"
    for name in "ab":
        case = Case({"a/model.py": MODEL, "b/model.py": MODEL}, f"{name}/model.py:build")
        done = audit_project(root, case).done
        assert done.returncode == 0, done.stderr
    texts = [path.read_text() for path in root.glob("audits/**/patched_model.py")]
    assert sorted(name for name in "ab" for text in texts if f"/{name}/model.py'" in text) == ["a", "b"]


# The user's code fails, or gives another model, in the fresh process alone: an error with its place, and no verdict.


ONCE = "from pathlib import Path\n" + first("Path(__file__).with_name('made').mkdir()")
"""Its factory can be called once."""

PLACE = ("FileExistsError", f"model.py:{ONCE[: ONCE.index('.mkdir')].count(chr(10)) + 1}")
FILES = {
    "model.py": ONCE,
    "score.py": "def score(model):\n    return 1.0\n",
    "loss.py": "def loss(outputs):\n    return outputs.square().mean()\n",
    "good.py": MODEL,
}

OPTIONS = ("--measure-time", "--evaluate score.py:score", "--mode training --loss loss.py:loss", "--format json")


@pytest.mark.parametrize("options", ["", *(pytest.param(one, marks=pytest.mark.slow) for one in OPTIONS)])
def test_a_factory_that_raises_in_the_fresh_process(options: str, tmp_path: Path) -> None:
    program = (sys.executable, "-m", "auditor") if options else HERE
    audited = audit_project(tmp_path / "project", Case(FILES, options=tuple(options.split()), program=program))
    check_refused(audited.done, *PLACE)
    assert audited.files == []


@pytest.mark.slow
def test_inputs_that_do_not_pickle_hide_no_failure(tmp_path: Path) -> None:
    closed = ONCE.replace("torch.randn(8, 16)", "torch.randn(8, 16), lambda: None")
    text = closed.replace("forward(self, x)", "forward(self, x, f)")
    audited = audit_project(tmp_path / "project", Case({"model.py": text}))
    check_refused(audited.done, *PLACE)
    assert audited.files == []


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    case = Case(FILES, "good.py:build", program=HERE)
    audited = audit_project(tmp_path_factory.mktemp("good") / "project", case)
    check_verdict(audited)
    return audited


@pytest.mark.slow
def test_it_is_no_difference_from_a_baseline(good, tmp_path: Path) -> None:
    case = Case(FILES, options=("--baseline", str(good.folder)), program=HERE)
    check_refused(audit_project(tmp_path / "project", case).done, *PLACE)


def test_apply_imports_what_it_wrote(good, tmp_path: Path) -> None:
    """Once, and it leaves nothing where that fails."""
    root = tmp_path / "project"
    write_project(root, Case(FILES))
    check_refused(run_here("apply", str(good.folder), "model.py:build", cwd=root), *PLACE)
    assert not list(root.glob("**/patched_model.py"))


ANOTHER = "the factory returns a different model each time: seed the factory, or give --weights"
DRAWS = {"numpy": "int(numpy.random.default_rng().integers(2**31))", "the clock": "time.time_ns() % 2**31"}


@pytest.mark.parametrize("name", [pytest.param("numpy", marks=pytest.mark.slow), "the clock"])
def test_a_factory_that_makes_another_model_each_time(name: str, tmp_path: Path) -> None:
    model = "import numpy, time\n" + MODEL.replace("manual_seed(0)", f"manual_seed({DRAWS[name]})")
    audited = audit_project(tmp_path / "project", Case({"model.py": model}, program=HERE))
    assert ANOTHER in " ".join(audited.said.split())
    assert FP32 not in audited.said
    for plan in audited.root.glob("audits/**/plan.json"):
        assert all(made["verification"]["holds"] for made in audited.plan["plans"].values()), plan


@pytest.mark.slow
def test_a_file_that_hides_one_of_pythons_from_python_itself(tmp_path: Path) -> None:
    """`python -m` puts the working directory first: the audit goes on, or says in one line what is in the way."""
    audited = audit_project(tmp_path / "project", Case({"signal.py": MODEL}, "signal.py:build"))
    if audited.done.returncode == 0:
        check_verdict(audited)
    else:
        check_refused(audited.done, "circular import")


@pytest.mark.slow
def test_a_factory_that_draws_without_a_seed_has_a_verdict(tmp_path: Path) -> None:
    check_verdict(audit_project(tmp_path / "project", Case({"model.py": RANDOM})))


@pytest.mark.slow
def test_inputs_that_do_not_pickle(tmp_path: Path) -> None:
    """The artefact is imported and built in a fresh process, and what was not run there is said."""
    case = Case({"model.py": HEAD + OF_FUNCTION + BUILD + CLOSED}, call="x, gelu", program=HERE)
    audited = audit_project(tmp_path / "project", case)
    assert audited.done.returncode == 0, audited.said
    assert audited.plan["recommended"] == "cast_bf16"
    (said,) = [line for line in audited.plan["warnings"] if "fresh process" in line]
    assert "inputs" in said
    assert "fresh process" in (audited.folder / "report.html").read_text()
    check_error(audited)


def test_nothing_is_written_into_a_project(tmp_path: Path) -> None:
    """Its folders are read-only, which root does not heed."""

    def lock(root: Path) -> None:
        (root / "pkg").chmod(0o555)
        root.chmod(0o555)

    files = package()
    case = Case(files, "project/pkg/model.py:build", "..", options=("--out", "out"), prepare=lock, program=HERE)
    audited = audit_project(tmp_path / "project", case)
    check_verdict(audited)
    written = {path.relative_to(audited.root).as_posix() for path in audited.root.rglob("*") if not path.is_dir()}
    assert written == set(files)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The model in a file of its own, audited; its weights come from a file."""
    case = Case({"model.py": RANDOM}, options=("--weights", "weights/net.pt"), prepare=save_weights, program=HERE)
    audited = audit_project(tmp_path_factory.mktemp("plain") / "project", case)
    check_verdict(audited)
    return audited


@pytest.mark.slow
def test_a_file_of_that_name_in_another_project(plain, tmp_path: Path) -> None:
    """It is refused, or taken with a warning; either names it."""
    other = tmp_path / "other"
    write_project(other, Case({"model.py": MODEL.replace("GELU", "SiLU")}))
    save_weights(other)
    shutil.copytree(plain.folder, other / "audits" / "model-build")
    done = run_again(plain, other / "audits" / "model-build", other)
    named = [line for line in done.stderr.splitlines() if str(other / "model.py") in line]
    assert any("audit" in line for line in named), done.stderr


@pytest.mark.slow
def test_paths_in_pyproject_count_from_its_folder(plain, tmp_path: Path) -> None:
    root = tmp_path / "project"
    table = '[tool.auditor]\nweights = "weights/net.pt"\ninputs = "data.py:batch"\nout = "out"\nbaseline = "known"\n'
    data = HEAD + INPUTS.replace("get_inputs", "batch")
    files = {"pyproject.toml": table, "data.py": data, "net/model.py": RANDOM.replace("get_inputs", "unused")}
    shutil.copytree(plain.folder, root / "known")
    audited = audit_project(root, Case(files, cwd="net", prepare=save_weights))
    assert audited.done.returncode == 0, audited.said
    assert "Baseline" in audited.done.stdout
    assert [path.name for path in audited.cwd.iterdir()] == ["model.py"]
    check_error(audited, root / "out", root / "net")


@pytest.mark.parametrize(
    ("context", "words"), [(torch.autocast("cpu", torch.bfloat16), "autocast"), (torch.device("meta"), "meta")]
)
def test_an_audit_inside_a_mode_of_torch_says_so(context, words: str) -> None:
    with torch.device("cpu"):
        model, x = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)), torch.randn(8, 16)
    with context, refused(AuditorError, "bad-surroundings", words):
        auditor.audit(model, x, formats="bf16", strategies="cast", quick=True)
