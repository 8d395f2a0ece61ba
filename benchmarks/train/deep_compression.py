"""Deep Compression of the digits CNN: bytes of the trained model's file, and the accuracy that it costs."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from harness import benchmark, commands

_TIMEOUT_S = 300.0
_SMALLER, _POINTS = 20, 0.5
_CONFIG = {
    "name": "digits-cnn",
    "task": {"type": "digits", "model": "cnn", "hidden": [32, 64]},
    "train": {
        "batch_size": 64,
        "epochs": 20,
        "optimizer": {"type": "adamw", "lr": 0.003, "weight_decay": 0.01},
        "lr_schedule": {"type": "cosine", "warmup_steps": 20, "min_factor": 0.05},
    },
}
_SPARSITY, _BITS, _STEPS = 0.9, 4, 400


def measure(report: benchmark.Report, options: benchmark.Options) -> None:
    seeds = options.rounds(5)
    steps = 40 if options.quick else _STEPS
    recipe = {"sparsity": _SPARSITY, "bits": _BITS, "fine-tune": steps}
    report.settings = {"seeds": seeds, "recipe": recipe, **_CONFIG}
    found = []
    for seed in range(seeds):
        benchmark.say(f"seed {seed} of {seeds}")
        found.append(_compressed(seed, recipe, options.workspace))
    ratios = [each["bytes_before"] / each["bytes"] for each in found]
    lost = [100 * (each["accuracy"]["whole"] - each["accuracy"]["coded"]) for each in found]
    report.add("bytes of the trained model's file", "KB", [each["bytes_before"] / 1e3 for each in found])
    report.add("bytes after Deep Compression", "KB", [each["bytes"] / 1e3 for each in found])
    report.add("accuracy lost", "points", lost)
    report.goal(f"bytes of the file / before, times {_SMALLER}", _SMALLER / statistics.median(ratios), 1)
    report.goal("accuracy lost, mean of the seeds, points", statistics.mean(lost), _POINTS)
    stages = list(found[0]["accuracy"])
    rows = [[stage, f"{100 * statistics.mean(each['accuracy'][stage] for each in found):.2f} %"] for stage in stages]
    report.table(["stage", "mean accuracy"], rows)
    report.details = {"seeds": found}
    report.notes.append(
        f"A seed is `orchestray train` and `orchestray compress --sparsity {_SPARSITY} --bits {_BITS} --fine-tune "
        f"{steps}`. Bytes are those of `model.safetensors` and of `model.huffman` on the disk. Of 359 validation "
        "images one is 0.28 points."
    )


def _compressed(seed: int, recipe: dict[str, Any], workspace: Path) -> dict[str, Any]:
    told = commands.write_json(workspace / "config.yaml", _CONFIG)  # JSON is YAML
    name, places = f"seed-{seed}", ["--runs-dir", str(workspace)]
    program = commands.script("orchestray")
    train = [program, "train", str(told), f"train.seed={seed}", "--name", name, "--quiet", *places]
    commands.run_command(train, _TIMEOUT_S)
    numbers = [word for key, value in recipe.items() for word in (f"--{key}", str(value))]
    commands.run_command([program, "compress", name, *numbers, *places], _TIMEOUT_S)
    result = json.loads((workspace / f"{name}-compressed" / "result.json").read_text(encoding="utf-8"))["compressed"]
    accuracy = {stage: metrics["accuracy"] for stage, metrics in result["validation"].items()}
    return {"bytes_before": result["bytes_before"], "bytes": result["bytes"], "accuracy": accuracy}


if __name__ == "__main__":
    benchmark.run("deep_compression", "Deep Compression of a trained run: its file, and its accuracy.", measure)
