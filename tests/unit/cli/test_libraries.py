"""Libraries imported without a search for garbage."""

import gc
import os
import subprocess
import sys

import pytest

from auditor.cli import guard, libraries


@pytest.fixture
def watched(monkeypatch):
    monkeypatch.setattr(guard, "is_watched", lambda: True)
    yield
    gc.unfreeze()
    gc.enable()


def test_nothing_is_looked_through_while_libraries_are_imported_and_what_they_leave_is_set_apart(watched):
    before = gc.get_freeze_count()
    with libraries.imported():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() > before


def test_a_library_that_fails_leaves_the_collector_as_it_was(watched):
    with pytest.raises(ImportError), libraries.imported():
        raise ImportError
    assert gc.isenabled()


def test_a_collector_that_is_off_stays_off(watched):
    gc.disable()
    with libraries.imported():
        pass
    assert not gc.isenabled()


def test_the_collector_of_a_process_with_other_things_to_do_is_left_alone():
    before = gc.get_freeze_count()
    with libraries.imported():
        assert gc.isenabled()
    assert gc.get_freeze_count() == before


SOURCE = """
import gc
import torch
with open("seen", "a") as file:
    file.write(f"{gc.isenabled()} {gc.get_threshold()}\\n")
def get_model():
    return torch.nn.Linear(8, 8)
def example_inputs():
    return (torch.ones(2, 8),)
"""


def test_the_users_code_runs_with_the_collector_on_in_both_processes(tmp_path):
    source = SOURCE.replace('"seen"', repr(str(tmp_path / "seen")))
    (tmp_path / "model.py").write_text(source, encoding="utf-8")
    words = [sys.executable, "-m", "auditor", "model.py", "-q", "--quick", "--fail-on", "never", "--device", "cpu"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, env=os.environ, check=False)
    assert done.returncode == 0, done.stderr
    seen = (tmp_path / "seen").read_text(encoding="utf-8").splitlines()
    assert len(seen) >= 2  # the audit, and the process that verified
    assert set(seen) == {f"True {gc.get_threshold()}"}
