import torch

from auditor.plan.answered import _joined
from auditor.verify import WITH_GRADIENTS, Answers


def answers(*numbers, graded=None):
    return Answers([[torch.tensor(float(number))] for number in numbers], graded)


def test_the_answers_of_two_ranks_stand_in_the_order_of_the_checks():
    graded = [torch.tensor(7.0)]
    joined = _joined([answers(0, 2, 4, graded=graded), answers(1, 3)], 5)
    assert [float(outputs[0]) for outputs in joined.outputs] == [0, 1, 2, 3, 4]
    assert joined.graded is graded


def test_a_plan_fails_where_it_fails_on_any_rank_and_without_gradients_first():
    assert _joined([answers(0), "it overflows"], 2) == "it overflows"
    assert _joined([f"{WITH_GRADIENTS}, it overflows", "it does not run"], 2) == "it does not run"
