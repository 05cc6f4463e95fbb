"""Small models that write into themselves when they run, one for each way of doing it."""

import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

X = torch.linspace(-1, 1, 12).reshape(4, 3)


class Writer(nn.Module):
    """A linear layer with `build(self)` done at the start and `write(self, x)` before every forward."""

    def __init__(self, build: Callable[[Any], object], write: Callable[[Any, torch.Tensor], object]) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("seen", torch.zeros(3))
        build(self)
        self.write = write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.write(self, x)
        return x * 2


@dataclass
class Cache:
    """What a decoder keeps between calls."""

    keys: list[torch.Tensor] = field(default_factory=list)
    length: int = 0
    owner: Any = None


class Slots:
    __slots__ = ("count", "state", "unset")

    def __init__(self) -> None:
        self.count, self.state = 0, torch.zeros(2)


class Refusing(nn.Linear):
    """No attribute can be set after the start, all are equal, none has a hash."""

    __hash__ = None  # type: ignore[assignment]

    def __setattr__(self, name: str, value: Any) -> None:
        if "bias" in self.__dict__.get("_parameters", ()):
            raise AttributeError(name)
        super().__setattr__(name, value)

    def __eq__(self, other: object) -> bool:
        return True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.__dict__["calls"] = self.__dict__.get("calls", 0) + 1
        self._parameters["bias"] = None
        self.weight.data.mul_(2)
        return super().forward(x)


class Strict(OrderedDict[str, Any]):
    """Refuses to be written, as the outputs of transformers do."""

    def __setitem__(self, key: str, value: Any) -> None:
        raise TypeError("no")

    def clear(self) -> None:
        raise TypeError("no")


def nothing(m: Any) -> None:
    pass


def attributes(**values: Any) -> Callable[[Any], None]:
    def build(m: Any) -> None:
        for name, make in values.items():
            setattr(m, name, make())

    return build


def some_buffers(m: Any) -> None:
    m.register_buffer("unset", None)
    m.register_buffer("gone", torch.ones(2))


def write_buffers(m: Any, x: torch.Tensor) -> None:
    m.seen = m.seen + 1
    m.unset = torch.ones(2)
    m.register_buffer("made", torch.ones(1), persistent=False)
    del m.gone


def one_storage(m: Any) -> None:
    m.register_buffer("whole", torch.arange(6.0))
    m.register_buffer("part", m.whole[:3])
    m.plain = m.whole[2:]


def write_storage(m: Any, x: torch.Tensor) -> None:
    m.part.add_(1)
    m.plain.mul_(2)
    m.part = m.part.clone()


def lists_of_modules(m: Any) -> None:
    m.several = nn.ModuleList([nn.ReLU()])
    m.by_name = nn.ModuleDict({"a": nn.ReLU()})
    m.weights = nn.ParameterList([nn.Parameter(torch.ones(2))])
    m.row = nn.Sequential(nn.Linear(3, 3))


def grow(m: Any, x: torch.Tensor) -> None:
    m.late = nn.Parameter(torch.ones(2))
    m.register_parameter("later", nn.Parameter(torch.ones(1)))
    m.linear.weight = nn.Parameter(torch.zeros(3, 3))
    m.extra = nn.Linear(1, 1)
    m.several.append(nn.Linear(1, 1))
    m.by_name["b"] = nn.ReLU()
    m.weights.append(nn.Parameter(torch.ones(1)))
    m.row[0] = nn.ReLU()


def normalize(m: Any, x: torch.Tensor) -> None:
    m.norm(x)


def spectral(m: Any) -> None:
    m.norm = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3))
    m.norm.parametrizations.weight[0]._u.copy_(torch.tensor([1.0, 0.0, 0.0]))


def write_flags(m: Any, x: torch.Tensor) -> None:
    m.linear.requires_grad_(False)
    m.seen.requires_grad_(True)
    m.linear.eval()
    m.linear.bias.grad = torch.ones(3)


def write_gradients(m: Any, x: torch.Tensor) -> None:
    m.linear(x).sum().backward()
    m.linear.weight.grad = None
    m.linear(x).sum().backward()


def half_and_back(m: Any, x: torch.Tensor) -> None:
    m.linear.half()
    m.linear.bias.data = torch.zeros(7)
    m.seen.data = torch.zeros(2, 2)


def write_recurrent(m: Any, x: torch.Tensor) -> None:
    m.rnn(x)
    m.rnn.weight_ih_l0.data.add_(1)
    m.rnn.weight_hh_l0 = nn.Parameter(torch.zeros(9, 3))
    m.rnn.half()


def hidden_state(m: Any) -> None:
    m.state, m.base = torch.zeros(3), torch.ones(4)
    m.view = m.base[:2]
    m.view.mark = [1]


def write_hidden(m: Any, x: torch.Tensor) -> None:
    """With gradients on, states written in place become results of the graph."""
    m.state.copy_(m.linear(x)[0])
    m.view.mul_(m.linear(x)[0, :2])


def write_hooks(m: Any, x: torch.Tensor) -> None:
    m.linear.register_forward_hook(lambda *_: None)
    m.linear.register_forward_pre_hook(lambda *_: None, with_kwargs=True)
    m.linear.weight.register_hook(lambda g: g)
    m.linear.weight.register_post_accumulate_grad_hook(lambda p: None)
    m.linear.weight.mark = 1


def storing_hook(m: Any) -> None:
    m.log, m.last = [], {}
    m.linear.register_forward_hook(lambda module, args, out: m.log.append(out))
    m.linear.register_forward_pre_hook(lambda module, args: m.last.update(x=args))


def some_cache(m: Any) -> None:
    m.cache = Cache([torch.ones(2)])
    m.cache.owner = m.cache
    m.pair = (m.cache, [1])


def write_cache(m: Any, x: torch.Tensor) -> None:
    m.cache.keys.append(x)
    m.cache.keys[0].add_(1)
    m.cache.length += 4
    m.cache.new = True
    m.pair[1].append(2)


def some_containers(m: Any) -> None:
    m.items = [1, 2]
    m.nested = {"first": 0, "a": {"b": [torch.ones(2)]}, "z": 0}
    m.names = {"a"}
    m.queue = deque([1, 2], maxlen=2)
    m.groups = defaultdict(list, {"old": [1]})
    m.counts = Counter("aab")
    m.strict = OrderedDict(a=1, z=2)
    m.refusing = Strict()
    OrderedDict.__setitem__(m.refusing, "a", 1)
    m.numbers = np.arange(3.0)


def write_containers(m: Any, x: torch.Tensor) -> None:
    m.items.reverse()
    m.items.append(x)
    m.nested["a"]["b"][0].add_(1)
    m.nested["a"]["c"] = 1
    m.nested["first"] = m.nested.pop("first")
    del m.nested["z"]
    m.names.add("b")
    m.queue.append(3)
    m.groups["new"].append(1)
    m.counts.update("abc")
    m.strict.move_to_end("a")
    m.strict["b"] = 2
    OrderedDict.__setitem__(m.refusing, "b", 2)
    m.numbers[1] = 9


def two_aliases(m: Any) -> None:
    m.memo = m.linear.memo = {"a": [torch.ones(2)]}


def write_aliases(m: Any, x: torch.Tensor) -> None:
    m.linear.memo["a"].append(x)
    m.memo = dict(m.memo)


def parent_link(m: Any) -> None:
    m.linear.__dict__["parent"] = m
    m.linear.__dict__["weak"] = weakref.ref(m)


def write_slots(m: Any, x: torch.Tensor) -> None:
    m.slots.count += 1
    m.slots.state.add_(1)
    m.slots.unset = 1


def write_sizes(m: Any, x: torch.Tensor) -> None:
    m.seen.resize_(7).fill_(3)
    m.plain.set_(torch.ones(5))
    m.cut.resize_(1)


def delete(m: Any, x: torch.Tensor) -> None:
    del m.count, m.seen, m.linear


def optimize(m: Any, x: torch.Tensor) -> None:
    optimizer = torch.optim.Adam(m.linear.parameters(), foreach=True)
    m.linear(x).sum().backward()
    optimizer.step()


def own_optimizer(m: Any) -> None:
    m.optimizer = torch.optim.SGD(m.linear.parameters(), lr=0.1, momentum=0.9)
    m.linear(X).sum().backward()
    m.optimizer.step()


def own_step(m: Any, x: torch.Tensor) -> None:
    m.linear(x).square().sum().backward()
    m.optimizer.step()
    m.optimizer.param_groups[0]["lr"] = 5


Build, Write = Callable[[Any], object], Callable[[Any, torch.Tensor], object]
_WRITERS: dict[str, tuple[Build, Write]] = {
    "parameter data": (nothing, lambda m, x: m.linear.weight.data.mul_(2)),
    "storage of a parameter": (nothing, lambda m, x: m.linear.weight.untyped_storage().fill_(0)),
    "item": (nothing, lambda m, x: m.seen.__setitem__(0, 3.0)),
    "out": (nothing, lambda m, x: torch.add(x[0], 1, out=m.seen)),
    "foreach": (nothing, lambda m, x: torch._foreach_add_([m.seen, m.linear.weight.data], 1.0)),
    "through numpy": (nothing, lambda m, x: torch.from_numpy(m.seen.numpy()[1:]).add_(1)),
    "swap": (nothing, lambda m, x: torch.utils.swap_tensors(m.linear.weight, nn.Parameter(torch.zeros(2)))),
    "buffers": (some_buffers, write_buffers),
    "one storage": (one_storage, write_storage),
    "sizes": (attributes(plain=lambda: torch.zeros(2), cut=lambda: torch.arange(4.0)), write_sizes),
    "half": (nothing, half_and_back),
    "transposed": (nothing, lambda m, x: setattr(m.linear.weight, "data", m.linear.weight.data.t())),
    "growth": (lists_of_modules, grow),
    "deletion": (attributes(count=int), delete),
    "batch norm": (attributes(norm=lambda: nn.BatchNorm1d(3)), normalize),
    "max norm": (attributes(table=lambda: nn.Embedding(5, 3, max_norm=0.1)), lambda m, x: m.table(torch.arange(2))),
    "spectral norm": (spectral, normalize),
    "observer": (attributes(norm=lambda: torch.ao.quantization.FusedMovingAvgObsFakeQuantize()), normalize),
    "lazy": (attributes(norm=lambda: nn.LazyLinear(2)), normalize),
    "flags": (nothing, write_flags),
    "gradients": (lambda m: setattr(m.linear.weight, "grad", torch.ones(3, 3)), write_gradients),
    "recurrent": (attributes(rnn=lambda: nn.GRU(3, 3)), write_recurrent),
    "hidden state": (hidden_state, write_hidden),
    "hooks": (nothing, write_hooks),
    "hook that stores": (storing_hook, lambda m, x: m.linear(x)),
    "cache": (some_cache, write_cache),
    "containers": (some_containers, write_containers),
    "aliases": (two_aliases, write_aliases),
    "parent": (parent_link, lambda m, x: setattr(m.linear.parent, "calls", 1)),
    "slots": (attributes(slots=Slots), write_slots),
    "generators": (
        attributes(noise=lambda: torch.Generator().manual_seed(1)),
        lambda m, x: setattr(m, "drawn", torch.rand(3, generator=m.noise)),
    ),
    "refusing": (attributes(norm=lambda: Refusing(3, 3)), normalize),
    "adam foreach": (nothing, optimize),
    "own optimizer": (own_optimizer, own_step),
}
NAMES = sorted(_WRITERS)


def writer(name: str) -> Writer:
    """The model called `name`, with weights that depend on nothing else."""
    torch.manual_seed(0)
    return Writer(*_WRITERS[name])
