"""One name for all spellings of a function, none for those in place."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from auditor.numerics.functions import function_name, functions_by_name


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
