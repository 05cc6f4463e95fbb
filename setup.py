"""Copies what lies beside the package in a checkout into the package that a wheel holds: rules, templates, errors.md."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
DATA = ("rules", "reports")
ERRORS = Path("docs", "errors.md")
LEFT_OUT = ("samples", "__pycache__", "*.pyc", ".*")


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
        shutil.copy(ROOT / ERRORS, Path(self.build_lib) / "auditor" / ERRORS.name)


setup(cmdclass={"build_py": BuildWithData})
