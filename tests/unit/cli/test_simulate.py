"""`orchestray simulate` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orchestray.platform.comm.allreduce.costs import AlphaBeta
from orchestray.trainers.machine import kept
from orchestray.trainers.machine.profile import Links
from orchestray.trainers.survey.cluster.schemes import SCHEMES
from support.cli import orchestray_here
from unit.trainers.planning.test_planner import machine


def found(*arguments: str) -> Any:
    done = orchestray_here("simulate", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_it_compares_every_scheme_the_fastest_first() -> None:
    done = orchestray_here("simulate", "--workers", "16", "--steps", "10")
    assert done.returncode == 0, done.stderr
    assert {line.split()[0] for line in done.stdout.splitlines()[1:]} == set(SCHEMES)
    schemes = found("--workers", "16", "--steps", "10")["schemes"]
    times_s = [each["useful_step_s"] for each in schemes]
    assert times_s == sorted(times_s)


def test_the_numbers_are_those_of_the_units_that_were_given() -> None:
    links = ("--per-node", "0", "--near-latency-us", "1000", "--near-gbit-s", "8", "--compute-ms", "50")
    (ring,) = found("ring", "--workers", "4", "--mb", "4", *links)["schemes"]
    assert ring["step_s"] == pytest.approx(0.05 + 2 * 3 * (1e-3 + 1e6 / 1e9))
    assert ring["near_bytes"] == pytest.approx(2 * 3 * 4e6)


def test_failures_add_goodput_and_the_interval_of_checkpoints() -> None:
    failing = ("ring", "--workers", "512", "--mtbf-hours", "100", "--checkpoint-s", "5", "--restart-s", "30")
    done = orchestray_here("simulate", *failing)
    assert "goodput" in done.stdout
    (ring,) = found(*failing)["schemes"]
    interval_s = ring["checkpoint_every"] * ring["step_s"]
    assert interval_s == pytest.approx((2 * 5 * 100 * 3600 / 512) ** 0.5, rel=0.01)
    assert 0.7 < ring["goodput"] < 0.9
    (given,) = found(*failing, "--checkpoint-every", "10")["schemes"]
    assert given["checkpoint_every"] == 10
    assert given["goodput"] < ring["goodput"]
    saving = orchestray_here("simulate", "ring", "--checkpoint-every", "10", "--checkpoint-s", "5")
    assert "goodput" in saving.stdout  # it costs something, even if none fails


def test_what_does_not_fit_is_left_out_of_all_and_refused_by_name() -> None:
    done = orchestray_here("simulate", "--workers", "6", "--stages", "4")
    assert done.returncode == 0
    assert "Not pipeline: pipelines of 4 workers each do not divide 6 workers." in done.stdout
    refused = orchestray_here("simulate", "pipeline", "--workers", "6", "--stages", "4")
    assert (refused.returncode, "do not divide 6" in refused.stderr) == (2, True)


def test_every_wrong_option_is_named_at_once() -> None:
    refused = orchestray_here("simulate", "rings", "--placement", "near", "--ports", "many")
    assert refused.returncode == 2
    for part in ("'rings'", "'near'", "'many'"):
        assert part in refused.stderr


def test_the_same_seed_gives_the_same_numbers_and_another_others() -> None:
    uneven = ("async", "--workers", "8", "--speed-spread", "0.2", "--steps", "10")
    assert found(*uneven) == found(*uneven)
    assert found(*uneven) != found(*uneven, "--seed", "1")


def test_a_profile_has_the_links_and_no_option_beside_it(tmp_path: Path) -> None:
    kept.save(machine(links=Links(AlphaBeta(1e-3, 1e-9), AlphaBeta(1e-2, 1e-8))), tmp_path / "profile.json")
    given = ("ring", "--machine", str(tmp_path / "profile.json"))
    (ring,) = found(*given, "--workers", "4", "--per-node", "0", "--mb", "4", "--compute-ms", "50")["schemes"]
    assert ring["step_s"] == pytest.approx(0.05 + 2 * 3 * (1e-3 + 1e6 / 1e9))
    done = orchestray_here("simulate", *given, "--gbit-s", "10")
    assert done.returncode == 2
    assert "leave out --gbit-s" in done.stderr


def test_numbers_beyond_what_can_be_computed_are_refused_by_name() -> None:
    endless = orchestray_here("simulate", "ring", "--mb", "1e308")
    assert (endless.returncode, endless.stderr.splitlines()) == (
        2,
        ["ring: a step takes longer than numbers reach; give a smaller load or faster links"],
    )
    long = orchestray_here("simulate", "ring", "--steps", "100000000000")
    assert long.returncode == 2
    assert "ring: 64 workers and 100,000,000,000 steps need more memory than there is" in long.stderr
