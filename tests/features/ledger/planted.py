"""Models with one silent cast each, as a project would have it: the line that casts is marked, and what it must be called."""

from dataclasses import dataclass

from auditor.asked import Command
from auditor.features.ledger.stage import run_ledger
from auditor.loading import load
from auditor.records import Finding
from auditor.records.ledger import LedgerRow
from auditor.rulebook.findings import silent_findings

OPTIONS = Command(fail_on="never")


def ledger(target: str, weights: str | None = None) -> tuple[tuple[LedgerRow, ...], tuple[Finding, ...]]:
    """The rows and the findings that the command `ledger` prints of a target, without a plan."""
    capture, rows, casts = run_ledger(load(target, weights=weights), None, OPTIONS.seed)
    return rows, silent_findings(casts, capture, OPTIONS.rulebook, OPTIONS.formats)


NET = """
import torch
import torch.nn.functional as F
from torch import nn

class Net(nn.Module):
    def __init__(self, **kwargs):
        super().__init__()
        self.embed, self.body = nn.Embedding(16, 8), nn.Linear(8, 8, **kwargs)
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 16, bias=False)
        self.setup()

    def setup(self):
        pass

    def hidden(self, x):
        return self.norm(self.body(x))

    def forward(self, ids):
        return self.head(self.hidden(self.embed(ids)))

class Converting(Net):  # its layer computes in the dtype of its weight, whatever comes in
    def hidden(self, x):
        return self.norm(self.body(x.to(self.body.weight.dtype)).to(x.dtype))

def get_inputs():
    return torch.arange(16)
"""


@dataclass(frozen=True)
class Planted:
    """code: below NET, with the one line that casts marked `# here`. rule: that reports it; names: of what is cast."""

    name: str
    rule: str
    names: tuple[str, ...]
    code: str
    weights: str | None = None


LOADING = (
    Planted("entries halved before loading", "CST001", ("embed.weight",), """
def get_model():
    net = Net()
    state = torch.load("weights.pt")
    state["embed.weight"] = state["embed.weight"].half()
    net.load_state_dict(state)  # here
    return net
"""),
    Planted("entries halved and widened again", "CST001", ("body.weight", "body.bias"), """
def get_model():
    net = Net()
    state = {k: v.bfloat16().float() if k.startswith("body") else v for k, v in torch.load("weights.pt").items()}
    net.load_state_dict(state)  # here
    return net
"""),
    Planted("copied from a file without load_state_dict", "CST001", ("head.weight",), """
from safetensors.torch import load_file

def get_model():
    net = Net()
    for name, value in load_file("weights.safetensors").items():  # here
        held = net.get_parameter(name) if "running" not in name and "num_" not in name else net.get_buffer(name)
        held.data.copy_(value.half() if name == "head.weight" else value)
    return net
"""),
    Planted("a layer in BF16 meets a checkpoint in FP32", "CST001", ("body.weight", "body.bias"), """
def get_model():
    net = Converting(dtype=torch.bfloat16)
    net.load_state_dict(torch.load("weights.pt"))  # here
    return net
"""),
    Planted("a checkpoint with FP32 tensors in a model all in BF16", "CST001", ("norm.weight", "norm.bias"), """
def get_model():
    net = Net().to(torch.bfloat16)
    net.norm.running_var.fill_(1.0)
    net.load_state_dict(torch.load("mixed.pt"))  # here
    return net
"""),
    Planted("--weights into a layer in FP16", "CST001", ("body.weight", "body.bias"), """
def get_model():
    return Converting(dtype=torch.float16)
""", "weights.pt"),
)  # fmt: skip

CONVERTED = (
    Planted("halved and widened again", "CST002", ("body.weight", "body.bias"), """
def get_model():
    net = Net()
    net.body.half()  # here
    return net.float()
"""),
    Planted("a buffer in a model that is halved", "CST002", ("angles",), """
class Mine(Net):
    def setup(self):
        self.register_buffer("angles", 100 ** -torch.linspace(0, 1, 8))

    def hidden(self, x):
        return self.body(x) * self.angles

def get_model():
    net = Mine()
    return net.half()  # here
"""),
    Planted("a running statistic from a checkpoint in a model that is halved", "CST002", ("norm.running_var",), """
def get_model():
    net = Net()
    net.load_state_dict(torch.load("weights.pt"))
    return net.half()  # here
"""),
    Planted("a running statistic in BF16", "CST002", ("norm.running_mean",), """
def get_model():
    net = Net()
    net.norm.running_mean.normal_()
    return net.to(torch.bfloat16)  # here
"""),
    Planted("a head that shares its weight with the embedding", "CST002", ("embed.weight",), """
class Mine(Net):
    def setup(self):
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.hidden(self.embed(ids).float())
        return self.head(x.to(self.head.weight.dtype))

def get_model():
    net = Mine()
    net.head.half()  # here
    return net
"""),
    Planted("a module of the author's list of FP32 modules", "CST002", ("norm.weight", "norm.bias"), """
class Mine(Net):
    _keep_in_fp32_modules = ["norm"]

    def setup(self):
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.norm.bias)

def get_model():
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    net = Mine().to(torch.float16)  # here
    torch.__future__.set_overwrite_module_params_on_conversion(False)
    return net
"""),
)  # fmt: skip

CREATED = (
    Planted("a buffer made in FP16", "CST003", ("gain",), """
class Mine(Net):
    def setup(self):
        self.register_buffer("gain", torch.linspace(0.5, 1.5, 8).half())  # here

    def hidden(self, x):
        return self.body(x) * self.gain
"""),
    Planted("a tie that is broken by a copy in FP16", "CST003", ("head.weight",), """
class Mine(Net):
    def setup(self):
        self.head.weight = nn.Parameter(self.embed.weight.detach().half())  # here

    def forward(self, ids):
        return self.hidden(self.embed(ids)) @ self.head.weight.float().T
"""),
    Planted("a default dtype for the whole file", "CST003", ("embed.weight", "body.weight", "norm.weight"), """
torch.set_default_dtype(torch.bfloat16)  # here

def get_model():
    return Net()
"""),
    Planted("a default dtype around one layer", "CST003", ("last.weight",), """
def low():
    torch.set_default_dtype(torch.float16)  # here
    layer = nn.Linear(16, 4, bias=False)
    torch.set_default_dtype(torch.float32)
    return layer

class Mine(Net):
    def setup(self):
        self.last = low()

    def forward(self, ids):
        return super().forward(ids) @ self.last.weight.float().T
"""),
)  # fmt: skip

FORWARD = (
    Planted("half and float in one line", "CST004", ("the model",), """
class Mine(Net):
    def hidden(self, x):
        return self.norm(self.body(x.half().float()))  # here
"""),
    Planted("to the dtype of a table", "CST004", ("the model",), """
class Mine(Net):
    def setup(self):
        self.table = torch.ones(8, dtype=torch.bfloat16)

    def hidden(self, x):
        return self.norm(self.body(x.to(self.table.dtype).float()))  # here
"""),
    Planted("a sum in BF16", "CST004", ("the model",), """
class Mine(Net):
    def hidden(self, x):
        total = torch.zeros(16, 8, dtype=torch.bfloat16)
        total += self.body(x)  # here
        return total.float()
"""),
    Planted("type() in a module of its own", "CST004", ("cast",), """
class Cast(nn.Module):
    def forward(self, x):
        return x.type(torch.float16)  # here

class Mine(Net):
    def setup(self):
        self.cast = Cast()

    def hidden(self, x):
        return self.norm(self.cast(self.body(x)).float())
"""),
    Planted("a weight cast in the forward", "CST004", ("the model",), """
class Mine(Net):
    def hidden(self, x):
        weight = self.body.weight.to(torch.bfloat16)  # here
        return self.norm(F.linear(x, weight.float(), self.body.bias))
"""),
)  # fmt: skip

AUTOCAST = (
    Planted("a region around a module that upcasts", "CST005", ("router",), """
class Router(nn.Linear):
    def forward(self, x):
        return super().forward(x.float() / 3)  # here

class Mine(Net):
    def setup(self):
        self.router = Router(8, 8)

    def hidden(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.router(self.body(x)).float()
"""),
    Planted("a softmax in FP32 before a product in a region", "CST005", ("the model",), """
class Mine(Net):
    def hidden(self, x):
        with torch.autocast("cuda", torch.float16):
            scores = self.body(x) @ self.body(x).T
            weights = scores.float().softmax(-1)
            return (weights @ self.body(x)).float()  # here
"""),
)  # fmt: skip

SCALES = (
    Planted("the scale of a stored weight", "CST006", ("weight_scale",), """
class Mine(Net):
    def setup(self):
        self.register_buffer("low", torch.randn(8, 8).to(torch.float8_e4m3fn))
        self.register_buffer("weight_scale", torch.ones(8, 1))  # here

    def hidden(self, x):
        return self.norm(F.linear(x, self.low.float() * self.weight_scale))
"""),
    Planted("the scale of an activation", "CST006", ("the model",), """
class Mine(Net):
    def setup(self):
        self.register_buffer("scale", torch.ones(()))

    def hidden(self, x):
        low = (x / self.scale).clamp(-448, 448).to(torch.float8_e4m3fn)  # here
        return self.norm(self.body(low.float() * self.scale))
"""),
)  # fmt: skip

PLANTED = (*LOADING, *CONVERTED, *CREATED, *FORWARD, *AUTOCAST, *SCALES)

ASKED = {
    "a model in FP32": "",
    "a model that is halved by a swap of tensors": """
def get_model():
    torch.__future__.set_swap_module_params_on_conversion(True)
    net = Net().half().half()
    torch.__future__.set_swap_module_params_on_conversion(False)
    return net
""",
    "a model with a tied weight that is halved": """
class Mine(Net):
    def setup(self):
        self.head.weight = self.embed.weight

def get_model():
    return Mine().half()
""",
    "a layer that is halved": """
def get_model():
    net = Converting()
    net.body.bfloat16()
    return net.eval()
""",
    "a checkpoint in FP32": 'def get_model():\n    net = Net()\n    net.load_state_dict(torch.load("weights.pt"))\n    return net\n',
    "a layer that is halved after loading": """
def get_model():
    net = Converting()
    net.load_state_dict(torch.load("weights.pt"))
    net.body.half()
    return net
""",
    "arguments by name": """
class Mine(Net):
    def setup(self):
        self.register_buffer(name="gain", tensor=torch.ones(8), persistent=False)
        self.register_parameter("shift", param=nn.Parameter(torch.ones(8)))

def get_model():
    net = Mine()
    net.load_state_dict(state_dict=torch.load(f="weights.pt"), strict=False)
    return net
""",
    "a checkpoint in BF16": """
def get_model():
    net = Net().to(torch.bfloat16)
    net.load_state_dict(torch.load("low.pt"))
    return net
""",
    "a checkpoint in FP16 in a model in FP32": """
def get_model():
    net = Net()
    net.load_state_dict({k: v.float() for k, v in torch.load("half.pt").items()})
    return net
""",
    "a region of autocast": """
class Mine(Net):
    def hidden(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            x = self.body(x)
        return self.norm(x.float())
""",
    "a norm that upcasts and returns to its input's dtype": """
class Norm(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.float()).to(x.dtype)

class Mine(Net):
    def setup(self):
        self.norm = Norm(8)

    def hidden(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.norm(self.body(x)).float()
""",
    "masks and indices in few bits": """
class Mine(Net):
    def hidden(self, x):
        mask = (x > 0).to(torch.float16)
        return self.norm(self.body(x) * mask)
""",
    "a scale that was computed": """
class Mine(Net):
    def setup(self):
        weight = torch.randn(8, 8)
        self.register_buffer("weight_scale", weight.abs().amax(1, keepdim=True) / 448)
        self.register_buffer("low", (weight / self.weight_scale).to(torch.float8_e4m3fn))
        self.register_buffer("scale", torch.tensor(0.01))

    def hidden(self, x):
        low = (x / self.scale).to(torch.float8_e4m3fn).float() * self.scale
        return self.norm(F.linear(low, self.low.float() * self.weight_scale))
""",
}  # fmt: skip
"""Models of which every cast is asked for."""
