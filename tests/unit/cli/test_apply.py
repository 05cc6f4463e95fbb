"""The verb `apply`: a plan made earlier and a model of today become patched_model.py, or one line says why not."""

import json
import runpy

import pytest
import torch

from auditor import cli
from tests.support import documents

HOSTILE = "\"\"\"'''\\\n); open('pwned', 'w'); raise SystemExit(7)  # {0}%s"
MODEL = f"""
import torch
print("noise from the user's file")
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(3, 4)
        self.add_module({HOSTILE!r}, torch.nn.Linear(4, 2))
    def forward(self, x):
        return self._modules[{HOSTILE!r}](self.first(x))
def get_model(): return Net()
def get_inputs(): return torch.ones(2, 3)
"""


def choice(precision: str) -> dict:
    return {"precision": precision, "output": "cast"}


def document() -> dict:
    # 3 * 4 + 4 parameters in the first layer, 4 * 2 + 2 in the second: 26.
    islands = {"": choice("bf16"), HOSTILE: choice("fp32")}
    plans = {
        "autocast_bf16": {"strategy": "autocast", "format": "bf16", "scopes": islands, "predicted_error": 0.001},
        "cast_fp16": {"strategy": "cast", "format": "fp16", "scopes": {"": choice("fp16")}},
    }
    return documents.document(plans, "autocast_bf16", parameters=26)


@pytest.fixture
def plan(here):
    """A folder with model.py and plan.json, made the current one; called with a document, it rewrites the plan."""
    (here / "model.py").write_text(MODEL)

    def write(content: object) -> None:
        text = content if isinstance(content, str) else json.dumps(content)
        (here / "plan.json").write_text(text)

    write(document())
    return write


def run_patched(folder) -> list:
    """What is recommended, and the dtypes of what each layer answers."""
    patched = runpy.run_path(str(folder / "patched_model.py"))
    model, seen = patched["build"](), [patched["RECOMMENDED"]]
    for part in model.children():
        part.register_forward_hook(lambda module, args, result: seen.append(result.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(torch.ones(2, 3))
    return seen


def test_patched_model_follows_the_plan_and_nothing_in_it_is_run(plan, capsys, tmp_path):
    assert cli.main(["apply", "plan.json", "model.py"]) == 0
    captured = capsys.readouterr()
    folder = tmp_path / "audits" / "model"
    assert captured.out.splitlines() == [
        "Plan     autocast_bf16, 1 module in FP32; not verified on this model: to verify the plan, audit the model",
        "Patched  audits/model/patched_model.py",
    ]
    assert "noise" in captured.err
    assert [path.name for path in folder.iterdir()] == ["patched_model.py"]
    assert run_patched(folder) == ["autocast_bf16", torch.bfloat16, torch.float32]
    assert not list(tmp_path.rglob("pwned"))


def test_named_plan_and_directory(plan, tmp_path):
    assert cli.main(["apply", "plan.json", "model.py", "--plan", "cast_fp16", "--out", "else where"]) == 0
    text = (tmp_path / "else where" / "patched_model.py").read_text()
    assert "RECOMMENDED = 'cast_fp16'\n" in text
    assert not (tmp_path / "audits").exists()


@pytest.mark.parametrize(
    ("content", "words", "text"),
    [
        ("{", [], "is not a plan"),
        ({**document(), "recommended": None}, [], "no plan is recommended; choose one of autocast_bf16"),
        ({**document(), "parameters": 27}, [], "the plan was made for 27 parameters, this model has 26"),
        (document(), ["--plan", "gone"], "choose one of autocast_bf16, cast_fp16"),
        (document(), ["--out", "model.py"], "cannot write to 'model.py' (Not a directory)"),
        (document(), ["--weights", "absent.pt"], "absent.pt does not exist"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_exit_code_2(content, words, text, plan, capsys, tmp_path):
    plan(content)
    assert cli.main(["apply", "plan.json", "model.py", *words]) == 2
    error, hint = capsys.readouterr().err.splitlines()[-2:]
    assert error.startswith("error: ") and text in error
    assert hint.startswith("hint: `python -m auditor ")
    assert not (tmp_path / "audits").exists()
