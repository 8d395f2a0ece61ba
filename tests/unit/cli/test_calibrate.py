"""`orchestray calibrate` as a user types it; docs/how-to/calibrate.md measures for real."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchestray.trainers.machine import calibrate, kept
from orchestray.trainers.machine.rdma import rdma_devices
from support.cli import orchestray_here
from support.profiles import profile


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Put a machine of closed forms instead of half a minute; return where its numbers are kept."""
    monkeypatch.setattr(calibrate, "calibrate", lambda *_, **_more: profile())
    monkeypatch.setattr(calibrate, "check_quiet", lambda: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "orchestray" / "machine.json"


def test_it_shows_what_it_keeps_in_the_place_of_this_machine(measured: Path) -> None:
    done = orchestray_here("calibrate")
    assert done.returncode == 0, done.stderr
    assert kept.load().to_json() == profile().to_json()
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["products,", "float32,", "GFLOP/s", "100", "200"] in rows
    assert ["message,", "TCP", "2", "100", "1", "101", "1,149", "16,877"] in rows
    assert "1.50 x for products, 2.00 x for copies" in done.stdout
    assert ("RDMA: no device for it here." in done.stdout) == (rdma_devices() == [])
    assert str(measured) in done.stdout


def test_json_is_the_file(measured: Path, tmp_path: Path) -> None:
    done = orchestray_here("calibrate", "--json", "--profile", tmp_path / "mine.json")
    assert json.loads(done.stdout.splitlines()[-1]) == json.loads((tmp_path / "mine.json").read_text())
    assert not measured.exists()


def test_it_measures_quickly_where_that_is_asked_for(measured: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(calibrate, "calibrate", lambda *_, quick, **_more: asked.append(quick) or profile())
    assert [orchestray_here("calibrate", *words).returncode for words in ([], ["--quick"])] == [0, 0]
    assert asked == [False, True]


def test_a_busy_machine_leaves_no_file_unless_it_is_forced_to(measured: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "calibrate", lambda *_, **_more: profile(spread=0.9))
    refused = orchestray_here("calibrate")
    assert (refused.returncode, measured.exists()) == (1, False)
    assert "busy" in refused.stderr
    assert orchestray_here("calibrate", "--force").returncode == 0
    assert measured.exists()


def test_a_place_that_cannot_be_written_is_refused_before_measuring(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(calibrate, "check_quiet", lambda: pytest.fail("it has begun"))
    (tmp_path / "file").touch()
    for place, why in ((tmp_path, "it is a folder"), (tmp_path / "file" / "a.json", "File exists")):
        done = orchestray_here("calibrate", "--profile", place)
        assert (done.returncode, done.stderr) == (1, f"could not write {place}: {why}\n")
