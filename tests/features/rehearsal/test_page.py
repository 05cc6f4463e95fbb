"""The page of a rehearsal: verdict first, then code to copy; and the code for each kind of recipe."""

import re
from dataclasses import replace

import pytest

from auditor.features.rehearsal.page import render, step_code
from auditor.features.rehearsal.result import FP32, Recipe, RecipeProblem, RecipeRun, Rehearsal
from auditor.report.charts import round_marks
from auditor.training.step import LOSS

ISLAND = {"precision": "fp32"}
RECIPES = {
    "bf16_autocast": Recipe("bf16_autocast", "BF16 under autocast", "bf16"),
    "fp16_autocast": Recipe("fp16_autocast", "FP16 under autocast, GradScaler", "fp16", scale=1024.0),
    "bf16": Recipe("bf16", "pure BF16 (weights, gradients, optimizer)", "bf16", stored=True),
    "bf16_kahan_sums": Recipe(
        "bf16_kahan_sums", "BF16 with Kahan sums", "bf16", stored=True, remedies=("kahan_sums",), repairs="bf16"
    ),
    "bf16_autocast_islands": Recipe(
        "bf16_autocast_islands",
        "BF16 under autocast, head and the loss in FP32",
        "bf16",
        scopes={"": {"precision": "bf16"}, "head": ISLAND, LOSS: ISLAND},
        repairs="bf16_autocast",
    ),
    "plan": Recipe("plan", "the plan autocast_fp16", "fp16", scale=65536.0, scopes={LOSS: ISLAND}),
}


def made(recommended="bf16_autocast"):
    """A rehearsal of four steps in every recipe; pure BF16 has a problem, which Kahan sums solve."""
    recipes = {"fp32": FP32, **RECIPES}
    runs = {name: RecipeRun(recipe, [1.5, 1.4, 1.38, 1.31], [0, 3], [0.01, 0.02]) for name, recipe in recipes.items()}
    problems = (RecipeProblem("bf16", "updates-lost", "56% of the updates change no weight"),)
    text = f"Train in {recipes[recommended].title}. The final loss is 1.31, in FP32 1.31."
    return Rehearsal("train.py:step", 4, 2, runs, problems, recommended, text)


@pytest.mark.parametrize("name", RECIPES)
def test_the_code_of_each_recipe_is_python(name):
    code = step_code(made(name))
    compile(code, name, "exec")
    assert ("scaler.scale(loss).backward()" in code) is (RECIPES[name].scale is not None)
    assert ('torch.autocast("cuda", dtype=' in code) is (
        name in ("bf16_autocast", "fp16_autocast", "bf16_autocast_islands")
    )


def test_the_code_has_what_makes_the_recipe():
    assert "init_scale=1024)" in step_code(made("fp16_autocast"))
    assert "model.to(torch.bfloat16)" in step_code(made("bf16"))
    assert "fp32_updates(optimizer, rounding='kahan')" in step_code(made("bf16_kahan_sums"))
    assert 'patched_model.apply(model, plan="autocast_fp16")' in step_code(made("plan"))
    islands = step_code(made("bf16_autocast_islands"))
    assert "enabled=False): head\n" in islands
    assert "loss = loss_of(outputs.float(), batch)" in islands
    assert step_code(made("fp32")) == "# FP32: recommended as it is, no change is needed.\n"
    own = replace(made("fp32"), runs={**made().runs, "as_written": made().runs["fp16_autocast"]})
    assert step_code(own) == "# FP32: FP32 weights, without autocast regions and without a GradScaler.\n"


def test_the_verdict_is_the_headline_and_the_code_is_not_folded():
    page = render(made())
    assert re.search(r"<h1>(.*?)</h1>", page)[1] == "Train in BF16 under autocast."
    before = page.partition("loss = compute_loss(model, batch)")[0]
    assert before.count("<details") == before.count("</details>")
    assert before.index("<h1>") < before.index("Use it")
    article = re.search(r"(?s)<article.*?</article>", page)[0]
    assert "pure BF16 (weights, gradients, optimizer)" in article
    assert "56% of the updates change no weight." in article
    assert "BF16 with Kahan sums: no problem" in article


@pytest.mark.parametrize(
    ("low", "high", "marks"),
    [(1.31, 1.53, [1.3, 1.35, 1.4, 1.45, 1.5, 1.55]), (2.0, 2.0, [2.0, 2.5]), (3, 9, [2, 4, 6, 8, 10])],
)
def test_marks_of_an_axis_are_round_and_contain_the_values(low, high, marks):
    made_marks = round_marks(low, high)
    assert made_marks[0] <= low
    assert made_marks[-1] >= high
    assert made_marks == pytest.approx(marks)
