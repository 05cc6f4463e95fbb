"""Rule files to write into a directory: a whole rule, a chain for it, an example for it."""

from pathlib import Path

RULE = """severity = "warning"
confidence = "low"
formats = ["fp16"]
when = [{ fact = "reduction_length", above = 8 }]
message = "sums {reduction_length} numbers"
why = "because"
advice = "do not"
references = ["a paper: https://example.org"]

[match]
ops = ["aten.sum"]
"""


def write(root: Path, text: str = RULE, family: str = "tests", stem: str = "TST001-bad-thing") -> Path:
    """The rule as a file under `root`, in a family's directory."""
    path = root / family / f"{stem}.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


CHAIN = """
[[match.chain]]
paths = ["a > b? > c"]
report = "a"
[match.nodes]
a = { ops = ["aten.exp"] }
b = { ops = ["aten.neg"] }
c = { ops = ["aten.sum"] }
"""

EXAMPLE = """[example]
inputs = ["torch.ones(4)"]
code = "def forward(x): return x.sum()"
fixed = "def forward(x): return x.mean()"

"""
