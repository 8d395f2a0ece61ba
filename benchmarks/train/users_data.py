"""Data as users bring it: images decoded by our stream beside bare threads, and 6,000 columns beside one matrix."""

from __future__ import annotations

import io
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from harness import benchmark

_THREADS = 2
_BATCH = 32
_COLUMNS, _ROWS = 6000, 3000
_PER_IMAGE, _PER_BATCH_MS = 1 / 0.9, 3.0


def measure(report: benchmark.Report, options: benchmark.Options) -> None:
    import torch

    rounds = options.rounds(9, quick=2)
    torch.set_num_threads(_THREADS)
    report.settings = {"rounds": rounds, "threads": _THREADS, "batch_size": _BATCH, "torch": torch.__version__}
    _measure_images(report, rounds, 256 if options.quick else 1024)
    torch.set_num_threads(1)
    _measure_columns(report, rounds, 10 if options.quick else 80)
    report.notes += [
        (
            "Images: JPEG of 256 x 256, decoded by Pillow, resized to 128 x 128. Bare threads: "
            "`ThreadPoolExecutor.map` over the same bytes, in batches that are stacked. Ours: batches of a shuffled "
            "table, from a `SampleStream`."
        ),
        "Columns: rows gathered and stacked to a float32 matrix of 32 x 6,000; one matrix: `matrix[rows]` in torch.",
    ]


def _measure_images(report: benchmark.Report, rounds: int, num_images: int) -> None:
    import numpy as np
    import pyarrow as pa
    import torch
    from PIL import Image

    from orchestray.platform.data.images import decode_images
    from orchestray.platform.data.source import open_source
    from orchestray.platform.data.stream import SampleStream

    contents = [_jpeg(number) for number in range(num_images)]
    table = pa.table({"image": pa.array(contents, pa.binary())})

    def resized(image: Any) -> Any:
        return image.resize((128, 128))

    def bare(content: bytes) -> Any:
        image = resized(Image.open(io.BytesIO(content)).convert("RGB"))
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()

    stream = SampleStream(
        open_source(table), lambda rows: {"inputs": decode_images(rows["image"], resized)}, batch_size=_BATCH
    )
    taken: dict[str, list[float]] = {"ours": [], "bare threads": []}

    def ours() -> None:
        began_s = time.perf_counter()
        with stream.epoch(1) as shares:
            found = sum(share.num_samples for share in shares)
        taken["ours"].append(1e3 * (time.perf_counter() - began_s) / found)

    def peer() -> None:
        began_s = time.perf_counter()
        with ThreadPoolExecutor(_THREADS) as pool:
            for start in range(0, num_images, _BATCH):
                torch.stack(list(pool.map(bare, contents[start : start + _BATCH])))
        taken["bare threads"].append(1e3 * (time.perf_counter() - began_s) / num_images)

    benchmark.alternate({"ours": ours, "bare threads": peer}, rounds, benchmark.say)
    for name, values in taken.items():
        report.add(f"{name}, an image", "ms", values)
    ratio = report.compare("an image / bare threads", taken["ours"], taken["bare threads"])
    report.goal("decoding an image / bare threads", ratio, _PER_IMAGE)


def _measure_columns(report: benchmark.Report, rounds: int, num_batches: int) -> None:
    import numpy as np
    import pyarrow as pa
    import torch

    from orchestray import stack_columns
    from orchestray.platform.data.source import open_source

    values = np.random.default_rng(0).normal(size=(_ROWS, _COLUMNS)).astype(np.float32)
    table = pa.table({**{f"gene_{index}": values[:, index] for index in range(_COLUMNS)}, "y": np.arange(_ROWS)})
    rows, matrix = open_source(table).read([0]), torch.from_numpy(values)
    order = np.random.default_rng(1).permutation(_ROWS)[: _BATCH * num_batches].reshape(-1, _BATCH)
    taken: dict[str, list[float]] = {"ours": [], "one matrix": []}

    def ours() -> None:
        began_s = time.perf_counter()
        for indices in order:
            columns = rows.take(indices)
            stack_columns(columns, [name for name in columns.column_names if name != "y"])
        taken["ours"].append(1e3 * (time.perf_counter() - began_s) / len(order))

    def peer() -> None:
        began_s = time.perf_counter()
        for indices in order:
            matrix[torch.from_numpy(indices)]
        taken["one matrix"].append(1e3 * (time.perf_counter() - began_s) / len(order))

    benchmark.alternate({"ours": ours, "one matrix": peer}, rounds, benchmark.say)
    what = f"a batch of {_BATCH} x {_COLUMNS:,}"
    mine, other = (report.add(f"{name}, {what}", "ms", each) for name, each in taken.items())
    report.compare("a batch of many columns / one matrix", mine.values, other.values)
    report.goal(what, mine.median, _PER_BATCH_MS, "ms")


def _jpeg(number: int) -> bytes:
    import numpy as np
    from PIL import Image

    coarse = np.random.default_rng(number).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    into = io.BytesIO()
    Image.fromarray(coarse).resize((256, 256), Image.Resampling.BICUBIC).save(into, "JPEG", quality=90)
    return into.getvalue()


if __name__ == "__main__":
    benchmark.run(
        "users_data",
        "Data as users bring it: an image decoded by our stream beside bare threads, 6,000 columns beside one matrix.",
        measure,
    )
