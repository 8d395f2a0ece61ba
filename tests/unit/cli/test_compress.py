"""`orchestray compress` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

from orchestray.trainers.saved.run import load_run
from support.cli import orchestray_here as orchestray
from support.trained_runs import train_here

CONFIG = {
    "name": "small",
    "task": {"type": "digits", "hidden": [24]},
    "train": {"batch_size": 64, "epochs": 1, "optimizer": {"type": "sgd", "lr": 0.1}},
}


def test_it_prints_the_bytes_on_the_disk_and_the_metrics_of_each_stage(tmp_path: Path) -> None:
    train_here(CONFIG, runs_dir=tmp_path)
    done = orchestray("compress", "small", "--sparsity", "0.5", "--runs-dir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    before, after = (
        (tmp_path / name).stat().st_size
        for name in ("small/model/model.safetensors", "small-compressed/model/model.huffman")
    )
    assert f"small-compressed: {before:,} -> {after:,} bytes, {before / after:.1f} x smaller" in done.stdout
    assert "888 of 1,776 left, in 5 bits" in done.stdout
    accuracy = load_run(tmp_path / "small-compressed").result["final"]["validation"]["accuracy"]
    assert f"accuracy {accuracy:.4g}" in done.stdout.splitlines()[-2]


def test_as_json_it_is_the_result_and_a_wrong_number_is_a_sentence(tmp_path: Path) -> None:
    train_here(CONFIG, runs_dir=tmp_path)
    done = orchestray("compress", str(tmp_path / "small"), "--name", "b", "--json")
    told = json.loads(done.stdout)
    assert told["compressed"] == load_run(tmp_path / "b").result["compressed"]
    assert (told["name"], told["path"]) == ("b", str(tmp_path / "b"))
    refused = orchestray("compress", str(tmp_path / "small"), "--bits", "0")
    assert (refused.returncode, "Traceback" in refused.stderr) == (2, False)
    assert "--bits must be 1 to 8, got 0" in refused.stderr
