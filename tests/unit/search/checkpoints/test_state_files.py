"""Files of states: read back byte for byte, known by their names, and never taken for whole when they are damaged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from orchestray.search.checkpoints.state_files import KEPT, StateAt, StateFiles, StateLostError
from orchestray.search.trials.program import TrialState


def state(seed: int, size: int = 50_000, report: int = 1) -> TrialState:
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "model/weight": torch.randn(size, generator=generator),
        "model/small": torch.randn(3, 2, generator=generator, dtype=torch.float64),
        "optimizer/weight.step": torch.tensor(float(seed)),
    }
    return TrialState(tensors, {"step": seed, "validation": {"loss": 0.1}, KEPT: {"report": report}})


def assert_equal(a: TrialState, b: TrialState) -> None:
    assert dict(a.position) == dict(b.position)
    assert a.tensors.keys() == b.tensors.keys()
    for name, tensor in a.tensors.items():
        assert tensor.dtype == b.tensors[name].dtype
        assert torch.equal(tensor, b.tensors[name]), name


def test_a_state_is_read_back_byte_for_byte_and_does_not_share_its_memory(tmp_path: Path) -> None:
    files = StateFiles(tmp_path / "states")
    files.write(StateAt(3, 7), state(7))
    files.read(StateAt(3, 7)).tensors["model/weight"].zero_()
    assert_equal(files.read(StateAt(3, 7)), state(7))


def test_files_are_found_by_their_trials_and_reports(tmp_path: Path) -> None:
    files = StateFiles(tmp_path)
    for at in (StateAt(3, 7), StateAt(3, 9), StateAt(123456, 1), StateAt(4, 2, is_on_the_way=True)):
        files.write(at, state(1))
    assert files.reports() == {3: {7, 9}, 123456: {1}}
    files.remove(StateAt(3, 7))
    files.remove(StateAt(3, 7))
    assert files.reports() == {3: {9}, 123456: {1}}
    with pytest.raises(StateLostError, match="trial 3 at its report 7"):
        files.read(StateAt(3, 7))


def test_of_states_on_the_way_a_trial_has_the_newest(tmp_path: Path) -> None:
    files = StateFiles(tmp_path)
    assert files.on_the_way(1) is None
    for report in (2, 2, 3):
        files.write(StateAt(1, report, is_on_the_way=True), state(report, report=report), is_secure=True)
    found = files.on_the_way(1)
    assert found == StateAt(1, 3, is_on_the_way=True)
    assert_equal(files.read(found), state(3, report=3))
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("is_on_the_way", [False, True])
@pytest.mark.parametrize("left", [0, 5, 100, -1])
def test_a_file_that_a_loss_of_power_has_damaged_is_not_whole(tmp_path: Path, left: int, is_on_the_way: bool) -> None:
    files, at = StateFiles(tmp_path), StateAt(1, 9, is_on_the_way)
    files.write(at, state(9, report=9))
    assert files.is_whole(at)
    files.path(at).write_bytes(files.path(at).read_bytes()[:left])
    assert not files.is_whole(at)
    assert files.on_the_way(1) is None
    with pytest.raises(StateLostError, match="damaged"):
        files.read(at)


def test_of_a_search_that_is_over_the_states_to_keep_alone_are_left(tmp_path: Path) -> None:
    files = StateFiles(tmp_path)
    for trial in (1, 2):
        files.write(StateAt(trial, 1), state(trial))
    (tmp_path / "gang-left").mkdir()
    (tmp_path / ".half-written").touch()
    files.remove_remains()
    assert files.reports() == {1: {1}, 2: {1}}
    assert len(list(tmp_path.iterdir())) == 2
    files.clear([StateAt(2, 1), StateAt(3, 1)])
    assert list(tmp_path.iterdir()) == [files.path(StateAt(2, 1))]
    files.clear()
    assert not tmp_path.exists()
