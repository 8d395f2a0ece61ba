"""A store of trial states in the memory of the process that made them, from which other processes fetch them.

A state never passes through the object store, and it goes to disk only so that it outlives its process. The newest
state of each trial is written to the search's directory from time to time, in the background. Where other trials may
take over states, that of each report is written before the report is acted on.
"""

from __future__ import annotations

import json
import os
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from orchestray.platform.comm.channel import ChannelError, ChannelTimeoutError, connect, open_channel
from orchestray.platform.process.sockets import listens
from orchestray.search.checkpoints.state_files import StateFiles, StateLostError, StatePlace
from orchestray.search.trials.program import TrialState

if TYPE_CHECKING:
    from torch.distributed import TCPStore

    from orchestray.platform.comm.channel import Channel

_TIMEOUT_S = 30.0
_OPENING_S = 2 * _TIMEOUT_S
"""Seconds to wait until a store sends a state: its process may be frozen, or its machine unreachable."""
_FOR_EVER = timedelta(days=365)
_KEPT_BYTES = 2 * 2**30


class StateStore:
    """The states that this process holds (the latest of each trial) and the thread that serves them to others."""

    def __init__(self, files: StateFiles, *, host: str = "127.0.0.1", kept_bytes: int = _KEPT_BYTES) -> None:
        """
        Args:
            files: files for the states that have to outlive the process.
            host: address at which others reach this machine.
            kept_bytes: bytes held in memory; beyond these, the least recently used states are moved to their files.
        """
        from torch.distributed import TCPStore

        self._files, self._host, self._kept_bytes = files, host, kept_bytes
        self._held: OrderedDict[int, list[tuple[int, TrialState]]] = OrderedDict()
        """Maps a trial to its last states, the newest last: a process may fetch one while the next is being made."""
        self._lock = threading.Lock()
        self._store: TCPStore = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=_FOR_EVER)
        self._name = os.urandom(8).hex()
        self._writer = ThreadPoolExecutor(1, "states")
        self._writing: Future[None] | None = None
        self._door = threading.Thread(target=self._answer_door, name="state-store", daemon=True)
        self._door.start()

    def put(self, trial: int, report: int, state: TrialState) -> StatePlace:
        """Keep a state (which must not change any more), and the last of the trial's earlier ones.

        Returns:
            The location of the state.
        """
        with self._lock:
            known = [(at, old) for at, old in self._held.get(trial, []) if at < report]
            self._held[trial] = [*known[-1:], (report, state)]
            self._held.move_to_end(trial)
            over = self._too_many()
        for other, at, old in over:
            self._files.write(other, at, old)
        return StatePlace(trial, report, self._host, self._store.port, self._name)

    def _too_many(self) -> list[tuple[int, int, TrialState]]:
        sizes = {trial: sum(_num_bytes(state) for _, state in held) for trial, held in self._held.items()}
        total, gone = sum(sizes.values()), []
        for trial in list(self._held)[:-1]:
            if total <= self._kept_bytes:
                break
            gone += [(trial, report, state) for report, state in self._held.pop(trial)]
            total -= sizes[trial]
        return gone

    def save(self, trial: int, *, keeps_earlier: bool = False) -> Future[None] | None:
        """Write the newest state of a trial to its file in the background; return None if the last write is unfinished.

        Args:
            trial: number of the trial.
            keeps_earlier: True to keep the files of its earlier reports.
        """
        if self._writing is not None and not self._writing.done():
            return None
        with self._lock:
            report, state = self._held[trial][-1]
        self._writing = self._writer.submit(self._save, trial, report, state, keeps_earlier=keeps_earlier)
        return self._writing

    def save_now(self, trial: int) -> None:
        """Write the newest state of a trial as one of the best; return when the file exists."""
        with self._lock:
            report, state = self._held[trial][-1]
        self._files.write(trial, report, state, is_best=True)

    def write(self, trial: int) -> None:
        """Write the newest state of a trial, for it to resume from; return when the file exists."""
        with self._lock:
            report, state = self._held[trial][-1]
        self._writer.submit(self._save, trial, report, state).result()

    def write_beside(self, trial: int) -> None:
        """Write the newest state of a trial and keep the files of its earlier reports; return when the file exists."""
        with self._lock:
            report, state = self._held[trial][-1]
        # On the background writer's thread: a write it has begun is of an older state, and must not finish last.
        self._writer.submit(self._files.write, trial, report, state).result()

    def _save(self, trial: int, report: int, state: TrialState, *, keeps_earlier: bool = False) -> None:
        self._files.write(trial, report, state, is_secure=True)  # before the files that it replaces are removed
        if not keeps_earlier:
            self._files.remove(trial, before=report)

    def retain(self, trials: Collection[int]) -> None:
        """Drop the states of all other trials, which are not needed again."""
        with self._lock:
            for trial in [trial for trial in self._held if trial not in trials]:
                del self._held[trial]

    def fetch(self, place: StatePlace, *, exact: bool = False) -> TrialState:
        """Return a state from this process, from the process that holds it, or from its file.

        Args:
            place: location of the state.
            exact: True to accept only this state; otherwise one of an earlier report will do if its file is missing
                or damaged.

        Raises:
            StateLostError: the state is gone from all of these, or its file is damaged.
        """
        if place.is_best:
            return self._files.read(place.trial, place.report, is_best=True)
        if place.vault in ("", self._name) and (found := self._at(place.trial, place.report)) is not None:
            return found
        if place.vault not in ("", self._name) and (fetched := ask(place)) is not None:
            return fetched
        for report in reversed(self._files.reports(place.trial)):
            if report == place.report or (report < place.report and not exact):
                try:
                    return self._files.read(place.trial, report)
                except StateLostError:
                    if exact:
                        raise
        raise StateLostError(
            f"The state of trial {place.trial} at its report {place.report} is lost: the process that held it is "
            "gone, and there is no whole file of it."
        )

    def _at(self, trial: int, report: int) -> TrialState | None:
        """Return the state of a report, or None if it is not held any more."""
        with self._lock:
            return next((state for at, state in self._held.get(trial, []) if at == report), None)

    def close(self) -> None:
        """Stop serving states; return when pending writes are finished."""
        self._store.set(f"ask-{self._store.add('asked', 1) - 1}", "")
        self._door.join(_TIMEOUT_S)
        self._writer.shutdown()

    def _answer_door(self) -> None:
        # A client of its own: a client that waits blocks all other calls made through it.
        store = _client(self._host, self._store.port)
        number = 0
        while True:
            key = f"ask-{number}"
            store.wait([key], _FOR_EVER)
            asked = store.get(key)
            if not asked:
                return
            threading.Thread(target=self._hand_out, args=(number, json.loads(asked)), daemon=True).start()
            number += 1

    def _hand_out(self, number: int, asked: Mapping[str, Any]) -> None:
        from torch.distributed import PrefixStore

        state = self._at(asked["trial"], asked["report"])
        names = list(state.tensors) if state is not None else []
        meta = {"has": state is not None, "names": names, "position": dict(state.position) if state else {}}
        pair = PrefixStore(f"give-{number}", _client(self._host, self._store.port))
        try:
            with open_channel(
                pair, 0, name="a state store", peer="who asked", timeout_s=_TIMEOUT_S, connect_timeout_s=_TIMEOUT_S
            ) as channel:
                tensors = [state.tensors[name].cpu() for name in names] if state is not None else []
                channel.send([*tensors, _mark()], meta=meta)
                channel.recv()  # the receiver confirms that it has arrived
        except ChannelError:
            pass  # the receiver is gone, or has the state from elsewhere


def ask(place: StatePlace) -> TrialState | None:
    """Fetch a state from the process that holds it; return None if the process or the state is gone."""
    if not listens(place.host, place.port, _TIMEOUT_S):
        return None
    try:
        with _opened(place) as channel:
            message = channel.recv()
            channel.send(_mark())
    except (ChannelError, RuntimeError):
        return None
    if not message.meta["has"]:
        return None
    return TrialState(dict(zip(message.meta["names"], message.tensors[:-1], strict=True)), message.meta["position"])


def _opened(place: StatePlace) -> Channel:
    """Request a state from the store that holds it, and return the channel on which the store sends it.

    Raises:
        ChannelError, RuntimeError: the store is gone, or does not answer in time.
    """
    opening: Future[Channel] = Future()

    def ask_and_connect() -> None:
        try:
            opening.set_result(_ask_and_connect(place))
        except Exception as error:  # noqa: BLE001 - passed on to the thread that waits
            opening.set_exception(error)

    # In a thread of its own: the client of a TCPStore waits forever for a server that is frozen, despite its timeouts.
    threading.Thread(target=ask_and_connect, name="ask-a-state-store", daemon=True).start()
    if not wait([opening], _OPENING_S).done:
        opening.add_done_callback(_close_late)
        raise ChannelTimeoutError(f"a state store at {place.host}:{place.port} did not answer within {_OPENING_S:g} s")
    return opening.result()


def _ask_and_connect(place: StatePlace) -> Channel:
    store = _client(place.host, place.port)
    number = store.add("asked", 1) - 1
    store.set(f"ask-{number}", json.dumps({"trial": place.trial, "report": place.report}))
    return connect(
        place.host,
        place.port,
        f"give-{number}",
        1,
        name="a trial",
        peer="a state store",
        timeout_s=_TIMEOUT_S,
        connect_timeout_s=_TIMEOUT_S,
    )


def _close_late(opening: Future[Channel]) -> None:
    """Close a channel that was opened after the wait for it had timed out."""
    if opening.exception() is None:
        opening.result().close()


def _client(host: str, port: int) -> TCPStore:
    from torch.distributed import TCPStore

    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=_TIMEOUT_S))


def _mark() -> Any:
    """Return a placeholder tensor: a message needs at least one tensor."""
    import torch

    return torch.zeros(1)


def _num_bytes(state: TrialState) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in state.tensors.values())
