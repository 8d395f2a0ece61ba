"""A classifier of series of different lengths, which are packed for the LSTM: is a wave slow or fast?"""

import numpy as np
import pyarrow as pa
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from orchestray import pad_lists, to_tensor


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(1, 16, batch_first=True)
        self.head = nn.Linear(16, 2)

    def forward(self, series, lengths):
        packed = pack_padded_sequence(series.unsqueeze(-1), lengths.cpu(), batch_first=True, enforce_sorted=False)
        _, (hidden, _) = self.lstm(packed)
        return self.head(hidden[-1])


class Waves:
    def build_model(self):
        return Classifier()

    def dataset(self, split):
        rng = np.random.default_rng(0 if split == "train" else 1)
        fast = rng.integers(2, size=256 if split == "train" else 64)
        series = [np.sin((1 + kind) * np.arange(rng.integers(8, 25)) / 2 + rng.uniform(0, 6)) for kind in fast]
        return pa.table({"series": [wave.astype(np.float32) for wave in series], "fast": fast})

    def to_batch(self, columns):
        series = pad_lists(columns["series"])
        return {"inputs": (series.values, series.lengths), "targets": to_tensor(columns["fast"])}

    def loss(self, outputs, batch):
        return nn.functional.cross_entropy(outputs, batch["targets"])

    def metrics(self, outputs, batch):
        return {"accuracy": (outputs.argmax(1) == batch["targets"]).float().mean()}
