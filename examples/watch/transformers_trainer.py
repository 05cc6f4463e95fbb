"""A Trainer of transformers with a recorder, as a callback.

python examples/watch/transformers_trainer.py
python -m auditor replay capsules/step-000012-loss-not-finite examples/watch/transformers_trainer.py:trainer
"""

import logging
from typing import Any

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments

import auditor


class Watch(TrainerCallback):
    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.recorder = auditor.watch(given["model"], given["optimizer"])

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.recorder.close()


class Sentences(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 512

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(5, 100, (16,), generator=torch.Generator().manual_seed(i))
        label = float("nan") if i == 100 else float(ids[0]) / 100  # one label is missing
        return {"input_ids": ids, "labels": torch.tensor(label)}


torch.manual_seed(0)
sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
model = BertForSequenceClassification(BertConfig(vocab_size=100, num_labels=1, problem_type="regression", **sizes))
arguments = TrainingArguments(
    "trainer", max_steps=20, per_device_train_batch_size=8, use_cpu=True, report_to="none", save_strategy="no"
)
arguments.train_sampling_strategy = "sequential"
trainer = Trainer(model, arguments, train_dataset=Sentences(), callbacks=[Watch()])

if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    trainer.train()
