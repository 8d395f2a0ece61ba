"""Layouts of the network on real processes, as the command line runs them: results, kills, resumes."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestray import load_run
from orchestray.platform.cluster.cluster import Cluster
from orchestray.platform.run.checkpoint import load_model_tensors
from support.cli import Running, beside, orchestray_here, read_lines
from support.slow_digits import slowly
from support.under_way import UnderWay

DIGITS = Path(__file__).parents[2] / "configs" / "train" / "digits.yaml"
STEPS = 20
FIRST_CHECKPOINT = 5
SHARE = 1.0
"""A step takes as long as all slow ones before: few are left, and a run must not come to its end meanwhile."""
COMMON = [
    "train.epochs=null", f"train.steps={STEPS}", "task.hidden=[32,32]", "train.precision=float64",
    f"checkpoint.every_steps={FIRST_CHECKPOINT}",
]  # fmt: skip
MICROBATCHES = 4
LAYOUTS = {
    "pipeline": "strategy.network={data: 1, pipeline: 2, microbatches: 4}",
    "tensor": "strategy.network={data: 1, tensor: 2, microbatches: 4}",
    "shard": "strategy={network: {data: 2, microbatches: 4}, exchange: {type: allreduce, shard: gradients}}",
    "fully sharded": "strategy={network: {data: 2, microbatches: 4}, exchange: {type: allreduce, shard: parameters}}",
    "store": "strategy={network: {data: 2, microbatches: 4}, exchange: {factors: auto, store_shards: 2}}",
}


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_model_tensors(run / "model")


def furthest(left: Path, right: Path) -> float:
    one, two = weights(left), weights(right)
    assert one.keys() == two.keys()
    return max(float((one[name] - two[name]).abs().max()) for name in one)


def with_killed(runs: Path, ranks: Sequence[int], *overrides: str, before: int = FIRST_CHECKPOINT) -> UnderWay:
    """Train to the end with workers killed one after the other, from the first checkpoint on: that of step `before`."""
    slowed, slow = slowly(runs, before, parts=MICROBATCHES, share=SHARE)
    every = f"checkpoint.every_steps={before}"
    running = UnderWay(DIGITS, runs, [*overrides, *slowed, every], name="digits")
    running.until("a checkpoint", lambda: running.events("checkpoint_saved"))
    for rank in ranks[:-1]:
        running.kill(rank)
        running.until("recovery", lambda: running.events("recovered"))
    running.kill(ranks[-1])
    slow.unlink()
    running.finish()
    return running


@pytest.fixture(scope="module")
def one(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of a run of a single process."""
    runs = tmp_path_factory.mktemp("one")
    network = "strategy.network={data: 1, microbatches: 4}"
    done = orchestray_here("train", DIGITS, *COMMON, network, "--runs-dir", runs)
    assert done.returncode == 0, done.stderr
    return runs / "digits"


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [("pipeline", [0, 1]), ("shard", [0]), ("fully sharded", [1]), ("tensor", [1]), ("store", [0])],
)
def test_sigkill_of_a_stage_or_shard_recovers_with_the_right_weights(
    one: Path, tmp_path: Path, layout: str, ranks: list[int]
) -> None:
    running = with_killed(tmp_path, ranks, *COMMON, LAYOUTS[layout])
    assert running.events("checkpoint_saved")[0]["step"] < running.events("recovered")[0]["step"]
    assert furthest(one, tmp_path / "digits") <= 1e-11
    assert load_run(tmp_path / "digits").result["restarts"] == len(ranks)
    steps = [line["step"] for line in read_lines(tmp_path / "digits" / "metrics.jsonl") if "split" not in line]
    assert steps == list(range(1, STEPS + 1))


def test_a_run_goes_on_under_another_layout(one: Path, tmp_path: Path) -> None:
    first = orchestray_here(
        "train", DIGITS, *COMMON, LAYOUTS["pipeline"], f"train.steps={STEPS // 2}", "--runs-dir", tmp_path
    )
    assert first.returncode == 0, first.stderr
    then: list[Any] = ["train", DIGITS, *COMMON, LAYOUTS["shard"], "--runs-dir", tmp_path, "--resume"]
    second = orchestray_here(*then)
    assert second.returncode == 0, second.stderr
    assert furthest(one, tmp_path / "digits") <= 1e-11


@pytest.mark.slow
def test_ctrl_c_saves_a_checkpoint_of_a_pipeline_to_go_on_from(one: Path, cluster: Cluster, tmp_path: Path) -> None:
    slowed, slow = slowly(tmp_path, FIRST_CHECKPOINT, parts=MICROBATCHES, share=SHARE)
    once = "checkpoint.every_steps=100000"  # the one of the end alone is there
    arguments: list[str | Path] = ["train", DIGITS, *COMMON, once, LAYOUTS["pipeline"], *slowed, "--runs-dir", tmp_path]
    running = Running(arguments, run_path=tmp_path / "digits", env=beside(cluster))
    running.until("the first steps", lambda: running.steps() >= FIRST_CHECKPOINT)
    running.signal(signal.SIGINT)
    status, _, stderr = running.finish()
    slow.unlink()
    assert status == 130, stderr
    assert "with a checkpoint saved. Go on with --resume" in stderr
    assert "Traceback" not in stderr
    assert "lost" not in stderr
    assert load_run(tmp_path / "digits").status == "interrupted"
    assert len(list((tmp_path / "digits" / "checkpoints").iterdir())) == 1
    again = orchestray_here(*arguments, "--resume")
    assert again.returncode == 0, again.stderr
    assert furthest(one, tmp_path / "digits") <= 1e-11


@pytest.mark.slow
def test_pipedream_survives_the_kill_of_a_stage_and_tells_its_staleness(cluster: Cluster, tmp_path: Path) -> None:
    network = "strategy.network={data: 1, pipeline: 2, microbatches: 4, schedule: pipedream}"
    longer = ["train.steps=250", "train.optimizer.lr=0.05"]
    with_killed(tmp_path, [1], *COMMON, network, *longer, before=20)
    result = load_run(tmp_path / "digits").result
    assert result["staleness"]["max"] == 1
    assert result["final"]["validation"]["accuracy"] > 0.9


def test_two_by_two_by_two_workers_are_the_single_process(one: Path, tmp_path: Path) -> None:
    network = "strategy.network={data: 2, tensor: 2, pipeline: 2, microbatches: 4}"
    done = orchestray_here(
        "train", DIGITS, *COMMON, network, f"train.steps={FIRST_CHECKPOINT}", "--runs-dir", tmp_path, "--json"
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert len(result["memory"]["peak_bytes"]) == len(result["memory"]["peak_activation_bytes"]) == 8
    assert 0 < result["bubble"] < 1
    assert len(result["busy_s"]) == 8
    assert set(result["bytes"]["links"]) == {"stage 0 -> stage 1", "stage 1 -> stage 0", "tensor"}
    steps = [line for line in read_lines(tmp_path / "digits" / "metrics.jsonl") if "split" not in line]
    expected = [line for line in read_lines(one / "metrics.jsonl") if "split" not in line]
    for line, wanted in zip(steps, expected, strict=False):
        assert line["loss"] == pytest.approx(wanted["loss"], rel=0, abs=1e-12)
