"""A patched model is still the user's model: everything that worked on it goes on working."""

import copy
import inspect
import pickle
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from auditor.artefact.applying import apply_plan, is_wrapped
from tests.support.patching import PLANS, Net, patched, plan, scope
from tests.support.subjects import normal, seeded
from tests.support.thinned import thinned

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


@both
def test_checkpoints_load_both_ways(name: str) -> None:
    """A checkpoint of the original fills the patched model, and back: values round only where weights are low."""
    original, trained = seeded(Net).state_dict(), patched(name)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(1)
    dtypes = {key: value.dtype for key, value in trained.state_dict().items()}
    assert trained.load_state_dict(original) == torch.nn.modules.module._IncompatibleKeys([], [])
    for key, value in trained.state_dict().items():
        assert value.dtype is dtypes[key]
        assert torch.equal(value, original[key].to(value.dtype))
    again = seeded(Net, seed=1)
    again.load_state_dict(trained.state_dict())
    assert torch.equal(apply_plan(again, PLANS[name])(normal(2, 4)), patched(name)(normal(2, 4)))


@both
def test_hooks_still_fire(name: str) -> None:
    model, heard = seeded(Net), []
    model.norm.register_forward_hook(lambda *_: heard.append("norm"))
    model.norm.register_full_backward_hook(lambda *_: heard.append("norm back"))
    model.register_forward_pre_hook(lambda *_: heard.append("root"))
    apply_plan(model, PLANS[name])
    model.first.register_forward_hook(lambda *_: heard.append("first"))
    model.head[2].register_full_backward_hook(lambda *_: heard.append("head back"))
    model(normal(2, 4)).float().sum().backward()
    assert heard == ["root", "first", "norm", "head back", "norm back"]


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
def test_applying_twice_is_applying_once(name: str) -> None:
    once, twice = patched(name), apply_plan(patched(name), PLANS[name])
    x = normal(2, 4)
    assert torch.equal(once(x), twice(x))
    assert [is_wrapped(m) for m in once.modules()] == [is_wrapped(m) for m in twice.modules()]
    assert twice.norm.forward.args[1] is None  # the wrapper does not wrap the wrapper


@both
def test_train_and_eval_and_requires_grad_stay(name: str) -> None:
    model = seeded(Net).train()
    model.norm.eval()
    model.first.weight.requires_grad_(False)
    apply_plan(model, PLANS[name])
    assert (model.training, model.norm.training, model.head.training) == (True, False, True)
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == ["first.weight"]


@both
def test_functional_call_runs_the_weights_it_is_given(name: str) -> None:
    model, x = patched(name), normal(2, 4)
    doubled = {key: value * 2 for key, value in model.state_dict().items() if value.is_floating_point()}
    other = copy.deepcopy(model)
    other.load_state_dict(doubled, strict=False)
    with torch.no_grad():
        assert torch.equal(torch.func.functional_call(model, doubled, (x,)), other(x))


def test_recurrent_weights_are_put_in_one_piece_once_they_are_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN would copy them together at every call; on a CPU this does nothing."""
    found: list[set[torch.dtype]] = []
    monkeypatch.setattr(
        torch.nn.LSTM, "flatten_parameters", lambda self: found.append({x.dtype for x in self.parameters()})
    )
    model = torch.nn.Sequential(torch.nn.LSTM(4, 4))
    found.clear()
    for strategy, after in (("autocast", []), ("cast", [{torch.float16}])):
        apply_plan(model, plan(strategy, {"": scope("fp16")}))
        assert found == after


# torch.compile and torch.export take a patched model whole, for inputs of any size.


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@both
def test_torch_compile_without_a_graph_break(name: str) -> None:
    model, x = patched(name), normal(2, 4)
    with torch.no_grad():
        assert torch.equal(torch.compile(model, backend="aot_eager", fullgraph=True)(x), model(x))


@both
def test_training_through_torch_compile(name: str) -> None:
    compiled, model, x = patched(name).train(), patched(name).train(), normal(6, 4)
    torch.compile(compiled, backend="aot_eager", fullgraph=True)(x).float().square().sum().backward()
    model(x).float().square().sum().backward()
    for one, other in zip(compiled.parameters(), model.parameters(), strict=True):
        assert one.grad.dtype is other.grad.dtype
        assert torch.allclose(one.grad.float(), other.grad.float(), rtol=2**-6, atol=1e-4)


@both
def test_other_batch_sizes_compile_once(name: str) -> None:
    model = patched(name)
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(1)
        return graph

    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for size in (2, 3, 7):
            assert torch.equal(compiled(normal(size, 4)), model(normal(size, 4)))
    assert len(graphs) == 1


# A strict export of any autocast region that holds a cast asserts the wrong dtype when it is run (torch 2.13).
@pytest.mark.parametrize(("name", "strict"), [("autocast", False), ("cast", False), ("cast", True)])
def test_torch_export(name: str, strict: bool) -> None:
    model, shapes = patched(name), ({0: torch.export.Dim.DYNAMIC},)
    exported = torch.export.export(model, (normal(2, 4),), dynamic_shapes=shapes, strict=strict).module()
    with torch.no_grad():
        for count in (2, 3, 7):
            assert torch.equal(exported(normal(count, 4)), model(normal(count, 4)))


@pytest.mark.parametrize("name", thinned(PLANS))
def test_low_layers_in_an_fp32_model(name: str) -> None:
    """The other way round: FP32 with low scopes in it, one of which holds an island."""
    scopes = {"": scope("fp32"), "first": scope("bf16"), "head": scope("bf16"), "head.2": scope("fp32")}
    model, x = apply_plan(seeded(Net), plan(name, scopes)), normal(3, 4)
    with torch.no_grad():
        assert torch.equal(torch.compile(model, backend="aot_eager", fullgraph=True)(x), model(x))
        shapes = ({0: torch.export.Dim.DYNAMIC},)
        exported = torch.export.export(model, (x,), dynamic_shapes=shapes).module()
        assert torch.equal(exported(normal(5, 4)), model(normal(5, 4)))
        assert torch.equal(pickle.loads(pickle.dumps(model))(x), model(x))
        assert torch.equal(copy.deepcopy(model)(x), model(x))
