"""The checks for GPUs: without one they say so, each has run on the CPU, and what they compute from traces is right."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch

from gpu import gang, trace
from gpu.check import Place, Skip, Verdict, num_gpus, verdict_of
from support.gone_member import gone
from support.layers import ROOT

FOLDER = ROOT / "benchmarks" / "gpu"
NAMES = sorted(file.stem for file in FOLDER.glob("check_*.py") if file.stem != "check")
WITH_RAY = {"check_03_gpu_worker_cpu_servers", "check_10_spare_takes_over"}
"""Checks that start Ray, and are rehearsed by hand: `run_all.sh --cpu`."""
SLOW = {"check_04_cpu_run_leaves_gpus_alone", "check_05_fork_then_cuda", "check_19_killed_in_all_reduce"}
"""Checks that start processes, as each of the others does on GPUs."""
PLAIN = [name for name in NAMES if name not in WITH_RAY | SLOW]


def module_of(name: str) -> ModuleType:
    return import_module(f"gpu.{name}")


@pytest.mark.skipif(num_gpus() > 0, reason="there is a GPU: run_all.sh is the test")
def test_without_a_gpu_every_check_is_skipped_with_the_reason_and_nothing_fails() -> None:
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run([FOLDER / "run_all.sh"], env=environment, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert len(lines) == len(NAMES) == 20
    for number, line in enumerate(lines, start=1):
        assert line.startswith(f"SKIP {number:02} ")
        assert ": it needs " in line
    assert done.returncode == 0


def test_a_check_that_fails_is_a_status_of_one_and_its_line_has_the_reason(tmp_path: Path) -> None:
    for source in ("check.py", "run_all.sh"):
        (tmp_path / source).write_bytes((FOLDER / source).read_bytes())
    (tmp_path / "run_all.sh").chmod(0o755)
    body = "from check import Verdict, main\nimport sys\ndef run(place):\n    {}\nmain(run)\n"
    (tmp_path / "check_01_fine.py").write_text(body.format("return Verdict(True, 'a')"))
    (tmp_path / "check_02_worse.py").write_text(body.format("return Verdict(False, 'b')"))
    (tmp_path / "check_03_broken.py").write_text(body.format("raise ValueError('c')"))
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(tmp_path)}
    command = [tmp_path / "run_all.sh", "--cpu"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["REHEARSED 01 fine: a", "FAIL 02 worse: b", "FAIL 03 broken: ValueError: c"]
    assert done.returncode == 1


@pytest.mark.parametrize("name", PLAIN)
def test_a_check_has_run_on_the_cpu(name: str) -> None:
    word, figure = verdict_of(module_of(name).run, Place(is_rehearsal=True, has_threads=True))
    assert word == "REHEARSED", figure


@pytest.mark.parametrize("name", sorted(WITH_RAY | SLOW))
def test_a_check_that_starts_processes_can_be_imported(name: str) -> None:
    assert callable(module_of(name).run)


def test_checks_without_ray_import_none(tmp_path: Path) -> None:
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "__init__.py").write_text("raise ImportError('there is no Ray here')")
    path = os.pathsep.join(map(str, (tmp_path, FOLDER.parent, ROOT / "src")))
    code = (
        "import sys, torch\n"
        "from gpu import gang, trace, training\n"
        "import orchestray.serving.models.served, orchestray.serving.generation.engine\n"
        "import orchestray.search.trials.batched\n"
        "replica = training.replica_of(training.DIGITS, torch.device('cpu'), steps=2)\n"
        "assert len(training.trained(replica)) == 2\n"
    )
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_check_without_a_gpu_is_never_passed() -> None:
    def passes(place: Place) -> Verdict:
        return Verdict(True, "fine")

    def skips(place: Place) -> Verdict:
        raise Skip("it needs luck")

    assert verdict_of(passes, Place(is_rehearsal=True))[0] == "REHEARSED"
    assert verdict_of(passes, Place(is_rehearsal=False), gpus=99)[0] == "SKIP"
    assert verdict_of(skips, Place(is_rehearsal=True)) == ("SKIP", "it needs luck")


def test_a_member_that_ends_without_an_answer_fails_the_check_at_once() -> None:
    with pytest.raises(RuntimeError, match="the process of member 0 ended without an answer"):
        gang.run_gang(Place(is_rehearsal=True), 1, gone)


def test_copies_beside_kernels_are_not_exposed() -> None:
    copies, kernels = [(0.0, 4.0), (10.0, 12.0), (11.0, 13.0)], [(1.0, 3.0), (2.0, 3.5), (12.5, 20.0)]
    assert trace.exposed_us(copies, kernels) == pytest.approx(1.0 + 0.5 + 2.5)
    assert trace.length_us(copies) == 7.0
    assert trace.exposed_us(copies, []) == 7.0
    with trace.tracing() as traced:
        torch.ones(3).sum()
    assert trace.on_device(traced) == []
