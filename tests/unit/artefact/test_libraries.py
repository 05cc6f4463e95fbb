"""Plans of quantization schemes in other libraries: the code is run as pasted, and the library's model is compared with the
audit's emulation.

ModelOpt and compressed-tensors are skipped where they are not installed. torchao's kernels for FP8 and NVFP4 need a GPU: there
the fields of the configurations are compared.
"""

import copy
import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor.artefact.libraries import LIBRARIES
from auditor.errors import AuditorError, PlanError
from auditor.isolation.members import named_modules
from auditor.measure.layers import QuantizedModel, spans_of
from auditor.numerics.metrics import output_error
from auditor.numerics.quantize import fake_quantize
from auditor.numerics.schemes import SCHEMES
from auditor.records.audit import Audit
from auditor.reporters import html
from auditor.snippets import snippet, snippets
from tests.support.refusing import refused
from tests.support.snippets import pasted
from tests.support.subjects import seeded

WIDTH = 128
LINEAR = ("q", "k", "v", "up", "down", "head", "lm_head")


class Net(nn.Module):
    """Attention, a convolution and two heads, of which one's name ends with the other's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.conv = nn.Embedding(40, WIDTH), nn.Conv2d(1, 16, 3, padding=1)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.up, self.down = nn.Linear(WIDTH, 256), nn.Linear(256, WIDTH)
        self.head, self.lm_head = nn.Linear(WIDTH, 32), nn.Linear(WIDTH, 32)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + (self.q(x) @ self.k(x).transpose(-1, -2) / 16).softmax(-1) @ self.v(x)
        x = self.conv((x + self.down(torch.tanh(self.up(x))))[:, None]).mean(1)
        return self.head(x) + self.lm_head(x)


IDS = torch.arange(24).view(2, 12) % 40


@cache
def net() -> Net:
    return seeded(Net)


@cache
def audited() -> Audit:
    return auditor.audit(net(), IDS, formats="int8_weights")


def planned(layers: Mapping[str, str], name: str = "mixed", **changes: Any) -> Audit:
    """The audit with one plan of these schemes; all other layers stay in 16 bits."""
    chosen = {path: layers.get(path, "") for path in ("embed", "conv", *LINEAR)}
    schemes = tuple(dict.fromkeys(filter(None, chosen.values())))
    plan = replace(audited().quantized_plans[0], name=name, schemes=schemes, layers=chosen, groups=())
    return replace(audited(), quantized_plans=(replace(plan, **changes),))


def alike(scheme: str, *more: str) -> dict[str, str]:
    """All linear layers but `head`, and more layers, in one scheme."""
    return dict.fromkeys([*(path for path in LINEAR if path != "head"), *more], scheme)


def code(audit: Audit, library: str) -> dict[str, Any]:
    """What the code for a library defines."""
    return pasted(snippet(audit, library, audit.quantized_plans[0].name), pytest.MonkeyPatch())


def emulated(layers: Mapping[str, str], model: nn.Module, batch: Tensor = IDS) -> Tensor:
    """The outputs in the audit's emulation; static scales are of this batch."""
    ours = QuantizedModel(model, spans_of(model, ("int8_static",), [((batch,), {})], 0))
    (result,) = ours.outputs(layers, ((batch,), {}), 0)
    return result


def quantized_by(model: nn.Module) -> dict[str, str]:
    """{path: class} of the weights that are no plain tensors."""
    return {
        path: type(module.weight.data).__name__
        for path, module in named_modules(model)
        if isinstance(getattr(module, "weight", None), Tensor) and type(module.weight.data) is not Tensor
    }


ON_CPU = {
    "int8": ("embed",),
    "int8_asymmetric": ("embed",),
    "int8_static": (),
    "int8_tensor": (),
    "int8_weights": ("embed",),
    "int4": ("embed", "conv"),
    "int4_asymmetric": ("embed", "conv"),
}
"""{scheme that torchao runs on a CPU in FP32: further kinds of layers that it quantizes}."""


@pytest.mark.parametrize("scheme", ON_CPU)
def test_torchaos_model_is_the_emulation(scheme: str) -> None:
    pytest.importorskip("torchao.quantization", exc_type=ImportError)
    layers = alike(scheme, *(path for path in ("embed", "conv") if path in ON_CPU[scheme]))
    if scheme.startswith("int4"):
        del layers["conv"]  # torchao has groups along the input channels, of which this one has 1
    given = [[(IDS,)]] if scheme == "int8_static" else []
    model = code(planned(layers), "torchao")["quantize"](copy.deepcopy(net()), *given, dtype=None)
    assert quantized_by(model).keys() == layers.keys()
    with torch.no_grad():
        theirs, ours, exact = model(IDS), emulated(layers, net()), net()(IDS)
    error = output_error([exact], [theirs])
    assert error > 1e-3  # it is quantized
    assert output_error([ours], [theirs]) < error / 10  # an entry at a tie may go the other way


@pytest.mark.parametrize("scheme", [name for name, one in SCHEMES.items() if name.startswith("mx") and one.config])
def test_torchao_emulates_mx_without_a_gpu(scheme: str) -> None:
    pytest.importorskip("torchao.quantization", exc_type=ImportError)
    torch.manual_seed(0)
    x, model = torch.randn(8, WIDTH).bfloat16(), nn.ModuleDict({"q": nn.Linear(WIDTH, WIDTH)})
    layer = copy.deepcopy(model["q"]).bfloat16()
    made = code(planned({"q": scheme}), "torchao")["quantize"](model)
    assert quantized_by(made) == {"q": "MXTensor"}
    row = SCHEMES[scheme]
    assert row.activation is not None
    given, weight = fake_quantize(x, row.activation).values, fake_quantize(layer.weight, row.weight).values
    ours = nn.functional.linear(given, weight, layer.bias.float())
    assert output_error([ours], [made["q"](x).float()]) < 2**-8  # the result is rounded to BF16


def test_configurations_whose_kernels_need_a_gpu_have_the_schemes_fields() -> None:
    ao = pytest.importorskip("torchao.quantization", exc_type=ImportError)
    of = {name: code(planned({"q": name}), "torchao")["CONFIGS"][name] for name in ("fp8", "fp8_tensor", "fp8_block")}
    assert of["fp8"].granularity == [ao.PerRow(), ao.PerRow()]
    assert of["fp8_tensor"].granularity == [ao.PerTensor(), ao.PerTensor()]
    assert of["fp8_block"].granularity == [ao.PerBlock([1, 128]), ao.PerBlock([128, 128])]
    assert {(one.activation_dtype, one.weight_dtype) for one in of.values()} == {(torch.float8_e4m3fn,) * 2}
    levels = {name: code(planned({"q": name}), "torchao")["CONFIGS"][name] for name in ("nvfp4", "nvfp4_one_level")}
    assert [one.use_dynamic_per_tensor_scale for one in levels.values()] == [True, False]


def test_every_configuration_of_torchao_is_one_of_its_own() -> None:
    core = pytest.importorskip("torchao.core.config", exc_type=ImportError)
    for name, scheme in SCHEMES.items():
        if scheme.config is not None:
            assert isinstance(code(planned({"q": name}), "torchao")["CONFIGS"][name], core.AOBaseConfig)
    lacking = [name for name, scheme in SCHEMES.items() if scheme.config is None]
    rows = ["fp8_token", "fp8_e5m2_row", "fp8_e5m2_tensor", "fp8_e5m2_token", "fp8_e5m2_block"]
    assert lacking == [*rows, "mxfp6", "mxfp6_e3m2"]


def test_a_weight_that_torchao_would_skip_silently_is_named() -> None:
    pytest.importorskip("torchao.quantization", exc_type=ImportError)
    quantize = code(planned({"q": "int4", "k": "int4"}), "torchao")["quantize"]
    model = nn.ModuleDict({"q": nn.Linear(100, 8), "k": nn.Linear(128, 8)})
    with pytest.warns(UserWarning, match=r"q is not quantized: torchao has no int4 for a weight of \(8, 100\)"):
        quantize(model)
    assert quantized_by(model).keys() == {"k"}


def test_code_for_fp8_says_which_sizes_torchao_leaves_out() -> None:
    said = "torchao leaves a layer in 16 bits if its number of inputs or outputs is not a multiple of 16."
    for key, text in snippets(planned({"q": "fp8"}), "mixed").items():
        assert (said in " ".join(text.replace("\n# ", " ").split())) == (key in ("torchao", "hf-quantization"))


def test_static_scales_need_batches_that_reach_the_layers() -> None:
    pytest.importorskip("torchao.quantization", exc_type=ImportError)
    audit = planned({"q": "int8_static"})
    with pytest.raises(ValueError, match="int8_static needs batches that reach these layers: q"):
        code(audit, "torchao")["quantize"](copy.deepcopy(net()), [])
    with refused(PlanError, "no-arithmetic"):
        auditor.apply(net(), audit, "mixed")


def test_what_a_library_cannot_express_is_left_in_16_bits_and_said() -> None:
    audit = planned({"q": "int8", "k": "fp8_e5m2_row", "embed": "int8", "conv": "int8"})
    said = {key: " ".join(text.replace("\n# ", " ").split()) for key, text in snippets(audit, "mixed").items()}
    assert list(said) == list(LIBRARIES)
    left = "which therefore stay in 16 bits: conv (convolution, int8), k (linear, fp8_e5m2_row)."
    assert f"torchao cannot quantize these layers, {left}" in said["torchao"]
    assert "embed (embedding, int8)" in said["compressed-tensors"]
    for key in LIBRARIES:
        assert "2 of 9 layers" in said[key] if key == "torchao" else "1 of 9 layers" in said[key]


def test_layers_that_must_have_one_scheme_stay_together() -> None:
    grouped = planned({"q": "int8", "k": "fp8_token", "v": "int8", "up": "int8"}, groups=(("q", "k", "v"),))
    assert code(grouped, "torchao")["LAYERS"] == {"up": "int8"}
    assert code(grouped, "modelopt")["LAYERS"].keys() == {"q", "k", "v", "up"}
    tied = replace(planned({"embed": "int8", "head": "int8"}), tied_parameters=(("embed.weight", "head.weight"),))
    assert code(tied, "torchao")["LAYERS"] == {"head": "int8", "embed": "int8"}
    assert snippet(tied, "modelopt").startswith("# ModelOpt: there is no code")


def test_a_layer_with_several_paths_is_quantized() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 32))
    model = nn.Sequential(model[0], *model).eval()
    audit = auditor.audit(model, torch.randn(4, WIDTH), formats="int8", max_error=0.1)
    assert code(audit, "torchao")["LAYERS"] == {"0": "int8", "1": "int8", "3": "int8"}
    assert "3 of 3 layers quantized." in snippet(audit, "compressed-tensors", "int8")
    assert type(auditor.apply(model, audit, "int8")[1].weight.data).__name__ == "Int8Tensor"


def test_a_plan_without_a_quantized_layer_is_a_comment() -> None:
    for text in snippets(planned({}), "mixed").values():
        assert text.endswith("# It quantizes no layer.\n")
        assert all(line.startswith("#") for line in text.splitlines())


def test_compressed_tensors_reads_the_configuration_and_rounds_as_the_audit() -> None:
    library = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize as theirs
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    x = torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(0))
    compared = []
    for name, scheme in SCHEMES.items():
        defined = code(planned(alike(name)), "compressed-tensors")
        if "e5m2" in name or "one_level" in name or "mxfp6" in name:
            assert "QUANTIZATION_CONFIG" not in defined
            continue
        config = library.QuantizationConfig.model_validate(json.loads(json.dumps(defined["QUANTIZATION_CONFIG"])))
        model = copy.deepcopy(net())
        library.apply_quantization_config(model, config)
        marked = {path for path, module in named_modules(model) if hasattr(module, "quantization_scheme")}
        assert marked == set(LINEAR) - {"head"}
        assert config.ignore == ["head"]
        args = config.config_groups["group_0"].input_activations
        assert (args is None) == (scheme.activation is None)
        if args is not None and args.dynamic is True and (not name.startswith("mx") or name in ("mxfp8", "mxfp4_even")):
            scale, zero = compute_dynamic_scales_and_zp(x, args, model.q)
            assert scheme.activation is not None
            assert (theirs(x, scale, zero, args) != fake_quantize(x, scheme.activation).values).float().mean() < 2e-3
            compared.append(name)
    assert len(compared) == 9


def test_several_schemes_are_groups_of_compressed_tensors() -> None:
    config = code(planned({"q": "fp8", "up": "int4", "k": "fp8"}), "compressed-tensors")["QUANTIZATION_CONFIG"]
    assert [group["targets"] for group in config["config_groups"].values()] == [["q", "k"], ["up"]]
    assert config["format"] == "mixed-precision"
    assert [group["format"] for group in config["config_groups"].values()] == ["float-quantized", "pack-quantized"]
    assert config["ignore"] == ["down", "head", "lm_head", "v"]


def test_transformers_loads_a_model_with_exactly_these_layers_quantized(tmp_path: Path) -> None:
    pytest.importorskip("torchao.quantization", exc_type=ImportError)
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(vocab_size=48, num_key_value_heads=2, **sizes)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    ids = torch.arange(12)[None]
    audit = auditor.audit(model, {"input_ids": ids}, formats="int8", max_error=0.02)
    (plan,) = audit.quantized_plans
    wanted = {path for path, scheme in plan.layers.items() if scheme}
    assert len(wanted) >= 8
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=code(audit, "hf-quantization")["QUANTIZATION_CONFIG"], dtype=torch.float32
    )
    assert quantized_by(loaded).keys() == wanted
    with torch.no_grad():
        expected = pytest.approx(plan.calibration_error, rel=0.05)
        assert output_error([model(ids).logits], [loaded(ids).logits]) == expected


@pytest.mark.parametrize("scheme", ["fp8", "fp8_block", "int8"])
def test_methods_of_transformers_skip_exactly_the_kept_layers(scheme: str) -> None:
    pytest.importorskip("torchao.quantization", exc_type=ImportError)
    quantizers = pytest.importorskip("transformers.quantizers.quantizers_utils")
    other = code(planned(alike(scheme)), "hf-quantization")["OTHER_CONFIG"]
    kept = other.llm_int8_skip_modules if scheme == "int8" else other.modules_to_not_convert
    converted = {path for path in LINEAR if quantizers.should_convert_module(path, kept)}
    assert converted == set(LINEAR) - {"head"}  # `head` alone would match `lm_head` too
    assert not quantizers.should_convert_module("head.weight", kept)


@pytest.mark.parametrize(
    "scheme", ["fp8", "fp8_tensor", "fp8_token", "fp8_block", "int8", "int8_static", "int8_weights"]
)
def test_modelopts_model_is_the_emulation(scheme: str) -> None:
    pytest.importorskip("modelopt.torch.quantization")
    layers = alike(scheme, *(["conv"] if scheme in ("fp8_tensor", "int8_static", "int8_weights") else []))
    model = code(planned(layers), "modelopt")["quantize"](copy.deepcopy(net()), lambda model: model(IDS))
    parts = {path.rpartition(".") for path, one in model.named_modules() if getattr(one, "is_enabled", False)}
    assert {path for path, _, _ in parts} == layers.keys()
    expected = {"weight_quantizer", "input_quantizer"} - ({"input_quantizer"} if scheme == "int8_weights" else set())
    assert {part for _, _, part in parts} == expected
    with torch.no_grad():
        theirs, ours, exact = model(IDS), emulated(layers, net()), net()(IDS)
    ratio = output_error([exact], [theirs]) / output_error([exact], [ours])
    assert 0.6 < ratio < 1.4  # its integers have other scales
    if scheme.startswith("fp8"):
        assert output_error([ours], [theirs]) < 1e-5


def test_modelopts_attributes_are_those_of_its_recipes() -> None:
    """ModelOpt is too large for the tests' requirements: these are modelopt_recipes/configs/numerics/*.yaml of 0.47."""
    blocks = {"nvfp4": ((2, 1), 16, (4, 3)), "mxfp8": ((4, 3), 32, (8, 0)), "mxfp4": ((2, 1), 32, (8, 0))}
    for name, (bits, size, scale) in blocks.items():
        expected = {"num_bits": bits, "block_sizes": {-1: size, "type": "dynamic", "scale_bits": scale}}
        assert code(planned({"q": name}), "modelopt")["FORMATS"] == {name: {"weight": expected, "input": expected}}
    plain = {name: code(planned({"q": name}), "modelopt")["FORMATS"][name] for name in ("fp8", "int8_static", "int4")}
    assert plain["fp8"]["weight"] == {"num_bits": (4, 3), "axis": 0}
    assert plain["fp8"]["input"] == {"num_bits": (4, 3), "type": "dynamic", "block_sizes": {-1: None}}
    assert plain["int8_static"] == {"weight": {"num_bits": 8, "axis": 0}, "input": {"num_bits": 8, "axis": None}}
    assert plain["int4"] == {"weight": {"num_bits": 4, "block_sizes": {-1: 128}}}
    assert code(planned({"q": "fp8"}), "modelopt")["QUANT_CFG"]["quant_cfg"] == [
        {"quantizer_name": "*", "enable": False},
        {"quantizer_name": "q.weight_quantizer", "cfg": plain["fp8"]["weight"]},
        {"quantizer_name": "q.input_quantizer", "cfg": plain["fp8"]["input"]},
    ]


def test_names_that_are_patterns_match_only_themselves() -> None:
    pytest.importorskip("torchao.quantization", exc_type=ImportError)
    quantizers = pytest.importorskip("transformers.quantizers.quantizers_utils")
    audit = planned({"q": "int8"})
    odd = replace(audit.quantization[0], owner="k(*[", op="aten.linear.default")
    kept = code(replace(audit, quantization=(*audit.quantization, odd)), "hf-quantization")["KEPT"]
    assert not quantizers.should_convert_module("k(*[", kept)
    assert quantizers.should_convert_module("q", kept)


def test_an_audits_directory_has_the_plan_for_every_library(tmp_path: Path) -> None:
    pytest.importorskip("torchao.quantization", exc_type=ImportError)
    audit = planned(alike("int8"), "int8")
    files = {str(file.relative_to(tmp_path)) for file in audit.save(tmp_path) if "quantized" in file.parts}
    names = [library.file for library in LIBRARIES.values()]
    assert files == {f"quantized/int8/{name}" for name in [*names, "quantization_config.json"]}
    config = json.loads((tmp_path / "quantized" / "int8" / "quantization_config.json").read_text(encoding="utf-8"))
    assert config["quant_method"] == "compressed-tensors"
    page = html(audit)
    assert all(
        f"The INT8 plan in {library.title}: quantized/int8/{library.file}" in page for library in LIBRARIES.values()
    )

    names_of_file: dict[str, Any] = {"__file__": str(tmp_path / "patched_model.py"), "__name__": "patched_model"}
    exec((tmp_path / "patched_model.py").read_text(encoding="utf-8"), names_of_file)
    theirs = names_of_file["apply"](copy.deepcopy(net()), plan="int8")
    ours = auditor.apply(copy.deepcopy(net()), tmp_path, "int8")
    assert quantized_by(theirs) == quantized_by(ours) == dict.fromkeys(alike("int8"), "Int8Tensor")
    with torch.no_grad():
        assert torch.equal(theirs(IDS), ours(IDS))
    planned({"q": "int4"}, "int4").save(tmp_path)
    assert not (tmp_path / "quantized" / "int8" / "torchao_config.py").exists()


def test_a_plan_that_torchao_cannot_apply_here_changes_nothing() -> None:
    pytest.importorskip("torchao.quantization", exc_type=ImportError)
    model = copy.deepcopy(net())
    with refused(PlanError, "no-arithmetic", match="torchao cannot apply the plan 'mixed' to this model: Float8"):
        auditor.apply(model, planned({"k": "int8", "q": "fp8"}), "mixed")
    assert all(torch.equal(x, y) for x, y in zip(model.parameters(), net().parameters(), strict=True))
    assert not quantized_by(model)
    with torch.no_grad():
        assert torch.equal(model(IDS), net()(IDS))


@pytest.mark.parametrize(
    ("name", "tool", "slug"), [("nope", "torchao", "no-such-plan"), ("int8", "sglang", "no-such-tool")]
)
def test_unknown_names_are_refused(name: str, tool: str, slug: str) -> None:
    with refused(AuditorError, slug):
        snippet(planned(alike("int8"), "int8"), tool, name)


def test_another_model_is_refused() -> None:
    with refused(PlanError, "plan-mismatch"):
        auditor.apply(nn.Linear(3, 3), planned(alike("int8"), "int8"), "int8")


def test_an_audit_without_schemes_has_no_such_plan() -> None:
    with refused(PlanError, "no-such-plan"):
        snippet(replace(audited(), quantized_plans=()), "torchao")
