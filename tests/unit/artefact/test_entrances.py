"""A plan holds wherever a model is entered: at its forward, its other methods, and its modules."""

import contextlib
import copy
import functools
import linecache
import pickle
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from auditor.artefact.applying import apply_plan
from tests.support.patching import plan, scope
from tests.support.subjects import normal, seeded

HALF, WIDE = torch.float16, torch.float32
SCOPES = {"": scope("fp16"), "norm": scope("fp32")}
both = pytest.mark.parametrize("strategy", ["autocast", "cast"])


class Spy(nn.Linear):
    """A linear layer that notes the dtype in which it computes."""

    seen: tuple[list[torch.dtype], ...] = ([],)

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        self.seen[0].append(result.dtype)
        return result


class Autoencoder(nn.Module):
    """Methods of every kind that lead to the same two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Spy(8, 8), Spy(8, 8)
        self.norm = nn.LayerNorm(8)
        self.gain = nn.Parameter(torch.ones(8))

    def encode(self, x: Tensor) -> Tensor:
        return self.encoder(x)

    def decode(self, z: Tensor) -> Tensor:
        return self.norm(self.decoder(z)) * self.gain

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))

    def even(self, x: Tensor, depth: int = 3) -> Tensor:
        return self.encoder(x) if depth == 0 else self.odd(x, depth - 1)

    def odd(self, x: Tensor, depth: int = 3) -> Tensor:
        return self.decoder(self.even(x, depth))

    def product(self, x: Tensor) -> Tensor:
        """Operations of the method's own, on weights of the model."""
        result = F.linear(x * self.gain, self.encoder.weight)
        Spy.seen[0].append(result.dtype)
        return result

    @torch.no_grad()
    def sample(self, x: Tensor) -> Tensor:
        return self.decode(x)

    def draw(self, rows: int) -> Tensor:
        """Tensors that the method makes, in FP32."""
        return self.decode(torch.ones(rows, 8))

    def draws(self, rows: int) -> Iterator[Tensor]:
        while True:
            yield self.draw(rows)

    def generate(self, x: Tensor) -> Tensor:
        return self(x)

    def stream(self, x: Tensor) -> Iterator[Tensor]:
        while True:
            x = self.product(x)
            yield x

    def by_name(self, x: Tensor) -> Tensor:
        return getattr(self, "encoder")(x)  # noqa: B009 - the bytecode names no module

    def update(self, x: Tensor, state: dict[str, Tensor]) -> None:
        state["hidden"] = self.encoder(x)

    async def later(self, x: Tensor) -> Tensor:
        return self.encoder(x)

    def fail(self, x: Tensor) -> Tensor:
        raise KeyError(str(self.encoder(x).dtype))


def model_under(strategy: str, scopes: Any = SCOPES) -> Any:
    return apply_plan(seeded(Autoencoder), plan(strategy, scopes, "fp16"))


def dtypes_of(run: Callable[[], Any]) -> set[torch.dtype]:
    """Dtypes in which the layers compute during `run`, which must not warn."""
    Spy.seen[0].clear()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        run()
    return set(Spy.seen[0])


def awaited(coroutine: Any) -> Any:
    with pytest.raises(StopIteration) as end:
        coroutine.send(None)
    return end.value.value


X = normal(4, 8)
ENTRANCES: dict[str, Callable[[Any], Any]] = {
    "forward": lambda model: model(X),
    "encode": lambda model: model.encode(X),
    "decode": lambda model: model.decode(X),
    "methods that call each other": lambda model: model.even(X),
    "own operations": lambda model: model.product(X),
    "without gradients": lambda model: model.sample(X),
    "generate": lambda model: model.generate(X),
    "tensors of its own": lambda model: model.draw(4),
    "tensors of a generator": lambda model: next(model.draws(4)),
    "functional_call": lambda model: torch.func.functional_call(model, model.state_dict(), (X,)),
    "copy": lambda model: copy.deepcopy(model).decode(X),
    "pickle": lambda model: pickle.loads(pickle.dumps(model)).decode(X),
}


@both
@pytest.mark.parametrize("entrance", ENTRANCES)
def test_every_entrance_computes_as_planned(strategy: str, entrance: str) -> None:
    model = model_under(strategy)
    assert dtypes_of(lambda: ENTRANCES[entrance](model)) == {HALF}
    assert dtypes_of(lambda: model(X)) == {HALF}


@both
@pytest.mark.parametrize("entrance", ["encoder", "by_name", "later"])
def test_a_module_called_from_outside_computes_as_planned_and_warns_once(strategy: str, entrance: str) -> None:
    model = model_under(strategy)
    call = getattr(model, entrance)
    with pytest.warns(UserWarning, match=r"'encoder' \(Spy\) is called from outside the model"):
        result = awaited(call(X)) if entrance == "later" else call(X)
    assert result.dtype is HALF
    assert dtypes_of(lambda: model.encoder(X)) == {HALF}  # no second warning


@both
def test_the_decoder_gives_the_same_bits_alone_and_in_the_model(strategy: str) -> None:
    model = model_under(strategy)
    with torch.no_grad():
        assert torch.equal(model.decode(model.encode(X)), model(X))


class Careful(Autoencoder):
    """A forward that hands FP32 to a method on purpose."""

    def decode(self, z: Tensor) -> Tensor:
        self.handed = z.dtype
        return self.decoder(z.to(self.decoder.weight.dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x).float())


@both
def test_what_a_forward_hands_to_a_method_stays_as_the_audit_recorded_it(strategy: str) -> None:
    model = apply_plan(seeded(Careful), plan(strategy, {"": scope("fp16")}, "fp16"))
    for run in (model, model.generate):
        run(X)
        assert model.handed is WIDE


@both
def test_a_generator_computes_as_planned_whenever_it_is_resumed(strategy: str) -> None:
    model = model_under(strategy)
    stream = model.stream(X)  # never ends: it must not be read ahead
    for _ in range(3):
        assert dtypes_of(lambda: next(stream)) == {HALF}
        assert not torch.is_autocast_enabled("cpu")
    stream.close()


@both
def test_an_exception_leaves_the_plan_intact(strategy: str) -> None:
    model = model_under(strategy)
    with pytest.raises(KeyError, match="float16"):
        model.fail(X)
    assert dtypes_of(lambda: model.decode(X)) == {HALF}


@both
def test_a_dict_that_a_method_writes_to_is_the_callers(strategy: str) -> None:
    state: dict[str, Tensor] = {}
    model_under(strategy).update(X, state)
    assert state["hidden"].dtype is HALF


@both
def test_threads_enter_the_plan_on_their_own(strategy: str) -> None:
    model, results = model_under(strategy), []
    inside, done = threading.Event(), threading.Event()

    def hold(*_: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            done.wait(10)

    model.encoder.register_forward_hook(hold)
    thread = threading.Thread(target=lambda: results.append(model.encode(X).dtype))
    thread.start()
    inside.wait(10)
    assert dtypes_of(lambda: model.product(X)) == {HALF}  # while the other thread is inside a call
    done.set()
    thread.join()
    assert results == [HALF]


@both
def test_kept_functions_of_the_enclosing_scopes_are_kept(strategy: str) -> None:
    class Exponential(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.exp()

    class Net(Autoencoder):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Linear(8, 8), Exponential())

        def grow(self, x: Tensor) -> Tensor:
            return self.block(x)

    scopes = {"": {"precision": "fp16", "keep": ["exp"]}}
    model = apply_plan(seeded(Net), plan(strategy, scopes, "fp16"))
    with torch.no_grad():
        assert model.grow(X).dtype is WIDE
        with pytest.warns(UserWarning, match="outside"):
            assert model.block(X).dtype is WIDE


@both
def test_the_innermost_scope_around_an_entrance_decides(strategy: str) -> None:
    class Net(Autoencoder):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Sequential(Spy(8, 8)))

    # The kept function opens an autocast region around the low-precision scope, which the FP32 scope switches off.
    scopes = {"": {"precision": "fp16", "keep": ["exp"]}, "block": scope("fp32")}
    model = apply_plan(seeded(Net), plan(strategy, scopes, "fp16"))
    with torch.no_grad(), pytest.warns(UserWarning, match="outside"):
        assert model.block[0](X).dtype is WIDE


@both
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_that_recomputes_is_no_entrance(strategy: str, use_reentrant: bool) -> None:
    """The model disables autocast around a checkpoint: what the backward pass repeats must not enable it again."""

    class Net(Autoencoder):
        def forward(self, x: Tensor) -> Tensor:
            low = x.to(self.encoder.weight.dtype)
            with torch.autocast("cpu", enabled=False):
                return checkpoint(lambda x: self.encoder(x).square(), low, use_reentrant=use_reentrant)

    model = apply_plan(seeded(Net), plan(strategy, SCOPES, "fp16"))
    Spy.seen[0].clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(X.clone().requires_grad_()).float().sum().backward()
    stored = {"autocast": WIDE, "cast": HALF}[strategy]
    assert Spy.seen[0] == [stored, stored]


@both
def test_low_layers_of_an_fp32_model_are_entered_in_their_own_precision(strategy: str) -> None:
    model = model_under(strategy, {"": scope("fp32"), "decoder": scope("fp16")})
    assert dtypes_of(lambda: model.encode(X)) == {WIDE}
    assert dtypes_of(lambda: model.decode(X)) <= {HALF, WIDE}
    with pytest.warns(UserWarning, match="'encoder'"):
        assert model.encoder(X.half()).dtype is WIDE


@both
def test_entrances_compile_without_a_graph_break(strategy: str) -> None:
    torch._dynamo.reset()
    model = apply_plan(seeded(Plain), plan(strategy, SCOPES, "fp16"))
    with torch.no_grad():
        with pytest.warns(UserWarning, match="outside"):
            model.decoder(X)
        for entrance in (model, model.decode, model.decoder):
            compiled = torch.compile(entrance, backend="eager", fullgraph=True)
            assert torch.equal(compiled(X), entrance(X))
    torch._dynamo.reset()


class Plain(nn.Module):
    """Two layers, without notes, for torch.compile."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)

    def decode(self, z: Tensor) -> Tensor:
        return self.norm(self.decoder(z))

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encoder(x))


@both
def test_another_plan_removes_all_that_the_first_one_bound(strategy: str) -> None:
    model = model_under(strategy)
    before = {path: set(vars(module)) for path, module in seeded(Autoencoder).named_modules()}
    bound = {path: set(vars(module)) - before[path] for path, module in model.named_modules()}
    assert {"forward", "encode", "decode", "stream", "even"} <= bound[""]
    assert not {"generate", "later", "by_name"} & bound[""]  # they enter the plan where they call a module
    apply_plan(model, plan(strategy, SCOPES, "fp16"))
    assert model.decode.args[1] is None  # a method that was bound twice would keep the first
    assert {path: set(vars(module)) - before[path] for path, module in model.named_modules()} == bound


# Conversions of the weights after a plan was applied.

CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "half()": lambda model: model.half(),
    "bfloat16()": lambda model: model.bfloat16(),
    "double()": lambda model: model.double(),
    "to(torch.float64)": lambda model: model.to(torch.float64),
    "to(torch.bfloat16)": lambda model: model.decoder.to(dtype=torch.bfloat16),
    "to(torch.float16)": lambda model: nn.Sequential(model).to("cpu", torch.float16),
}


@both
@pytest.mark.parametrize("call", CONVERSIONS)
def test_a_conversion_after_a_plan_is_named_and_changes_no_dtype(strategy: str, call: str) -> None:
    model = model_under(strategy)
    with torch.no_grad():
        expected = model(X)
        with pytest.warns(UserWarning, match="does not change the model's dtypes") as caught:
            CONVERSIONS[call](model)
        assert torch.equal(model(X), expected)
    message = str(caught[0].message)
    assert len(caught) == 1
    assert message.startswith(f".{call} (test_entrances.py:")
    assert caught[0].filename == __file__


def test_the_place_of_a_conversion_is_outside_the_models_own_methods() -> None:
    class Net(Autoencoder):
        def to(self, *args: Any, **kwargs: Any) -> Any:  # as in diffusers and transformers
            return super().to(*args, **kwargs)

    model = apply_plan(seeded(Net), plan("cast", SCOPES, "fp16"))
    with pytest.warns(UserWarning, match="does not change") as caught:
        model.to(torch.float32)
    line = linecache.getline(__file__, caught[0].lineno)
    assert str(caught[0].message).startswith(f".to(torch.float32) (test_entrances.py:{caught[0].lineno}) does not")
    assert line.strip() == "model.to(torch.float32)"


@both
def test_what_only_moves_weights_is_not_warned_about(strategy: str) -> None:
    model = model_under(strategy)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.to("cpu").share_memory()
        moved = model.to("meta")
    assert {x.device.type for x in moved.parameters()} == {"meta"}
    assert moved.norm.weight.dtype is WIDE


def test_weights_of_another_dtype_are_named_when_they_fail() -> None:
    model = model_under("cast")
    wide = {name: value.float() for name, value in model.state_dict().items()}
    with pytest.raises(RuntimeError) as caught:
        torch.func.functional_call(model, wide, (X,))
    assert "'gain' is torch.float32, and torch.float16 under the FP16 plan (cast)" in caught.value.__notes__[0]


class Fusing(nn.Module):
    """An attention layer that can fuse its projections, as those of diffusers do."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(16, 8)
        self.to_qk: nn.Linear | None = None

    def fuse_projections(self) -> None:
        self.to_qk = nn.Linear(8, 16, dtype=self.to_q.weight.dtype)
        self.to_qk.weight.data = torch.cat([self.to_q.weight.data, self.to_k.weight.data])
        self.to_qk.bias.data = torch.cat([self.to_q.bias.data, self.to_k.bias.data])

    def forward(self, x: Tensor) -> Tensor:
        parts = torch.cat([self.to_q(x), self.to_k(x)], -1) if self.to_qk is None else self.to_qk(x)
        return self.out(parts)


@both
def test_a_method_that_adds_weights_is_named_once(strategy: str) -> None:
    model = apply_plan(nn.ModuleList([seeded(Fusing), seeded(Fusing)]), plan(strategy, {"": scope("fp16")}, "fp16"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model[0].fuse_projections()
        model[1].fuse_projections()
    assert len(caught) == 1
    assert caught[0].filename == __file__
    message = str(caught[0].message)
    assert message.startswith(".fuse_projections() of Fusing added the weight '0.to_qk.weight'")


def test_an_added_weight_of_another_dtype_is_named_when_it_fails() -> None:
    scopes = {"": scope("fp16"), "to_q": scope("fp32"), "to_k": scope("fp32")}
    model = apply_plan(seeded(Fusing), plan("cast", scopes, "fp16"))
    model(X)
    with pytest.warns(UserWarning, match=r"fuse_projections\(\) first"):
        model.fuse_projections()
    with pytest.raises(RuntimeError) as caught:
        model(X)
    assert caught.value.__notes__[0].startswith("The weight 'to_qk.weight' was added after the FP16 plan (cast)")


@both
def test_a_wrapped_part_adds_no_weight(strategy: str) -> None:
    model = model_under(strategy)
    model.encoder = torch.compile(model.encoder, backend="eager")
    dtypes_of(lambda: model.decode(X))  # must not warn


@both
def test_a_parametrized_weight_may_be_read_at_any_time(strategy: str) -> None:
    model = seeded(Autoencoder)
    nn.utils.parametrizations.orthogonal(model.encoder)
    apply_plan(model, plan(strategy, {"": scope("fp16"), "encoder": scope("fp32")}, "fp16"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert model.encoder.weight.dtype is WIDE


def test_a_context_manager_of_the_model_goes_on_working() -> None:
    class Net(Autoencoder):
        @contextlib.contextmanager
        def averaged(self) -> Iterator[Tensor]:
            yield self.encoder.weight

    with apply_plan(seeded(Net), plan("cast", SCOPES, "fp16")).averaged() as weight:
        assert weight.dtype is HALF


def in_eval(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator without functools.wraps, as many repositories have it."""

    def run(self: nn.Module, *args: Any) -> Any:
        self.eval()
        return function(self, *args)

    return run


class Decorator:
    """A decorator that is an object, with an attribute of its own."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.__doc__ = function, "about"

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)

    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else types.MethodType(self, instance)


def multiply(model: Any, x: Tensor) -> Tensor:
    """A product with a weight, outside of any module."""
    result = F.linear(x, model.encoder.weight)
    Spy.seen[0].append(result.dtype)
    return result


def scaled_by(factor: float, model: Any, x: Tensor) -> Tensor:
    return multiply(model, model.encoder(x)) * factor


class Decorated(Autoencoder):
    """Methods whose own bytecode reads none of the model's attributes."""

    @in_eval
    def bare(self, x: Tensor) -> Tensor:
        return multiply(self, self.encoder(x))

    @torch.no_grad()
    @in_eval
    def twice(self, x: Tensor) -> Tensor:
        return multiply(self, self.encoder(x))

    @Decorator
    def by_object(self, x: Tensor) -> Tensor:
        return multiply(self, self.encoder(x))

    @functools.singledispatchmethod
    def dispatched(self, x: Tensor) -> Tensor:
        return multiply(self, self.encoder(x))

    def scaled(self, factor: float, x: Tensor) -> Tensor:
        return multiply(self, self.encoder(x)) * factor

    doubled = functools.partialmethod(scaled, 2.0)
    tripled = in_eval(functools.partial(scaled_by, 3.0))

    @functools.lru_cache  # noqa: B019 - the cache is what a plan must not hide
    def cached(self, rows: int) -> Tensor:
        return self.encoder(torch.ones(rows, 8))

    @staticmethod
    def static(model: nn.Module) -> Tensor:
        return model.encoder.weight


@both
@pytest.mark.parametrize("method", ["bare", "twice", "by_object", "dispatched", "doubled", "tripled"])
def test_decorated_methods_compute_as_planned(strategy: str, method: str) -> None:
    model = apply_plan(seeded(Decorated), plan(strategy, SCOPES, "fp16"))
    assert dtypes_of(lambda: getattr(model, method)(X)) == {HALF}
    expected = getattr(seeded(Decorated), method)(X)
    assert torch.allclose(getattr(model, method)(X).float(), expected, atol=2e-3)


def test_what_is_no_method_or_has_attributes_of_its_own_stays(recwarn: pytest.WarningsRecorder) -> None:
    model: Any = apply_plan(seeded(Decorated), plan("autocast", SCOPES, "fp16"))
    assert model.cached(2) is model.cached(2)
    model.cached.cache_clear()
    assert model.static(model) is model.encoder.weight


@both
def test_replicas_of_data_parallel_run_their_own_weights(strategy: str) -> None:
    """As `torch.nn.parallel.replicate` makes them for a second device; here the replica's weights are all zero."""
    model = model_under(strategy)
    modules = list(model.modules())
    replicas = {module: module._replicate_for_data_parallel() for module in modules}
    for module, replica in replicas.items():
        for name, child in module._modules.items():
            replica._modules[name] = replicas[child]
        for name, weight in module._parameters.items():
            setattr(replica, name, torch.zeros_like(weight))
    assert dtypes_of(lambda: replicas[model](X)) == {HALF}
    assert not replicas[model](X).any()
    assert not replicas[model].decode(X).any()
    assert model(X).any()
