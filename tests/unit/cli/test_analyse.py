"""`orchestray analyse` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchestray.trainers.machine import kept
from support.cli import orchestray_here
from support.profiles import FLOPS_PER_S, profile

ROOT = Path(__file__).parents[3]
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


def test_a_page_is_written_beside_the_table_and_a_place_that_is_none_is_a_sentence(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = orchestray_here("analyse", LENET, "--inputs", "1,1,32,32", "--html", str(page))
    assert done.returncode == 0, done.stderr
    assert "c3.15" in done.stdout
    assert "c3.15" in page.read_text(encoding="utf-8")
    refused = orchestray_here("analyse", LENET, "--inputs", "1,1,32,32", "--html", str(tmp_path / "none" / "page.html"))
    assert (refused.returncode != 0, "Traceback" in refused.stderr) == (True, False)


def test_a_model_that_looks_at_values_is_run_with_measure_and_the_output_says_so(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from torch import nn\n"
        "class Looks(nn.Linear):\n"
        "    def __init__(self): super().__init__(4, 2)\n"
        "    def forward(self, x): return super().forward(x) if x.abs().sum().item() >= 0 else x\n"
    )
    refused = orchestray_here("analyse", f"{tmp_path / 'own.py'}:Looks", "--inputs", "3,4")
    assert (refused.returncode, "--measure helps: it is run" in refused.stderr) == (2, True)
    done = orchestray_here("analyse", f"{tmp_path / 'own.py'}:Looks", "--inputs", "3,4", "--measure", "--json")
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["parameters"] == 10
    assert found["forward"]["multiplications"] >= 3 * 4 * 2
    (note,) = (note for note in found["notes"] if note.startswith("counted as it ran"))
    assert "--measure" not in note


def test_inputs_of_a_module_are_shown_by_their_shapes_and_those_of_a_task_as_samples() -> None:
    of_module = orchestray_here("analyse", LENET, "--inputs", "20,1,32,32").stdout
    assert "A step of inputs [20, 1, 32, 32]: " in of_module
    of_task = orchestray_here("analyse", str(ROOT / "configs/train/digits.yaml")).stdout
    assert "A step of 64 samples: " in of_task


def test_what_is_wrong_is_a_sentence_and_a_status() -> None:
    refused = orchestray_here("analyse", LENET)
    assert refused.returncode == 2
    assert "give the shapes of its inputs" in refused.stderr
    missing = orchestray_here("analyse", "nowhere.yaml")
    assert (missing.returncode, "Traceback" in missing.stderr) == (2, False)
