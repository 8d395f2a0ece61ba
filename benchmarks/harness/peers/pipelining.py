"""The peer of the pipeline: the same training under `torchrun` with bare `torch.distributed.pipelining` over gloo.

Usage: torchrun --nproc-per-node N pipelining.py SPEC.json OUT.json

With one process it is the same micro-batches one after the other, without a pipeline.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.peers.plain import Plain


class Batches(Plain):
    """Whole batches in our order, for loops that cut them up."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self._task.loss(outputs, {"targets": targets})
        return loss

    def batches(self, num_steps: int) -> Iterator[dict[str, Tensor]]:
        self.order_as_ours(num_steps)
        batch_size = self._spec["batch_size"]
        per_epoch = self._num_samples // batch_size  # the peer's schedules want whole batches
        for step in range(num_steps):
            epoch, index = divmod(step, per_epoch)
            chosen = self._order(epoch)[index * batch_size : (index + 1) * batch_size]
            yield {name: value[chosen] for name, value in self._data.items()}


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    plain = Batches(spec)
    part: nn.Module = plain.model if size == 1 else nn.Sequential(*stage_of(plain.model, spec["cuts"], rank).values())
    optimizer = plain.optimizer(part)
    train = one_after_the_other(spec, plain, part) if size == 1 else pipelined(spec, plain, part, rank, size)
    times, losses = [], []
    for loss in train:
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.time())
        losses.append(loss)
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, losses)
    if rank == 0:
        Path(sys.argv[2]).write_text(json.dumps({"times": times, "losses": gathered[-1]}), encoding="utf-8")
    dist.barrier()
    os._exit(0)  # gloo's threads abort some regular exits


def stage_of(model: nn.Module, cuts: Sequence[int], stage: int) -> dict[str, nn.Module]:
    """Return the children of an `nn.Sequential` from one cut to the next, by name."""
    children = list(model.named_children())
    bounds = [0, *cuts, len(children)]
    return dict(children[bounds[stage] : bounds[stage + 1]])


def cut_up(batch: Mapping[str, Tensor], number: int) -> list[dict[str, Tensor]]:
    """Return the micro-batches of a batch."""
    parts = {name: torch.tensor_split(value, number) for name, value in batch.items()}
    return [{name: values[index] for name, values in parts.items()} for index in range(number)]


def one_after_the_other(spec: Mapping[str, Any], plain: Batches, model: nn.Module) -> Iterator[float]:
    number = spec["micro_batches"]
    for batch in plain.batches(spec["steps"]):
        total = 0.0
        for samples in cut_up(batch, number):
            loss = plain.loss(model(samples["inputs"]), samples["targets"]) / number
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        yield total


def pipelined(spec: Mapping[str, Any], plain: Batches, part: nn.Module, rank: int, size: int) -> Iterator[float]:
    from torch.distributed import pipelining

    kinds: dict[str, Any] = {"1f1b": pipelining.Schedule1F1B, "gpipe": pipelining.ScheduleGPipe}
    stage = pipelining.PipelineStage(part, rank, size, torch.device("cpu"))
    schedule = kinds[spec["schedule"]](stage, spec["micro_batches"], plain.loss)
    for batch in plain.batches(spec["steps"]):
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(batch["inputs"])
        elif rank == size - 1:
            schedule.step(target=batch["targets"], losses=losses)
        else:
            schedule.step()
        yield float(torch.stack([loss.detach() for loss in losses]).mean()) if losses else 0.0


if __name__ == "__main__":
    main()
