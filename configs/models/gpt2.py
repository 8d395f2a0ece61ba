"""A language model of transformers with tied embeddings, whose loss is the mean over valid tokens: it counts."""

import numpy as np
import pyarrow as pa
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel

from orchestray import pad_lists


class Gpt2:
    def build_model(self):
        config = GPT2Config(
            vocab_size=32,
            n_positions=16,
            n_embd=32,
            n_layer=2,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
        return GPT2LMHeadModel(config)

    def dataset(self, split):
        rng = np.random.default_rng(0 if split == "train" else 1)
        starts = rng.integers(1, 16, size=256 if split == "train" else 64)
        return pa.table({"ids": [start + np.arange(rng.integers(2, 16)) for start in starts]})

    def to_batch(self, columns):
        ids = pad_lists(columns["ids"])
        inputs = {"input_ids": ids.values, "attention_mask": ids.mask}
        return {"inputs": inputs, "targets": ids.values.masked_fill(~ids.mask, -100)[:, 1:]}

    def loss(self, outputs, batch):
        logits = outputs.logits[:, :-1]
        return cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), ignore_index=-100)

    def weight(self, batch):
        return (batch["targets"] != -100).sum()

    def metrics(self, outputs, batch):
        hits = outputs.logits[:, :-1].argmax(-1) == batch["targets"]
        return {"hits": hits.sum(), "tokens": self.weight(batch)}

    def final_metrics(self, totals):
        return {"accuracy": totals["hits"] / totals["tokens"]}
