"""A classifier of transformers as a user brings it, somewhat larger than `configs/models/bert.py`; no validation."""

import numpy as np
import pyarrow as pa
from torch.nn.functional import cross_entropy
from transformers import BertConfig, BertForSequenceClassification

from orchestray import pad_lists, to_tensor


class Bert:
    def build_model(self):
        config = BertConfig(
            vocab_size=32,
            hidden_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=256,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        return BertForSequenceClassification(config)

    def dataset(self, split):
        if split == "validation":
            return None
        rng = np.random.default_rng(0)
        sentences = [rng.integers(1, 32, size=rng.integers(8, 65)) for _ in range(1024)]
        return pa.table({"ids": sentences, "high": [int(ids.mean() > 16) for ids in sentences]})

    def to_batch(self, columns):
        ids = pad_lists(columns["ids"])
        inputs = {"input_ids": ids.values, "attention_mask": ids.mask}
        return {"inputs": inputs, "targets": to_tensor(columns["high"])}

    def loss(self, outputs, batch):
        return cross_entropy(outputs.logits, batch["targets"])

    def metrics(self, outputs, batch):
        return {}
