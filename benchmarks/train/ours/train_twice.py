"""Two runs of `orchestray.train` in one process: the second finds Ray and its workers there.

Usage: train_twice.py CONFIG OUT.json
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    import orchestray

    config = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    runs: list[dict[str, Any]] = []
    for number in (1, 2):
        called_at = time.time()
        run = orchestray.train(config, name=f"run-{number}", runs_dir=Path(sys.argv[1]).parent)
        returned_at = time.time()
        steps = [line["time_s"] for line in run.metrics().to_pylist() if line.get("split") is None]
        runs.append({"first_step_s": steps[0], "last_step_s": steps[-1], "returned_s": returned_at - called_at})
    Path(sys.argv[2]).write_text(json.dumps(runs), encoding="utf-8")


if __name__ == "__main__":
    main()
