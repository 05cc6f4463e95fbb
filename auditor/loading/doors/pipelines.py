"""Runs a diffusers pipeline for a few steps, and records how it calls its components."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, update_wrapper
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ...errors import LoadError, suggest
from ...isolation.process import reseed
from ...numerics.entries import tensors_in
from ...records import Batch
from ..target import blame, call, named_in, parse, required_arguments, user_code
from ..texts import LINES, read_texts
from .checkpoints import silence
from .folders import PIPELINE, locate, read_json

STEPS = 3
"""Number of steps of the run."""

MOST_CALLS = 3
"""Maximum number of recorded calls of a method: the first, the last, and those evenly between."""

PROMPT = "a photograph of an astronaut riding a horse"

Calls = Mapping[str, tuple[Batch, ...]]
"""{method of a component: its calls}"""

_runs: dict[tuple[Path, int, str], PipelineRun] = {}
"""Runs of this process, by folder, seed and arguments."""


@dataclass(frozen=True)
class PipelineRun:
    """A run of a pipeline. kind: its class. calls: {component: its calls}. arguments: those of the call, in words."""

    kind: str
    calls: Mapping[str, Calls]
    arguments: str


def models_in(folder: Path) -> list[str]:
    """Names of the components of a pipeline that are models: folders with a config.json. Raises: LoadError."""
    entries = read_json(folder / PIPELINE)
    named = (name for name, entry in entries.items() if isinstance(entry, list) and any(entry))
    names = [name for name in named if (folder / name / "config.json").is_file()]
    if not names:
        message = f"{folder / PIPELINE} names no component whose folder has a config.json"
        raise LoadError(f"{message}: give a complete folder, as `pipeline.save_pretrained` writes it", "missing-target")
    return names


def arguments_from(text: str | None, folder: Path, seed: int) -> dict[str, Any] | None:
    """The arguments with which `--inputs` asks to call the pipeline: prompts of a file, or the dict that a function
    returns. None if `--inputs` gives the audited component's own inputs instead."""
    if not text:
        return None
    if Path(text).suffix == LINES and Path(text).is_file():
        return {"prompt": read_texts(Path(text))}
    if ".py" not in text:
        return None
    target = parse(text)
    if target.symbol is None:
        return None
    with user_code(target, seed):
        function = named_in(target, "name a function", "missing-inputs")
        what = f"{target.symbol}() in {target.label}"
        value = call(function, what, "inputs-raise") if callable(function) else function
    known = inspect.signature(pipeline_class(folder).__call__).parameters
    is_call = isinstance(value, Mapping) and bool(value) and all(name in known for name in value)
    has_plain = is_call and not all(isinstance(item, Tensor) for item in value.values())
    return dict(value) if has_plain else None


def pipeline_class(folder: Path) -> Any:
    """The pipeline's class in diffusers. Raises: LoadError(slug="model-raises" | "remote-code")."""
    diffusers: Any = importlib.import_module("diffusers")
    entries = read_json(folder / PIPELINE)
    name = entries.get("_class_name")
    lists = [(part, entry[0]) for part, entry in entries.items() if isinstance(entry, list) and entry]
    if isinstance(name, list) or any((folder / part / f"{library}.py").is_file() for part, library in lists):
        message = f"{folder} contains its own pipeline code, which an hf: target never runs"
        raise LoadError(f"{message}: write a model.py that loads the pipeline and returns a component", "remote-code")
    kind = getattr(diffusers, str(name), None)
    if kind is None or not hasattr(kind, "from_pretrained"):
        hint = "install the version of diffusers that wrote the folder, or audit a component with --inputs"
        message = f"{folder / PIPELINE} names the class {name}, which diffusers {diffusers.__version__} lacks"
        raise LoadError(f"{message}: {hint}", slug="model-raises")
    return kind


def short_run(folder: Path, seed: int, given: Mapping[str, Any] | None) -> PipelineRun:
    """Run a pipeline in FP32 for STEPS steps, and return the calls of its components; a run is not repeated for the
    next component. given: arguments of the pipeline's call.

    Raises: LoadError(slug="model-raises").
    """
    key = folder, seed, repr(given)
    if key not in _runs:
        _runs[key] = _short_run(folder, seed, given or {})
    return _runs[key]


def _short_run(folder: Path, seed: int, given: Mapping[str, Any]) -> PipelineRun:
    for library in ("diffusers", "transformers"):
        if importlib.util.find_spec(library) is not None:
            silence(library)
    kind = pipeline_class(folder)
    what = f"loading {kind.__name__} from {folder.name}"
    absent = _absent_components(kind, folder)
    pipeline = call(kind.from_pretrained, what, "model-raises", str(folder), local_files_only=True, **absent)
    models = {name: part for name, part in pipeline.components.items() if isinstance(part, nn.Module)}
    for model in models.values():
        model.float().eval()
    if hasattr(pipeline, "set_progress_bar_config"):
        pipeline.set_progress_bar_config(disable=True)
    reseed(seed)
    arguments = _arguments(pipeline, given)
    try:
        calls = _recorded_calls(pipeline, models, arguments, seed)
    except Exception as error:
        hint = "give arguments of its call: --inputs f.py:func, where func() returns a dict of them"
        message = f"a short run of {kind.__name__} from {folder.name} raised {blame(error)}"
        raise LoadError(f"{message}: {hint}", slug="model-raises") from error
    chosen = {
        name: {method: tuple(_spread(batches)) for method, batches in methods.items()}
        for name, methods in calls.items()
        if methods
    }
    return PipelineRun(kind.__name__, chosen, _in_words(arguments))


def _recorded_calls(
    pipeline: Any, models: Mapping[str, nn.Module], arguments: Mapping[str, Any], seed: int
) -> dict[str, dict[str, list[Batch]]]:
    """{model: {method: its calls}} of a run of the pipeline: without optional images, or with them if it then raises,
    as the pipeline of a ControlNet does. Raises: the pipeline's last exception."""
    images = _optional_images(pipeline, arguments)
    try:
        return _calls_in(pipeline, models, arguments, seed)
    except Exception:
        if not images:
            raise
    return _calls_in(pipeline, models, {**arguments, **images}, seed)


def _calls_in(
    pipeline: Any, models: Mapping[str, nn.Module], arguments: Mapping[str, Any], seed: int
) -> dict[str, dict[str, list[Batch]]]:
    """{model: {method: its calls}} of one run of the pipeline. Raises: the pipeline's exceptions."""
    takes_generator = "generator" in inspect.signature(pipeline.__call__).parameters
    seeded = {"generator": torch.Generator().manual_seed(seed)} if takes_generator else {}
    reseed(seed)
    with torch.no_grad(), recorded(models) as calls:
        pipeline(**{**seeded, **arguments})
    return calls


def _absent_components(kind: Any, folder: Path) -> dict[str, None]:
    """{component: None} for components that the pipeline was saved without: some pipelines' `from_pretrained` requires
    them as arguments."""
    entries = read_json(folder / PIPELINE)
    wanted = required_arguments(kind.__init__)
    return {name: None for name in wanted if name != "self" and not (entries.get(name) or [None])[0]}


def _arguments(pipeline: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of the run: a prompt, few steps, and images without a default, as far as the pipeline takes them."""
    parameters = inspect.signature(pipeline.__call__).parameters
    for name in given:
        if name not in parameters:
            hint = suggest(name, parameters) or f"it takes {', '.join(list(parameters)[:8])}"
            message = f"the call of {type(pipeline).__name__} takes no argument {name!r}"
            raise LoadError(f"{message}: {hint}", slug="bad-inputs")
    defaults: dict[str, Any] = {
        "prompt": PROMPT,
        "num_inference_steps": _steps(parameters, given),
        "output_type": "np",
    }
    needed = required_arguments(pipeline.__call__)
    defaults |= {name: value for name, value in _images(pipeline).items() if name in needed}
    if "class_labels" in needed:
        defaults["class_labels"] = [0]
    known = {name: value for name, value in defaults.items() if name in parameters}
    if any(name.endswith("embeds") for name in given):
        known.pop("prompt", None)
    return {**known, **given}


def _steps(parameters: Mapping[str, inspect.Parameter], given: Mapping[str, Any]) -> int:
    """`num_inference_steps` with which STEPS steps run: image-to-image pipelines run the share `strength` of them."""
    default = parameters["strength"].default if "strength" in parameters else 1.0
    strength = given.get("strength", default)
    if not isinstance(strength, int | float) or not 0.0 < strength <= 1.0:
        return STEPS
    return math.ceil(STEPS / strength)


def _optional_images(pipeline: Any, arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    """Images that the pipeline takes and the arguments lack."""
    parameters = inspect.signature(pipeline.__call__).parameters
    return {name: value for name, value in _images(pipeline).items() if name in parameters and name not in arguments}


def _images(pipeline: Any) -> dict[str, Tensor]:
    """{argument: a random image [1, 3, h, w] or mask [1, 1, h, w] in [0, 1]}, of the pipeline's default size."""
    denoiser = getattr(pipeline, "unet", None) or getattr(pipeline, "transformer", None)
    side = getattr(getattr(denoiser, "config", None), "sample_size", None) or 64
    side = side if isinstance(side, int) else side[0]
    scale = getattr(pipeline, "vae_scale_factor", 1)
    image = torch.rand(1, 3, side * scale, side * scale)
    mask = (torch.rand(1, 1, side * scale, side * scale) > 0.5).float()
    return {"image": image, "control_image": image, "mask_image": mask, "control_mask": mask}


def _in_words(arguments: Mapping[str, Any]) -> str:
    """`3 steps, prompt 'a photograph ...'`."""
    words = list[str]()
    if "num_inference_steps" in arguments:
        words.append(f"{arguments['num_inference_steps']} steps")
    prompt = arguments.get("prompt")
    if isinstance(prompt, str):
        words.append(f"prompt {prompt!r}")
    elif prompt:
        words.append(f"{len(prompt)} prompts")
    return ", ".join(words) or "its default arguments"


@contextmanager
def recorded(models: Mapping[str, nn.Module]) -> Iterator[dict[str, dict[str, list[Batch]]]]:
    """In the `with` block, calls of each model's `forward` and public methods are recorded, as {model: {method: calls}}.

    A call inside another call of the same model is not recorded.
    """
    calls: dict[str, dict[str, list[Batch]]] = {name: {} for name in models}
    with ExitStack() as stack:
        for name, model in models.items():
            recorder = Recorder(calls[name])
            for method in ("forward", *own_methods(model)):
                stack.enter_context(recorder.recording(model, method))
        yield calls


def own_methods(model: nn.Module) -> list[str]:
    """Public methods that the model's classes define, without those of nn.Module."""
    names = set[str]()
    for kind in type(model).__mro__:
        if issubclass(nn.Module, kind):
            continue
        for name, value in vars(kind).items():
            is_public = not name.startswith("_") and not hasattr(nn.Module, name)
            if is_public and isinstance(value, types.FunctionType):
                names.add(name)
    return sorted(names)


class Recorder:
    """Records the outermost calls of one model. calls: {method: its calls}, which the recorder fills."""

    def __init__(self, calls: dict[str, list[Batch]]) -> None:
        self.calls, self.depth = calls, 0

    @contextmanager
    def recording(self, model: nn.Module, method: str) -> Iterator[None]:
        """In the `with` block, calls of this method are recorded."""
        before = model.__dict__.get(method)
        original = getattr(model, method)
        model.__dict__[method] = update_wrapper(partial(self.call, method, original), original)
        try:
            yield
        finally:
            del model.__dict__[method]
            if before is not None:
                model.__dict__[method] = before

    def call(self, method: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the method; record its arguments if no other method of the model runs, and a tensor is among them."""
        given: Batch = (args, kwargs)
        if self.depth == 0 and tensors_in(given):
            self.calls.setdefault(method, []).append(_copy(given))
        self.depth += 1
        try:
            return original(*args, **kwargs)
        finally:
            self.depth -= 1


def _copy(value: Batch) -> Batch:
    """A copy of arguments: tensors are cloned, and generators of random numbers are left out."""

    def copy(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.detach().clone()
        return None if isinstance(leaf, torch.Generator) else leaf

    result: Batch = tree_map(copy, value)
    return result


def _spread(batches: Sequence[Batch]) -> list[Batch]:
    """At most MOST_CALLS calls: the first, the last, and those evenly between."""
    if len(batches) <= MOST_CALLS:
        return list(batches)
    last = len(batches) - 1
    return [batches[round(index * last / (MOST_CALLS - 1))] for index in range(MOST_CALLS)]


def parts_of(text: str, inputs: str | None, seed: int) -> dict[str, str]:
    """The components that a pipeline calls, as {name: target to audit}; {} if `text` is not the folder of a pipeline.

    The name is that of the component's folder; if the pipeline calls several of its methods, each has an entry
    `NAME-METHOD`. Raises: LoadError.
    """
    target = parse(text)
    if target.hub != "hf" or target.symbol:
        return {}
    if importlib.util.find_spec("huggingface_hub") is None:
        return {}
    with user_code(target, seed):
        folder = locate(target)
        if folder.kind != "pipeline" or importlib.util.find_spec("diffusers") is None:
            return {}  # loading the target reports the missing package
        arguments = arguments_from(inputs, folder.path, seed)
        if inputs and arguments is None:
            message = f"--inputs {inputs} are no arguments of the pipeline {folder.path.name}"
            hint = "give prompts.txt, or f.py:func, where func() returns a dict of arguments of its call"
            raise LoadError(f"{message}: {hint}", slug="bad-inputs")
        run = short_run(folder.path, seed, arguments)
    parts = dict[str, str]()
    for name, methods in run.calls.items():
        for method in methods:
            if len(methods) == 1:
                parts[name] = f"{text}/{name}"
            else:
                parts[f"{name}-{method}"] = f"{text}/{name}:{method}"
    return parts
