"""A run of a config that was planned here is put beside its prediction, once, and plans that are tried are run."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

import orchestray
from orchestray.platform.cluster.cluster import Cluster
from orchestray.platform.errors import ConfigError
from orchestray.trainers.config.load import load_train_config
from orchestray.trainers.driver import tried_plans
from orchestray.trainers.driver.tried_plans import try_plans
from orchestray.trainers.machine import kept
from orchestray.trainers.machine.profile import MachineProfile
from orchestray.trainers.planning import plan as planning
from orchestray.trainers.planning import record as records
from support.cli import orchestray_here
from unit.trainers.planning.test_planner import machine

CONFIG = {
    "task": {"type": "digits", "hidden": [16]},
    "train": {"batch_size": 64, "steps": 60, "optimizer": {"type": "sgd", "lr": 0.1}},
    "strategy": {"network": {"data": 2}},
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MachineProfile:
    """Return the profile of this machine, which its planner finds."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("orchestray.trainers.planning.measuring._DISTURBED", 2.0)
    here = machine(processor=kept.processor(), cores=kept.cores(), versions=kept.versions(), memory_bytes=10**11)
    kept.save(here, kept.default_file())
    return here


def test_a_planned_run_has_its_prediction_in_its_result_and_in_the_record(
    cluster: Cluster, tmp_path: Path, here: MachineProfile
) -> None:
    del cluster
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


@pytest.mark.usefixtures("cluster", "here")
def test_with_plan_auto_a_run_trains_by_the_best_plan_and_says_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "plan", functools.partial(planning.plan, workers=1))  # of fifty schemes four
    file = tmp_path / "small.yaml"
    file.write_text(json.dumps({**CONFIG, "train": {**CONFIG["train"], "steps": 5}}), encoding="utf-8")
    best = planning.plan(file).best
    assert best is not None
    done = orchestray_here("train", file, "--plan", "auto", "--runs-dir", tmp_path, "--name", "best")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"plan: {best.name}, {1e3 * best.step_s:.3g} ms a step")
    assert load_train_config(tmp_path / "best" / "config.yaml").strategy == load_train_config(best.config).strategy


@pytest.mark.usefixtures("cluster")
def test_plans_that_are_tried_have_what_their_steps_took_and_the_fastest_is_the_best(
    tmp_path: Path, here: MachineProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tried_plans, "_MOST_STEPS", 40)  # not three seconds each
    file = tmp_path / "small.yaml"
    kept_elsewhere = {"checkpoint": {"storage": str(tmp_path / "kept"), "every_steps": 5}}
    goal = {"until": {"metric": "accuracy", "value": 0.0}, "validate_every_steps": 1}
    long = {"steps": 5000, "lr_schedule": {"type": "cosine", "warmup_steps": 4000}}
    deeper = {"task": {"type": "digits", "hidden": [16, 16, 16]}, "train": {**CONFIG["train"], **goal, **long}}
    file.write_text(json.dumps({**CONFIG, **kept_elsewhere, **deeper}), encoding="utf-8")
    planned = planning.plan(file, workers=1)
    one, again = planned.plans
    broken = replace(one, name="broken", config={**one.config, "task": {"type": "digits", "hidden": "none"}})
    done: list[tuple[int, int]] = []
    tried = try_plans(replace(planned, plans=(broken, one, again)), 3, report=lambda *each: done.append(each))
    times_s: dict[str, list[float]] = {}
    for entry in records.load_record(here.name).entries:
        times_s.setdefault(entry.name.split("-")[1], []).append(entry.measured_s)
    assert [len(each) for each in times_s.values()] == [3, 3]
    assert [plan.tried_s for plan in tried.plans] == [pytest.approx(median(times_s[place])) for place in "12"]
    (unfit,) = [each for each in tried.unfit if each.name == "broken"]
    assert unfit.why.startswith("it failed when it was tried: ")
    assert "task.hidden" in unfit.why
    assert done[-1] == (9, 9)
    assert not (tmp_path / "kept").exists()
    for number, text in ((0, "must be 1 or more, got 0"), (1, "none keeps the result")):
        with pytest.raises(ConfigError, match=text):
            try_plans(replace(planned, plans=()), number)
