"""`orchestray lab` as a user types it."""

from __future__ import annotations

import json

from orchestray.trainers.machine import kept
from orchestray.trainers.survey.lab.registry import EXPERIMENTS
from support.cli import orchestray_here


def test_without_a_name_it_lists_the_experiments() -> None:
    done = orchestray_here("lab")
    assert done.returncode == 0, done.stderr
    for name, experiment in EXPERIMENTS.items():
        assert name in done.stdout
        assert "".join(experiment.line.split()) in "".join(done.stdout.split())
    assert json.loads(orchestray_here("lab", "--json").stdout) == {n: each.line for n, each in EXPERIMENTS.items()}


def test_an_experiment_prints_its_table_and_its_findings_or_json() -> None:
    done = orchestray_here("lab", "winograd")
    assert done.returncode == 0, done.stderr
    assert "F(2x2, 3x3)" in done.stdout
    assert "the error grows" in done.stdout
    found = json.loads(orchestray_here("lab", "winograd", "--json").stdout)
    assert (found["name"], len(found["rows"])) == ("winograd", 6)


def test_an_unknown_experiment_is_a_sentence_with_those_that_there_are() -> None:
    refused = orchestray_here("lab", "nothing")
    assert (refused.returncode, "Traceback" in refused.stderr) == (2, False)
    assert "There is no experiment 'nothing'; there are convolutions, " in refused.stderr


def test_more_threads_than_cores_are_refused_before_torch_fails_of_them() -> None:
    refused = orchestray_here("lab", "gemm", "--threads", "100000")
    assert refused.returncode == 2
    assert f"--threads: this machine has {kept.cores()} cores, got 100000" in refused.stderr
