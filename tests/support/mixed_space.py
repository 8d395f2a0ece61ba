"""A space of two operations with a network of all of them, and a task that two of the operations are made for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn

from orchestray.search.spaces.architectures.base import Genome, Graph, Node
from orchestray.search.spaces.architectures.choices import ChoiceSpace, Choose

OPERATIONS = ("identity", "square", "sine")
HALVES = ("first", "second")
BEST = {"first": "square", "second": "sine"}


class Squares:
    """Two features squared and the sines of two, summed: regression without noise."""

    def __init__(self, num_rows: int = 256) -> None:
        self.num_rows = num_rows

    def build_model(self) -> nn.Module:
        return nn.Linear(4, 1)

    def dataset(self, split: str) -> pa.Table:
        rng = np.random.default_rng([split == "train", 7])
        inputs = rng.normal(size=(self.num_rows, 4)).astype("float32")
        targets = (inputs[:, :2] ** 2).sum(1) + 2 * np.sin(3 * inputs[:, 2:]).sum(1)
        return pa.table({**{f"x{i}": inputs[:, i] for i in range(4)}, "target": targets.astype("float32")})

    def to_batch(self, columns: pa.Table) -> dict[str, Tensor]:
        inputs = np.stack([columns[f"x{i}"].to_numpy() for i in range(4)], axis=1)
        return {"inputs": torch.from_numpy(inputs), "target": torch.from_numpy(columns["target"].to_numpy().copy())}

    def loss(self, outputs: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        return (outputs[:, 0] - batch["target"]).square().mean()

    def metrics(self, outputs: Tensor, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"closeness": 1 / (1 + self.loss(outputs, batch))}


class Shifted(nn.Module):
    """An operation on its input plus a learned number."""

    def __init__(self, operation: str) -> None:
        super().__init__()
        self.operation = operation
        self.shift = nn.Parameter(torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        moved = inputs + self.shift
        return {"identity": moved, "square": moved.square(), "sine": torch.sin(3 * moved)}[self.operation]


class Halves(nn.Module):
    """The network of a genome, or, called with one, of all genomes."""

    def __init__(self, genomes: Sequence[Mapping[str, str]]) -> None:
        super().__init__()
        self.operations = nn.ModuleDict(
            {f"{half}_{genome[half]}": Shifted(genome[half]) for genome in genomes for half in HALVES}
        )
        self.head = nn.Linear(4, 1)
        self.own = genomes[0] if len(genomes) == 1 else None

    def forward(self, inputs: Tensor, genome: Any = None) -> Tensor:
        chosen = self.own or genome
        return self._summed([{chosen[half]: 1.0} for half in HALVES], inputs)

    def _summed(self, weights: Sequence[Mapping[str, Any]], inputs: Tensor) -> Tensor:
        halves = zip(HALVES, weights, inputs.split(2, dim=1), strict=True)
        mixed = [sum(w * self.operations[f"{half}_{name}"](x) for name, w in of.items()) for half, of, x in halves]
        return self.head(torch.cat(mixed, dim=1))

    @property
    def alpha_shapes(self) -> dict[str, tuple[int, int]]:
        return {"halves": (2, len(OPERATIONS))}

    def forward_mixed(self, inputs: Tensor, alphas: Mapping[str, Tensor]) -> Tensor:
        rows = torch.softmax(alphas["halves"], dim=1)
        return self._summed([dict(zip(OPERATIONS, row, strict=True)) for row in rows], inputs)

    def genome_of_alphas(self, alphas: Mapping[str, Tensor]) -> dict[str, str]:
        best = alphas["halves"].argmax(dim=1).tolist()
        return {half: OPERATIONS[index] for half, index in zip(HALVES, best, strict=True)}

    def child_state(self, genome: Mapping[str, str]) -> dict[str, Tensor]:
        kept = tuple(f"operations.{half}_{genome[half]}." for half in HALVES)
        return {k: v.detach().clone() for k, v in self.state_dict().items() if k.startswith((*kept, "head."))}


class Mixed(ChoiceSpace):
    """An operation for each half of four features."""

    def compose(self, choose: Choose) -> None:
        for half in HALVES:
            choose(half, OPERATIONS)

    def build(self, genome: Genome, input_shape: Sequence[int], num_outputs: int) -> nn.Module:
        return Halves([genome])

    def supernet(self, input_shape: Sequence[int], num_outputs: int) -> nn.Module:
        return Halves([dict.fromkeys(HALVES, name) for name in OPERATIONS])

    def graph(self, genome: Genome) -> Graph:
        return Graph(tuple(Node(half, genome[half]) for half in HALVES), ())


def mixed_config(*, steps: int, **train: Any) -> Any:
    """Return the config of a trial of any network of `Mixed` for `Squares`."""
    from orchestray.search.spaces.searched_task import searched_task_section
    from orchestray.trainers.config.schema import TrainConfig

    section = searched_task_section({"type": "support.mixed_space:Squares"}, "support.mixed_space:Mixed", BEST)
    settings = {"batch_size": 32, "steps": steps, "optimizer": {"type": "adam", "lr": 0.02}, "seed": 0, **train}
    return TrainConfig.model_validate({"name": "mixed", "task": section, "train": settings})
