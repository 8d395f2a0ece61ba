"""Members of a group that are threads."""

from __future__ import annotations

import gc

from orchestray.platform.comm.thread_group import in_threads


def test_no_garbage_is_collected_while_threads_compute() -> None:
    assert gc.isenabled()
    assert in_threads(3, lambda rank: (rank, gc.isenabled())) == [(0, False), (1, False), (2, False)]
    assert gc.isenabled()
