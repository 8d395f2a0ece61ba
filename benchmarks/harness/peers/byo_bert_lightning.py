"""The BERT of `train/ours/byo_bert.py`, as Lightning's documentation has its users write it."""

import lightning as L  # noqa: N812 - as its documentation has it
import numpy as np
import torch
from byo_clock import callback  # measuring
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification


class Bert(L.LightningModule):
    def __init__(self):
        super().__init__()
        config = BertConfig(
            vocab_size=32,
            hidden_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=256,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        self.model = BertForSequenceClassification(config)

    def training_step(self, batch, batch_idx):
        return self.model(**batch).loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.001)


def dataset():
    rng = np.random.default_rng(0)
    sentences = [rng.integers(1, 32, size=rng.integers(8, 65)) for _ in range(1024)]
    return [(torch.from_numpy(ids), int(ids.mean() > 16)) for ids in sentences]


def collate(samples):
    sentences, high = zip(*samples, strict=True)
    ids = pad_sequence(sentences, batch_first=True)
    return {"input_ids": ids, "attention_mask": ids != 0, "labels": torch.tensor(high)}


if __name__ == "__main__":
    L.seed_everything(0)  # measuring
    loader = DataLoader(dataset(), batch_size=16, shuffle=True, collate_fn=collate)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=3, **quiet)
    trainer.callbacks.append(callback())  # measuring
    trainer.fit(Bert(), loader)
