"""Where the states of trials lie: in the memory of the process that made them, fetched by whoever needs them.

A state never goes through the object store, and through a disk only to survive its process: the newest of each trial
is written into the search's directory now and then, beside the work; that of each report, before the report is acted
on, where other trials may take it.
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

from orchestray.platform.channel import ChannelError, ChannelTimeoutError, connect, open_channel
from orchestray.platform.listening import listens
from orchestray.search.engine.state_files import StateFiles, StateLostError, StatePlace
from orchestray.search.trials.program import TrialState

if TYPE_CHECKING:
    from torch.distributed import TCPStore

    from orchestray.platform.channel import Channel

_TIMEOUT_S = 30.0
_OPENING_S = 2 * _TIMEOUT_S
"""Until a vault sends a state: its process may be frozen, or its machine as good as."""
_FOR_EVER = timedelta(days=365)
_KEPT_BYTES = 2 * 2**30


class Vault:
    """The states this process holds, the latest of each trial, and the thread that hands them to others."""

    def __init__(self, files: StateFiles, *, host: str = "127.0.0.1", kept_bytes: int = _KEPT_BYTES) -> None:
        """
        Args:
            files: where states go that are to survive.
            host: address at which others reach this machine.
            kept_bytes: held in memory; beyond it the states that were not touched for longest go to their files.
        """
        from torch.distributed import TCPStore

        self._files, self._host, self._kept_bytes = files, host, kept_bytes
        self._held: OrderedDict[int, list[tuple[int, TrialState]]] = OrderedDict()
        """Of each trial the last states, the newest last: who was told of one may come while the next is made."""
        self._lock = threading.Lock()
        self._store: TCPStore = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=_FOR_EVER)
        self._name = os.urandom(8).hex()
        self._writer = ThreadPoolExecutor(1, "states")
        self._writing: Future[None] | None = None
        self._door = threading.Thread(target=self._answer_door, name="vault", daemon=True)
        self._door.start()

    def put(self, trial: int, report: int, state: TrialState) -> StatePlace:
        """Keep a state (which nobody changes any more); of the trial's earlier ones the last stays, too.

        Returns:
            Where it lies.
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
        """Write what is held of a trial to its file, beside the work; None if the last writing is not over.

        Args:
            trial: whose state it is.
            keeps_earlier: whether the files of its earlier reports stay.
        """
        if self._writing is not None and not self._writing.done():
            return None
        with self._lock:
            report, state = self._held[trial][-1]
        self._writing = self._writer.submit(self._save, trial, report, state, keeps_earlier=keeps_earlier)
        return self._writing

    def save_now(self, trial: int) -> None:
        """Write what is held of a trial as one of the best; the file is there when this returns."""
        with self._lock:
            report, state = self._held[trial][-1]
        self._files.write(trial, report, state, is_best=True)

    def write(self, trial: int) -> None:
        """Write what is held of a trial, for it to go on from; the file is there when this returns."""
        with self._lock:
            report, state = self._held[trial][-1]
        self._writer.submit(self._save, trial, report, state).result()

    def write_beside(self, trial: int) -> None:
        """Write what is held of a trial, beside the files of its earlier reports; it is there when this returns."""
        with self._lock:
            report, state = self._held[trial][-1]
        # By the thread that writes beside the work: what that has begun with is older, and must not come last.
        self._writer.submit(self._files.write, trial, report, state).result()

    def _save(self, trial: int, report: int, state: TrialState, *, keeps_earlier: bool = False) -> None:
        self._files.write(trial, report, state, is_secure=True)  # before those it takes the place of go
        if not keeps_earlier:
            self._files.remove(trial, before=report)

    def retain(self, trials: Collection[int]) -> None:
        """Nobody will ask for the states of other trials again."""
        with self._lock:
            for trial in [trial for trial in self._held if trial not in trials]:
                del self._held[trial]

    def fetch(self, place: StatePlace, *, exact: bool = False) -> TrialState:
        """A state, from this process, from the one that holds it, or from its file.

        Args:
            place: where it is.
            exact: that state and no other; else that of an earlier report, if there is no whole file of this.

        Raises:
            StateLostError: none of them has it any more, or its file is damaged.
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
        """The state of a report, if it is held still."""
        with self._lock:
            return next((state for at, state in self._held.get(trial, []) if at == report), None)

    def close(self) -> None:
        """Stop handing states out; what is being written is finished."""
        self._store.set(f"ask-{self._store.add('asked', 1) - 1}", "")
        self._door.join(_TIMEOUT_S)
        self._writer.shutdown()

    def _answer_door(self) -> None:
        # A client of its own: one that waits lets nobody else through.
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
                pair, 0, name="a vault", peer="who asked", timeout_s=_TIMEOUT_S, connect_timeout_s=_TIMEOUT_S
            ) as channel:
                tensors = [state.tensors[name].cpu() for name in names] if state is not None else []
                channel.send([*tensors, _mark()], meta=meta)
                channel.recv()  # it has arrived
        except ChannelError:
            pass  # who asked is gone, or has it from elsewhere


def ask(place: StatePlace) -> TrialState | None:
    """Fetch a state from the vault that holds it; None if that is gone, or has it no more."""
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
    """Where a vault that has been asked for a state sends it.

    Raises:
        ChannelError, RuntimeError: it is gone, or does not answer in time.
    """
    opening: Future[Channel] = Future()

    def ask_and_connect() -> None:
        try:
            opening.set_result(_ask_and_connect(place))
        except Exception as error:  # noqa: BLE001 - carried to who waits
            opening.set_exception(error)

    # Not in this thread: a store's client waits for a server that is frozen for ever, whatever its timeouts.
    threading.Thread(target=ask_and_connect, name="ask-a-vault", daemon=True).start()
    if not wait([opening], _OPENING_S).done:
        opening.add_done_callback(_close_late)
        raise ChannelTimeoutError(f"a vault at {place.host}:{place.port} did not answer within {_OPENING_S:g} s")
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
        peer="a vault",
        timeout_s=_TIMEOUT_S,
        connect_timeout_s=_TIMEOUT_S,
    )


def _close_late(opening: Future[Channel]) -> None:
    """Nobody waits any more for what was opened."""
    if opening.exception() is None:
        opening.result().close()


def _client(host: str, port: int) -> TCPStore:
    from torch.distributed import TCPStore

    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=_TIMEOUT_S))


def _mark() -> Any:
    """A message has one tensor at least."""
    import torch

    return torch.zeros(1)


def _num_bytes(state: TrialState) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in state.tensors.values())
