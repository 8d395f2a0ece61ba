"""States of trials: handed from store to store byte for byte, written to files, found again when a store is gone."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from orchestray.search.checkpoints import state_store
from orchestray.search.checkpoints.state_files import StateFiles, StateLostError, StatePlace
from orchestray.search.checkpoints.state_store import StateStore, ask
from orchestray.search.trials.program import TrialState
from support.patience import PATIENCE_S


def state(seed: int, size: int = 50_000) -> TrialState:
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "model/weight": torch.randn(size, generator=generator),
        "model/small": torch.randn(3, 2, generator=generator, dtype=torch.float64),
        "optimizer/weight.step": torch.tensor(float(seed)),
    }
    return TrialState(tensors, {"step": seed, "validation": {"loss": 0.1}})


def assert_equal(a: TrialState, b: TrialState) -> None:
    assert dict(a.position) == dict(b.position)
    assert a.tensors.keys() == b.tensors.keys()
    for name, tensor in a.tensors.items():
        assert tensor.dtype == b.tensors[name].dtype
        assert torch.equal(tensor, b.tensors[name]), name


@pytest.fixture
def vaults(tmp_path: Path) -> Iterator[tuple[StateStore, StateStore]]:
    made = StateStore(StateFiles(tmp_path)), StateStore(StateFiles(tmp_path))
    yield made
    for one in made:
        one.close()


def test_a_state_comes_over_byte_for_byte_as_often_as_it_is_asked_for(vaults: tuple[StateStore, StateStore]) -> None:
    holder, taker = vaults
    place = holder.put(3, 7, state(7))
    for _ in range(3):
        assert_equal(taker.fetch(place), state(7))
    assert StatePlace.from_json(place.to_json()) == place


def test_who_comes_late_still_gets_the_state_it_was_told_of(vaults: tuple[StateStore, StateStore]) -> None:
    holder, taker = vaults
    place = holder.put(3, 7, state(7))
    holder.put(3, 9, state(9))
    assert_equal(taker.fetch(place), state(7))
    holder.put(3, 11, state(11))  # of two states the earlier is given up
    with pytest.raises(StateLostError):
        taker.fetch(place)


def test_of_a_vault_that_is_gone_the_file_is_read(vaults: tuple[StateStore, StateStore], tmp_path: Path) -> None:
    holder, taker = vaults
    place = holder.put(3, 7, state(7))
    holder.write(3)
    gone = replace(place, port=1, vault="gone")
    assert ask(gone) is None
    assert_equal(taker.fetch(gone), state(7))
    assert_equal(taker.fetch(replace(gone, report=9)), state(7))  # the newest there is
    with pytest.raises(StateLostError, match="trial 4"):
        taker.fetch(replace(gone, trial=4))


def test_of_a_vault_that_is_frozen_the_file_is_read(
    vaults: tuple[StateStore, StateStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ask a port that takes connections and never answers: such is one whose process has been stopped."""
    holder, taker = vaults
    monkeypatch.setattr(state_store, "_OPENING_S", 1.0)
    monkeypatch.setattr(state_store, "_TIMEOUT_S", 2.0)
    place = holder.put(3, 7, state(7))
    holder.write(3)
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        assert_equal(taker.fetch(replace(place, port=frozen.getsockname()[1], vault="frozen")), state(7))
    for thread in threading.enumerate():
        if thread.name == "ask-a-state-store":  # it gives up, now that nobody listens
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


def test_only_the_newest_file_of_a_trial_is_kept_and_the_best_apart(
    vaults: tuple[StateStore, StateStore], tmp_path: Path
) -> None:
    holder, _ = vaults
    files = StateFiles(tmp_path)
    for step in (2, 4, 6):
        holder.put(1, step, state(step))
        holder.write(1)
        if step == 4:
            holder.save_now(1)
    assert files.reports(1) == [6]
    assert files.best_reports(1) == [4]
    assert_equal(files.read(1, 4, is_best=True), state(4))


def test_a_state_that_is_to_be_exact_is_that_or_none(vaults: tuple[StateStore, StateStore]) -> None:
    holder, taker = vaults
    holder.put(1, 8, state(8))
    holder.write_beside(1)
    holder.put(1, 9, state(9))
    holder.write_beside(1)
    assert_equal(taker.fetch(StatePlace(1, 8), exact=True), state(8))
    with pytest.raises(StateLostError, match="trial 1 at its report 10"):
        taker.fetch(StatePlace(1, 10), exact=True)


@pytest.mark.parametrize("left", [0, 5, 100, -1])
def test_of_a_state_whose_file_a_loss_of_power_has_damaged_the_one_before_is_taken(
    vaults: tuple[StateStore, StateStore], tmp_path: Path, left: int
) -> None:
    holder, taker = vaults
    files = StateFiles(tmp_path)
    for report in (8, 9):
        holder.put(1, report, state(report))
        holder.write_beside(1)
        assert files.is_whole(1, report)
    damaged = files.path(1, 9)
    damaged.write_bytes(damaged.read_bytes()[:left])
    assert not files.is_whole(1, 9)
    assert_equal(taker.fetch(StatePlace(1, 9)), state(8))
    with pytest.raises(StateLostError, match="damaged"):
        taker.fetch(StatePlace(1, 9), exact=True)
    files.remove(1, before=9)
    with pytest.raises(StateLostError):
        taker.fetch(StatePlace(1, 9))


def test_of_a_search_that_is_over_the_best_state_alone_is_left(
    vaults: tuple[StateStore, StateStore], tmp_path: Path
) -> None:
    holder, _ = vaults
    files = StateFiles(tmp_path)
    for trial in (1, 2):
        holder.put(trial, 1, state(trial))
        holder.write(trial)
        holder.save_now(trial)
    (tmp_path / "gang-left").mkdir()
    (tmp_path / ".half-written").touch()
    files.remove_remains()
    assert len(list(tmp_path.iterdir())) == 4
    files.clear(keep=(2, 1))
    assert [path.name for path in tmp_path.iterdir()] == [files.path(2, 1, is_best=True).name]


def test_states_beyond_the_memory_given_go_to_their_files(tmp_path: Path) -> None:
    one_bytes = sum(tensor.numel() * tensor.element_size() for tensor in state(1).tensors.values())
    small = StateStore(StateFiles(tmp_path), kept_bytes=2 * one_bytes)
    places = [small.put(trial, 1, state(trial)) for trial in range(5)]
    assert [StateFiles(tmp_path).reports(trial) for trial in range(5)] == [[1], [1], [1], [], []]
    for trial, place in enumerate(places):
        assert_equal(small.fetch(place), state(trial))
    small.close()


def test_states_nobody_needs_are_let_go(vaults: tuple[StateStore, StateStore]) -> None:
    holder, _ = vaults
    places = [holder.put(trial, 1, state(trial)) for trial in range(3)]
    holder.retain({1})
    assert_equal(holder.fetch(places[1]), state(1))
    with pytest.raises(StateLostError):
        holder.fetch(places[0])
