"""A patched model is still the user's model: everything that worked on it goes on working."""

from __future__ import annotations

import copy
import inspect
import io
import pickle

import pytest
import torch
from torch import Tensor

from auditor.patch.runtime import apply_plan, is_wrapped
from tests.patching import PLANS, Net, patched, plan, scope
from tests.subjects import normal, seeded

both = pytest.mark.parametrize("name", PLANS)


@both
def test_class_signature_and_state_dict_stay(name: str) -> None:
    before, after = seeded(Net), patched(name)
    assert type(after) is Net
    assert inspect.signature(after.forward) == inspect.signature(before.forward)
    assert list(after.state_dict()) == list(before.state_dict())
    assert [path for path, _ in after.named_modules()] == [path for path, _ in before.named_modules()]
    after.load_state_dict(before.state_dict())
    assert after(normal(2, 4), scale=2.0).shape == (2, 3)


def test_autocast_leaves_the_weights_alone() -> None:
    before, after = seeded(Net), patched("autocast")
    assert all(
        torch.equal(a, b) and a.dtype is b.dtype
        for a, b in zip(before.state_dict().values(), after.state_dict().values(), strict=True)
    )


@both
def test_hooks_still_fire(name: str) -> None:
    model, heard = seeded(Net), []
    model.norm.register_forward_hook(lambda *_: heard.append("norm"))
    model.register_forward_pre_hook(lambda *_: heard.append("root"))
    apply_plan(model, PLANS[name])
    model.first.register_forward_hook(lambda *_: heard.append("first"))
    model(normal(2, 4))
    assert heard == ["root", "first", "norm"]


@both
def test_a_forward_set_on_the_instance_is_wrapped_and_comes_back(name: str) -> None:
    model = seeded(Net)
    own = model.first.forward
    calls: list[int] = []

    def replaced(x: Tensor) -> Tensor:
        calls.append(1)
        return own(x)

    model.first.forward = replaced
    scopes = {"": scope("bf16"), "first": scope("fp32")}
    apply_plan(model, plan(name, scopes))(normal(2, 4))
    assert calls == [1]
    apply_plan(model, plan(name, {"": scope("bf16")}))
    assert model.first.forward is replaced


@both
def test_deepcopy_and_pickle_run_their_own_weights(name: str) -> None:
    model, x = patched(name), normal(2, 4)
    expected = model(x)
    twin = copy.deepcopy(model)
    again = pickle.loads(pickle.dumps(model))
    assert torch.equal(twin(x), expected)
    assert torch.equal(again(x), expected)
    with torch.no_grad():
        for copied in (twin, again):
            copied.first.weight.zero_()
            copied.norm.weight.zero_()
            assert not torch.equal(copied(x), expected)
    assert torch.equal(model(x), expected)


@both
def test_torch_save_and_load(name: str) -> None:
    model, x = patched(name), normal(2, 4)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x), model(x))


@both
def test_torch_compile_without_a_graph_break(name: str) -> None:
    model, x = patched(name), normal(2, 4)
    torch._dynamo.reset()
    with torch.no_grad():
        assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(x), model(x))


# A strict export of any autocast region that holds a cast asserts the wrong dtype when it is run (torch 2.13).
@pytest.mark.parametrize(("name", "strict"), [("autocast", False), ("cast", False), ("cast", True)])
def test_torch_export(name: str, strict: bool) -> None:
    model, x = patched(name), normal(2, 4)
    exported = torch.export.export(model, (x,), strict=strict).module()
    with torch.no_grad():
        assert torch.equal(exported(x), model(x))


@both
def test_applying_twice_is_applying_once(name: str) -> None:
    once, twice = patched(name), apply_plan(patched(name), PLANS[name])
    x = normal(2, 4)
    assert torch.equal(once(x), twice(x))
    assert [is_wrapped(m) for m in once.modules()] == [is_wrapped(m) for m in twice.modules()]
    assert twice.norm.forward.args[1] is None  # the wrapper does not wrap the wrapper


def test_another_plan_replaces_the_first() -> None:
    model = apply_plan(patched("autocast"), plan("autocast", {"": scope("fp32")}))
    assert [path for path, module in model.named_modules() if is_wrapped(module)] == [""]
    with torch.no_grad():
        assert torch.equal(model(normal(2, 4)), seeded(Net)(normal(2, 4)))


@both
def test_train_and_eval_and_requires_grad_stay(name: str) -> None:
    model = seeded(Net).train()
    model.norm.eval()
    model.first.weight.requires_grad_(False)
    apply_plan(model, PLANS[name])
    assert (model.training, model.norm.training, model.head.training) == (True, False, True)
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == ["first.weight"]
