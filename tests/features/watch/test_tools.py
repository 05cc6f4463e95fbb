"""The examples in loops of other libraries: each saves the step that its comment names, and a replay explains it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "watch"
CASES = {
    "plain_loop": (150, "", "std"),
    "accelerate_loop": (25, "", "torch.log(rates)"),
    "transformers_trainer": (12, ":trainer", ""),
    "lightning_module": (7, ":Classifier", "weights.sum()"),
}
LIBRARIES = {"accelerate_loop": "accelerate", "transformers_trainer": "transformers", "lightning_module": "lightning"}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_an_example_is_recorded_and_explained(name: str, tmp_path: Path) -> None:
    step, symbol, code = CASES[name]
    if name in LIBRARIES:
        try:
            __import__(LIBRARIES[name])
            if name == "transformers_trainer":
                from transformers import GPT2LMHeadModel  # noqa: F401
        except (ImportError, RuntimeError) as error:
            pytest.skip(f"{LIBRARIES[name]} cannot be imported: {error}")
    script = EXAMPLES / f"{name}.py"
    subprocess.run([sys.executable, "-W", "ignore", str(script)], check=True, cwd=tmp_path)
    capsule = f"capsules/step-{step:06d}-loss-not-finite"
    words = ["-m", "auditor", "replay", capsule, f"{script}{symbol}" if symbol else f"{script}:step", "--quiet"]
    subprocess.run([sys.executable, *words, "--out", "out"], check=True, cwd=tmp_path)
    data = json.loads((tmp_path / "out/replay.json").read_text())
    assert (data["is_reproduced"], data["fails_in_fp32"]) == (True, True)
    file, _, line = data["culprit"]["line"].partition(":")
    if file == script.name:
        assert code in script.read_text().splitlines()[int(line) - 1]
    else:
        assert (name, file) == ("transformers_trainer", "loss_utils.py")
