"""TensorBoard event files with scalars and hyper-parameters.

The format is a few dozen bytes of protocol buffer per line, written here directly. The usual writers import torch or
TensorFlow, which costs the driver seconds at start-up. Formats: `tensorflow/core/util/event.proto`,
`tensorflow/core/framework/summary.proto`, the framing of `tensorflow/core/lib/io/record_writer.h`, and of
hyper-parameters `tensorboard/plugins/hparams/{plugin_data,api}.proto`.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from typing import TYPE_CHECKING, Any, BinaryIO

from orchestray.platform.run.files import storage_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

# Keys of a metric line that locate it and are not drawn as curves.
_PLACES = frozenset({"step", "epoch", "time_s", "split"})
_SESSION_START = 1
_STATUS_SUCCESS = 1
_TEXT, _FLAG, _NUMBER = 1, 2, 3
"""Types of a hyper-parameter."""


class TensorBoardLog:
    """An event file in `directory`, made with the first line; a continued run adds a further file."""

    def __init__(self, directory: Path, started_s: Callable[[], float] | None = None) -> None:
        """Prepare the log.

        Args:
            directory: directory of the file.
            started_s: returns the start of the run (Unix time), to which a line's `time_s` is added; default: now.
        """
        self._directory = directory
        now_s = time.time()
        self._started_s: Callable[[], float] = (lambda: now_s) if started_s is None else started_s
        self._file: BinaryIO | None = None

    def append(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Add the numbers of metric lines, as `train/<key>` or `<split>/<key>` at the line's step."""
        records = []
        for line in lines:
            split = str(line.get("split", "train"))
            values = b"".join(_field(1, _scalar(f"{split}/{key}", value)) for key, value in _curves(line))
            if values:
                time_s = self._started_s() + float(line.get("time_s") or 0.0)
                records.append(_record(_event(time_s, int(line["step"]), _field(5, values))))
        self._write(b"".join(records))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Add numbers at a step, each under its own name, with the current time."""
        summary = b"".join(_field(1, _scalar(name, value)) for name, value in values.items())
        self._write(_record(_event(time.time(), step, _field(5, summary))))

    def hyper_parameters(self, values: Mapping[str, bool | float | str], metrics: Iterable[str]) -> None:
        """Write the hyper-parameters of a trial, and the names of the scalars by which it is judged."""
        summaries = _hyper_parameters(values, metrics)
        self._write(b"".join(_record(_event(time.time(), 0, _field(5, _field(1, one)))) for one in summaries))

    def purge_after(self, step: int) -> None:
        """Make TensorBoard drop its data of steps > `step`: training went back to a checkpoint of `step`."""
        self._write(_record(_event(time.time(), step + 1, _field(7, _varint_field(1, _SESSION_START)))))

    def flush(self) -> None:
        """Pass everything to the operating system."""
        if self._file is not None:
            with storage_errors(f"write {self._file.name}"):
                self._file.flush()

    def close(self) -> None:
        """Flush and close; may be called again."""
        if self._file is not None:
            file, self._file = self._file, None
            with storage_errors(f"write {file.name}"):
                file.close()

    def _write(self, records: bytes) -> None:
        if not records:
            return
        with storage_errors(f"write into {self._directory}"):
            if self._file is None:
                self._directory.mkdir(parents=True, exist_ok=True)
                self._file = _new_file(self._directory)
                self._file.write(_record(_event(time.time(), 0, _field(3, b"brain.Event:2"))))
            self._file.write(records)


def _new_file(directory: Path) -> BinaryIO:
    """Create a file for this process; the names sort by time, as TensorBoard expects of a continued run."""
    stem = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
    for number in range(1000):
        try:
            return (directory / f"{stem}.{number:03d}").open("xb", buffering=64 * 1024)
        except FileExistsError:
            continue
    raise FileExistsError(f"{directory} has too many event files of this second")


def _curves(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in line.items():
        if key not in _PLACES and isinstance(value, int | float) and not isinstance(value, bool):
            yield key, float(value)


def _varint(value: int) -> bytes:
    out = bytearray()
    value &= (1 << 64) - 1
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _varint_field(number: int, value: int) -> bytes:
    return bytes([number << 3]) + _varint(value)


def _field(number: int, payload: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _varint(len(payload)) + payload


def _scalar(tag: str, value: float) -> bytes:
    """Return a `Summary.Value`: tag = 1, simple_value = 2."""
    try:
        packed = struct.pack("<f", value)
    except OverflowError:
        packed = struct.pack("<f", float("inf") if value > 0 else float("-inf"))
    return _field(1, tag.encode()) + b"\x15" + packed


def _hyper_parameters(values: Mapping[str, bool | float | str], metrics: Iterable[str]) -> tuple[bytes, ...]:
    """Return three `Summary.Value`s of the plugin `hparams`: the experiment, a session's start, and its end.

    `Experiment`: hparam_infos = 4 (name = 1, type = 4), metric_infos = 5 (name = 1 with tag = 2). `SessionStartInfo`:
    hparams = 1, a map of names to `google.protobuf.Value` (number = 2, string = 3, bool = 4). `SessionEndInfo`: status
    = 1.
    """
    infos, entries = b"", b""
    for name, value in values.items():
        if isinstance(value, bool):
            kind, packed = _FLAG, _varint_field(4, value)
        elif isinstance(value, str):
            kind, packed = _TEXT, _field(3, value.encode())
        else:
            kind, packed = _NUMBER, b"\x11" + struct.pack("<d", value)
        infos += _field(4, _field(1, name.encode()) + _varint_field(4, kind))
        entries += _field(1, _field(1, name.encode()) + _field(2, packed))
    infos += b"".join(_field(5, _field(1, _field(2, name.encode()))) for name in metrics)
    return (
        _of_plugin("_hparams_/experiment", _field(2, infos)),
        _of_plugin("_hparams_/session_start_info", _field(3, entries)),
        _of_plugin("_hparams_/session_end_info", _field(4, _varint_field(1, _STATUS_SUCCESS))),
    )


def _of_plugin(tag: str, content: bytes) -> bytes:
    """Return a `Summary.Value`: tag = 1, metadata = 9 (plugin_data = 1: plugin_name = 1, content = 2)."""
    return _field(1, tag.encode()) + _field(9, _field(1, _field(1, b"hparams") + _field(2, content)))


def _event(time_s: float, step: int, what: bytes) -> bytes:
    """Return an `Event`: wall_time = 1, step = 2, and `what` (file_version = 3, summary = 5 or session_log = 7)."""
    return b"\x09" + struct.pack("<d", time_s) + _varint_field(2, step) + what


def _record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", _masked_crc(length)) + data + struct.pack("<I", _masked_crc(data))


def _crc_table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
        table.append(crc)
    return tuple(table)


_CRC32C = _crc_table()


def _masked_crc(data: bytes) -> int:
    table, crc = _CRC32C, 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
