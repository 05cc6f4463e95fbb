"""How large the package may be, room by room: it gets smaller, and what makes a room larger says so here.

The numbers are set again, each to what there is or to its goal, by what this prints:
python -c "from tests.unit.test_budgets import table; print(table())"
"""

from collections import Counter

from tests.support.structure import PACKAGE, modules

LOOSE = "loose files"

GOAL = {
    "capture": 2800,
    "isolation": 1200,
    "numerics": 2000,
    "execution": 1150,
    "measure": 2300,
    "rules": 2400,
    "plan": 2000,
    "graphs": 1100,
    "verify": 900,
    "artefact": 950,
    "training": 1700,
    "records": 1500,
    "document": 900,
    "report": 2800,
    "loading": 1800,
    "settings": 1100,
    "criteria": 1250,
    "offload": 350,
    "fleet": 450,
    "telling": 300,
    "snippets": 450,
    "flow": 450,
}
"""Lines that a part of the package is to come down to. Loose files count to flow, except those of WITH. Fleet was planned with
400 and execution with 1,200: the supervisor of processes in fleet serves the command, verification and rehearsal too."""

WITH = {
    **dict.fromkeys(("settings", "asked", "api"), "cli"),  # all that an audit is asked by
    "stages": "progress",  # the clock whose calls are shown there
    **dict.fromkeys(("fleet", "processes"), "fleet"),  # with the supervisor of processes
}
"""{file in no folder: the room that it counts to}."""

CAPABILITIES = {"dtypes": 900, "generation": 1500, "quantization": 2200, "rehearsal": 960}
"""Lines that what came after the third house may have in all, wherever its files are. Of rehearsal 900 without its verb."""

PARTS = {
    "artefact/configs.py": "quantization",
    "artefact/libraries.py": "quantization",
    "cli/ledger.py": "dtypes",
    "cli/rehearse.py": "rehearsal",
    "criteria/margins.py": "generation",
    "document/torchao.py": "quantization",
    "execution/ledger.py": "dtypes",
    "graphs/pipelines.py": "quantization",
    "loading/watch.py": "dtypes",
    "measure/decisions.py": "generation",
    "measure/layers.py": "quantization",
    "measure/products.py": "dtypes",
    "measure/quantized.py": "quantization",
    "numerics/accumulators.py": "quantization",
    "numerics/fp32_output.py": "dtypes",
    "numerics/quantize.py": "quantization",
    "numerics/schemes.py": "quantization",
    "plan/choices.py": "quantization",
    "plan/outputs.py": "dtypes",
    "plan/quantized.py": "quantization",
    "records/decisions.py": "generation",
    "records/generation.py": "generation",
    "records/ledger.py": "dtypes",
    "records/quantization.py": "quantization",
    "report/generation.py": "generation",
    "report/ledger.py": "dtypes",
    "report/quantization.py": "quantization",
    "report/rehearsal.py": "rehearsal",
}
"""Files of a capability in other rooms, which count towards the capability. `dtypes` (the ledger and the causes of a product's error) and `quantization` have no room."""

BUDGET = {
    "artefact": (950, "artefact"),
    "capture": (2800, "capture"),
    "cli": (1100, "settings"),
    "criteria": (920, "criteria"),
    "document": (900, "document"),
    "dtypes": (900, "dtypes"),
    "execution": (1150, "execution"),
    "fleet": (450, "fleet"),
    "generation": (1500, "generation"),
    "graphs": (1100, "graphs"),
    "isolation": (1200, "isolation"),
    "loading": (1800, "loading"),
    "loose files": (450, "flow"),
    "measure": (2300, "measure"),
    "numerics": (2000, "numerics"),
    "offload": (350, "offload"),
    "plan": (2000, "plan"),
    "progress": (300, "telling"),
    "quantization": (2200, "quantization"),
    "records": (1500, "records"),
    "rehearsal": (960, "rehearsal"),
    "report": (2800, "report"),
    "rulebook": (2400, "rules"),
    "score": (280, "criteria"),
    "snippets": (450, "snippets"),
    "training": (1700, "training"),
    "verify": (900, "verify"),
}
"""{room: (lines that it has at most, the goal that it counts to)}."""

LINES, FILES, ROOMS = 29600, 213, 23
"""Lines without the capabilities; files and rooms of the whole package."""


def lines() -> dict[str, int]:
    """{room or capability: its lines}: a room is a folder, and all files that are in none are one."""
    found: Counter[str] = Counter()
    for file in modules().values():
        path = file.relative_to(PACKAGE)
        loose = WITH.get(file.stem, LOOSE)
        room = PARTS.get(path.as_posix(), path.parts[0] if len(path.parts) > 1 else loose)
        found[room] += len(file.read_text(encoding="utf-8").splitlines())
    return dict(found)


def test_no_room_is_over_its_budget() -> None:
    assert lines().keys() == BUDGET.keys()
    assert {room: n for room, n in lines().items() if n > BUDGET[room][0]} == {}


def test_the_whole_is_no_larger_than_it_was() -> None:
    assert _house() <= LINES
    assert len(modules()) <= FILES
    assert _folders() <= ROOMS


def test_every_room_counts_to_a_goal() -> None:
    assert {goal for _, goal in BUDGET.values()} == GOAL.keys() | CAPABILITIES.keys()
    assert sum(GOAL.values()) <= 30_000


def _folders() -> int:
    """Number of rooms that are folders."""
    return sum((folder / "__init__.py").is_file() for folder in PACKAGE.iterdir())


def _house() -> int:
    """Lines of all rooms without the capabilities."""
    return sum(n for room, n in lines().items() if room not in CAPABILITIES)


def table() -> str:
    """The budgets as they would be written today: a room that is within a goal of its own has that, any other what it has."""
    rooms = Counter(goal for _, goal in BUDGET.values())

    def most(room: str, now: int) -> int:
        goal = BUDGET[room][1]
        most = (GOAL | CAPABILITIES)[goal]
        return most if rooms[goal] == 1 and now <= most else _tens(now)

    rows = [f'    "{room}": ({most(room, now)}, "{BUDGET[room][1]}"),' for room, now in sorted(lines().items())]
    whole = f"LINES, FILES, ROOMS = {_tens(_house())}, {len(modules())}, {_folders()}"
    return "\n".join(["BUDGET = {", *rows, "}", whole])


def _tens(number: int) -> int:
    return -(-number // 10) * 10
