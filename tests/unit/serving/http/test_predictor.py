"""The way from the samples of a request to their answers: how many one request may have."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from support.http_endpoint import ROW_SUMS, endpoint

SAMPLE = ROW_SUMS.example


@pytest.mark.parametrize(("max_queue", "most"), [(5, 5), (1024, 1024), (5000, 1024)])
def test_a_request_has_at_most_1024_samples_and_no_more_than_can_wait(max_queue: int, most: int) -> None:
    async def ask(num_samples: int) -> httpx.Response:
        async with endpoint(max_queue=max_queue) as asked:
            return await asked.client.post("/invocations", json={"inputs": [SAMPLE] * num_samples})

    whole, more = asyncio.run(ask(most)), asyncio.run(ask(most + 1))
    assert (whole.status_code, len(whole.json()["predictions"])) == (200, most)
    assert more.status_code == 422
    assert f"wanted 1 to {most} samples in a request, got {most + 1}" in more.json()["error"]
