"""`orchestray exhibit` as a user types it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from orchestray.cli import exhibit
from orchestray.cli.exhibit import EXHIBITS
from support.cli import orchestray_here


@pytest.fixture(scope="module", autouse=True)
def computed_once() -> Iterator[None]:
    """Have each exhibit computed once for all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exhibit, "EXHIBITS", {name: (line, cache(make)) for name, (line, make) in EXHIBITS.items()})
        yield


def rows(name: str) -> list[dict[str, Any]]:
    done = orchestray_here("exhibit", name, "--json")
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])["rows"]
    return found


def test_without_a_name_all_are_listed_and_an_unknown_one_is_refused() -> None:
    listed = orchestray_here("exhibit")
    assert [line.split()[0] for line in listed.stdout.splitlines()[1:]] == list(EXHIBITS)
    refused = orchestray_here("exhibit", "sgd")
    assert (refused.returncode, "sgd-rate" in refused.stderr) == (2, True)


@pytest.mark.parametrize("name", EXHIBITS)
def test_each_prints_a_table_and_says_what_it_shows(name: str) -> None:
    done = orchestray_here("exhibit", name)
    assert done.returncode == 0, done.stderr
    table, sentence = done.stdout.rsplit("\n\n", 1)
    assert len(table.splitlines()) > 2
    assert sentence.strip().endswith(".")


def test_the_numbers_are_the_ones_to_show() -> None:
    assert all(row["mean after it"] <= row["bound"] for row in rows("descent-lemma"))
    rates = rows("sgd-rate")
    assert rates[-1]["loss above the least"] < rates[0]["loss above the least"] * (128 / 16_384) ** 0.5
    steps = [row["steps"] for row in rows("batch-sizes")]
    assert steps[0] > 3 * steps[2] > 9 * steps[-1]
    assert [row["workers"] for row in rows("asynchronous-rate")] == [1, 2, 4, 8]
    assert [row["reported"] for row in rows("hybrid")] == [2.2, "at most 2.2", 3.1]
    assert [row["copies"] for row in rows("host-staged")] == [1, 3, 4]
    fewest = {(row["numbers"], row["memory of a process, GB"]): row["fewest processes"] for row in rows("gpt-3")}
    assert fewest["float16", 80] == 5
    assert fewest["float32", 80] == 9
    assert [(row["numbers"], row["bytes"]) for row in rows("int8")] == [("float32", 104_488), ("int8", 27_984)]
    goodputs = {row["of Young and Daly's"]: row["goodput, simulated"] for row in rows("checkpoints")}
    assert max(goodputs, key=lambda factor: float(goodputs[factor].rstrip("%"))) == "1"
    assert max(abs(float(row["error"].rstrip("%"))) for row in rows("gpipe") + rows("bert")) < 10
    in_step, free = rows("load-balancing")
    assert in_step["steps/s"] <= 2 < 3.4 < free["steps/s"]
    rumours = rows("rumours")
    assert [row["missed after correction"] for row in rumours] == [0] * 6
    assert max(row["of all"] for row in rumours) < 1000  # gossip alone misses somebody for each number of nodes
    paxos = {row.pop("what"): list(row.values()) for row in rows("paxos")}
    assert paxos["violations in all of these"] == paxos["decisions, a majority down"] == [0, 0, 0]
    assert min(paxos["crashes in them"] + paxos["decisions in them"] + paxos["fewest of these in a schedule"]) > 0
    full, asp, alone = (row for row in rows("data-centres") if (row["link"], row["rate"]) == ("slow", 0.4))
    assert float(asp["seconds"]) < 0.5 * float(full["seconds"])
    assert (full["ahead"], asp["ahead"]) == ("1 of 1", "4 of 4")
    assert int(alone["ahead"]) > 4
    assert min(asp["barrier, s"], asp["clock, s"]) > alone["barrier, s"] == alone["clock, s"] == 0
