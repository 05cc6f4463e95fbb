"""Rules from strangers: read, or refused in one line; no text of theirs is run, whatever it is called."""

import copy
import json
import random
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

import auditor
from auditor.errors import AuditorError
from tests.files.test_strangers import CODE, RUN, folder, hook
from tests.support.documents import at, places

FILE = Path(auditor.__file__).parents[1] / "rules/softmax/SFT001-softmax-in-low-precision.toml"
EVIL = (
    CODE,
    "{op.__class__.__init__.__globals__}",
    "{op!r:>9999999999}",
    "{op:{op:{op}}}",
    "{",
    "(?R)(a+)+$",
    "*" * 2000 + "!",
    "[" * 3000,
    "\n\n[when]\nx = 1",
    "../../canary",
)
__all__ = ["folder", "hook"]
VALUES = (None, True, -1, 10**30, float("nan"), float("inf"), [], {}, [[]], {"all": []}, {"not": {"not": {}}}, *EVIL)


def toml(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {toml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, float) or value is None:
        return str(value).lower().replace("none", '""')
    return json.dumps(value)


def tampered(rule: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    found = copy.deepcopy(rule)
    for _ in range(draw.choice((1, 1, 2))):
        *way, last = draw.choice(list(places(found)))
        inside = at(found, way)
        if draw.random() < 0.2 and isinstance(inside, dict):
            inside[draw.choice(EVIL)] = inside.pop(last)
        else:
            inside[last] = draw.choice(VALUES)
    return found


def written(rule: dict[str, Any], folder: Path) -> Path:
    """The rule under another code, so that it stands beside the one that ships, which all of it comes from."""
    file = folder / "own" / "evil" / "EVL001-softmax-in-low-precision.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{json.dumps(key)} = {toml(value)}\n" for key, value in rule.items()))
    return folder / "own"


@pytest.fixture(scope="module")
def rule() -> dict[str, Any]:
    return tomllib.loads(FILE.read_text())


def audited(rules: Path) -> str:
    """What an audit with these rules is refused with; their findings where it is not."""
    model, x = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Softmax(-1)), torch.ones(1, 2)
    try:
        found = auditor.audit(model, x, formats=("fp16",), strategies=("cast",), device="cpu", rules=rules)
    except AuditorError as error:
        return f"{error.slug}: {error}"
    return " ".join(finding.message for finding in found.findings if finding.rule == "EVL001")


@pytest.mark.parametrize("seeds", [range(24), pytest.param(range(24, 300), marks=pytest.mark.slow)], ids=["few", "all"])
def test_tampered_rules(seeds: range, rule: dict[str, Any], folder: Path) -> None:
    assert audited(written(rule, folder)).startswith("PyTorch's own softmax")
    ends = []
    for seed in seeds:
        spoilt = tampered(rule, random.Random(seed))
        ends.append(audited(written(spoilt, folder)))
        assert RUN == [], spoilt
        assert not ends[-1].startswith("rule-") or "\n" not in ends[-1]
        assert len(ends[-1]) < 10_000, spoilt
    assert {end.partition(":")[0] for end in ends} > {"rule-bad-type", "rule-bad-value"}


@pytest.mark.parametrize("field", ["{dtype:>9999999999}", "{dtype!r:>100}", "{input_max_abs:.99999999f}"])
def test_a_message_of_any_width_is_refused(field: str, rule: dict[str, Any], tmp_path: Path) -> None:
    assert audited(written({**rule, "message": field}, tmp_path)).endswith("makes a field 100 or more characters wide")


def test_a_message_reaches_nothing_but_facts(rule: dict[str, Any], tmp_path: Path) -> None:
    for field in ("{dtype.__class__}", "{dtype[0]}", "{dtype:{dtype.__class__.__mro__}}"):
        said = audited(written({**rule, "message": field}, tmp_path / str(len(field))))
        assert "message" in said and "<class" not in said, said
