"""A rehearsal in words: what each remedy does is said where it matters, and once."""

from auditor.rehearsal.result import Recipe, RecipeProblem, RecipeRun, Rehearsal
from auditor.report.blocks import Item
from auditor.report.rehearsal import overview


def notes(*problems: RecipeProblem) -> list[list[str]]:
    recipes = (
        Recipe("fp32", "FP32"),
        Recipe("bf16", "BF16", "bf16", stored=True),
        Recipe("bf16_master", "BF16 with a master copy", "bf16", repairs="bf16"),
        Recipe("bf16_kahan", "BF16 with Kahan sums", "bf16", repairs="bf16"),
    )
    runs = {recipe.name: RecipeRun(recipe, [2.0, 1.0], steps=[0, 1]) for recipe in recipes}
    result = Rehearsal("train.py:step", 2, 2, runs, problems, "fp32", "")
    return [list(block.notes) for block in overview(result) if isinstance(block, Item)]


def test_a_remedy_of_every_problem_is_named_at_the_first():
    lost, decay = RecipeProblem("bf16", "updates", "96% lost"), RecipeProblem("bf16", "decay", "all lost")
    still = RecipeProblem("bf16_kahan", "decay", "half lost")
    assert notes(lost, decay, still) == [
        [
            "BF16 with a master copy: repairs these 2 problems; last loss 1.",
            "BF16 with Kahan sums: repairs this problem; last loss 1.",
        ],
        ["BF16 with Kahan sums: still, half lost."],
    ]
    assert notes(lost) == [
        [
            "BF16 with a master copy: repairs this problem; last loss 1.",
            "BF16 with Kahan sums: repairs this problem; last loss 1.",
        ]
    ]


def test_a_remedy_whose_own_run_ends_early_is_not_said_to_repair():
    lost, ends = (
        RecipeProblem("bf16", "updates", "96% lost"),
        RecipeProblem("bf16_kahan", "not-finite", "NaN in step 3"),
    )
    assert notes(lost, ends)[0][1] == "BF16 with Kahan sums: instead, NaN in step 3."
