"""A script that trains when it is imported is named, with the line that runs and the way out."""

import runpy
from contextlib import suppress

import pytest

from auditor.loading import target
from auditor.loading.target import import_target, parse

SCRIPT = """
import time
import torch
from torch import nn

model = nn.Linear(2, 2)

def train(steps):
    for _ in range(steps):
        time.sleep(0.1)

train(10)  # by hand
"""


def test_an_import_that_takes_long_names_its_line_and_the_way_out(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(target, "SLOW", 0.3)
    file = tmp_path / "trains_on_import.py"
    file.write_text(SCRIPT)
    import_target(parse(str(file)))
    said = capsys.readouterr().err
    assert "importing trains_on_import.py has taken 0.3 seconds, now at trains_on_import.py:12 (train(10)" in said
    assert 'under `if __name__ == "__main__":`' in said
    assert len(said.splitlines()) == 1


def test_of_a_module_that_the_file_imports_the_line_within_is_named(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(target, "SLOW", 0.3)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "helper_that_trains.py").write_text(SCRIPT)
    file = tmp_path / "imports_a_helper.py"
    file.write_text("from helper_that_trains import model\n")
    import_target(parse(str(file)))
    said = capsys.readouterr().err
    assert "importing imports_a_helper.py has taken 0.3 seconds, now at helper_that_trains.py:12 (train(10)" in said


def test_of_a_library_that_is_slow_to_import_nothing_is_said(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(target, "SLOW", 0.3)
    library = tmp_path / "site-packages" / "slow_library"
    library.mkdir(parents=True)
    (library / "__init__.py").write_text("import time\ntime.sleep(0.8)\n")
    monkeypatch.syspath_prepend(str(library.parent))
    file = tmp_path / "imports_a_library.py"
    file.write_text("import slow_library\n\nmodel = None\n")
    import_target(parse(str(file)))
    assert capsys.readouterr().err == ""


def test_a_script_that_calls_the_audit_is_not_what_is_imported(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(target, "SLOW", 0.3)
    library = tmp_path / "site-packages" / "slow_models"
    library.mkdir(parents=True)
    (library / "__init__.py").write_text("import time\ntime.sleep(0.8)\n")
    (library / "nets.py").write_text("model = None\n")
    monkeypatch.syspath_prepend(str(library.parent))
    script = tmp_path / "caller.py"
    script.write_text(
        "from auditor.loading.target import import_target, parse\n\nimport_target(parse('slow_models.nets'))\n"
    )
    runpy.run_path(str(script))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("body", ["import torch", "raise ValueError('quick')"])
def test_a_quick_import_says_nothing(body, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(target, "SLOW", 5.0)
    file = tmp_path / f"quick_{len(body)}.py"
    file.write_text(body)
    with suppress(target.LoadError):
        import_target(parse(str(file)))
    assert capsys.readouterr().err == ""
