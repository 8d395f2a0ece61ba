"""`orchestray advise` as a user types it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.cli import orchestray_here

DIGITS = "configs/train/digits.yaml"
LENET = "orchestray.trainers.survey.networks.plain:LeNet5"


def advised(*arguments: str) -> Any:
    done = orchestray_here("advise", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_small_data_are_for_one_device_and_the_table_says_why() -> None:
    done = orchestray_here("advise", DIGITS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Distribute: single. ")
    assert advised(DIGITS)["samples"] == 1438


@pytest.mark.parametrize(
    ("options", "choice"),
    [
        (["--samples", "60000", "--device-gb", "1"], "single"),
        (["--samples", "1000000", "--device-gb", "1"], "data parallel"),
        (["--device-gb", "0.0005"], "split"),
    ],
)
def test_samples_and_the_memory_of_a_device_decide(options: list[str], choice: str) -> None:
    found = advised(LENET, "--inputs", "8,1,32,32", *options)["distribute"]
    assert found["choice"] == choice


def test_stragglers_and_needs_decide_the_rest() -> None:
    in_step = advised(DIGITS)
    assert (in_step["consistency"]["choice"], in_step["centre"]["choice"]) == ("synchronous", "all-reduce")
    late = advised(DIGITS, "--speed-spread", "0.5")
    assert (late["consistency"]["choice"], late["centre"]["choice"]) == ("asynchronous", "server")
    assert advised(DIGITS, "--elastic", "--no-centre")["centre"]["choice"] == "gossip"


def test_what_is_wrong_is_a_sentence_and_a_status() -> None:
    missing = orchestray_here("advise", "nowhere.yaml")
    assert (missing.returncode, "Traceback" in missing.stderr) == (2, False)
