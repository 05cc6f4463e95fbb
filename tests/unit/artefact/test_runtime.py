"""The runtime's own small functions: conversion of trees, precisions by path, and how modules are wrapped."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import nn

from auditor.artefact.runtime import (
    Runtime,
    by_scope,
    call,
    convert,
    device_type,
    floating_dtype,
    holds_fp32,
    in_region,
    precision_of,
)

Pair = namedtuple("Pair", "a b")
HALF, WIDE = torch.float16, torch.float32


def test_any_tree_is_converted_and_nothing_else_in_it() -> None:
    x, index = torch.ones(1), torch.tensor([1])
    tree = {"list": [x, index], "tuple": (x.double(), 7), "named": Pair(x, None), "text": "x"}
    found = convert(tree, HALF)
    assert [leaf.dtype for leaf in found["list"]] == [HALF, torch.int64]
    assert (found["tuple"][0].dtype, found["tuple"][1]) == (torch.float64, 7)
    assert isinstance(found["named"], Pair)
    assert (found["named"].a.dtype, found["named"].b, found["text"]) == (HALF, None, "x")
    assert x.dtype is WIDE


def test_what_has_the_dtype_is_handed_on() -> None:
    x = torch.ones(1)
    assert convert(x, WIDE) is x


SCOPES = {"": {"precision": "fp16"}, "a": {"precision": "fp32"}, "a.b.c": {"precision": "fp16"}}


@pytest.mark.parametrize(
    ("path", "expected"),
    [("", "fp16"), ("z", "fp16"), ("a", "fp32"), ("a.b", "fp32"), ("a.b.c.d", "fp16"), ("ab", "fp16")],
)
def test_the_nearest_scope_above_decides(path: str, expected: str) -> None:
    assert precision_of(path, SCOPES) == expected


def test_outside_of_all_scopes_it_is_fp32() -> None:
    assert precision_of("x.y", {"a": {"precision": "fp16"}}) == "fp32"


def test_a_tensor_of_several_owners_is_fp32_as_soon_as_one_is() -> None:
    shared, own = torch.ones(1), torch.ones(1)
    named = [("b.w", shared), ("a.w", shared), ("z.w", shared), ("a.b.c.v", own)]
    assert by_scope(named, SCOPES) == {id(shared): "fp32", id(own): "fp16"}


def test_a_layer_that_holds_a_wide_weight() -> None:
    layer, parent = nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1))
    assert holds_fp32(layer, {id(layer.bias): "fp32"})
    assert not holds_fp32(layer, {id(layer.bias): "fp16"})
    assert not holds_fp32(parent, {id(parent[0].weight): "fp32"})  # not its own


def wrapping(*paths: str, scopes: dict[str, Any] | None = None, wide: bool = False) -> dict[str, Any] | None:
    layer = nn.Linear(1, 1)
    stored = {id(layer.weight): "fp32"} if wide else {}
    return Runtime.wrapping(layer, list(paths), scopes or SCOPES, stored)


def test_who_is_wrapped_and_how() -> None:
    assert wrapping("z") is None  # as what calls it
    assert wrapping("") == {"precision": "fp16", "output": None}  # the root hands out what it has
    assert wrapping("a") == {"precision": "fp32", "output": "fp16"}
    keeping = {**SCOPES, "a": {"precision": "fp32", "output": "keep"}}
    assert wrapping("a", scopes=keeping) == {"precision": "fp32", "output": None}
    assert wrapping("a.b.c") == {"precision": "fp16", "output": "fp32"}


def test_under_several_names() -> None:
    assert wrapping("z", "a.b") == {"precision": "fp32", "output": "input"}  # callers that differ
    assert wrapping("z", "y") is None
    assert wrapping("z", wide=True) == {"precision": "fp32", "output": "fp16"}  # tied to a wide one


def test_a_forward_set_on_the_instance_is_what_is_called() -> None:
    layer = nn.Identity()
    assert call(layer, None, (3,), {}) == 3
    assert call(layer, lambda x: x + 1, (3,), {}) == 4


def test_dtype_and_device_of_what_comes_in() -> None:
    x = torch.ones(1)
    assert floating_dtype((([torch.tensor([1]), x.double(), x.half()],), {})) is HALF
    assert floating_dtype(((3,), {})) is None
    assert device_type(nn.Identity(), ((3,), {"x": x})) == "cpu"
    assert device_type(nn.Linear(1, 1, device="meta"), ((), {})) == "cpu"  # autocast has none for meta


def test_what_is_computed_while_it_is_read_is_computed_in_the_region() -> None:
    lazy = in_region(lambda: torch.autocast("cpu"), lambda: (torch.is_autocast_enabled("cpu") for _ in range(2)))
    assert list(lazy) == [True, True]
    assert in_region(lambda: torch.autocast("cpu"), lambda: [1]) == [1]
