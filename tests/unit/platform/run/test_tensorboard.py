from __future__ import annotations

import struct
import time
from pathlib import Path
from typing import Any

import pytest

from orchestray.platform.run.directory import RunDirectory
from orchestray.platform.run.tensorboard import TensorBoardLog, _masked_crc
from orchestray.platform.run.writer import RunWriter


def read_events(path: Path) -> list[Any]:
    """Return the events of a file, by another program's reading of the format: its message class, its checksums."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    data, events = path.read_bytes(), []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        assert struct.unpack("<I", data[8:12])[0] == masked_crc32c(data[:8])
        payload = data[12 : 12 + length]
        assert struct.unpack("<I", data[12 + length : 16 + length])[0] == masked_crc32c(payload)
        events.append(Event.FromString(payload))
        data = data[16 + length :]
    return events


def test_scalars_are_read_back_by_another_reader(tmp_path: Path) -> None:
    log = TensorBoardLog(tmp_path, started_s=lambda: 1000.0)
    log.append(
        [
            {
                "step": 1,
                "epoch": 1,
                "time_s": 0.5,
                "loss": 2.25,
                "samples_per_s": 30000,
                "note": "text",
                "nothing": None,
            },
            {"step": 300, "epoch": 1, "time_s": 9.0, "split": "validation", "accuracy": 0.5, "loss": 1e300},
        ]
    )
    log.purge_after(100)
    log.close()
    log.close()
    [path] = tmp_path.iterdir()
    first, train, validation, purge = read_events(path)
    assert first.file_version == "brain.Event:2"
    assert (train.step, train.wall_time) == (1, 1000.5)
    assert {value.tag: value.simple_value for value in train.summary.value} == {
        "train/loss": 2.25,
        "train/samples_per_s": 30000.0,
    }
    assert validation.step == 300
    assert {value.tag: value.simple_value for value in validation.summary.value} == {
        "validation/accuracy": 0.5,
        "validation/loss": float("inf"),
    }
    assert (purge.step, purge.session_log.status) == (101, purge.session_log.START)


def test_hyper_parameters_are_what_another_writer_would_have_written(tmp_path: Path) -> None:
    from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData
    from tensorboardX.summary import hparams

    values = {"lr": 0.1, "steps": 300, "name": "sgd \u00e9", "nesterov": True, "average": False, "h" * 200: -1e300}
    log = TensorBoardLog(tmp_path)
    log.hyper_parameters(values, ["accuracy", "objective"])
    log.scalars(7, {"objective": 0.5})
    log.close()
    [path] = tmp_path.iterdir()
    *written, last = read_events(path)[1:]
    expected = hparams(values, {"accuracy": 0.0, "objective": 0.5})
    assert len(written) == len(expected)
    for event, summary in zip(written, expected, strict=True):
        ([ours], [theirs]) = event.summary.value, summary.value
        assert (event.step, ours.tag) == (0, theirs.tag)
        assert ours.metadata.plugin_data.plugin_name == theirs.metadata.plugin_data.plugin_name == "hparams"
        contents = (HParamsPluginData.FromString(one.metadata.plugin_data.content) for one in (ours, theirs))
        assert next(contents) == next(contents)
    assert (last.step, {value.tag: value.simple_value for value in last.summary.value}) == (7, {"objective": 0.5})


def test_nothing_is_made_before_the_first_line_and_a_run_that_goes_on_has_a_further_file(tmp_path: Path) -> None:
    directory = tmp_path / "tensorboard"
    TensorBoardLog(directory).close()
    assert not directory.exists()
    for step in (1, 2):
        log = TensorBoardLog(directory)
        log.append([{"step": step, "loss": 1.0}])
        log.close()
    paths = sorted(directory.iterdir())
    assert [read_events(path)[-1].step for path in paths] == [1, 2]


def test_curves_of_a_run_that_goes_on_count_from_when_it_was_first_started(tmp_path: Path) -> None:
    earlier_s = [0.0]
    with RunDirectory.create(tmp_path, "a") as run, RunWriter(run, clock=lambda: earlier_s[0]) as writer:
        earlier_s[0] = 3600.0  # it has found its checkpoint
        writer.metrics([{"step": 9, "loss": 1.0, "time_s": 3600.0}])
        writer.flush()
        [path] = run.paths.tensorboard.iterdir()
        assert abs(read_events(path)[-1].wall_time - time.time()) < 600


@pytest.mark.parametrize("data", [b"", b"123456789", bytes(range(256))])
def test_the_checksum_is_masked_crc32c(data: bytes) -> None:
    from tensorboardX.record_writer import masked_crc32c

    assert _masked_crc(data) == masked_crc32c(data)
