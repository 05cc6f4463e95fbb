"""Runs the tests in fresh environments, on the oldest and the newest releases, and writes which releases passed.

    python -m benchmarks.versions [NAME ...] [--whole | --tests PATH ...] [--folder FOLDER] [--keep]
    python -m benchmarks.versions --page

For each environment: a virtual environment, the packages, the tests; then `results/versions.json`, docs/compatibility.md
and `auditor/tested.toml`. An environment with torch takes about 6 GB of disk space, and is removed after its tests.
`--page` only writes the two files again, from the results.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import xml.etree.ElementTree as xml
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "versions.json"
PAGE = ROOT / "docs" / "compatibility.md"
TESTED = ROOT / "auditor" / "tested.toml"
START, END = "<!-- versions -->\n", "<!-- end of versions -->"

SUBSET = (
    "tests/unit/capture",
    "tests/unit/loading",
    "tests/unit/numerics",
    "tests/features/generation",
    "tests/features/programs",
    "tests/unit/execution",
    "tests/unit/artefact",
    "tests/unit/isolation",
    "tests/any_model",
    "tests/emulation",
    "tests/features/rehearsal",
)
"""What runs without `--whole`: the tests of what depends on torch and on the libraries around it."""

TOOLS = {"ray", "ruff", "mypy"}
"""Packages of the extra `test` that none of these tests needs."""

LOWEST = ("transformers",)
"""Packages, besides the package's own dependencies, whose lower bound an environment with `lowest` has."""

FURTHER = ("diffusers", "scikit-learn", "huggingface_hub", "pillow", "hydra-core", "omegaconf")
"""Packages that tests use if they are installed."""

ALONE = ("torchvision", "timm", "axe-playwright-python")
"""Packages that are installed without what they ask for: they would bring another torch, or a browser."""

SHOWN = (
    *("torch", "numpy", "networkx", "pydantic", "safetensors", "transformers", "timm", "diffusers", "accelerate"),
    *("lightning", "torchao", "compressed-tensors", "onnx", "onnxscript", "onnxruntime"),
)
"""Packages whose versions the page shows."""


@dataclass(frozen=True)
class Environment:
    """One environment. pins: {package: version}. lowest: whether the package's dependencies have the oldest release that
    pyproject.toml allows, instead of the newest."""

    name: str
    python: str
    pins: Mapping[str, str] = field(default_factory=dict)
    lowest: bool = False


ENVIRONMENTS = (
    Environment("oldest", "3.11", {"torch": "2.11.0"}, lowest=True),
    Environment("previous", "3.12", {"torch": "2.14.1"}),
    Environment("newest", "3.13"),
)


@dataclass(frozen=True)
class Outcome:
    """What the tests of one environment printed. counts: {"passed" | "failed" | "skipped": tests}. failed: their names.
    tests: what ran; empty for all quick tests."""

    name: str
    python: str
    versions: Mapping[str, str]
    counts: Mapping[str, int]
    failed: Sequence[str]
    tests: Sequence[str]
    seconds: int


def requirements(environment: Environment) -> list[str]:
    """What pip installs, from pyproject.toml: for `numpy>=1.26`, the newest release, or with `lowest` `numpy==1.26.*`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    result = []
    for requirement in (*project["dependencies"], *project["optional-dependencies"]["test"]):
        name, bounds = _split(requirement)
        is_bounded = requirement in project["dependencies"] or name in LOWEST
        if name in TOOLS:
            continue
        if name in environment.pins:
            bounds = f"=={environment.pins[name]}"
        elif environment.lowest and is_bounded:
            bounds = _lowest(bounds)
        result.append(f"{name}{bounds}")
    return [*result, *FURTHER]


def _split(requirement: str) -> tuple[str, str]:
    """`torch>=2.11,<3` -> ("torch", ">=2.11,<3")."""
    match = re.match(r"[\w.-]*\w", requirement)
    assert match is not None, requirement
    return match[0], requirement[match.end() :]


def _lowest(bounds: str) -> str:
    """`>=1.26,<3` -> `==1.26.*`, and `>=5` -> `==5.0.*`; other bounds are returned unchanged."""
    match = re.match(r">=([\d.]+)", bounds)
    if match is None:
        return bounds
    version = match[1] if "." in match[1] else f"{match[1]}.0"
    return f"=={version}.*"


def interpreter(version: str) -> str | None:
    """The path of a Python of this version, such as "3.13"; None if there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [sys.executable, shutil.which(f"python{version}"), *map(str, pyenv.glob(f"{version}.*/bin/python"))]
    if uv := shutil.which("uv"):
        done = subprocess.run([uv, "python", "find", version], capture_output=True, text=True)
        candidates.append(done.stdout.strip())
    ask = "import sys; print('.'.join(map(str, sys.version_info[:2])))"
    for candidate in filter(None, candidates):
        done = subprocess.run([candidate, "-c", ask], capture_output=True, text=True)
        if done.stdout.strip() == version:
            return candidate
    return None


def install(environment: Environment, folder: Path) -> Path:
    """Make the virtual environment and install the packages; return its Python."""
    base = interpreter(environment.python)
    if base is None:
        sys.exit(f"{environment.name} needs Python {environment.python}, which this machine does not have")
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([base, "-m", "venv", str(folder)], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--only-binary=:all:"]
    subprocess.run([*pip, "--no-binary=antlr4-python3-runtime", *requirements(environment)], check=True)
    subprocess.run([*pip, "--no-deps", *ALONE], check=True)
    return python


def run_tests(environment: Environment, python: Path, tests: Sequence[str]) -> Outcome:
    """Run the tests with the environment's Python, in one process."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        command = [str(python), "-m", "pytest", "-q", "-m", "not slow and not browser", f"--junitxml={report}", *tests]
        # Tests run programs in other folders, which find this package by the path.
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
        began = time.monotonic()
        subprocess.run(command, cwd=ROOT, env=env, check=False)
        seconds = round(time.monotonic() - began)
        counts, failed = read_report(report)
    versions = installed(python)
    shown = {name: versions[name] for name in SHOWN if name in versions}
    return Outcome(environment.name, versions["python"], shown, counts, failed, tests, seconds)


def read_report(file: Path) -> tuple[dict[str, int], list[str]]:
    """The counts of a JUnit report, and the names of the tests that failed."""
    counts, failed = {"passed": 0, "failed": 0, "skipped": 0}, []
    for case in xml.parse(file).iter("testcase"):
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            counts["failed"] += 1
            failed.append(f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}")
        elif "skipped" in kinds:
            counts["skipped"] += 1
        else:
            counts["passed"] += 1
    return counts, failed


def installed(python: Path) -> dict[str, str]:
    """{package: version} of an environment, and "python"."""
    listed = subprocess.run([str(python), "-m", "pip", "list", "--format=json"], capture_output=True, check=True)
    versions = {row["name"].lower().replace("_", "-"): row["version"] for row in json.loads(listed.stdout)}
    ask = "import platform; print(platform.python_version())"
    version = subprocess.run([str(python), "-c", ask], capture_output=True, text=True, check=True)
    return {**versions, "python": version.stdout.strip()}


def read_results() -> dict[str, Outcome]:
    """The outcomes of the committed results, by the environment's name."""
    if not RESULTS.exists():
        return {}
    return {name: Outcome(**row) for name, row in json.loads(RESULTS.read_text(encoding="utf-8")).items()}


def table(outcomes: Mapping[str, Outcome]) -> Iterator[str]:
    """Markdown: an environment a column, with its versions and what came out."""
    shown = [outcomes[one.name] for one in ENVIRONMENTS if one.name in outcomes]
    yield "| | " + " | ".join(one.name for one in shown) + " |"
    yield "|---|" + "---|" * len(shown)
    yield _row("Python", [one.python for one in shown])
    for name in SHOWN:
        yield _row(name, [one.versions.get(name, "") for one in shown])
    for name in ("passed", "failed", "skipped"):
        yield _row(f"tests {name}", [f"{one.counts[name]:,}" for one in shown])
    for one in shown:
        which = ", ".join(f"`{path}`" for path in one.tests) or "all quick tests without a browser"
        yield ""
        yield f"Tests of *{one.name}*: {which}."
        yield from (f"- failed: `{name}`" for name in one.failed)


def _row(name: str, cells: Sequence[str]) -> str:
    return f"| {name} | " + " | ".join(cells) + " |"


def page(old: str, outcomes: Mapping[str, Outcome]) -> str:
    """docs/compatibility.md with its table written anew."""
    before, _, rest = old.partition(START)
    after = rest.partition(END)[2]
    return before + START + "\n".join(table(outcomes)) + "\n" + END + after


def tested(outcomes: Mapping[str, Outcome]) -> str:
    """The contents of `auditor/tested.toml`: the range of torch in the environments where no test failed, and of
    `make test`, which installs the release in constraints.txt."""
    versions = [one.versions["torch"].partition("+")[0] for one in outcomes.values() if not one.counts["failed"]]
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    versions += re.findall(r"(?m)^torch==([\d.]+)", constraints)
    versions.sort(key=lambda version: [int(part) for part in version.split(".")])
    first = "# The oldest and the newest release with which the tests passed, as `make versions` writes it."
    return f'{first}\ntorch = ["{versions[0]}", "{versions[-1]}"]\n'


def write_pages(outcomes: Mapping[str, Outcome]) -> None:
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), outcomes), encoding="utf-8")
    TESTED.write_text(tested(outcomes), encoding="utf-8")


def main(words: Sequence[str] | None = None) -> int:
    """Run the environments; the exit code is 1 if a test failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    names = [one.name for one in ENVIRONMENTS]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"environments to run, of {', '.join(names)}")
    parser.add_argument("--whole", action="store_true", help="run all quick tests, instead of the named directories")
    parser.add_argument("--tests", nargs="+", default=SUBSET, metavar="PATH", help="what runs instead of these")
    parser.add_argument("--folder", type=Path, help="where the environments are made; existing ones are used again")
    parser.add_argument("--keep", action="store_true", help="do not remove an environment after its tests")
    parser.add_argument("--page", action="store_true", help="only write the page again")
    asked: Any = parser.parse_args(words)
    if unknown := set(asked.names) - set(names):
        parser.error(f"unknown environments: {', '.join(sorted(unknown))}")
    outcomes = read_results()
    chosen = [] if asked.page else [one for one in ENVIRONMENTS if one.name in (asked.names or names)]
    above = asked.folder or Path(tempfile.mkdtemp(prefix="versions-"))
    for environment in chosen:
        folder = above / environment.name
        python = install(environment, folder)
        outcomes[environment.name] = run_tests(environment, python, () if asked.whole else tuple(asked.tests))
        if not asked.keep:
            shutil.rmtree(folder)
        rows = {name: asdict(outcome) for name, outcome in outcomes.items()}
        RESULTS.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    write_pages(outcomes)
    return int(any(outcomes[one.name].counts["failed"] for one in chosen))


if __name__ == "__main__":
    sys.exit(main())
