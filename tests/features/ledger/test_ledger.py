"""The ledger: every planted silent cast is reported with its line, no asked-for cast is, and every dtype is who decided it."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from auditor.cli import main
from auditor.records import Finding
from auditor.records.ledger import LedgerRow
from auditor.rulebook.rule import Rule
from tests.features.ledger.planted import ASKED, NET, OPTIONS, PLANTED, Planted, ledger


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with checkpoints of NET in several dtypes."""
    monkeypatch.chdir(tmp_path)
    space: dict[str, object] = {}
    torch.manual_seed(1)
    exec(NET, space)
    state = {name: x.normal_() if x.is_floating_point() else x for name, x in space["Net"]().state_dict().items()}
    state["norm.running_var"].abs_().clamp_(min=0.5)
    state["norm.running_mean"].zero_()
    torch.save(state, "weights.pt")
    save_file(state, "weights.safetensors")
    kept = ("norm.weight", "norm.bias")
    low = {k: x.bfloat16() if x.is_floating_point() else x for k, x in state.items()}
    low["norm.running_var"] = torch.ones(8, dtype=torch.bfloat16)
    torch.save(low, "low.pt")
    torch.save({k: x.half() if x.is_floating_point() else x for k, x in state.items()}, "half.pt")
    torch.save({**low, **{k: state[k] for k in kept}}, "mixed.pt")
    return tmp_path


def kept_by(code: str, weights: str | None = None) -> tuple[tuple[LedgerRow, ...], tuple[Finding, ...]]:
    """The ledger and the findings of NET with this code below it."""
    made = (
        "" if "def get_model" in code else f"\ndef get_model():\n    return {'Mine' if 'Mine' in code else 'Net'}()\n"
    )
    Path("model.py").write_text(NET + code + made)
    return ledger("model.py", weights)


@pytest.mark.parametrize("case", PLANTED, ids=lambda case: case.name)
def test_a_planted_cast_is_reported_with_its_line(case: Planted, project: Path) -> None:
    _, findings = kept_by(case.code, case.weights)
    lines = Path("model.py").read_text().splitlines()
    here = next((f"model.py:{number}" for number, line in enumerate(lines, 1) if "# here" in line), None)
    found = [(one.rule, (one.source or "").rpartition("/")[2] or None, one.evidence["names"]) for one in findings]
    own = [names for rule, source, names in found if (rule, source) == (case.rule, here)]
    assert own, found
    assert set(case.names) <= set(own[0])
    assert {rule for rule, _, _ in found} == {case.rule}


@pytest.mark.parametrize("name", ASKED)
def test_a_cast_that_the_author_asks_for_is_not_reported(name: str, project: Path) -> None:
    assert kept_by(ASKED[name])[1] == ()


CASTS = [rule for rule in OPTIONS.rulebook if rule.family == "casts"]


@pytest.mark.parametrize("rule", CASTS, ids=lambda rule: rule.code)
def test_the_example_of_each_rule_is_reported_and_its_repair_is_not(rule: Rule, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    torch.save({f"layer.{name}": x for name, x in torch.nn.Linear(8, 8).state_dict().items()}, "weights.pt")
    found = []
    for code in (rule.example.code, rule.example.fixed):
        file = Path("model.py")
        head = "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n"
        file.write_text(f"{head}{code}\ndef get_inputs():\n    return {rule.example.inputs[0]}\n")
        found.append({one.rule for one in ledger("model.py")[1]})
    assert found == [{rule.code}, set()]


def test_the_bits_that_a_cast_loses_are_measured(project: Path) -> None:
    code = """
class Mine(Net):
    def setup(self):
        self.register_buffer("values", torch.tensor([1.0, 1.0 + 2**-12, 1e-9, 1e6, -1e6, 0.0, 2.0, 3.0]))

    def hidden(self, x):
        return self.body(x) + self.values.half().float().clamp(-9, 9)
"""
    (finding,) = kept_by(code)[1]
    # of eight, 1 + 2^-12 rounds to 1, 1e-9 to zero, and two become infinite; 7 are not zero
    assert finding.evidence["changed"] == 4 / 8
    assert finding.evidence["zeros"] == pytest.approx(1 / 7)
    assert finding.evidence["infinite"] == 2
    norm = sum(x * x for x in (1.0, 1 + 2**-12, 1e-9, 2.0, 3.0)) ** 0.5
    assert finding.evidence["error"] == pytest.approx(2**-12 / norm, rel=1e-4)
    assert "24 to 11 significant bits; 50% of the values change" in finding.message


def test_every_column_says_who_decided(project: Path, capsys) -> None:
    code = """
class Router(nn.Linear):
    def forward(self, x):
        return super().forward(x.float())

class Mine(Net):
    def setup(self):
        self.router = Router(8, 8)

    def hidden(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            x = self.body(x)
        return self.router(x)

def get_model():
    net = Mine()
    net.load_state_dict(torch.load("half.pt"), strict=False)
    return net
"""
    rows = {row.name: row for row in kept_by(code)[0]}
    body, router = rows["body.weight"], rows["router.weight"]
    assert (body.checkpoint, body.loaded, body.author, body.executed) == ("float16", "float32", None, "bfloat16")
    assert (router.checkpoint, router.loaded, router.executed) == (None, "float32", "float32")
    assert (rows["linear"].author, rows["linear"].executed) == ("bfloat16", "bfloat16")
    assert (rows["to"].author, rows["to"].executed) == ("float32", "float32")
    assert main(["model.py", "--out", "audit", "--quick", "--formats", "fp16", "--strategies", "cast", "-q"]) < 2
    capsys.readouterr()
    assert main(["ledger", "model.py", "--plan", "audit", "--format", "json"]) == 0
    planned = {row["name"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    low = [planned[name] for name in ("head.weight", "linear_2")]
    assert [(row["planned"], row["executed"]) for row in low] == [("float16", "float16")] * 2
    assert planned["linear"]["executed"] == "bfloat16"


def test_the_report_and_sarif_have_the_ledger(project: Path) -> None:
    kept_by(next(case.code for case in PLANTED if case.name == "a buffer made in FP16"))
    assert main(["model.py", "--out", "audit", "--quick", "-q"]) < 2
    page = Path("audit/report.html").read_text()
    assert "Dtypes, and what decided them" in page
    assert "1 unintended cast to fewer bits" in page
    (run,) = json.loads(Path("audit/findings.sarif").read_text())["runs"]
    line = next(n for n, text in enumerate(Path("model.py").read_text().splitlines(), 1) if "# here" in text)
    places = [r["locations"][0]["physicalLocation"] for r in run["results"] if r["ruleId"] == "CST003"]
    assert [(p["artifactLocation"]["uri"], p["region"]["startLine"]) for p in places] == [("model.py", line)]


def test_the_command_prints_what_a_merge_would_be_refused_for(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = next(case.code for case in PLANTED if case.name == "half and float in one line")
    kept_by(code + "\n\ndef get_model():\n    return nn.Sequential(Mine(), nn.Softmax(-1))\n")
    capsys.readouterr()
    assert main(["ledger", "model.py", "--fail-on", "warning"]) == 1
    assert main(["ledger", "model.py"]) == 0
    page = capsys.readouterr().out
    here = next(n for n, text in enumerate(Path("model.py").read_text().splitlines(), 1) if "# here" in text)
    assert re.search(rf"(?m)^model\.py:{here} \(from model\.py:\d+ in Net\.forward\) CST004 ", page)
    assert "Casts     1 unintended cast to fewer bits." in page
    rows = [line.split() for line in page.splitlines()]
    assert ["0.body.weight", "-", "FP32", "-", "-", "FP32"] in rows
    assert any(row[:2] == ["0", "to.dtype"] and row[-5:] == ["-", "FP16", "FP16", "-", "FP16"] for row in rows)


def test_tensors_of_a_transformers_checkpoint_that_only_it_keeps_in_fp32(tmp_path: Path, monkeypatch) -> None:
    """A directory whose norms are FP32 and whose config says BF16, as in transformers#46198."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **sizes)).to(torch.bfloat16)
    model.save_pretrained("llama")
    state = {name: x.float() * 1.001 if "norm" in name else x for name, x in model.state_dict().items()}
    save_file(state, "llama/model.safetensors", metadata={"format": "pt"})
    for dtype, expected in (("torch.bfloat16", {"CST001"}), ("torch.float32", set())):
        Path("model.py").write_text(
            "import torch\nfrom transformers import LlamaForCausalLM\n\ndef get_model():\n"
            f"    return LlamaForCausalLM.from_pretrained('llama', dtype={dtype})\n\n"
            "def get_inputs():\n    return torch.arange(8)[None]\n"
        )
        found = ledger("model.py")[1]
        assert {one.rule for one in found} == expected
        assert all(one.source == "model.py:5" and "norm" in one.evidence["names"][0] for one in found)


@pytest.mark.parametrize(
    "words", [["absent.py"], ["model.py", "--plan", "absent.json"], ["model.py", "--plan", "other"]]
)
def test_a_failure_is_one_line(words: list[str], project: Path, capsys) -> None:
    kept_by("")
    Path("small.py").write_text("import torch\nmodel = torch.nn.Linear(4, 2)\nexample_inputs = torch.ones(1, 4)\n")
    assert main(["small.py", "--out", "other", "--quick", "-q"]) < 2
    capsys.readouterr()
    assert main(["ledger", *words]) == 2
    assert capsys.readouterr().err.startswith("error: ")
