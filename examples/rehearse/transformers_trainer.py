"""A Trainer of transformers: `bf16`, `max_grad_norm` and accumulation of its arguments are rehearsed as they are.

python -m auditor rehearse examples/rehearse/transformers_trainer.py:trainer --steps 40
"""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

torch.manual_seed(0)
config = GPT2Config(
    vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0, pad_token_id=0
)
starts = torch.randint(64, (64, 1), generator=torch.Generator().manual_seed(1))
texts = (starts + torch.arange(32)) % 64  # every token is followed by the next one

trainer = Trainer(
    GPT2LMHeadModel(config),
    TrainingArguments(
        tempfile.gettempdir(),
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        max_grad_norm=1.0,
        learning_rate=3e-3,
        bf16=True,
        use_cpu=True,
        report_to=[],
    ),
    train_dataset=[{"input_ids": text, "labels": text} for text in texts],
)
