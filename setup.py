"""Copies what lies beside the package in a checkout into the package that a wheel holds: rules, templates, errors.md."""

import re
import shutil
import tomllib
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
DATA = ("rules", "reports")
ERRORS = Path("docs", "errors.md")
LEFT_OUT = ("samples", "__pycache__", "*.pyc", ".*")


def long_description() -> str:
    """README.md as a package page shows it: pictures and links that lead from there to the repository."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    repository = project["urls"]["Repository"]
    pages = f"{repository}/blob/main/"
    pictures = repository.replace("github.com", "raw.githubusercontent.com") + "/main/"
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"(!\[[^\]]*\]\()(?!\w+:|#|/)", rf"\1{pictures}", text)
    return re.sub(r"((?<!!)\[(?:[^\[\]]|!\[[^\]]*\]\([^)]*\))*\]\()(?!\w+:|#|/)", rf"\1{pages}", text)


class BuildWithData(build_py):
    """An editable install copies nothing: it finds all of it beside the package, as a checkout does."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for name in DATA:
            target = Path(self.build_lib) / "auditor" / name
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(ROOT / name, target, ignore=shutil.ignore_patterns(*LEFT_OUT))
        errors = Path(self.build_lib) / "auditor" / ERRORS
        errors.parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / ERRORS, errors)


setup(
    cmdclass={"build_py": BuildWithData},
    long_description=long_description(),
    long_description_content_type="text/markdown",
)
