"""Folders as people have them: where the model's file lies, what it imports, and by which names it can be given.

As a program: a server that has imported torch, and forks a process for each job, see `serve`.
"""

import contextlib
import io
import json
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.projects.project import HEAD, MODEL, PARTS, using

STEP = """
def step(x):
    loss = net(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss

net = build()
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
"""
WHOLE = MODEL + STEP
OTHER = WHOLE.replace("nn.GELU()", "nn.SiLU()")


def of(module: str) -> str:
    """A file that takes the class from another."""
    return using(module) + STEP


def guarded(text: str) -> str:
    return text + 'if __name__ == "__main__":\n    raise SystemExit("trains")\n'


INIT = ""
BY_FILE = "import sys\nfrom pathlib import Path\nsys.path.{how}(str(Path(__file__).resolve().parents[1]{more}))\n"
BY_CWD = "import os, sys\nsys.path.insert(0, os.getcwd())\n"
EXPORT = "#!/usr/bin/env python\n# coding: utf-8\n\n# In[1]:\n\n" + WHOLE + "\n# In[ ]:\n"
YOLO = """
import os, sys
from pathlib import Path
FILE = Path(__file__).resolve()
ROOT = FILE.parents[1]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))
ROOT = Path(os.path.relpath(ROOT, Path.cwd()))
"""
OPTIONS = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=32)
ARGS = parser.parse_args()
"""
ALL_MODULES = """
import importlib, pkgutil
for found in pkgutil.iter_modules(__path__):
    if found.name != "wide":
        importlib.import_module(f"{__name__}.{found.name}")
from .net import Net
"""
LAZY = HEAD + "dependencies = ['torch']\n" + using("pkg.parts").partition("\n")[2]


@dataclass(frozen=True)
class Layout:
    """files: texts by their paths. entries: (working directory, TARGET without a symbol), all of which name the model.
    script: what a user's own program imports, and from which directory it runs; "" if Python itself cannot. env: further
    entries of the environment. act: the activation of the right model."""

    files: Mapping[str, str]
    entries: tuple[tuple[str, str], ...]
    script: tuple[str, str] = ("", ".")
    env: Mapping[str, str] = field(default_factory=dict)
    act: str = "GELU"
    prepare: Callable[[Path], object] = lambda root: None


def here(*targets: str, cwd: str = ".") -> tuple[tuple[str, str], ...]:
    return tuple((cwd, target) for target in targets)


FOONET = {"foonet/foonet/__init__.py": INIT, "foonet/foonet/parts.py": PARTS}
PKG = {"pkg/__init__.py": INIT, "pkg/parts.py": PARTS}
SRC = {f"src/{name}": text for name, text in PKG.items()}

LAYOUTS: dict[str, Layout] = {
    "a clone named as its package, a script at its root": Layout(
        {**FOONET, "foonet/audit_me.py": of("foonet.parts")},
        (
            *here("audit_me.py", "audit_me", cwd="foonet"),
            *here("foonet/audit_me.py"),
            *here("../audit_me.py", cwd="foonet/foonet"),
        ),
        ("audit_me", "foonet"),
    ),
    "a clone named as its package, a file of the package": Layout(
        {**FOONET, "foonet/foonet/net.py": of("foonet.parts")},
        (
            *here("foonet/net.py", "foonet.net", cwd="foonet"),
            *here("foonet/foonet/net.py"),
            *here("net.py", cwd="foonet/foonet"),
        ),
        ("foonet.net", "foonet"),
    ),
    "folder, package and module of one name": Layout(
        {**FOONET, "foonet/foonet/foonet.py": of(".parts")},
        (
            *here("foonet/foonet.py", "foonet.foonet", cwd="foonet"),
            *here("foonet/foonet/foonet.py"),
            *here("foonet.py", cwd="foonet/foonet"),
        ),
        ("foonet.foonet", "foonet"),
    ),
    "a clone that is a package itself, with a package of its name": Layout(
        {**FOONET, "foonet/__init__.py": INIT, "foonet/foonet/net.py": of(".parts")},
        (*here("foonet/net.py", "foonet.net", cwd="foonet"), *here("foonet/foonet/net.py")),
        ("foonet.net", "foonet"),
    ),
    "a clone named as its package in src": Layout(
        {
            "foonet/src/foonet/__init__.py": INIT,
            "foonet/src/foonet/parts.py": PARTS,
            "foonet/src/foonet/net.py": of("foonet.parts"),
        },
        (
            *here("src/foonet/net.py", cwd="foonet"),
            *here("foonet/src/foonet/net.py"),
            *here("foonet.net", cwd="foonet/src"),
        ),
        ("foonet.net", "foonet/src"),
    ),
    "a clone named as its module": Layout(
        {"foonet/foonet.py": PARTS, "foonet/train.py": of("foonet")},
        (*here("train.py", "train", cwd="foonet"), *here("foonet/train.py")),
        ("train", "foonet"),
    ),
    "src, relative imports": Layout(
        {**SRC, "src/pkg/net.py": of(".parts")},
        (*here("src/pkg/net.py"), *here("pkg.net", "pkg/net.py", cwd="src"), *here("net.py", cwd="src/pkg")),
        ("pkg.net", "src"),
    ),
    "src, its own package by name": Layout(
        {**SRC, "src/pkg/net.py": of("pkg.parts")},
        (*here("src/pkg/net.py"), *here("net.py", cwd="src/pkg")),
        ("pkg.net", "src"),
    ),
    "src on PYTHONPATH, a script beside it": Layout(
        {**SRC, "tools/run.py": of("pkg.parts")},
        here("tools/run.py", "tools.run"),
        ("tools.run", "."),
        env={"PYTHONPATH": "src"},
    ),
    "a script that adds src": Layout(
        {**SRC, "run.py": "import sys\nsys.path.insert(0, 'src')\n" + of("pkg.parts")},
        here("run.py", "run"),
        ("run", "."),
    ),
    "a script that adds src beside its folder": Layout(
        {**SRC, "tools/run.py": BY_FILE.format(how="append", more=" / 'src'") + of("pkg.parts")},
        (*here("tools/run.py"), *here("run.py", cwd="tools")),
        ("run", "tools"),
    ),
    "a namespace package": Layout(
        {"space/pkg/parts.py": PARTS, "space/pkg/net.py": of("space.pkg.parts")},
        (*here("space/pkg/net.py", "space.pkg.net"), *here("net.py", cwd="space/pkg")),
        ("space.pkg.net", "."),
    ),
    "a namespace package, relative imports": Layout(
        {"space/pkg/parts.py": PARTS, "space/pkg/net.py": of(".parts")},
        (*here("space/pkg/net.py", "space.pkg.net"), *here("net.py", cwd="space/pkg")),
        ("space.pkg.net", "."),
    ),
    "a folder without __init__ in a package, by name": Layout(
        {**PKG, "pkg/nets/net.py": of("pkg.parts")},
        (*here("pkg/nets/net.py", "pkg.nets.net"), *here("net.py", cwd="pkg/nets")),
        ("pkg.nets.net", "."),
    ),
    "a folder without __init__ in a package, two levels up": Layout(
        {**PKG, "pkg/nets/net.py": of("..parts")},
        (*here("pkg/nets/net.py", "pkg.nets.net"), *here("net.py", cwd="pkg/nets")),
        ("pkg.nets.net", "."),
    ),
    "a package in a namespace folder": Layout(
        {f"org/{name}": text for name, text in {**PKG, "pkg/net.py": of("org.pkg.parts")}.items()},
        (*here("org/pkg/net.py", "org.pkg.net"), *here("net.py", cwd="org/pkg")),
        ("org.pkg.net", "."),
    ),
    "scripts that add the folder above": Layout(
        {**PKG, "scripts/run.py": BY_FILE.format(how="append", more="") + of("pkg.parts")},
        (*here("scripts/run.py", "scripts.run"), *here("run.py", cwd="scripts")),
        ("run", "scripts"),
    ),
    "scripts that add '..'": Layout(
        {**PKG, "scripts/run.py": "import sys\nsys.path.append('..')\n" + of("pkg.parts")},
        here("run.py", cwd="scripts"),
        ("run", "scripts"),
    ),
    "scripts that add the working directory": Layout(
        {**PKG, "scripts/run.py": BY_CWD + of("pkg.parts")}, here("scripts/run.py", "scripts.run"), ("scripts.run", ".")
    ),
    "scripts that are run by python -m": Layout(
        {**PKG, "scripts/run.py": of("pkg.parts")}, here("scripts/run.py", "scripts.run"), ("scripts.run", ".")
    ),
    "scripts that are a package": Layout(
        {
            **PKG,
            "scripts/__init__.py": INIT,
            "scripts/common.py": "",
            "scripts/run.py": "from . import common\n" + of("pkg.parts"),
        },
        here("scripts/run.py", "scripts.run"),
        ("scripts.run", "."),
    ),
    "a notebook's export": Layout({"notebooks/01-train.py": EXPORT}, here("notebooks/01-train.py")),
    "a notebook's export, beside a package": Layout(
        {**PKG, "notebooks/Untitled (1).py": "import sys\nsys.path.insert(0, '..')\n" + of("pkg.parts")},
        here("Untitled (1).py", cwd="notebooks"),
    ),
    "a file with dashes": Layout({"my-model.py": WHOLE}, here("my-model.py", "./my-model.py")),
    "a file with dots": Layout({"model.v2.py": WHOLE, "model.py": OTHER}, here("model.v2.py")),
    "a file with spaces": Layout({"my model.py": WHOLE}, here("my model.py")),
    "a folder with dots": Layout(
        {"net-1.0/parts.py": PARTS, "net-1.0/run.py": of("parts")},
        (*here("net-1.0/run.py"), *here("run.py", "run", cwd="net-1.0")),
        ("run", "net-1.0"),
    ),
    "a package in a folder with dots and spaces": Layout(
        {f"my net v1.0/{name}": text for name, text in {**PKG, "pkg/net.py": of(".parts")}.items()},
        (*here("my net v1.0/pkg/net.py"), *here("pkg/net.py", "pkg.net", cwd="my net v1.0")),
        ("pkg.net", "my net v1.0"),
    ),
    "a clone with dashes that is a package, relative imports": Layout(
        {"my-net/__init__.py": INIT, "my-net/parts.py": PARTS, "my-net/net.py": of(".parts")},
        (*here("my-net/net.py"), *here("net.py", cwd="my-net")),
    ),
    "a clone with dots that is a package, relative imports": Layout(
        {"net-1.0/__init__.py": INIT, "net-1.0/parts.py": PARTS, "net-1.0/net.py": of(".parts")},
        (*here("net-1.0/net.py"), *here("net.py", cwd="net-1.0")),
    ),
    "a clone with dots, a package in it, relative imports": Layout(
        {
            f"net-main.2/{name}": text
            for name, text in {**PKG, "pkg/nets/__init__.py": INIT, "pkg/nets/net.py": of("..parts")}.items()
        },
        (*here("net-main.2/pkg/nets/net.py"), *here("pkg.nets.net", cwd="net-main.2")),
        ("pkg.nets.net", "net-main.2"),
    ),
    "__main__ of a package": Layout(
        {**PKG, "pkg/__main__.py": guarded(of(".parts"))},
        (*here("pkg/__main__.py", "pkg.__main__"), *here("__main__.py", cwd="pkg")),
        ("pkg.__main__", "."),
    ),
    "a script with a main block": Layout({"train.py": guarded(WHOLE)}, here("train.py", "train"), ("train", ".")),
    "relative imports of a sister package": Layout(
        {
            **PKG,
            "pkg/layers/__init__.py": "from .blocks import Net\n",
            "pkg/layers/blocks.py": PARTS,
            "pkg/nets/__init__.py": INIT,
            "pkg/nets/net.py": of("..layers"),
        },
        (*here("pkg/nets/net.py", "pkg.nets.net"), *here("net.py", cwd="pkg/nets"), *here("nets/net.py", cwd="pkg")),
        ("pkg.nets.net", "."),
    ),
    "tests beside the package": Layout(
        {**PKG, "tests/conftest.py": "", "tests/helpers.py": of("pkg.parts")},
        (*here("tests/helpers.py", "tests.helpers"),),
        ("tests.helpers", "."),
    ),
    "tests inside the package": Layout(
        {**PKG, "pkg/tests/__init__.py": INIT, "pkg/tests/test_net.py": of("..parts")},
        (*here("pkg/tests/test_net.py", "pkg.tests.test_net"), *here("test_net.py", cwd="pkg/tests")),
        ("pkg.tests.test_net", "."),
    ),
    "two packages of one name": Layout(
        {
            "a/pkg/__init__.py": INIT,
            "a/pkg/parts.py": PARTS.replace("nn.GELU()", "nn.SiLU()"),
            "a/run.py": of("pkg.parts"),
            "b/pkg/__init__.py": INIT,
            "b/pkg/parts.py": PARTS,
            "b/run.py": of("pkg.parts"),
        },
        (*here("b/run.py"), *here("run.py", "run", cwd="b"), *here("../b/run.py", cwd="a")),
        ("run", "b"),
    ),
    "two modules of one name": Layout(
        {"utils.py": "raise ImportError\n", "net/utils.py": PARTS, "net/model.py": of("utils")},
        (*here("net/model.py"), *here("model.py", "model", cwd="net")),
        ("model", "net"),
    ),
    "a package and a module of one name": Layout(
        {"net/__init__.py": INIT, "net/parts.py": PARTS, "net.py": OTHER, "run.py": of("net.parts")},
        here("run.py", "run"),
        ("run", "."),
    ),
    "a file with a name of Python's": Layout({"types.py": WHOLE}, here("types.py", "./types.py")),
    "a package with a name of Python's": Layout(
        {"code/__init__.py": INIT, "code/parts.py": PARTS, "code/net.py": of(".parts")},
        (*here("code/net.py"), *here("net.py", cwd="code")),
    ),
    "a folder with a name of Python's": Layout(
        {"code/parts.py": PARTS, "code/net.py": of("parts")},
        (*here("code/net.py"), *here("net.py", "net", cwd="code")),
        ("net", "code"),
    ),
    "a package called test": Layout(
        {"test/__init__.py": INIT, "test/parts.py": PARTS, "test/net.py": of("test.parts")},
        (*here("test/net.py", "test.net"), *here("net.py", cwd="test")),
        ("test.net", "."),
    ),
    "a clone with the name of an installed package": Layout(
        {"numpy/parts.py": PARTS, "numpy/net.py": of("parts")},
        (*here("numpy/net.py"), *here("net.py", "net", cwd="numpy")),
        ("net", "numpy"),
    ),
    "hubconf": Layout({**PKG, "hubconf.py": LAZY + STEP}, here("hubconf.py", "hubconf"), ("hubconf", ".")),
    "a package in a monorepo": Layout(
        {f"packages/net/{name}": text for name, text in {**PKG, "pkg/net.py": of("pkg.parts")}.items()},
        (*here("packages/net/pkg/net.py"), *here("pkg.net", "pkg/net.py", cwd="packages/net")),
        ("pkg.net", "packages/net"),
    ),
    "models, models.models": Layout(
        {
            "models/__init__.py": "from .models import *\n",
            "models/models.py": PARTS,
            "models/net.py": of("models.models"),
            "train.py": of("models"),
        },
        (*here("train.py", "train", "models/net.py", "models.net"), *here("net.py", cwd="models")),
        ("train", "."),
    ),
    "a name of the package that hides its module": Layout(
        {"pkg/__init__.py": "from .net import net\n", "pkg/parts.py": PARTS, "pkg/net.py": of(".parts")},
        (*here("pkg/net.py", "pkg.net"), *here("net.py", cwd="pkg")),
        ("pkg.net", "."),
    ),
    "folders without __init__, and a root added by the file": Layout(
        {"models/common.py": PARTS, "models/yolo.py": YOLO + of("models.common")},
        (*here("models/yolo.py", "models.yolo"), *here("yolo.py", cwd="models")),
        ("models.yolo", "."),
    ),
    "core and utils without __init__": Layout(
        {
            "core/parts.py": "from utils.tools import *\n" + PARTS,
            "utils/tools.py": "WIDTH = 32\n",
            "core/net.py": of("core.parts"),
        },
        (*here("core/net.py", "core.net"), *here("net.py", cwd="core")),
        ("core.net", "."),
    ),
    "a file with dots in a package": Layout(
        {**PKG, "pkg/net.v2.py": of(".parts")}, (*here("pkg/net.v2.py"), *here("net.v2.py", cwd="pkg"))
    ),
    "arguments that another file parses on import": Layout(
        {
            "opts.py": OPTIONS,
            "models/net.py": "from opts import ARGS\nassert ARGS.width == 32\n" + PARTS,
            "train.py": "import opts\n" + of("models.net"),
        },
        (*here("train.py", "train"), *here("../train.py", cwd="models")),
        ("train", "."),
    ),
    "a registry that pkgutil fills": Layout(
        {
            "zoo/__init__.py": ALL_MODULES,
            "zoo/registry.py": "TABLE = {}\n",
            "zoo/net.py": PARTS + "from zoo.registry import TABLE\nassert not TABLE\nTABLE['net'] = Net\n",
            "tools/run.py": BY_FILE.format(how="append", more="") + of("zoo"),
            "zoo/wide.py": of(".net"),
        },
        (*here("tools/run.py"), *here("run.py", cwd="tools"), *here("zoo/wide.py", "zoo.wide")),
        ("zoo.wide", "."),
    ),
    "a package called src, a class in its __init__": Layout(
        {
            "src/__init__.py": "",
            "src/nets/__init__.py": PARTS,
            "src/nets/run.py": of("src.nets"),
            "setup.py": "from setuptools import setup\nsetup(name='nets', packages=['src'])\n",
        },
        (*here("src/nets/run.py", "src.nets.run"), *here("nets/run.py", cwd="src"), *here("run.py", cwd="src/nets")),
        ("src.nets.run", "."),
    ),
    "a package that is a symlink": Layout(
        {f"releases/v2/{name}": text for name, text in {**PKG, "pkg/net.py": of("pkg.parts")}.items()},
        (*here("pkg/net.py", "pkg.net"), *here("net.py", cwd="pkg")),
        ("pkg.net", "."),
        prepare=lambda root: (root / "pkg").symlink_to("releases/v2/pkg"),
    ),
}


def write(layout: Layout, root: Path) -> None:
    """The files of a layout below `root`."""
    for name, text in layout.files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    layout.prepare(root)


# Jobs of the server, each in a process of its own.


def resolve(target: str) -> dict[str, Any]:
    """What a TARGET comes to: the class of its activation, and the module and file of its model's origin."""
    from auditor.loading import load

    subject = load(f"{target}:build")
    again = load(f"{target}:build", inputs=f"{target}:get_inputs" if target.endswith(".py") else None)
    assert type(subject.model) is type(again.model)
    assert subject.origin is not None
    return {
        "act": type(subject.model.act).__name__,
        "module": subject.origin.module,
        "file": subject.origin.path,
        "inputs": again.inputs_source,
    }


def command(*words: str) -> dict[str, Any]:
    """The exit code of a command, and what it printed."""
    from auditor.cli import main

    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = main(words)
    return {"code": code, "said": output.getvalue()}


def build(folder: str) -> dict[str, Any]:
    """What `patched_model.build()` gives, in a process without the auditor."""
    sys.modules["auditor"] = None  # type: ignore[assignment]
    sys.path.insert(0, folder)
    import patched_model
    import torch

    torch.manual_seed(1)
    model = patched_model.build()
    return {"act": type(model.act).__name__, "error": float((model(torch.randn(8, 16)).float()).isnan().sum())}


def script(text: str) -> dict[str, Any]:
    """What a user's own program prints."""
    Path("use_it.py").write_text(text)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        runpy.run_path("use_it.py", run_name="__main__")
    return {"said": output.getvalue()}


JOBS: dict[str, Callable[..., dict[str, Any]]] = {job.__name__: job for job in (resolve, command, build, script)}


def serve() -> None:
    """For each line of standard input, `[job, arguments, working directory, environment]`, fork a process that does it;
    write its answer as a line of JSON."""
    import torch

    from auditor.verify import artefact
    from tests.support.template import forking

    torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # which imports what every file of LAYOUTS needs
    before = [path for path in sys.path if path not in ("", str(Path.cwd()))]
    with forking():
        artefact.Process([""]).end()  # starts the process of which all are forked
        for line in sys.stdin:
            job, arguments, cwd, env = json.loads(line)
            read, written = os.pipe()
            if (child := os.fork()) == 0:
                os.close(read)
                os.chdir(cwd)
                extra = [str(Path(cwd, path)) for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
                os.environ.update(env)
                sys.path[:] = [cwd, *extra, *before]
                words = [] if job == "script" else arguments  # a program of the user's is started without words
                sys.argv[:] = ["auditor", *words]
                try:
                    answer = JOBS[job](*arguments)
                except BaseException:
                    answer = {"raised": traceback.format_exc()}
                with os.fdopen(written, "w") as pipe:
                    json.dump(answer, pipe)
                os._exit(0)
            os.close(written)
            with os.fdopen(read) as pipe:
                print(pipe.read(), flush=True)
            os.waitpid(child, 0)


def entries() -> Iterator[tuple[str, str, str]]:
    """(layout, working directory, TARGET) of all layouts."""
    for name, layout in LAYOUTS.items():
        for cwd, target in layout.entries:
            yield name, cwd, target


if __name__ == "__main__":
    serve()
