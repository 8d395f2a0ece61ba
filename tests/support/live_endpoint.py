"""An endpoint on a thread of this process, over real HTTP."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from orchestray.serving.api import serve
from support.patience import PATIENCE_S


@contextmanager
def serving(runs: Path, config: dict[str, Any]) -> Iterator[int]:
    """Serve an endpoint on a thread, and yield its port; end it as by a signal."""
    ready, url = threading.Event(), []
    loops: list[asyncio.AbstractEventLoop] = []
    failed: list[BaseException] = []
    stop: list[Any] = []

    def say(at: str) -> None:
        url.append(at)
        loops.append(asyncio.get_running_loop())
        stop.append(asyncio.all_tasks())
        ready.set()

    def run() -> None:
        try:
            serve(config, runs_dir=runs, local=True, on_ready=say)
        except asyncio.CancelledError:
            pass
        except BaseException as error:  # noqa: BLE001 - handed to the test
            failed.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(PATIENCE_S)
    if failed:
        raise failed[0]
    port = int(url[0].rpartition(":")[2])
    try:
        yield port
    finally:
        main = next(task for task in stop[0] if task.get_coro().__name__ == "run")
        loops[0].call_soon_threadsafe(main.cancel)
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
