"""A run of a config that was planned here is put beside its prediction, once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import orchestray
from orchestray.platform.cluster.cluster import Cluster
from orchestray.trainers.machine import kept
from orchestray.trainers.planning import plan as planning
from orchestray.trainers.planning import record as records
from unit.trainers.planning.test_planner import machine

CONFIG = {
    "task": {"type": "digits", "hidden": [16]},
    "train": {"batch_size": 64, "steps": 60, "optimizer": {"type": "sgd", "lr": 0.1}},
    "strategy": {"network": {"data": 2}},
}


def test_a_planned_run_has_its_prediction_in_its_result_and_in_the_record(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del cluster
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("orchestray.trainers.planning.measuring._DISTURBED", 2.0)
    here = machine(processor=kept.processor(), cores=kept.cores(), versions=kept.versions(), memory_bytes=10**11)
    kept.save(here, kept.default_file())
    unplanned = orchestray.train(CONFIG, runs_dir=tmp_path, name="unplanned")
    assert "predicted" not in unplanned.result
    plan = planning.plan_as_it_stands(CONFIG)
    planned = orchestray.train(CONFIG, runs_dir=tmp_path, name="planned")
    predicted = planned.result["predicted"]
    assert predicted["step_s"] == pytest.approx(plan.step_s)
    written = json.loads((tmp_path / "planned" / "result.json").read_text(encoding="utf-8"))["predicted"]
    assert written == predicted
    for _ in range(2):  # what is known is not added again
        assert planning.note_later(tmp_path / "planned") is not None
        assert planning.note_later(tmp_path / "unplanned") is not None
    entries = records.load_record(here.name).entries
    assert [(entry.name, entry.family) for entry in entries] == [("planned", "allreduce"), ("unplanned", "allreduce")]
    assert entries[0].measured_s == pytest.approx(predicted["measured_step_s"])
