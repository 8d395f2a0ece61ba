"""Reads are tried again after what passes, and not after what does not; they never outlive what waits for them."""

from __future__ import annotations

import errno
import http.client
import socket
import threading
from collections import deque
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from pyarrow.fs import FSSpecHandler, PyFileSystem

from orchestray.platform.data import retries
from orchestray.platform.data.prefetch import Prefetch
from orchestray.platform.data.retries import READS, read_patiently
from orchestray.platform.data.shares import ShareReader
from orchestray.platform.data.source import open_source, open_split
from orchestray.platform.data.stream import SampleStream
from orchestray.platform.errors import DataError, TaskError
from support.accounting import WriteParquet, numbered
from support.flaky_files import FlakyFiles
from support.patience import PATIENCE_S

FOR_EVER = (3600.0,)


class Answer:
    """An answer of a web server, as libraries attach it to their errors."""

    def __init__(self, status: int) -> None:
        self.status_code = status


class HttpError(Exception):
    """An error of a library that knows no OSError."""

    def __init__(self, status: int, way: str) -> None:
        super().__init__(f"bad answer for url {way}")
        if way == "response":
            self.response: Any = Answer(status)
        elif way == "botocore":
            self.response = {"ResponseMetadata": {"HTTPStatusCode": status}}
        else:
            setattr(self, way, status)


class ServerDisconnectedError(Exception):
    """An error like aiohttp's of this name."""


@pytest.fixture
def no_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(retries, "WAITS_S", (0.0, 0.0, 0.0))
    READS.begin(None)
    yield
    READS.begin(None)


def failing(*errors: BaseException) -> tuple[Any, list[int]]:
    """Return a function that raises these errors, one a call, and then returns 7; and the list of its calls."""
    left, calls = deque(errors), list[int]()

    def read() -> int:
        calls.append(len(calls))
        if left:
            raise left.popleft()
        return 7

    return read, calls


def hidden(cause: BaseException) -> FileNotFoundError:
    """Return an error of fsspec's, which hides its cause."""
    error = FileNotFoundError("bucket/x.parquet")
    error.__cause__ = cause
    return error


PASSING = {
    "stale": OSError(errno.ESTALE, "Stale file handle", "x"),
    "io": OSError(errno.EIO, "Input/output error"),
    "reset": ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
    "timeout": TimeoutError(),
    "cut": http.client.IncompleteRead(b"abc"),
    "disconnected": ServerDisconnectedError(),
    "name server": socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"),
    "arrow": OSError("When reading 'x': AWS Error SLOW_DOWN (HTTP status 503) during GetObject operation"),
    **{
        f"{status} {way}": HttpError(status, way) for status in (429, 503) for way in ("status", "response", "botocore")
    },
    "hidden": hidden(HttpError(503, "status")),
}
FINAL = {
    "missing": (FileNotFoundError(errno.ENOENT, "No such file or directory", "x"), ".*No such file.*Is the path"),
    "forbidden": (HttpError(403, "code"), "the server answers 403 Forbidden. May this user"),
    "404": (HttpError(404, "status"), "the server answers 404 Not Found. Is the path"),
    "refused": (
        ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"),
        r"the connection is refused \(.*Connection refused\). Does its server run",
    ),
    "no host": (hidden(socket.gaierror(socket.EAI_NONAME, "Name or service not known")), "its server is not found"),
    "damaged": (pa.ArrowInvalid("Parquet magic bytes not found."), "Parquet magic bytes not found. Is the file whole"),
}


@pytest.mark.usefixtures("no_waits")
@pytest.mark.parametrize("error", PASSING.values(), ids=PASSING)
def test_what_passes_is_tried_again_and_counted(error: BaseException) -> None:
    told: list[str] = []
    READS.begin(told.append)
    read, calls = failing(error, error)
    assert read_patiently(read, "x.parquet") == 7
    assert (len(calls), READS.num_retries) == (3, 2)
    assert all(text.startswith("cannot read x.parquet at the moment: ") for text in told)


@pytest.mark.usefixtures("no_waits")
@pytest.mark.parametrize(("error", "sentence"), FINAL.values(), ids=FINAL)
def test_what_does_not_pass_is_not_tried_again_and_says_why(error: BaseException, sentence: str) -> None:
    read, calls = failing(error)
    with pytest.raises(DataError, match=f"cannot read x.parquet: {sentence}"):
        read_patiently(read, "x.parquet")
    assert (len(calls), READS.num_retries) == (1, 0)


@pytest.mark.usefixtures("no_waits")
def test_what_passes_not_is_given_up_after_all_waits() -> None:
    read, calls = failing(*[PASSING["503 status"]] * 9)
    with pytest.raises(DataError, match=r"the server answers 503 Service Unavailable. It was tried 4 times"):
        read_patiently(read, "x.parquet")
    assert len(calls) == 4


@pytest.mark.usefixtures("no_waits")
@pytest.mark.parametrize("error", [ValueError("no such split"), TaskError("no such column"), KeyError("x")])
def test_errors_of_the_user_s_own_code_go_on_unchanged(error: Exception) -> None:
    error.__context__ = OSError(errno.ESTALE, "Stale file handle")  # that the user's code has dealt with
    read, calls = failing(error)
    with pytest.raises(type(error)) as caught:
        read_patiently(read, "x.parquet")
    assert caught.value is error
    assert len(calls) == 1


@pytest.mark.usefixtures("no_waits")
def test_a_server_that_refuses_a_file_that_was_there_may_come_back() -> None:
    read, _ = failing(ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), FileNotFoundError("b/x"))
    assert read_patiently(read, "x.parquet", was_there=True) == 7


def test_waits_grow() -> None:
    assert list(retries.WAITS_S) == sorted(set(retries.WAITS_S))
    assert 10 < sum(retries.WAITS_S) < 60


# -- files ----------------------------------------------------------------------------------------------------------


def stale() -> OSError:
    return OSError(errno.ESTALE, "Stale file handle", "x")


@pytest.mark.usefixtures("no_waits")
@pytest.mark.parametrize("fails_at", range(6))
def test_an_error_that_passes_changes_no_sample(write_parquet: WriteParquet, fails_at: int) -> None:
    files = FlakyFiles()
    paths = write_parquet(20, 20, row_group_rows=10).files
    plain = open_source(ds.dataset(paths, format="parquet"), window_rows=10)

    def ids_of(source: Any) -> list[list[int]]:
        with SampleStream(source, lambda rows: {"n": rows["number"]}, batch_size=7).epoch(0) as shares:
            return [share.micro_batches[0].batch["n"].to_pylist() for share in shares]

    files.errors += [*[None] * fails_at, stale()]
    dataset = read_patiently(lambda: files.dataset(paths), "here")
    assert ids_of(open_source(dataset, window_rows=10)) == ids_of(plain)
    assert READS.num_retries == 1


@pytest.fixture
def waiting(write_parquet: WriteParquet, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, threading.Event]]:
    """Yield a source whose second read fails and is then waited for; and an event that is set when it waits."""
    monkeypatch.setattr(retries, "WAITS_S", FOR_EVER)
    files = FlakyFiles()
    source = open_source(files.dataset(write_parquet(40, row_group_rows=10).files), window_rows=10)
    source.read([0])
    files.errors = deque([None, *[stale()] * 99])
    waits = threading.Event()
    READS.begin(lambda _: waits.set())
    yield source, waits
    READS.begin(None)


def test_an_epoch_that_waits_for_a_file_can_be_left(waiting: tuple[Any, threading.Event]) -> None:
    source, waits = waiting
    with SampleStream(source, lambda rows: {}, batch_size=10).epoch(0):
        assert waits.wait(PATIENCE_S)
    # Without an end of the wait, leaving would take an hour.


def test_a_reader_of_shares_that_waits_for_a_file_can_be_closed(waiting: tuple[Any, threading.Event]) -> None:
    class Order:
        epoch, step_in_epoch, batch_samples, num_micro_batches = 0, 0, 10, 1
        pieces = ((0, 10),)

    source, waits = waiting
    with ShareReader(source, lambda rows: {}) as shares:
        shares.prepare(Order())
        assert waits.wait(PATIENCE_S)


def test_what_a_task_reads_by_itself_ends_with_the_epoch_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "WAITS_S", FOR_EVER)
    waits = threading.Event()
    READS.begin(lambda _: waits.set())

    def items() -> Iterator[int]:
        yield read_patiently(failing(stale())[0], "x")

    with Prefetch(items(), 1):  # type: ignore[arg-type]
        assert waits.wait(PATIENCE_S)
    READS.begin(None)


# -- servers --------------------------------------------------------------------------------------------------------


class Server(ThreadingHTTPServer):
    """A server of the files of a folder, whose next answers are the statuses in `answers`, 0 for the file."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Request)
        self.folder, self.answers = folder, deque[int]()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class _Request(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        server: Any = self.server
        status = server.answers.popleft() if server.answers else 0
        path = server.folder / self.path[1:]
        if status or not path.is_file():
            self.send_error(status or 404)
            return
        content = path.read_bytes()
        first, last = 0, len(content) - 1
        if asked := self.headers.get("Range"):
            start, _, stop = asked.removeprefix("bytes=").partition("-")
            first, last = int(start), min(int(stop or last), last)
        self.send_response(206 if asked else 200)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(last - first + 1))
        self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[first : last + 1])


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    pytest.importorskip("aiohttp")
    pq.write_table(numbered(0, 30), tmp_path / "train.parquet", row_group_size=10)
    serving = Server(tmp_path)
    thread = threading.Thread(target=serving.serve_forever, args=(0.01,))
    thread.start()
    yield serving
    serving.shutdown()
    thread.join()
    serving.server_close()


class OverHttp:
    """A task whose data lie on a server."""

    def __init__(self, url: str) -> None:
        self.url = url

    def dataset(self, split: str) -> ds.Dataset:
        import fsspec

        files = fsspec.filesystem("http", skip_instance_cache=True)
        return ds.dataset(f"{self.url}/{split}.parquet", filesystem=PyFileSystem(FSSpecHandler(files)))


@pytest.mark.usefixtures("no_waits")
@pytest.mark.parametrize("answers", [[503, 503], [0, 503], [0, 0, 429, 429], [0, 0, 0, 503, 502]], ids=str)
def test_a_server_that_is_busy_for_a_moment_is_asked_again(server: Server, answers: list[int]) -> None:
    server.answers += answers
    task: Any = OverHttp(server.url)
    source = open_split(task, "train")
    assert source.read([0]).take(np.arange(30))["number"].to_pylist() == list(range(30))
    assert READS.num_retries > 0


@pytest.mark.usefixtures("no_waits")
def test_what_a_server_does_not_have_is_said_with_address_and_status(server: Server) -> None:
    task: Any = OverHttp(f"{server.url}/elsewhere")
    address = rf"{server.url}/elsewhere/train\.parquet"
    with pytest.raises(DataError, match=rf"cannot read the train data: {address}: the server answers 404 Not Found"):
        open_split(task, "train")


@pytest.mark.usefixtures("no_waits")
def test_a_server_that_is_not_there_is_said_with_the_address(server: Server) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    task: Any = OverHttp(url)
    with pytest.raises(DataError, match=rf"the train data: {url}/train.parquet: the connection is refused"):
        open_split(task, "train")
