"""The tests mirror the tree: a module of the core has a file of tests by its name, and a file of tests has its module.

A room of the core is a folder of `auditor/`; its tests lie in the folder of that name here.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

HERE = Path(__file__).parent
AUDITOR = HERE.parents[1] / "auditor"

CORE = (
    *(
        "records",
        "formats",
        "ops",
        "state",
        "dispatch",
        "imitation",
        "runs",
        "criteria",
        "tape",
        "replay",
        "measure",
        "facts",
    ),
    *("rulebook", "judge", "strategies", "plan", "patch", "score", "verify", "graphs", "training", "document"),
)

THEMES = {
    "criteria": "audits",
    "dispatch": "unfolded",
    "formats": "made_up nowhere_else twin",
    "imitation": "against_replay autocast backward transforms",
    "measure": "refusals",
    "ops": "half_kernels made_up one_place",
    "patch": "checkpointing compiling distributed emitted_text fused_paths keeping precisions sharing",
    "plan": "rules_alone",
    "replay": "in_place partly_low simulation",
    "state": "modes",
    "strategies": "made_up_strategy nowhere_else",
    "tape": "control_flow cost examples kinds_of_values modules operators programs regions state transforms writes",
    "training": "advice_sentences loop_sentences loops report sentences",
    "verify": "models scores",
}
"""{room: tests of what several of its modules do together}."""

ELSEWHERE: dict[str, str] = {}
"""{module of the core: where its tests are instead, and why}."""


def names(folder: Path, pattern: str) -> list[str]:
    return sorted(path.stem for path in folder.glob(pattern) if not path.stem.startswith("__"))


def does_something(file: Path) -> bool:
    """Whether there is a function or a method in it; a file of records alone is tested by whoever makes them."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return any(isinstance(node, ast.FunctionDef) for node in ast.walk(tree))


@pytest.mark.parametrize("room", CORE)
def test_every_module_has_its_tests(room: str) -> None:
    modules = [name for name in names(AUDITOR / room, "*.py") if does_something(AUDITOR / room / f"{name}.py")]
    assert modules, f"auditor/{room} is gone: take it out of CORE in {Path(__file__).name}, or write its new name there"
    tests = names(HERE / room, "test_*.py")
    without = [name for name in modules if f"test_{name}" not in tests and f"{room}/{name}" not in ELSEWHERE]
    assert without == [], "\n" + "\n".join(
        f"auditor/{room}/{name}.py has no tests of its own: write tests/unit/{room}/test_{name}.py, or, if it was moved "
        "or renamed, move its tests along"
        for name in without
    )


@pytest.mark.parametrize("room", CORE)
def test_every_file_of_tests_has_its_module_or_a_theme(room: str) -> None:
    known = {*names(AUDITOR / room, "*.py"), *THEMES.get(room, "").split()}
    lost = [name for name in names(HERE / room, "test_*.py") if name.removeprefix("test_") not in known]
    assert lost == [], "\n" + "\n".join(
        f"tests/unit/{room}/{name}.py tests no module of auditor/{room}: move it to where its module is, or, if it is about "
        f"what several modules do together, add its name to THEMES in {Path(__file__).name}"
        for name in lost
    )


@pytest.mark.parametrize("room", sorted({*THEMES, *(name.split("/")[0] for name in ELSEWHERE)}))
def test_what_is_allowed_is_there(room: str) -> None:
    themes, tests = THEMES.get(room, "").split(), names(HERE / room, "test_*.py")
    assert [name for name in themes if f"test_{name}" not in tests] == [], "themes without tests"
    assert [name for name in themes if (AUDITOR / room / f"{name}.py").exists()] == [], "modules, and no themes"
    listed = [name.split("/")[1] for name in ELSEWHERE if name.startswith(f"{room}/")]
    assert [name for name in listed if f"test_{name}" in tests] == [], "in ELSEWHERE, and here as well"


def test_every_folder_of_tests_is_a_room() -> None:
    folders = {path.parent.relative_to(HERE).parts[0] for path in HERE.glob("*/**/test_*.py")}
    assert sorted(name for name in folders if not (AUDITOR / name).is_dir()) == []
