"""`orchestray analyse` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchestray.trainers.planning.machine import kept
from support.cli import orchestray_here
from support.profiles import FLOPS_PER_S, profile

LENET = "orchestray.trainers.survey.networks.plain:LeNet5"


def test_it_prints_a_row_a_layer_or_json_with_the_same_numbers() -> None:
    table = orchestray_here("analyse", LENET, "--inputs", "1,1,32,32")
    assert table.returncode == 0, table.stderr
    assert "c3.15" in table.stdout
    assert "60 k" in table.stdout
    told = orchestray_here("analyse", LENET, "--inputs", "1,1,32,32", "--json")
    found = json.loads(told.stdout.splitlines()[-1])
    assert (found["parameters"], found["uncounted"]) == (60_000, {})
    assert {layer["name"] for layer in found["layers"]} >= {"c1", "s2", "c3.0", "f6"}


def test_it_predicts_by_models_of_the_literature_on_a_calibrated_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    refused = orchestray_here("analyse", LENET, "--inputs", "1,1,32,32", "--predict")
    assert refused.returncode == 2
    assert "run `orchestray calibrate`" in refused.stderr
    kept.save(profile(), kept.default_file())
    told = orchestray_here("analyse", LENET, "--inputs", "1,1,32,32", "--predict", "--json")
    found = json.loads(told.stdout.splitlines()[-1])
    work = found["forward"]["work"] + found["backward"]["work"]
    assert found["predicted_s"]["Paleo"] == pytest.approx(work / FLOPS_PER_S, rel=1e-3)
    assert found["predicted_s"]["table of products"] < found["predicted_s"]["two workers with a batch each"]
    shown = orchestray_here("analyse", LENET, "--inputs", "1,1,32,32", "--predict").stdout
    assert f"Paleo {1e3 * work / FLOPS_PER_S:.3g} ms" in shown


def test_what_is_wrong_is_a_sentence_and_a_status() -> None:
    refused = orchestray_here("analyse", LENET)
    assert refused.returncode == 2
    assert "give the shapes of its inputs" in refused.stderr
    missing = orchestray_here("analyse", "nowhere.yaml")
    assert (missing.returncode, "Traceback" in missing.stderr) == (2, False)
