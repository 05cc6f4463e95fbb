"""A Trainer of transformers with a recorder, as a callback. Its NaN is real: one batch has no label that counts.

python examples/watch/transformers_trainer.py
python -m auditor replay capsules/step-000012-loss-not-finite examples/watch/transformers_trainer.py:trainer
"""

import logging
import tempfile
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import auditor


class Watch(TrainerCallback):
    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.recorder = auditor.watch(given["model"], given["optimizer"])

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.recorder.close()


class Texts(torch.utils.data.Dataset):
    """Texts of which every token follows the one before. Those of step 12 are prompts alone: their labels are masked."""

    def __len__(self) -> int:
        return 160

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(32) + i) % 64
        labels = torch.full_like(ids, -100) if 96 <= i < 104 else ids
        return {"input_ids": ids, "labels": labels}


class InOrder(Trainer):
    def _get_train_sampler(self, *args: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


torch.manual_seed(0)
config = GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
arguments = TrainingArguments(
    tempfile.gettempdir(), max_steps=20, per_device_train_batch_size=8, use_cpu=True, report_to=[], save_strategy="no"
)
trainer = InOrder(GPT2LMHeadModel(config), arguments, train_dataset=Texts(), callbacks=[Watch()])

if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    trainer.train()
