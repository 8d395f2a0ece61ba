from __future__ import annotations

import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch._subclasses.fake_tensor import FakeTensorMode

from orchestray.platform.errors import CheckpointError, StorageError
from orchestray.platform.run import checkpoint
from orchestray.platform.run.checkpoint import (
    CheckpointWriter,
    latest_good,
    list_checkpoints,
    load_checkpoint,
)
from orchestray.platform.run.checkpoint_files import BEST_STEP, best_checkpoint, encode_state

Tensors = dict[str, torch.Tensor]


def tensors(seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {
        "layer.weight": torch.randn(300, 200, generator=generator),
        "layer.bias": torch.randn(200, dtype=torch.float64, generator=generator),
        "half": torch.randn(7, 3, generator=generator).to(torch.bfloat16),
        "turned": torch.randn(40, 500, generator=generator).t(),
        "count": torch.tensor(seed),
        "mask": torch.tensor([True, False, True]),
        "empty": torch.empty(0, 4),
    }


def same(a: Tensors, b: Tensors) -> bool:
    return a.keys() == b.keys() and all(a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a)


def save(path: Path, *steps: int, keep: int = 10) -> None:
    with CheckpointWriter(path, keep) as writer:
        for step in steps:
            writer.save_async(step, tensors(step), {"momentum": torch.full((1000,), float(step))}, {"step": step})


def test_a_checkpoint_comes_back_bit_for_bit(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path, keep=2) as writer:
        writer.prepare(tensors(), {})
        pending = writer.save_async(7, tensors(7), {}, {"epoch": 2, "lines": [{"step": 7, "loss": 0.1 + 0.2}]})
        assert pending.wait()
        assert pending.is_done
        assert writer.saved() == [7]
        assert writer.saved() == []
    found, warnings = latest_good(tmp_path)
    assert found is not None
    assert (found.step, found.name, warnings) == (7, "step-00000007", [])
    model, optimizer, state = load_checkpoint(found)
    assert same(model, tensors(7))
    assert optimizer == {}
    assert state == {"epoch": 2, "lines": [{"step": 7, "loss": 0.1 + 0.2}]}


def test_the_files_are_ordinary_safetensors(tmp_path: Path) -> None:
    save(tmp_path, 1)
    assert same(load_file(tmp_path / "step-00000001" / "model.safetensors"), tensors(1))


def test_loaded_tensors_may_be_written_to(tmp_path: Path) -> None:
    save(tmp_path, 1)
    found, _ = latest_good(tmp_path)
    assert found is not None
    for tensor in load_checkpoint(found)[0].values():
        tensor.zero_()
    assert same(load_checkpoint(found)[0], tensors(1))


def test_what_changes_after_wait_copied_is_not_in_the_checkpoint(tmp_path: Path) -> None:
    model, optimizer = {"weight": torch.ones(500_000)}, {"momentum": torch.ones(500_000)}
    with CheckpointWriter(tmp_path, keep=1) as writer:
        for step in (1, 2, 3):
            writer.save_async(step, model, optimizer, {})
            writer.wait_copied()
            model["weight"].add_(1)
            optimizer["momentum"].add_(1)
    found, _ = latest_good(tmp_path)
    assert found is not None
    saved_model, saved_optimizer, _ = load_checkpoint(found)
    assert torch.equal(saved_model["weight"], torch.full((500_000,), 3.0))
    assert torch.equal(saved_optimizer["momentum"], torch.full((500_000,), 3.0))


def test_buffers_and_small_tensors_may_change_as_soon_as_save_returns(tmp_path: Path) -> None:
    model = {"weight": torch.ones(4_000_000), "queue": torch.ones(4_000_000), "running_mean": torch.ones(64)}
    state = {"position": [1]}
    with CheckpointWriter(tmp_path, keep=1) as writer:
        writer.save_async(1, model, {}, state, buffers=["queue"])
        model["queue"].zero_()
        model["running_mean"].zero_()
        state["position"].append(2)
    found, _ = latest_good(tmp_path)
    assert found is not None
    saved, _, saved_state = load_checkpoint(found)
    assert saved["queue"].min() == 1
    assert saved["running_mean"].min() == 1
    assert saved_state == {"position": [1]}


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    save(tmp_path, 100, 200, 300, 400, keep=2)
    assert [found.step for found in list_checkpoints(tmp_path)] == [300, 400]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-00000300", "step-00000400"]


@pytest.mark.parametrize(("best", "kept"), [(100, [100, 300, 400]), (400, [300, 400]), (None, [300, 400])])
def test_the_best_is_kept_besides_the_newest(tmp_path: Path, best: int | None, kept: list[int]) -> None:
    with CheckpointWriter(tmp_path, 2) as writer:
        for step in (100, 200, 300, 400):
            writer.save_async(step, {"w": torch.zeros(2)}, {}, {BEST_STEP: best})
    assert [found.step for found in list_checkpoints(tmp_path)] == kept
    found = best_checkpoint(tmp_path)
    assert (None if found is None else found.step) == best


def test_a_best_checkpoint_that_is_gone_is_named(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path, 2) as writer:
        writer.save_async(200, {"w": torch.zeros(2)}, {}, {BEST_STEP: 100})
    with pytest.raises(CheckpointError, match="the best checkpoint, step-00000100, is missing"):
        best_checkpoint(tmp_path)


def test_checkpoints_of_a_future_that_was_given_up_do_not_outlive_new_ones(tmp_path: Path) -> None:
    save(tmp_path, 100, 200)
    (tmp_path / "step-00000200" / "state.json").write_text("{}")
    save(tmp_path, 150, keep=2)
    assert [found.step for found in list_checkpoints(tmp_path)] == [100, 150]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 5)
    with CheckpointWriter(tmp_path, 1) as writer:
        writer.save_async(5, {"other": torch.zeros(2)}, {}, {})
    found, warnings = latest_good(tmp_path)
    assert found is not None
    assert list(load_checkpoint(found)[0]) == ["other"]
    assert warnings == []
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000005"]


def test_a_step_that_was_being_replaced_when_the_process_died_is_still_there(tmp_path: Path) -> None:
    save(tmp_path, 5)
    (tmp_path / "step-00000005").rename(tmp_path / "step-00000005.replaced")
    found, warnings = latest_good(tmp_path)
    assert found is not None
    assert same(load_checkpoint(found)[0], tensors(5))
    assert warnings == []


DAMAGES: dict[str, Callable[[Path], object]] = {
    "model.safetensors: checksum differs": lambda path: flip(path / "model.safetensors"),
    "optimizer.safetensors: checksum differs": lambda path: flip(path / "optimizer.safetensors"),
    "state.json: checksum differs": lambda path: (path / "state.json").write_text(
        (path / "state.json").read_text().replace('"step":200', '"step":201')
    ),
    "state.json: not readable": lambda path: (path / "state.json").write_bytes(b'{"crc32": 1, "check'),
    "state.json: missing": lambda path: (path / "state.json").unlink(),
    "state.json: not readable (Is a directory)": lambda path: replaced_by_folder(path / "state.json"),
    "model.safetensors: missing, wanted": lambda path: (path / "model.safetensors").unlink(),
    "model.safetensors: has 1000 bytes, wanted": lambda path: cut(path / "model.safetensors", 1000),
}


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def replaced_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def cut(path: Path, num_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:num_bytes])


@pytest.mark.parametrize("problem", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(tmp_path: Path, problem: str) -> None:
    save(tmp_path, 100, 200)
    DAMAGES[problem](tmp_path / "step-00000200")
    found, warnings = latest_good(tmp_path)
    assert found is not None
    assert found.step == 100
    assert same(load_checkpoint(found)[0], tensors(100))
    [warning] = warnings
    assert warning.startswith(f"checkpoint step-00000200 is damaged ({problem}")
    assert warning.endswith("; using step-00000100")


@pytest.mark.parametrize("file", ["state.json", "model.safetensors"])
def test_a_checkpoint_that_the_storage_does_not_give_is_not_passed_over(tmp_path: Path, file: str) -> None:
    save(tmp_path, 100, 200)
    path = tmp_path / "step-00000200" / file
    path.unlink()
    path.symlink_to(path)  # it cannot be read, which does not say that it is damaged
    for look in (latest_good, list_checkpoints):
        with pytest.raises(StorageError, match="could not read"):
            look(tmp_path)


def test_without_an_undamaged_checkpoint_there_is_none_and_each_is_named(tmp_path: Path) -> None:
    assert latest_good(tmp_path / "nothing") == (None, [])
    save(tmp_path, 1, 2)
    for found in list_checkpoints(tmp_path):
        flip(tmp_path / found.name / "model.safetensors")
    found_none, warnings = latest_good(tmp_path)
    assert found_none is None
    assert [warning.split(" is ")[0] for warning in warnings] == [
        "checkpoint step-00000002",
        "checkpoint step-00000001",
    ]


def test_damage_after_the_check_is_found_when_loading(tmp_path: Path) -> None:
    save(tmp_path, 1)
    found, _ = latest_good(tmp_path)
    assert found is not None
    flip(tmp_path / found.name / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"step-00000001 is damaged \(model\.safetensors: checksum differs\)"):
        load_checkpoint(found)


def test_a_format_of_the_future_is_not_guessed_at(tmp_path: Path) -> None:
    save(tmp_path, 1)
    data = encode_state(1, "{}", {}).replace(b'"version":1', b'"version":2')
    content = data.split(b'"checkpoint":', 1)[1].strip()[:-1]
    (tmp_path / "step-00000001" / "state.json").write_bytes(
        b'{"crc32":%d,"checkpoint":%s}' % (zlib.crc32(content), content)
    )
    assert "written by a newer orchestray (format 2)" in latest_good(tmp_path)[1][0]


def test_a_killed_writer_leaves_only_whole_checkpoints_and_its_leavings_are_cleaned_up(tmp_path: Path) -> None:
    script = (
        "import sys, torch; from orchestray.platform.run.checkpoint import CheckpointWriter\n"
        "writer = CheckpointWriter(sys.argv[1], 2); step = 0\n"
        "while True:\n"
        "    step += 1\n"
        "    writer.save_async(step, {'w': torch.full((3_000_000,), float(step))}, {}, {'step': step})\n"
        "    print(step, flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for _ in range(6):
            process.stdout.readline()
        process.kill()
    found, warnings = latest_good(tmp_path)
    assert found is not None
    assert found.step >= 5
    assert warnings == []
    assert load_checkpoint(found)[0]["w"].tolist() == [float(found.step)] * 3_000_000
    CheckpointWriter(tmp_path, 2).close()
    assert all(entry.name.startswith("step-") for entry in tmp_path.iterdir())


def test_a_full_disk_is_a_clear_error_and_the_last_checkpoint_stays(
    mount_small_disk: Callable[..., Path],
) -> None:
    disk = mount_small_disk("2m") / "checkpoints"
    with CheckpointWriter(disk, keep=2) as writer:
        writer.save_async(1, {"weight": torch.ones(200_000)}, {}, {"step": 1}).wait()
        pending = writer.save_async(2, {"weight": torch.ones(400_000)}, {}, {"step": 2})
        with pytest.raises(StorageError, match=r"could not write .*step-00000002: the disk is full; free some space"):
            pending.wait()
        with pytest.raises(StorageError, match="the disk is full"):
            writer.wait()
        assert [entry.name for entry in disk.iterdir()] == ["step-00000001"]
        found, warnings = latest_good(disk)
        assert found is not None
        assert (found.step, warnings) == (1, [])
        # Once there is room, the same writer goes on.
        writer.save_async(3, {"weight": torch.ones(100_000)}, {}, {"step": 3})
        writer.wait()
        assert writer.saved() == [1, 3]


def test_a_failed_save_is_raised_by_the_next_one(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path / "file", keep=1)
    (tmp_path / "file").touch()
    writer.save_async(1, {"w": torch.zeros(1)}, {}, {})
    with pytest.raises(StorageError, match="could not write"):
        writer.save_async(2, {"w": torch.zeros(1)}, {}, {})
    writer.close()


def test_a_place_that_is_no_directory_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"could not clean up .*file: Not a directory"):
        CheckpointWriter(tmp_path / "file", keep=1)


def test_a_dtype_without_a_safetensors_name_is_refused(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path, 1) as writer, pytest.raises(CheckpointError, match=r"'z' .* complex32"):
        writer.save_async(1, {"z": torch.zeros(2, dtype=torch.complex32)}, {}, {})


class Streams:
    """A stand-in for `torch.cuda`, which is not there: notes what streams and events are made for, and their order."""

    def __init__(self) -> None:
        self.notes: list[tuple[str, object]] = []
        self.Event = lambda: Noted(self.notes, "event")

    def current_stream(self, device: torch.device) -> Noted:
        return Noted(self.notes, f"current stream of {device}")

    def Stream(self, device: torch.device) -> Noted:  # noqa: N802 - torch's name
        return Noted(self.notes, f"stream of {device}")

    @contextmanager
    def stream(self, stream: Noted) -> Iterator[None]:
        self.notes.append(("within", stream.name))
        yield
        self.notes.append(("outside", stream.name))


@dataclass
class Noted:
    notes: list[tuple[str, object]]
    name: str

    def record(self, stream: Noted) -> None:
        self.notes.append(("recorded on", stream.name))

    def wait_event(self, _: Noted) -> None:
        self.notes.append(("waits", self.name))

    def synchronize(self) -> None:
        self.notes.append(("waited for", self.name))


def test_the_copy_of_a_gpu_s_tensors_runs_on_a_stream_of_that_gpu_behind_its_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    streams = Streams()
    with FakeTensorMode():
        named = {"model.safetensors": {"weight": torch.empty(3, device="cuda:1"), "count": torch.empty(1)}}
    for name in ("Event", "current_stream", "Stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(streams, name))
    events = checkpoint._events(named)
    assert list(events) == [torch.device("cuda:1")]
    with CheckpointWriter(tmp_path, keep=1) as writer:
        writer._copy_late(checkpoint._Job(checkpoint.Pending(1), {}, {}, "", None, events))
    assert streams.notes == [
        ("recorded on", "current stream of cuda:1"),
        ("waits", "stream of cuda:1"),
        ("within", "stream of cuda:1"),
        ("outside", "stream of cuda:1"),
        ("waited for", "stream of cuda:1"),
    ]


def test_finding_checkpoints_needs_no_torch(tmp_path: Path) -> None:
    save(tmp_path, 1)
    script = (
        "import sys; from orchestray.platform.run.checkpoint import latest_good, list_checkpoints\n"
        "from orchestray.platform.run import directory, writer\n"
        "from orchestray.platform.terminal import progress\nfrom orchestray.trainers.saved import run\n"
        "assert latest_good(sys.argv[1])[0].step == list_checkpoints(sys.argv[1])[0].step == 1\n"
        "assert not {'torch', 'ray', 'pyarrow', 'numpy'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)
