"""Every `sh` and `python` block of the documents is run, what the README's command answers and writes is what it should
be, and the numbers in the README are those of the sample report. `bash` and `py` mark blocks that need more than a checkout has."""

import json
import os
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from auditor.cli import parse
from tests.browser.sample import audited, rows_of, with_rows
from tests.files.test_strangers import run as run_here
from tests.support.thinned import thinned

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"(?m)^```(\w*)\n(.*?)^```$", re.DOTALL)


def blocks(document: str) -> list[tuple[str, str]]:
    """(language, text) of every fenced block."""
    return BLOCK.findall((ROOT / document).read_text(encoding="utf-8"))


DOCUMENTS = ["README.md", *(str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("docs/*.md")))]
WITH_CODE = [name for name in DOCUMENTS if any(language in ("sh", "python") for language, _ in blocks(name))]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A directory that looks like the checkout to what reads, and keeps what is written."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("examples", "docs", "rules"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def commands(text: str) -> list[str]:
    """The lines of a block that do more than build or install; a backslash joins lines."""
    lines = text.replace("\\\n", " ").splitlines()
    return [
        line for line in lines if line.strip() and not re.match(r"(make|pip|python -m (pip|venv)|git clone)\b", line)
    ]


def run(program: list[str], source: str, folder: Path) -> subprocess.CompletedProcess[str]:
    paths = [str(Path(sys.executable).parent), os.environ["PATH"]]
    environment = {
        **os.environ,
        "PATH": os.pathsep.join(paths),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "NO_COLOR": "1",
        "COLUMNS": "80",
    }
    return subprocess.run(program, input=source, capture_output=True, text=True, cwd=folder, env=environment)


@cache
def run_shell(document: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """All `sh` blocks of a document, each in a shell of its own."""
    shell = ["\n".join(commands(text)) for language, text in blocks(document) if language == "sh"]
    done = run(["bash", "-euo", "pipefail"], "\n".join(f"(\n{text}\n)" for text in shell if text), folder)
    assert done.returncode == 0, f"{shell}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.mark.parametrize("document", thinned(WITH_CODE, len(WITH_CODE)))
def test_blocks_run(document, checkout):
    """Those of the README every time, and those in Python of one document follow each other in one process, with names of their own."""
    run_shell(document, checkout)
    python = [text for language, text in blocks(document) if language == "python"]
    source = f"for text in {python!r}:\n    exec(text, {{'__name__': '__main__'}})"
    done = run([sys.executable, "-"], source, checkout)
    assert done.returncode == 0, f"{source}\n{done.stdout}\n{done.stderr}"


# The README's command as a user runs it: files, streams and the verified plan.

EXAMPLES = sorted(path.stem for path in ROOT.glob("examples/[0-9]*.py"))
COMMAND = next(text.strip() for language, text in blocks("README.md") if language == "sh")
FIRST = Path(COMMAND.split()[-1]).stem
FILES = {"report.html", "plan.json", "measurements.json", "patched_model.py", "findings.sarif"}
PLANS = {"autocast_fp16", "autocast_bf16", "cast_fp16", "cast_bf16"}


@pytest.fixture(scope="module")
def readme(checkout):
    """How the README's commands ended."""
    return run_shell("README.md", checkout)


@pytest.fixture(scope="module")
def folder(readme, checkout):
    """What its one audit wrote."""
    return checkout / "audits" / FIRST


def check_plan(folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} == FILES
    plan, measured = (json.loads((folder / name).read_text()) for name in ("plan.json", "measurements.json"))
    assert plan["format_version"] == measured["format_version"] == 1
    assert set(plan["plans"]) == PLANS
    assert set(plan["baselines"]) == PLANS
    assert plan["recommended"] in PLANS
    chosen = plan["plans"][plan["recommended"]]
    assert chosen["verification"]["holds"] is True
    assert chosen["verification"]["measured_error"] <= plan["max_error"]
    verdicts = {one["verdict"] for node in measured["nodes"] for one in node["verdicts"].values()}
    assert verdicts <= {"safe", "sensitive", "unsafe", "untested"}
    assert "safe" in verdicts


def test_the_audit_writes_its_files_where_it_says_and_its_plan_is_verified(folder):
    check_plan(folder)


def test_summary_fits_100_columns_and_progress_is_on_stderr(readme):
    assert readme.stdout.strip()
    whole = re.compile(r"\S+:\d+:\d+ |Files ")  # a finding's first line and paths, to be clicked
    assert all(len(line) <= 100 for line in readme.stdout.splitlines() if not whole.match(line))
    assert "\x1b" not in readme.stdout
    stages = [line.partition(":")[0] for line in readme.stderr.splitlines()]
    assert stages[0] == "load"
    assert "write" in stages
    assert len(stages) >= 5
    assert "load: " not in readme.stdout


@pytest.mark.slow
def test_same_input_gives_the_same_plan(folder, here):
    """In the other process sets have another order than in this one; its command names the file by another path."""
    assert run_here(str(ROOT / "examples" / f"{FIRST}.py"))[0] == 0
    one, other = folder, here / "audits" / FIRST
    measured = [(base / "measurements.json").read_bytes() for base in (one, other)]
    assert len({re.sub(rb'"command": .*', b"", each) for each in measured}) == 1
    plans = [(base / "plan.json").read_text() for base in (one, other)]
    assert plans[0] == plans[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in EXAMPLES if name != FIRST])
def test_every_example(name, tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    done = run(["bash"], f"python -m auditor examples/{name}.py --fail-on never", tmp_path)
    assert done.returncode == 0, done.stderr
    check_plan(tmp_path / "audits" / name)


def test_yaml_recipes_call_the_command_line_as_it_is():
    found = re.findall(r"python -m auditor (.*?)(?: >> .*)?$", (ROOT / "docs/ci.md").read_text(), re.MULTILINE)
    assert len(found) > 4
    for words in (shlex.split(line.rstrip("\\")) for line in found):
        assert parse(words)


def test_make_targets_exist():
    targets = set(re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8")))
    named = {
        target
        for name in DOCUMENTS
        for target in re.findall(r"(?m)(?:^|`)make ([a-z-]+)", (ROOT / name).read_text(encoding="utf-8"))
    }
    assert {"demo", "test"} <= named <= targets


def test_links_lead_somewhere():
    for name in DOCUMENTS:
        text = (ROOT / name).read_text(encoding="utf-8")
        for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
            if "://" not in link:
                assert (ROOT / name).parent.joinpath(link).exists(), f"{name}: {link}"


def test_numbers_are_those_of_the_sample_report():
    report = (ROOT / "reports/samples/03_handwritten_transformer.html").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = rows_of(report)
    assert len(rows) == 4
    assert sum("(recommended)" in row for row in rows) == 1
    assert with_rows(readme, rows) == readme, "run `make samples`"


def test_sample_names_no_folder_of_the_machine_it_was_made_on():
    sample = (ROOT / "reports/samples/03_handwritten_transformer.html").read_text(encoding="utf-8")
    assert "03_handwritten_transformer.py:78" in sample
    assert not re.findall(r"(?:/tmp|/home|/root|/work|/Users|/var)/\S*", sample)


# The figures of the README are those that the audit it names states today, to the two digits it gives.


@pytest.mark.slow
def test_the_readmes_figures_are_those_of_a_run() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert with_rows(readme, rows_of(audited())) == readme, "run `make samples`"
