"""A new thread computes by as many threads as torch was set to, from its first operation."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
from threadpoolctl import threadpool_info

from orchestray.platform.comm.thread_group import in_threads
from orchestray.platform.process import torch_threads
from orchestray.search.engine.messages import TrialResult, TrialTask
from orchestray.search.engine.trainable import HostedTrial


def of_this_thread(_: Any = None) -> int:
    """Return the number of threads torch multiplies by: of its own OpenMP, since other libraries bring theirs.

    Asking torch itself would settle the number.
    """
    (num_threads,) = (
        int(pool["num_threads"])
        for pool in threadpool_info()
        if pool["user_api"] == "openmp" and Path(torch.__file__).resolve().parent in Path(pool["filepath"]).parents
    )
    return num_threads


def test_a_new_thread_takes_up_what_torch_was_told() -> None:
    found: list[int] = []

    def run() -> None:
        torch_threads.take_up()
        found.append(of_this_thread())

    for told in (1, 3):
        with torch_threads.using(told):
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
    assert found == [1, 3]


def test_members_in_threads_compute_by_what_torch_was_told() -> None:
    with torch_threads.using(3):
        assert in_threads(2, of_this_thread) == [3, 3]


def test_a_trial_computes_by_its_threads_in_whatever_thread_it_is_trained() -> None:
    class Host:
        def work(self, task: TrialTask) -> TrialResult:
            return TrialResult(task.trial, metrics={"threads": of_this_thread()})

    found: list[Any] = []
    with torch_threads.using(3):
        trial: Any = HostedTrial.__new__(HostedTrial)
        trial._host, trial._task = Host(), TrialTask(0, 1)
        thread = threading.Thread(target=lambda: found.append(trial.step()["threads"]))
        thread.start()
        thread.join()
    assert found == [3]
