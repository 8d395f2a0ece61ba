"""Train every cell of the small space once on `digits`, over 3 seeds: python benchmarks make_table

A run goes on where another was stopped: the table is written after every part, and what it lacks is done.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch

from lab.tabular.batched import BatchedCells, evaluate, train
from lab.tabular.space import CHANNELS, table_cells
from lab.tabular.table import TABLE_FILE, Table, genome_at
from orchestray.search.spaces.architectures.cell import NORMAL
from orchestray.trainers.tasks.digits import Digits

NUM_SEEDS = 3
EPOCHS = 2
BATCH_SIZE = 16
LR = 0.3
CELLS_AT_ONCE = 16


def digits(split: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images [samples, 1, 8, 8] and labels [samples]."""
    task = Digits(model="cnn")
    batch = task.to_batch(task.dataset(split))
    return batch["inputs"].contiguous(memory_format=torch.channels_last), batch["targets"]


def empty_table() -> Table:
    """Return the table before anything is measured: which genomes build the same network. It takes a minute."""
    space = table_cells()
    rows: dict[str, int] = {}
    index = [rows.setdefault(space.key(genome), len(rows)) for genome in space.enumerate()]
    unknown = np.full((len(rows), NUM_SEEDS), np.nan, dtype=np.float32)
    return Table(np.array(index, dtype=np.int16), tuple(rows), unknown, unknown.copy())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", type=Path, default=TABLE_FILE, help="the table to make, or to go on with")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--parts", type=int, default=None, help="how many parts to do now; default: all that are left")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    table = Table.read(arguments.table) if arguments.table.exists() else empty_table()
    table.write(arguments.table)
    space, training, validation = table_cells(), digits("train"), digits("validation")
    order = np.random.default_rng(0).permutation(len(table.keys))  # parts of like cost
    left = order[np.isnan(table.loss[order]).any(axis=1)]
    parts = [left[start : start + CELLS_AT_ONCE] for start in range(0, len(left), CELLS_AT_ONCE)]
    print(f"{len(table.index)} genomes, {len(table.keys)} networks, {len(left)} left", flush=True)
    for number, rows in enumerate(parts[: arguments.parts], start=1):
        began_s = time.perf_counter()
        numbers = [int(np.argmax(table.index == row)) for row in rows]
        cells = [space.nodes_in(genome_at(place))[NORMAL] for place in numbers]
        model = BatchedCells(cells, NUM_SEEDS, CHANNELS, 10).to(memory_format=torch.channels_last)
        train(model, *training, epochs=EPOCHS, batch_size=BATCH_SIZE, lr=LR)
        accuracy, loss = evaluate(model, *validation)
        table.accuracy[rows] = accuracy.view(len(rows), NUM_SEEDS).numpy()
        table.loss[rows] = loss.view(len(rows), NUM_SEEDS).numpy()
        table.write(arguments.table)
        print(
            f"part {number} of {len(parts)}: {time.perf_counter() - began_s:.1f} s, "
            f"{time.process_time():.0f} s of a core in all, best {np.nanmax(table.accuracy.mean(axis=1)):.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
