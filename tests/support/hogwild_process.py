"""Two workers that share memory, each in a process of its own: `hogwild_process.py SETTINGS PORT`; and their task.

The second is forked once all is imported, which costs more than the training does.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
import traceback
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn
from torch.nn import functional

from orchestray.platform.data.tensors import to_tensor
from orchestray.trainers.ps.hosts.worker_host import WorkerHost
from orchestray.trainers.ps.protocol.address import Address

NUM_SAMPLES, NUM_FEATURES, NUM_PRESENT = 1200, 120, 4
MEETING = "ORCHESTRAY_TEST_MEETING"
"""Environment variable: the directory where two workers meet before either goes on, or it could do all alone."""
_LOOK_S = 0.01


class SparseLogistic:
    """Logistic regression on samples with a few of many features; labels are drawn, so the best weights are finite.

    A sample's gradient touches the weights of its features alone.
    """

    def __init__(self) -> None:
        self._place = os.environ.get(MEETING, "")
        rng = np.random.default_rng(11)
        weights = rng.normal(size=NUM_FEATURES)
        self.features = np.stack([rng.choice(NUM_FEATURES, NUM_PRESENT, replace=False) for _ in range(NUM_SAMPLES)])
        self.labels = rng.random(NUM_SAMPLES) < 1 / (1 + np.exp(-weights[self.features].sum(axis=1)))

    def build_model(self) -> nn.Module:
        model = nn.EmbeddingBag(NUM_FEATURES, 1, mode="sum", sparse=True)
        nn.init.zeros_(model.weight)
        return model

    def dataset(self, split: str) -> pa.Table:
        column = pa.FixedSizeListArray.from_arrays(pa.array(self.features.reshape(-1)), NUM_PRESENT)
        return pa.table({"features": column, "label": pa.array(self.labels.astype(np.float32))})

    def to_batch(self, columns: pa.Table) -> dict[str, Tensor]:
        return {"inputs": to_tensor(columns["features"]), "targets": to_tensor(columns["label"])}

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        if self._place and torch.is_grad_enabled():
            _meet(Path(self._place))
            self._place = ""
        return functional.binary_cross_entropy_with_logits(outputs[:, 0], batch["targets"])

    def metrics(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {}


def _meet(place: Path) -> None:
    """Go on when both workers have computed their first share."""
    (place / f"met-{os.getpid()}").touch()
    while len(list(place.glob("met-*"))) < 2:
        time.sleep(_LOOK_S)


def work(rank: int) -> None:
    host = WorkerHost(pickle.loads(Path(sys.argv[1]).read_bytes()))  # noqa: S301 - written by the test
    ended = host.train(rank, 0, [Address("127.0.0.1", int(sys.argv[2]), f"worker-{rank}")])
    os.write(1, f"{ended} {host.usage()['shares']}\n".encode())  # whole lines, whichever ends first


if __name__ == "__main__":
    torch.set_num_threads(1)
    other = os.fork()
    try:
        work(0 if other else 1)
        failed = os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]) if other else 0
    except Exception:  # noqa: BLE001 - printed, and shown by the status
        traceback.print_exc()
        failed = 1
    os._exit(failed)  # gloo's threads abort some other exits
