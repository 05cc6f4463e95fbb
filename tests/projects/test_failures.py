"""The user's code fails, or gives another model, in the fresh process alone: an error with its place, and no verdict."""

import sys
from pathlib import Path

import pytest
import torch

from tests.projects.project import (
    FP32,
    HERE,
    MODEL,
    Case,
    audit_project,
    check_error,
    check_refused,
    check_verdict,
    first,
    run_here,
    state,
    write_project,
)

ONCE = "from pathlib import Path\n" + first("Path(__file__).with_name('made').mkdir()")
"""Its factory can be called once."""

PLACE = ("FileExistsError", f"model.py:{ONCE[: ONCE.index('.mkdir')].count(chr(10)) + 1}")
FILES = {
    "model.py": ONCE,
    "score.py": "def score(model):\n    return 1.0\n",
    "loss.py": "def loss(outputs):\n    return outputs.square().mean()\n",
    "fleet.toml": '[[target]]\nname = "net"\ntarget = "model.py:build"\nquick = true\nformats = "bf16"\n',
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


@pytest.mark.slow
def test_a_fleet_says_which_failed(tmp_path: Path) -> None:
    root = tmp_path / "project"
    write_project(root, Case(FILES))
    done = run_here("fleet", "fleet.toml", "--out", "fleet", cwd=root)
    assert done.returncode == 1
    assert all(word in done.stdout for word in ("failed", *PLACE)), done.stdout + done.stderr
    assert FP32 not in done.stdout + (root / "fleet" / "index.html").read_text()
    assert not list(root.glob("fleet/**/plan.json"))


ANOTHER = "the factory returns a different model each time: seed the factory, or give --weights"
DRAWS = {"numpy": "int(numpy.random.default_rng().integers(2**31))", "the clock": "time.time_ns() % 2**31"}


def drawn(seed: str) -> str:
    return "import numpy, time\n" + MODEL.replace("manual_seed(0)", f"manual_seed({seed})")


@pytest.mark.parametrize("name", [pytest.param("numpy", marks=pytest.mark.slow), "the clock"])
def test_a_factory_that_makes_another_model_each_time(name: str, tmp_path: Path) -> None:
    audited = audit_project(tmp_path / "project", Case({"model.py": drawn(DRAWS[name])}, program=HERE))
    assert ANOTHER in " ".join(audited.said.split())
    assert FP32 not in audited.said
    for plan in audited.root.glob("audits/**/plan.json"):
        assert all(made["verification"]["holds"] for made in audited.plan["plans"].values()), plan


@pytest.mark.slow
def test_weights_make_it_one_model(tmp_path: Path) -> None:
    case = Case(
        {"model.py": drawn(DRAWS["the clock"])},
        options=("--weights", "net.pt"),
        prepare=lambda root: torch.save(state(), root / "net.pt"),
    )
    audited = audit_project(tmp_path / "project", case)
    check_verdict(audited)
    assert ANOTHER not in audited.said
    check_error(audited)


@pytest.mark.slow
def test_a_file_that_hides_one_of_pythons_from_python_itself(tmp_path: Path) -> None:
    """`python -m` puts the working directory first: the audit goes on, or says in one line what is in the way."""
    audited = audit_project(tmp_path / "project", Case({"signal.py": MODEL}, "signal.py:build"))
    if audited.done.returncode == 0:
        check_verdict(audited)
    else:
        check_refused(audited.done, "circular import")
