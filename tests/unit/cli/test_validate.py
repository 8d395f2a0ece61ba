"""`validate` says what a run would do with the resources that it asks for."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestray.cli.validate import validate

DIGITS = Path(__file__).parents[3] / "configs/train/digits.yaml"


def said(capsys: pytest.CaptureFixture[str], gpus: str) -> list[str]:
    validate([str(DIGITS), f"resources.gpus_per_worker={gpus}"])
    return [line.strip() for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("gpus", ["0.5", "1"])
def test_a_worker_with_one_gpu_or_less_uses_what_it_reserves(capsys: pytest.CaptureFixture[str], gpus: str) -> None:
    assert len(said(capsys, gpus)) == 1


def test_a_worker_with_several_gpus_is_said_to_compute_on_one(capsys: pytest.CaptureFixture[str]) -> None:
    _, note = said(capsys, "2")
    assert note.startswith("note: resources.gpus_per_worker is 2: a worker computes on the first of its GPUs")
