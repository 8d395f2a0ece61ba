"""The alarm that sends requests in time."""

from __future__ import annotations

import asyncio
import time

from orchestray.loadtest.alarm import Alarm


def test_an_alarm_rings_in_order_and_never_early() -> None:
    async def main() -> list[float]:
        alarm, rung, over = Alarm(), list[float](), asyncio.get_running_loop().create_future()
        due_s = [time.monotonic() + offset for offset in (-1.0, 0.0, 0.002, 0.0021, 0.01)]

        def ring() -> None:
            rung.append(time.monotonic() - due_s[len(rung)])
            if len(rung) == len(due_s):
                over.set_result(None)
            else:
                alarm.at(due_s[len(rung)], ring)

        alarm.at(time.monotonic() + 3600, over.cancel)  # what is set later takes its place
        alarm.at(due_s[0], ring)
        await over
        alarm.close()
        return rung

    assert all(late_s >= 0 for late_s in asyncio.run(main()))
