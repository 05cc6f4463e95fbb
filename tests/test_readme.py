"""Every `sh` and `python` block of the documents is run, and the numbers in the README are those of the sample report."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from auditor.cli.parsers import parse
from tests.browser.sample import audited, rows_of, with_rows
from tests.support.thinned import thinned

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"(?m)^```(\w*)\n(.*?)^```$", re.DOTALL)
BUILDS = re.compile(r"(make|pip|python -m (pip|venv)|git clone)\b")


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
    return [line for line in lines if line.strip() and not BUILDS.match(line)]


def run(program: list[str], source: str, folder: Path) -> subprocess.CompletedProcess[str]:
    paths = [str(Path(sys.executable).parent), os.environ["PATH"]]
    environment = {
        **os.environ,
        "PATH": os.pathsep.join(paths),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "NO_COLOR": "1",
    }
    return subprocess.run(program, input=source, capture_output=True, text=True, cwd=folder, env=environment)


@pytest.mark.parametrize("document", thinned(WITH_CODE, len(WITH_CODE)))
def test_blocks_run(document, checkout):
    """Those of the README every time, and those in Python of one document follow each other in one process, with names of their own."""
    python = [text for language, text in blocks(document) if language == "python"]
    shell = ["\n".join(commands(text)) for language, text in blocks(document) if language == "sh"]
    for program, source in (
        (["bash", "-euo", "pipefail"], "\n".join(f"(\n{text}\n)" for text in shell if text)),
        ([sys.executable, "-"], f"for text in {python!r}:\n    exec(text, {{'__name__': '__main__'}})"),
    ):
        done = run(program, source, checkout)
        assert done.returncode == 0, f"{source}\n{done.stdout}\n{done.stderr}"


def test_yaml_recipes_call_the_command_line_as_it_is():
    found = re.findall(r"python -m auditor (.*?)(?: >> .*)?$", (ROOT / "docs/ci.md").read_text(), re.MULTILINE)
    assert len(found) > 4
    for words in (shlex.split(line.rstrip("\\")) for line in found):
        assert parse(words)


def test_readme_has_blocks_of_both_kinds_and_none_without_a_language():
    languages = [language for language, _ in blocks("README.md")]
    assert {"sh", "python"} <= set(languages)
    assert all(languages)


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


def test_samples_are_small():
    for path in (ROOT / "reports/samples").iterdir():
        assert path.stat().st_size < {".png": 300_000, ".html": 400_000}[path.suffix], path.name


# The figures of the README are those that the audit it names states today, to the two digits it gives.


@pytest.mark.slow
def test_the_readmes_figures_are_those_of_a_run() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert with_rows(readme, rows_of(audited())) == readme, "run `make samples`"
