"""Replicas that run and cannot report are an error with an address; what a replica itself says comes first."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from orchestray.platform.errors import OrchestrayError
from orchestray.serving.batching import Batcher, Greedy
from orchestray.serving.replicas.ray_replicas import ApplicationEndedError, first_report
from orchestray.serving.routing.endpoint import ModelVersion
from support.batching import in_virtual_time
from support.http_endpoint import ROW_SUMS

ADDRESS = "10.0.0.1:40123"


async def after(seconds: float, outcome: Any = None) -> Any:
    await asyncio.sleep(seconds)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


async def found(running: Coroutine[Any, Any, Any], reported: Coroutine[Any, Any, Any]) -> Any:
    tasks = asyncio.create_task(running), asyncio.create_task(reported)
    try:
        return await first_report(*tasks, ADDRESS)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@in_virtual_time
async def test_replicas_that_cannot_report_are_waited_for_no_longer_than_they_try_to() -> None:
    never = 1e9
    ended = ApplicationEndedError("ended while they started")
    version = ModelVersion(ROW_SUMS, Batcher(policy=Greedy()))
    for running, reported in (
        (after(5), after(never)),  # all run, and none is heard of
        (after(5, ended), after(never)),  # one has given up, and ended all
        (after(5, ended), after(1, version)),  # one could report, and another could not
    ):
        with pytest.raises(OrchestrayError, match=rf"could not report to this process at {ADDRESS}.*firewall") as told:
            await found(running, reported)
        assert not isinstance(told.value, ApplicationEndedError)


@in_virtual_time
async def test_a_version_is_there_when_its_replicas_run_and_one_has_reported_whichever_is_first() -> None:
    version = ModelVersion(ROW_SUMS, Batcher(policy=Greedy()))
    assert await found(after(5), after(1, version)) is version
    assert await found(after(1), after(5, version)) is version


@in_virtual_time
async def test_what_a_replica_says_of_itself_is_told_before_what_ray_serve_says_of_it() -> None:
    serves, own = OrchestrayError("did not start"), OrchestrayError("the weights are damaged")
    for running, reported, wanted in (
        (after(1, serves), after(1, own), own),
        (after(9), after(1, own), own),
        (after(1, serves), after(9), serves),
        (after(9, serves), after(1), serves),
    ):
        with pytest.raises(OrchestrayError) as told:
            await found(running, reported)
        assert told.value is wanted
