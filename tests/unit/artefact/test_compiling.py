"""torch.compile and torch.export take a patched model whole, for inputs of any size."""

import copy
import pickle
from collections.abc import Iterator

import pytest
import torch

from auditor.artefact.applying import apply_plan
from tests.support.patching import PLANS, Net, patched, plan, scope
from tests.support.subjects import normal, seeded

both = pytest.mark.parametrize("name", PLANS)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@both
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_torch_compile_without_a_graph_break(name: str, backend: str) -> None:
    model, x = patched(name), normal(2, 4)
    with torch.no_grad():
        assert torch.equal(torch.compile(model, backend=backend, fullgraph=True)(x), model(x))


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
@pytest.mark.parametrize("size", [None, torch.export.Dim.DYNAMIC], ids=["fixed", "dynamic"])
def test_torch_export(name: str, strict: bool, size: object) -> None:
    model = patched(name)
    shapes = None if size is None else ({0: size},)
    exported = torch.export.export(model, (normal(2, 4),), dynamic_shapes=shapes, strict=strict).module()
    with torch.no_grad():
        for count in (2,) if size is None else (2, 3, 7):
            assert torch.equal(exported(normal(count, 4)), model(normal(count, 4)))


@both
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
