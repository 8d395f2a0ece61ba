"""The BERT of `train/ours/byo_bert.py`, as Accelerate's documentation has its users write it."""

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed  # measuring
from byo_clock import Clock  # measuring
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification


def dataset():
    rng = np.random.default_rng(0)
    sentences = [rng.integers(1, 32, size=rng.integers(8, 65)) for _ in range(1024)]
    return [(torch.from_numpy(ids), int(ids.mean() > 16)) for ids in sentences]


def collate(samples):
    sentences, high = zip(*samples, strict=True)
    ids = pad_sequence(sentences, batch_first=True)
    return {"input_ids": ids, "attention_mask": ids != 0, "labels": torch.tensor(high)}


accelerator = Accelerator(cpu=True)
set_seed(0)  # measuring
config = BertConfig(
    vocab_size=32,
    hidden_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=256,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
model = BertForSequenceClassification(config)
optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
loader = DataLoader(dataset(), batch_size=16, shuffle=True, collate_fn=collate)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
clock = Clock()  # measuring
model.train()
for _ in range(3):
    for batch in loader:
        optimizer.zero_grad()
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        clock.step(loss)  # measuring
clock.write(model)  # measuring
accelerator.end_training()
