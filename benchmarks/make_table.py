"""Train every cell of the small space once on `digits`, over 3 seeds: python benchmarks/make_table.py

Goes on where it was stopped; what is done is kept in --parts. The table is written when all parts are there.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch

from orchestray.search.spaces.cell import NORMAL
from orchestray.search.tabular.batched import BatchedCells, evaluate, train
from orchestray.search.tabular.space import CHANNELS, OPERATIONS, table_cells
from orchestray.search.tabular.table import TABLE_FILE
from orchestray.trainers.tasks.digits import Digits

NUM_SEEDS = 3
EPOCHS = 2
BATCH_SIZE = 64
LR = 0.1
CELLS_AT_ONCE = 16


def digits(split: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Images [samples, 1, 8, 8] and labels [samples]."""
    task = Digits(model="cnn")
    batch = task.to_batch(task.dataset(split))
    return batch["inputs"].contiguous(memory_format=torch.channels_last), batch["targets"]


def distinct(file: Path) -> tuple[np.ndarray, list[dict[str, object]], list[str]]:
    """Of each genome, in the order of `enumerate`, the row of its network; and a genome and the key of each row.

    Kept in a file, as it takes a minute.
    """
    if file.exists():
        index, genomes, keys = json.loads(file.read_text(encoding="utf-8"))
        return np.array(index, dtype=np.int16), genomes, keys
    space = table_cells()
    rows: dict[str, int] = {}
    genomes, index = [], []
    for genome in space.enumerate():
        key = space.key(genome)
        if key not in rows:
            rows[key] = len(rows)
            genomes.append(genome)
        index.append(rows[key])
    file.write_text(json.dumps([index, genomes, list(rows)]), encoding="utf-8")
    return np.array(index, dtype=np.int16), genomes, list(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", type=Path, default=Path("build/tabular"), help="where what is done is kept")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--stop-after", type=int, default=None, help="parts, to measure how long it takes")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    arguments.parts.mkdir(parents=True, exist_ok=True)
    space = table_cells()
    index, genomes, keys = distinct(arguments.parts / "distinct.json")
    training, validation = digits("train"), digits("validation")
    order = np.random.default_rng(0).permutation(len(genomes))  # parts of like cost, whatever the order of enumeration
    parts = [order[start : start + CELLS_AT_ONCE] for start in range(0, len(order), CELLS_AT_ONCE)]
    print(f"{len(index)} genomes, {len(genomes)} networks, {len(parts)} parts", flush=True)
    for number, rows in enumerate(parts[: arguments.stop_after]):
        file = arguments.parts / f"part-{number:04d}.npz"
        if file.exists():
            continue
        began_s = time.perf_counter()
        cells = [space.nodes_in(genomes[row])[NORMAL] for row in rows]
        model = BatchedCells(cells, NUM_SEEDS, CHANNELS, 10).to(memory_format=torch.channels_last)
        train(model, *training, epochs=EPOCHS, batch_size=BATCH_SIZE, lr=LR)
        accuracy, loss = (result.view(len(rows), NUM_SEEDS).numpy() for result in evaluate(model, *validation))
        aside = file.with_suffix(".aside.npz")
        np.savez(aside, rows=rows, accuracy=accuracy, loss=loss)
        aside.replace(file)
        print(
            f"part {number} of {len(parts)}: {time.perf_counter() - began_s:.1f} s, best {accuracy.mean(1).max():.3f}",
            flush=True,
        )
    done = sorted(arguments.parts.glob("part-????.npz"))
    if len(done) < len(parts):
        print(f"{len(done)} of {len(parts)} parts are done")
        return
    accuracy = np.zeros((len(genomes), NUM_SEEDS), dtype=np.float32)
    loss = np.zeros_like(accuracy)
    for file in done:
        with np.load(file) as part:
            accuracy[part["rows"]], loss[part["rows"]] = part["accuracy"], part["loss"]
    key_bytes = np.frombuffer(bytes.fromhex("".join(keys)), dtype=np.uint8).reshape(len(keys), -1)
    np.savez_compressed(
        TABLE_FILE, index=index, keys=key_bytes, accuracy=accuracy, loss=loss, operations=np.array(OPERATIONS)
    )
    print(f"{TABLE_FILE}: {TABLE_FILE.stat().st_size} bytes, best {accuracy.mean(1).max():.4f}")


if __name__ == "__main__":
    main()
