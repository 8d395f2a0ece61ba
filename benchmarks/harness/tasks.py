"""Tasks the benchmarks train, written as any user's task file: `benchmarks/harness/tasks.py:Mlp`."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
from torch import Tensor, nn
from torch.nn import functional

from orchestray.platform.data.tensors import to_tensor
from orchestray.trainers.tasks.digits import Digits


class Mlp:
    """A fully connected network over rows of made-up numbers: what a step costs does not depend on what they say."""

    def __init__(
        self, widths: list[int] | None = None, num_samples: int = 4096, num_classes: int = 10, seed: int = 0
    ) -> None:
        """Make a network of these widths; the default ones make 8.0 M parameters."""
        self.widths = widths or [1024, 2048, 2048, 832]
        self.num_samples = num_samples
        self.num_classes = num_classes
        self.seed = seed

    def build_model(self) -> nn.Module:
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(self.widths):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(self.widths[-1], self.num_classes))

    def dataset(self, split: str) -> pa.Table:
        training = split == "train"
        rng = np.random.default_rng(self.seed if training else self.seed + 1)
        rows = self.num_samples if training else 64
        features = rng.standard_normal((rows, self.widths[0]), dtype=np.float32)
        labels = features[:, : self.num_classes].argmax(axis=1)
        column = pa.FixedSizeListArray.from_arrays(pa.array(features.reshape(-1)), self.widths[0])
        return pa.table({"features": column, "label": labels})

    def to_batch(self, columns: pa.Table) -> dict[str, Tensor]:
        return {"inputs": to_tensor(columns["features"]), "targets": to_tensor(columns["label"])}

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return functional.cross_entropy(outputs, batch["targets"])

    def metrics(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"accuracy": (outputs.argmax(dim=1) == batch["targets"]).float().mean()}


class Wide:
    """Two square matrices, and few operations on them: what a step costs is what its parameters cost to exchange."""

    def __init__(self, width: int, num_samples: int) -> None:
        self.width = width
        self.num_samples = num_samples

    def build_model(self) -> nn.Module:
        square = (self.width, self.width)
        return nn.Sequential(nn.Linear(*square, bias=False), nn.Tanh(), nn.Linear(*square, bias=False))

    def dataset(self, split: str) -> pa.Table:
        rng = np.random.default_rng(split == "train")
        rows = self.num_samples if split == "train" else 1
        columns = [rng.standard_normal(rows * self.width, dtype=np.float32) for _ in ("inputs", "targets")]
        inputs, targets = (pa.FixedSizeListArray.from_arrays(pa.array(column), self.width) for column in columns)
        return pa.table({"inputs": inputs, "targets": targets})

    def to_batch(self, columns: pa.Table) -> dict[str, Tensor]:
        return {name: to_tensor(columns[name]) for name in ("inputs", "targets")}

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return functional.mse_loss(outputs, batch["targets"])

    def metrics(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {}


class TimedDigits(Digits):
    """`digits` on workers that need a given time for a share, whatever the cores do: simulated accelerators."""

    def __init__(self, seconds_a_share: float, samples_a_share: int | None = None) -> None:
        """Set the time of a share; with `samples_a_share` it is that of this many samples, others in proportion."""
        super().__init__(hidden=[64])
        self.seconds_a_share = seconds_a_share
        self.samples_a_share = samples_a_share

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        part = 1.0 if self.samples_a_share is None else len(outputs) / self.samples_a_share
        time.sleep(self.seconds_a_share * part)
        return super().loss(outputs, batch)


class StormyDigits(TimedDigits):
    """`TimedDigits` on workers that leak memory once there is a file with their process id in its name."""

    def __init__(self, seconds_a_share: float, directory: str, num_bytes: int) -> None:
        """Set the time of a share, where that file is looked for, and how much memory leaks."""
        super().__init__(seconds_a_share)
        self.marker = Path(directory) / f"hungry-{os.getpid()}"
        self.num_bytes = num_bytes
        self.leaked: list[np.ndarray] = []

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        if self.marker.exists():
            with contextlib.suppress(OSError):
                self.marker.unlink()
            threading.Thread(target=self._leak, daemon=True).start()
        return super().loss(outputs, batch)

    def _leak(self) -> None:
        for _ in range(self.num_bytes // _LEAK_BYTES):
            self.leaked.append(np.ones(_LEAK_BYTES, dtype=np.uint8))


_LEAK_BYTES = 2**25
