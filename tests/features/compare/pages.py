"""Comparisons with something in each block of their pages, made without a run."""

from dataclasses import replace

from auditor.features.compare import page
from auditor.features.compare.compare import Comparison, Flip, OutputPair
from auditor.features.compare.fingerprint import Fingerprint
from auditor.features.compare.gradients import GradientChange
from auditor.features.compare.locate import Place
from auditor.features.compare.recording import Output, Recording, Value
from auditor.features.compare.rounding import Rounding

PRINT = Fingerprint((8, 16, 32), 4096, 0, 1.0, 2.0, 3.0, 4.0, 5.0, 0.5)
LONG = "model.language_model.layers.17.self_attention.query_key_value_projection"
CODE = "attention_scores = torch.matmul(query_states, key_states.transpose(2, 3)) * self.scaling + attention_mask[:, :, None]"
FILES = ("recordings/2026-11-29/original_implementation_on_the_first_machine.json", "port.py:PortedLanguageModel")
NOTES = (
    "without an FP64 kernel, so in FP32: _grouped_mm",
    "gradients: record both runs with --gradients to compare them",
    "output hidden: only B has it",
)


def value(name: str, op: str, literals: dict[str, str], dtype: str = "float32") -> Value:
    return Value(
        name,
        "operation",
        f"aten.{op}.default",
        LONG,
        (),
        dtype,
        (PRINT,),
        source="modeling_language_model_of_the_second_generation.py:1234",
        code=CODE,
        called_from="train.py:12",
        literals=literals,
    )


A = value("layer_norm", "layer_norm", {"eps": "1e-06"})
B = value("rsqrt", "layer_norm", {"eps": "1e-05"})
STORED = Value("weight", "parameter", "parameter", f"{LONG}.weight", (), "float32", (PRINT,), fits="bfloat16")


def recording(torch: str) -> Recording:
    environment = {"torch": torch, "transformers": torch, "processor": torch, "device": "cpu", "weights": "random"}
    values = {each.name: each for each in (A, B, STORED)}
    return Recording("model.py", environment, values, (), own_backwards=("Clip (net.py:12)",))


def comparison(verdict: str) -> Comparison:
    outputs = tuple(
        OutputPair(
            Output(name, "layer_norm", (), ()), Output(name, "rsqrt", (), ()), True, 3.3e-5, 3.3e-5, 1.6e-7, 1.8e-7
        )
        for name in ("logits", "past_key_values.17.keys_of_the_sliding_window")
    )
    found = Comparison(recording("2.13.0"), recording("2.14.1"), verdict, outputs, not_compared=NOTES)  # type: ignore[arg-type]
    if verdict == "differ":
        places = (Place(A, B), Place(A, None), Place(None, B))
        return replace(found, places=places)
    own = replace(STORED, own_gradient=True)
    return replace(
        found,
        stored=((STORED, STORED), (STORED, None)),
        roundings=(Rounding("B", replace(B, dtype="float16"), A, 2.2e-4, 6.1e-8, 3), Rounding("A", A, None, 1e-3, 0.0)),
        gradients=(GradientChange(own, STORED, "root mean square 0.1 in A, 0.2 in B", A, B),),
        flips=(Flip("B", B, 0.0123), Flip("A", A, 0.5)),
    )


def differing() -> str:
    """The page of runs that differ."""
    return page.render(comparison("differ"), FILES)


def rounding() -> str:
    """The page of runs of which one rounds more, with other gradients and flips."""
    return page.render(comparison("rounding"), FILES)
