"""The rest of a tape run again: only as far as a change reaches, and with choices that one of many errors may change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from auditor.execution.execute import Executor
from auditor.execution.rest import Rest
from auditor.numerics.casting import lowered
from auditor.numerics.formats import FORMATS
from auditor.records import Capture
from tests.capturing import Function
from tests.subjects import capture_of


def rounded(value: Any) -> Any:
    return lowered(value, FORMATS["bf16"])


def rest_of(function: Callable[..., Any], x: Tensor) -> tuple[Capture, Rest]:
    captured = capture_of(Function(function), x)
    values: dict[str, Any] = {captured.placeholders[0].name: x}
    Executor(captured.graph_module, observer=lambda n, value: values.update({n.name: value})).run(x)
    return captured, Rest(captured, [x], values)


def test_what_an_operation_absorbs_is_followed_no_further() -> None:
    _, rest = rest_of(lambda x: (x * 3).clamp(max=1.0).exp().sin(), torch.tensor([5.0]))
    (found,) = rest.outputs({"mul": torch.tensor([torch.inf])})
    assert found.item() == torch.tensor(1.0).exp().sin().item()
    assert rest.executed == 1  # the clamp gave what it gave before
    assert rest.replays == 1 / 4


def test_a_change_is_followed_to_the_end() -> None:
    _, rest = rest_of(lambda x: (x * 3).clamp(max=1.0).exp().sin(), torch.tensor([5.0]))
    (found,) = rest.outputs({"mul": torch.tensor([0.5])})
    assert found.item() == torch.tensor(0.5).exp().sin().item()
    assert rest.executed == 3


def test_many_low_together_are_each_low_on_what_reaches_them() -> None:
    # 1 + 2^-8 is rounded to 1 on its way in, 3 is exact, and 3 + 1 is
    _, rest = rest_of(lambda x: x * 3 + x, torch.tensor([1 + 2.0**-8]))
    assert rest.together(["mul", "add"], "bf16", rounded).outputs[0].item() == 4.0
    assert rest.together(["mul"], "bf16", rounded).outputs[0].item() == 4 + 2.0**-8


def test_a_choice_that_another_error_would_change_is_changed() -> None:
    # 1.02 is 1.0234 in BF16 and 4.0234 is 4.03125: both roundings go up, and the larger still wins; one down would do.
    _, rest = rest_of(lambda x: ((x * 1.0 + 3.0) * 0.5).argmax(-1), torch.tensor([[1.0, 1.02, -3.3]]))
    names = ["mul", "add", "mul_1"]
    kept = rest.together(names, "bf16", rounded)
    assert (kept.flipped, kept.outputs[0].item()) == (False, 1)
    found = rest.together(names, "bf16", rounded, provoke=True)
    assert (found.flipped, found.outputs[0].item()) == (True, 0)


def test_a_choice_far_from_any_other_stays() -> None:
    _, rest = rest_of(lambda x: ((x * 1.1 + 3.0) * 0.5).argmax(-1), torch.tensor([[1.0, 2.0, -3.0]]))
    found = rest.together(["mul", "add", "mul_1"], "bf16", rounded, provoke=True)
    assert (found.flipped, found.outputs[0].item()) == (False, 1)
