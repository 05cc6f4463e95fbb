"""Loops that exist are rehearsed as their libraries run them: Lightning, transformers, accelerate."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import auditor
from auditor.cli import main
from auditor.emulation.emulate import emulate
from auditor.errors import LoadError
from auditor.features.rehearsal.loops import LightningStep, TrainerStep
from tests.features.rehearsal.cases import classes, mlp
from tests.support.refusing import refused
from tests.support.thinned import thinned


class Classifier(nn.Module):
    """Has the methods of a LightningModule, and needs no Lightning. form: of what `configure_optimizers` returns."""

    def __init__(self, form: str = "dict", manual: bool = False) -> None:
        super().__init__()
        self.model, self.form, self.automatic_optimization = mlp(16, 32, 4), form, not manual

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        of_steps = {"scheduler": schedule, "interval": "step"}
        forms = {
            "one": optimizer,
            "list": [optimizer],
            "pair": ([optimizer], [of_steps]),
            "epochs": ([optimizer], [schedule]),
            "dict": {"optimizer": optimizer, "lr_scheduler": of_steps},
            "dicts": ({"optimizer": optimizer, "lr_scheduler": of_steps},),
        }
        return forms[self.form]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = F.cross_entropy(self.model(x), y)
        if not self.automatic_optimization:
            module: Any = self
            optimizer = module.optimizers()
            optimizer.zero_grad()
            module.manual_backward(loss)
            optimizer.step()
            if (schedule := module.lr_schedulers()) is not None:
                schedule.step()
            return None
        return {"loss": loss}

    def train_dataloader(self) -> Any:
        return classes(4)


def by_hand(steps: int, decays: bool) -> list[float]:
    model = mlp(16, 32, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for number, (x, y) in zip(range(steps), classes(4), strict=False):
        optimizer.param_groups[0]["lr"] = 0.1 * 0.5**number if decays else 0.1
        optimizer.zero_grad()
        with emulate("cuda"), torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        with emulate("cuda"):
            loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("form", thinned(["one", "list", "pair", "epochs", "dict", "dicts", "manual", "manual epochs"]))
def test_a_lightning_module_is_rehearsed_as_a_loop_by_hand(form: str) -> None:
    of_hand = {"manual": "one", "manual epochs": "epochs"}
    module = Classifier(of_hand.get(form, form), manual=form in of_hand)
    weight = module.model[0].weight.detach().clone()
    found = auditor.rehearse(module, steps=3, remedies=False)
    decays = form in ("pair", "dict", "dicts", "manual epochs")  # whose step calls the schedule
    assert found.runs["bf16_autocast"].losses == pytest.approx(by_hand(3, decays), rel=1e-6)
    assert all(run.failure is None for run in found.runs.values())
    assert torch.equal(module.model[0].weight, weight)
    assert "optimizers" not in vars(module)


def lightning_by_hand(
    steps: int, dtype: torch.dtype, scaled: bool, stored: bool, clip: Callable[..., Any] | None, count: int
) -> list[float]:
    """Losses of a loop by hand with the arguments of Lightning's Trainer."""
    model = mlp(16, 32, 4).to(dtype if stored else torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    batches, losses = classes(4), list[float]()
    for number in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for x, y in (batches[(number * count + i) % 4] for i in range(count)):
            x = x.to(dtype) if stored else x
            with emulate("cuda"), torch.autocast("cuda", dtype=dtype, enabled=not stored):
                loss = F.cross_entropy(model(x), y)
            loss = loss / count
            with emulate("cuda"):
                scaler.scale(loss).backward()
            total += float(loss.detach())
        scaler.unscale_(optimizer)
        if clip is not None:
            clip(model.parameters())
        with emulate("cuda"):
            scaler.step(optimizer)
            scaler.update()
        losses.append(total)
    return losses


LIGHTNING: dict[str, tuple[dict[str, Any], tuple[Any, ...]]] = {
    "16-mixed": ({"precision": "16-mixed"}, (torch.float16, True, False, None, 1)),
    "16-mixed, norm clipped, accumulated": (
        {"precision": 16, "gradient_clip_val": 0.1, "accumulate_grad_batches": 2},
        (torch.float16, True, False, partial(nn.utils.clip_grad_norm_, max_norm=0.1), 2),
    ),
    "bf16-mixed, values clipped": (
        {"precision": "bf16-mixed", "gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        (torch.bfloat16, False, False, partial(nn.utils.clip_grad_value_, clip_value=0.01), 1),
    ),
    "bf16-true": ({"precision": "bf16-true"}, (torch.bfloat16, False, True, None, 1)),
}


@pytest.mark.parametrize("name", thinned(LIGHTNING, 2))
def test_the_arguments_of_lightnings_trainer_are_the_step_as_written(name: str) -> None:
    arguments, by_hand_ = LIGHTNING[name]
    run = auditor.rehearse((Classifier("one"), arguments), steps=4, remedies=False).runs["as_written"]
    assert (run.failure, run.findings) == (None, [])
    assert run.losses == pytest.approx(lightning_by_hand(4, *by_hand_), rel=1e-6)


def test_manual_optimization_uses_the_scaler_of_the_precision() -> None:
    module = Classifier("one", manual=True)
    run = auditor.rehearse((module, {"precision": "16-mixed"}), steps=3, remedies=False).runs["as_written"]
    assert (run.failure, run.findings, run.scale) == (None, [], 65536)
    by_hand_ = LIGHTNING["16-mixed"][1]
    assert run.losses == pytest.approx(lightning_by_hand(3, *by_hand_), rel=1e-6)


def test_a_precision_that_is_not_known_is_refused() -> None:
    with refused(LoadError, "bad-step", match="does not know the precision 'transformer-engine'"):
        auditor.rehearse((Classifier(), {"precision": "transformer-engine"}), steps=3)


def test_the_arguments_are_read_from_the_only_call_in_the_file(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    text = Path(__file__).read_text().split("class Classifier")[1].split("def by_hand")[0]
    (tmp_path / "net.py").write_text(
        "import torch\nfrom torch import nn\nfrom torch.nn import functional as F\nfrom typing import Any\n"
        "from tests.features.rehearsal.cases import classes, mlp\n"
        f"class Classifier{text}\n"
        "def main():\n    L.Trainer(max_epochs=1, precision='16-mixed', gradient_clip_val=0.5).fit(Classifier())\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["rehearse", "net.py:Classifier", "--steps", "2", "--quiet", "--no-remedies"]) == 0
    assert "as written: FP16 under autocast, GradScaler" in " ".join(capsys.readouterr().out.split())


def test_lightning_itself_gives_the_same_losses() -> None:
    """Its Trainer on a CPU, in FP32, with clipping and accumulation."""
    lightning = pytest.importorskip("lightning")
    losses: list[float] = []

    class Net(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = mlp(16, 32, 4)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = F.cross_entropy(self.model(batch[0]), batch[1])
            losses.append(float(loss.detach()))
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(classes(8), batch_size=None)  # type: ignore[arg-type]

    how: Any = {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}
    quiet: Any = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", enable_model_summary=False, **quiet, **how)
    found = auditor.rehearse((Net(), trainer), steps=4, remedies=False)
    losses.clear()
    trainer.fit(Net())
    pairs = [(losses[i] + losses[i + 1]) / 2 for i in range(0, 8, 2)]
    assert found.runs["fp32"].losses == pytest.approx(pairs, rel=1e-5)


def test_the_command_finds_a_lightning_module_and_its_batches(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    lightning = pytest.importorskip("lightning")
    assert lightning
    (tmp_path / "net.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    assert main(["rehearse", "net.py", "--steps", "3", "--quiet", "--no-remedies"]) == 0
    assert "3 steps of net.py in each recipe, on 3 batches" in capsys.readouterr().out


NET = """
import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Net(lightning.LightningModule):
    def __init__(self, width=8):
        super().__init__()
        self.layer = nn.Linear(4, 2)
    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.layer(x), y)
        self.log("loss", loss)
        return loss
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(12, 4), torch.randint(2, (12,))), 4)
"""


class Trainer:
    """Has the methods of a Trainer of transformers that a rehearsal calls."""

    def __init__(self) -> None:
        self.model, self.optimizer, self.lr_scheduler = mlp(16, 32, 4), None, None
        self.args = SimpleNamespace(gradient_accumulation_steps=2, max_grad_norm=0.5, device=torch.device("cpu"))
        self.current_gradient_accumulation_steps = 0

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.1)
        schedule: Any = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, num_training_steps)
        self.optimizer, self.lr_scheduler = optimizer, schedule

    def get_train_dataloader(self) -> Iterator[Any]:
        return iter({"x": x, "labels": y} for x, y in classes(5))

    def training_step(self, model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        loss = F.cross_entropy(model(inputs["x"]), inputs["labels"]) / self.current_gradient_accumulation_steps
        loss.backward()
        return loss.detach()


def test_a_trainer_is_rehearsed_with_its_accumulation_clipping_and_schedule() -> None:
    trainer = Trainer()
    found = auditor.rehearse(trainer, steps=3, remedies=False)
    assert (found.batches, found.runs["fp32"].backward_passes) == (3, 2)
    assert trainer.optimizer is None
    model = mlp(16, 32, 4)
    optimizer, losses, all_batches = torch.optim.SGD(model.parameters(), lr=0.1), [], classes(5)
    for number, micro_batches in enumerate((all_batches[:2], all_batches[2:4], all_batches[4:])):
        optimizer.param_groups[0]["lr"] = 0.1 * (1 - number / 3)
        optimizer.zero_grad()
        parts = [F.cross_entropy(model(x), y) / len(micro_batches) for x, y in micro_batches]
        sum(parts).backward()  # type: ignore[union-attr]
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(float(sum(parts)))
    assert found.runs["fp32"].losses == pytest.approx(losses, rel=1e-5)


def test_a_trainer_of_transformers_is_rehearsed(tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(50, (8, 8))]
    asked = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 1e-2, "use_cpu": True}
    arguments = transformers.TrainingArguments(str(tmp_path), report_to=[], **asked)
    trainer = transformers.Trainer(transformers.GPT2LMHeadModel(config), arguments, train_dataset=rows)
    found = auditor.rehearse(trainer, steps=3, remedies=False)
    assert all(run.failure is None for run in found.runs.values())
    assert (found.batches, found.runs["fp32"].backward_passes) == (2, 2)
    assert found.runs["fp32"].losses[-1] < found.runs["fp32"].losses[0]
    assert found.runs["bf16_autocast"].losses != found.runs["fp32"].losses
    assert trainer.optimizer is None


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_the_precision_of_a_trainers_arguments_is_the_step_as_written(name: str, tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=16, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    model = transformers.GPT2LMHeadModel(config)
    first = {key: x.clone() for key, x in model.state_dict().items()}
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(50, (8, 8))]
    asked = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 1e-2, name: True}
    arguments = transformers.TrainingArguments(
        str(tmp_path), report_to=[], use_cpu=True, max_grad_norm=0.5, lr_scheduler_type="constant", **asked
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=rows)
    batches = [*trainer.get_train_dataloader()]
    found = auditor.rehearse(trainer, [batches[:2], batches[2:]], steps=2, remedies=False)
    run = found.runs["as_written"]
    assert (run.failure, run.findings) == (None, [])
    assert run.recipe.title.startswith(f"as written: {name.upper()} under autocast")
    assert run.scale == (65536 if name == "fp16" else None)
    by_hand_, losses = transformers.GPT2LMHeadModel(config), []
    by_hand_.load_state_dict(first)
    by_hand_.train()
    optimizer = torch.optim.AdamW(by_hand_.parameters(), lr=1e-2, weight_decay=0.0)
    scaler = torch.amp.GradScaler("cpu", enabled=name == "fp16")
    for group in (batches[:2], batches[2:]):
        total = 0.0
        count = sum(one["labels"].numel() for one in group)
        for one in group:
            with emulate("cuda"):
                with torch.autocast("cuda", dtype=torch.float16 if name == "fp16" else torch.bfloat16):
                    loss = by_hand_(**one, num_items_in_batch=torch.tensor(count)).loss
                scaler.scale(loss).backward()
            total += float(loss.detach())
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(by_hand_.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(total)
    assert run.losses == pytest.approx(losses, rel=1e-4)


@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
def test_a_loop_of_accelerate_is_rehearsed(mixed_precision: str) -> None:
    accelerate: Any = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=mixed_precision, gradient_accumulation_steps=2)
    plain = mlp(16, 32, 4)
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))

    def step(*micro_batches: Any) -> float:
        total = 0.0
        for x, y in micro_batches:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                total += float(loss.detach()) / 2
        return total

    few = classes(4)
    runs = auditor.rehearse(step, [(few[0], few[1]), (few[2], few[3])], 3, remedies=False).runs
    accelerate.state.AcceleratorState._reset_state(True)
    assert all(run.failure is None for run in runs.values())
    assert runs["fp32"].backward_passes == 2
    assert runs["bf16_autocast"].losses != runs["fp32"].losses
    assert runs["bf16_autocast"].losses == pytest.approx(_accelerated(few, torch.bfloat16), rel=1e-5)
    assert runs["fp32"].losses == pytest.approx(_accelerated(few, torch.float32), rel=1e-5)


def _accelerated(batches: list[Any], dtype: torch.dtype) -> list[float]:
    """Losses of two micro-batches a step, by hand. cross_entropy, on autocast's FP32 list, converts the outputs to FP32, as
    accelerate does."""
    model, losses = mlp(16, 32, 4), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for pair in (batches[:2], batches[2:], batches[:2]):
        total = 0.0
        optimizer.zero_grad()
        for x, y in pair:
            with emulate("cuda"):
                with torch.autocast("cuda", dtype=dtype, enabled=dtype is not torch.float32):
                    out = model(x)
                loss = F.cross_entropy(out.float(), y) / 2
                loss.backward()
            total += float(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(total)
    return losses


def test_a_loop_that_cannot_be_prepared_is_refused_in_one_line() -> None:
    class Broken(Classifier):
        def configure_optimizers(self) -> Any:
            raise ValueError("no luck")

    class Wide(Classifier):
        def __init__(self, width: int) -> None:
            super().__init__()

    with refused(LoadError, "bad-step", match="preparing Broken raised ValueError: no luck"):
        auditor.rehearse(Broken(), steps=3)
    with refused(LoadError, "bad-step", match=r"needs arguments \(width\): give them as '.*Wide\(width=...\)'"):
        auditor.rehearse(Wide, steps=3)
    assert LightningStep(Classifier()).optimizers
    assert TrainerStep(Trainer(), 3).trainer.optimizer is not None


@pytest.mark.parametrize(
    ("target", "library", "title"),
    thinned(
        [
            ("accelerate_loop.py", "accelerate", "as written: BF16 under autocast"),
            ("lightning_module.py:Classifier", "lightning", "as written: FP16 under autocast, GradScaler"),
            ("transformers_trainer.py:trainer", "transformers", "as written: BF16 under autocast"),
        ]
    ),
)
def test_the_examples_are_rehearsed(target: str, library: str, title: str, tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip(library)
    folder = Path(__file__).parents[3] / "examples" / "rehearse"
    asked = ["--steps", "3", "--quiet", "--no-remedies", "--out", str(tmp_path)]
    assert main(["rehearse", str(folder / target), *asked]) == 0
    said = " ".join(capsys.readouterr().out.split())
    run = json.loads((tmp_path / "rehearsal.json").read_text())["runs"]["as_written"]
    assert (run["recipe"]["title"], run["failure"], run["findings"]) == (title, None, [])
    assert "3 steps of" in said
