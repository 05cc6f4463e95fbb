"""One name for all spellings of a function, none for those in place."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from auditor.ops.functions import function_name, functions_by_name, is_kept, kept_calls


def test_names_of_functions() -> None:
    assert function_name(torch.Tensor.exp_) == ""
    assert function_name(torch.Tensor.__rpow__) == "rpow"
    assert function_name(torch.exp) == function_name(torch.Tensor.exp) == "exp"


def test_all_spellings_are_found_by_name() -> None:
    found = functions_by_name()
    assert {torch.pow, torch.Tensor.pow} <= set(found["pow"])
    assert {torch.softmax, torch.Tensor.softmax, F.softmax} <= set(found["softmax"])
    assert "" not in found
    assert all(function_name(function) == name for name, functions in found.items() for function in functions)


def test_entries_name_all_calls_of_a_function_or_one() -> None:
    found = kept_calls(["linear 3 of 4", "pow", "linear 1 of 4", "exp 2 of 2", "exp"])
    assert found == {"linear": (True, False, True, False), "pow": (), "exp": ()}
    assert [number for number in range(1, 7) if is_kept(found["linear"], number)] == [1, 3, 5, 6]
    assert not is_kept(found["linear"], 0)
    assert is_kept(found["pow"], 9)
