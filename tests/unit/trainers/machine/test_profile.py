"""A profile survives its file, answers between what was measured, and refuses numbers that cannot be."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest

from orchestray.platform.errors import ConfigError
from orchestray.trainers.machine.profile import Contention, MachineProfile
from support.profiles import FLOPS_PER_S, profile


def test_a_profile_survives_its_file() -> None:
    data = json.loads(json.dumps(profile(price_per_worker_hour=0.5).to_json()))
    again = MachineProfile.from_json(data)
    assert again.to_json() == data
    assert again.price_per_worker_hour == 0.5
    assert again.links == profile().links
    assert again.gemm_s(100, 50, 7, threads=2) == pytest.approx(profile().gemm_s(100, 50, 7, threads=2), rel=1e-3)


@pytest.mark.parametrize(("threads", "nearest"), [(1, 1), (2, 2), (16, 2), (0, 1)])
def test_the_speed_with_other_numbers_of_threads_is_that_of_the_nearest(threads: int, nearest: int) -> None:
    assert profile().flops_per_s(threads) == pytest.approx(nearest * FLOPS_PER_S)
    assert profile().computing(threads).copy_bytes_per_s == nearest * 1e10


def test_a_dtype_without_a_table_is_named_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="no products of float16; it has those of float32, bfloat16"):
        profile().gemm_s(1, 1, 1, dtype="float16")


def test_contention_is_linear_between_counts_and_mixes_products_with_copies() -> None:
    found = Contention({1: 1.0, 4: 1.6}, {1: 1.0, 4: 4.0})
    assert found.factor(1, cores=4) == 1.0
    assert found.factor(2, cores=4) == pytest.approx(1.2)
    assert found.factor(4, cores=4, copies=1.0) == pytest.approx(4.0)
    assert found.factor(4, cores=4, copies=0.5) == pytest.approx(2.8)


def test_more_processes_than_cores_share_them() -> None:
    assert Contention({1: 1.0, 2: 1.5}, {1: 1.0, 2: 2.0}).factor(6, cores=2) == pytest.approx(3 * 1.5)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"format": 0}, "not a profile of format 2, but of 0"),
        ({"overlap": 1.5}, "its overlap from 0 to 1"),
        ({"disk_bytes_per_s": 0}, "must be above 0"),
        ({"cores": "two"}, "wrong type"),
        ({"links": None}, "wrong type"),
        ({"channels": {}}, "the channel tcp are missing"),
        ({"compute": {}}, "a number of threads"),
        ({"price_per_worker_hour": -1}, "price_per_worker_hour must be a finite number of 0 or more, got -1"),
        ({"process_bytes": -5}, "process_bytes must be a finite number of 0 or more, got -5"),
        ({"cores": math.inf}, "wrong type"),
        ({"contention": {"products": {}, "copies": {"1": 1.0}}}, "the contention of products needs"),
        ({"contention": {"products": {"1": 0}, "copies": {"1": 1.0}}}, "a slowdown above 0"),
    ],
)
def test_a_file_with_a_wrong_number_is_refused_by_a_sentence(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        MachineProfile.from_json(profile().to_json() | changes)


def _places(value: Any, *keys: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the keys of every number of a file, of a list those of the first one."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _places(each, *keys, key)
    elif isinstance(value, list):
        yield from _places(value[0], *keys, 0)
    elif isinstance(value, int | float):
        yield keys


@pytest.mark.parametrize("wrong", [-1, math.nan, math.inf, 10**400])
def test_every_number_of_a_file_is_refused_if_no_machine_has_it(wrong: float) -> None:
    content = json.dumps(profile(price_per_worker_hour=0.5).to_json())
    places = [place for place in _places(json.loads(content)) if place != ("format",)]
    assert len(places) > 40
    for *keys, last in places:
        data = section = json.loads(content)
        for key in keys:
            section = section[key]
        if wrong > 1 and isinstance(section[last], int):
            continue  # of counts there is no largest
        section[last] = wrong
        with pytest.raises(ConfigError):
            MachineProfile.from_json(data)


def test_a_file_without_products_of_float32_or_with_an_operation_of_one_rank_is_refused() -> None:
    data = profile().to_json()
    del data["compute"]["1"]["gemm"]["float32"]
    with pytest.raises(ConfigError, match="the products of float32 with 1 threads are missing"):
        MachineProfile.from_json(data)
    data = profile().to_json()
    data["collectives"]["broadcast"]["0"] = data["collectives"]["broadcast"]["2"]
    with pytest.raises(ConfigError, match="there are times of broadcast with 0"):
        MachineProfile.from_json(data)


def test_a_file_that_lacks_a_number_names_it() -> None:
    data = profile().to_json()
    del data["contention"]["copies"]
    with pytest.raises(ConfigError, match="copies is missing"):
        MachineProfile.from_json(data)
    with pytest.raises(ConfigError, match="not a profile"):
        MachineProfile.from_json([])
