"""Replicas that answer one another at any time, and the threads in which they do."""

from __future__ import annotations

import gc
import threading

import torch

from orchestray.platform.comm.channel.base import Channel
from orchestray.platform.comm.collective import Collective
from orchestray.trainers.sync.local.answering import Links, PulledValues
from support.threads import run_replicas


class Slow(PulledValues):
    """Values whose threads take long to end, as those that wait for Python's lock."""

    def _serve(self, peer: int, channel: Channel) -> None:
        super()._serve(peer, channel)
        threading.Event().wait(0.1)


def answering() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "orchestray-answers"]


def joined(collective: Collective) -> Links:
    links = Links(collective, Slow([torch.zeros(3)], 0.5), [(0, 1), (1, 0)])
    other = 1 - collective.rank
    (pull,) = links.ask(other, [torch.full((3,), 2.0 + collective.rank)]).wait()
    assert pull.tolist() == [0.5 * (2.0 + collective.rank)] * 3
    assert links.asked_bytes == 2 * 3 * 4
    return links


def test_links_that_are_given_up_leave_no_thread_which_would_wake_in_a_process_that_ends() -> None:
    links = run_replicas(2, joined)
    threads = answering()
    assert len(threads) == 2
    links.clear()
    gc.collect()
    assert not any(thread.is_alive() for thread in threads)


def test_links_that_are_closed_leave_no_thread() -> None:
    links = run_replicas(2, joined)
    for each in links:
        each.close()
        each.close()  # closing again is nothing
    assert answering() == []
