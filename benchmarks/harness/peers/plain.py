"""Training as the peers' users write it: plain PyTorch, the data in memory as tensors.

That is the cheapest way to feed a model: no loader, no worker, one indexing a batch. Model, samples, batch and
optimizer are those of our run with the same specification. Where it matters (`order_as_ours`), so is the order of
samples: losses can be compared step by step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

_OPTIMIZERS = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}


class Plain:
    """Model, data and optimizer of a specification (`task`, `batch_size`, `optimizer`, `seed`, `fused`)."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        torch.set_num_threads(1)
        self._spec = spec
        self._task = _build_task(spec["task"])
        torch.manual_seed(spec["seed"])
        self.model: nn.Module = self._task.build_model()
        table = self._task.dataset("train")
        self._num_samples = table.num_rows
        self._data: dict[str, Tensor] = {
            name: value.clone() for name, value in self._task.to_batch(table.combine_chunks()).items()
        }
        self._orders: dict[int, Tensor] = {}

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        options = {name: value for name, value in self._spec["optimizer"].items() if name != "type"}
        if self._spec.get("fused"):
            options["fused"] = True
        optimizer: torch.optim.Optimizer = _OPTIMIZERS[self._spec["optimizer"]["type"]](model.parameters(), **options)
        return optimizer

    def steps(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, num_ranks: int, first_step: int = 1
    ) -> Iterator[tuple[int, float]]:
        """Train for ever; yields each completed step with this rank's loss."""
        batch_size = self._spec["batch_size"]
        per_epoch = -(-self._num_samples // batch_size)
        step = first_step
        while True:
            epoch, index = divmod(step - 1, per_epoch)
            batch = self._order(epoch)[index * batch_size : (index + 1) * batch_size]
            chosen = torch.tensor_split(batch, num_ranks)[rank]
            samples = {name: value[chosen] for name, value in self._data.items()}
            loss = self._task.loss(model(samples["inputs"]), samples)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield step, float(loss.detach())
            step += 1

    def _order(self, epoch: int) -> Tensor:
        if epoch not in self._orders:
            generator = torch.Generator().manual_seed(self._spec["seed"] + epoch)
            self._orders[epoch] = torch.randperm(self._num_samples, generator=generator)
        return self._orders[epoch]

    def order_as_ours(self, num_steps: int) -> None:
        """Use our order of samples for `num_steps` steps; it is made here, before the first one."""
        import numpy as np
        import pyarrow as pa

        from orchestray.platform.data.source import open_source
        from orchestray.platform.data.stream import SampleStream

        stream = SampleStream(
            open_source(pa.table({"row": np.arange(self._num_samples)})),
            lambda _rows: {},
            batch_size=self._spec["batch_size"],
            rank=0,
            num_replicas=1,
            seed=self._spec["seed"],
        )
        for epoch in range(-(-num_steps // stream.steps_per_epoch)):
            with stream.epoch(epoch) as shares:
                ids = [micro_batch.sample_ids for share in shares for micro_batch in share.micro_batches]
            self._orders[epoch] = torch.from_numpy(np.concatenate(ids))


def _build_task(told: Mapping[str, Any]) -> Any:
    arguments = {name: value for name, value in told.items() if name != "type"}
    name = str(told["type"]).rpartition(":")[2]
    if name in ("Mlp", "StormyDigits"):
        from harness import tasks

        return getattr(tasks, name)(**arguments)
    from orchestray.trainers.tasks import resolve

    return resolve(name)(**arguments)
