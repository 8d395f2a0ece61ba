"""Checkpoints in the memory of a process, which every process of the cluster can reach. Imports no torch.

Used for training that other workers continue after a pause: the checkpoints outlive the workers, but nothing else. A
folder is a set of files, and a file is a list of pieces of bytes as they were sent. They travel by the HTTP of the
standard library.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import threading
from collections.abc import Iterator
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from orchestray.platform.errors import StorageError
from orchestray.platform.process.sockets import end_where_lost, in_url, listen
from orchestray.platform.run.store import IN_MEMORY

if TYPE_CHECKING:
    from orchestray.platform.run.store import OpenForWriting

_TIMEOUT_S = 60.0
_PIECE_BYTES = 16 << 20
"""Largest number of bytes of one request: the server allocates memory for them before they come."""
_LOOK_AGAIN_S = 0.1
_LOOK_WHETHER_CLOSED_S = 1.0
_LIMITS = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""Keep-alive limits (seconds, and number of probes) until a vanished machine counts as gone.

Data that it posted but did not put, which may be a whole model, is held until then.
"""

Files = dict[str, list[bytearray]]


class MemoryStoreError(StorageError):
    """Raised when held folders cannot be read or changed; unlike other storage errors, it is not about disk space."""


class HolderLostError(MemoryStoreError):
    """Raised when the process that holds the folders does not answer."""


class HeldFolders:
    """A holder of folders in the memory of this process; a context manager. The folders are gone when it ends."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        """Start to serve the folders.

        Args:
            host: address at which other machines reach this one.
        """
        self._lock = threading.Lock()
        self._whole: dict[str, Files] = {}
        self._closed = threading.Event()
        key = secrets.token_urlsafe(16)
        self._listening = listen(host, 0, key="the address of this machine")
        self._listening.settimeout(_LOOK_WHETHER_CLOSED_S)  # shutdown does not wake accept() on all systems
        self._server = _Server(self._listening, key, self)
        self.location = f"{IN_MEMORY}://{in_url(host)}:{self._listening.getsockname()[1]}/{key}"
        """Location for `open_store`, in any process. It contains the key that grants access."""
        self._thread = threading.Thread(target=self._serve, name="held-folders", daemon=True)
        self._thread.start()

    def names(self) -> list[str]:
        with self._lock:
            return sorted(self._whole)

    def file(self, name: str, file: str) -> list[bytearray] | None:
        """Return the pieces of a file of a complete folder, which must not be changed; None if there is none."""
        with self._lock:
            return self._whole.get(name, {}).get(file)

    def put(self, name: str, files: Files) -> bool:
        """Add a folder, replacing one of the same name; return False if the holder is closed and holds nothing."""
        with self._lock:
            if self._closed.is_set():
                return False
            self._whole[name] = files
            return True

    def remove(self, name: str) -> None:
        with self._lock:
            self._whole.pop(name, None)

    def clear(self) -> None:
        """Remove all folders."""
        with self._lock:
            self._whole.clear()

    def close(self) -> None:
        """Stop serving, and remove all folders; may be called again."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # wakes a waiting accept()
        self._thread.join()
        self._server.server_close()
        self._server.hang_up()
        self.clear()

    def _serve(self) -> None:
        while not self._closed.is_set():
            try:
                connection, address = self._listening.accept()
            except TimeoutError:
                continue
            except OSError:  # closed, or this process has too many open files at present
                self._closed.wait(_LOOK_AGAIN_S)
            else:
                self._server.take(connection, address)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, listening: socket.socket, key: str, folders: HeldFolders) -> None:
        super().__init__(listening.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.key, self.folders = key, folders
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        """Connections that are not closed yet."""

    def take(self, connection: socket.socket, address: Any) -> None:
        """Answer a connection in a thread of its own."""
        with self._lock:
            self._open.add(connection)
        try:
            self.process_request(connection, address)
        except RuntimeError:  # too many threads at present: the connection ends
            self.shutdown_request(connection)

    def hang_up(self) -> None:
        """End all connections, and drop data that was posted but not put."""
        with self._lock:  # none may be closed meanwhile: its number could then be that of another file
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the error: the client is gone, or sees the connection end."""


class _Handler(BaseHTTPRequestHandler):
    """A handler of one connection: `/KEY` lists folders, and `/KEY/NAME/FILE` reads a file.

    POST to `/KEY/FILE` sends a piece, and PUT of `/KEY/NAME` makes a folder of all pieces sent. Pieces that were posted
    but not put end with the connection, and thus with the process that sent them.
    """

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    timeout = _TIMEOUT_S
    server: _Server

    def setup(self) -> None:
        super().setup()
        end_where_lost(self.connection, _LIMITS)
        self._draft: Files = {}

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name in the base class
        """Log nothing."""

    def do_GET(self) -> None:
        match self._asked():
            case []:
                self._answer([json.dumps(self.server.folders.names()).encode()])
            case [name, file]:
                self._answer(self.server.folders.file(name, file))
            case _:
                self._answer(None)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        match self._asked(), self.headers["Content-Length"] or "":
            case [file], length if length.isdecimal() and int(length) <= _PIECE_BYTES:
                piece = bytearray(int(length))
                if self.rfile.readinto(piece) < len(piece):
                    self.close_connection = True  # the writer is gone
                    return
                self._draft.setdefault(file, []).append(piece)
                self._answer([])
            case _:
                self.close_connection = True  # the rest of the request is not read
                self._answer(None)

    def do_PUT(self) -> None:
        match self._asked():
            case [name] if self._draft and self.server.folders.put(name, self._draft):
                self._draft = {}
                self._answer([])
            case _:
                self._answer(None)

    def do_DELETE(self) -> None:
        match self._asked():
            case [name]:
                self.server.folders.remove(name)
                self._answer([])
            case _:
                self._answer(None)

    def _asked(self) -> list[str] | None:
        """Return the parts of the path after the key; None if the key is wrong."""
        key, *parts = urlsplit(self.path).path.strip("/").split("/")
        if not secrets.compare_digest(key.encode(), self.server.key.encode()):
            return None
        self.connection.settimeout(None)  # an authorised client may compute between two pieces
        return parts

    def _answer(self, pieces: list[bytearray] | list[bytes] | None) -> None:
        """Send the pieces, or "not found" for None."""
        self.send_response(HTTPStatus.OK if pieces is not None else HTTPStatus.NOT_FOUND)
        self.send_header("Content-Length", str(sum(map(len, pieces or []))))
        self.end_headers()
        if self.command != "HEAD":
            for piece in pieces or []:
                self.wfile.write(piece)


class MemoryStore:
    """The folders that another process holds, as a `store.Store` in any process."""

    def __init__(self, location: str) -> None:
        """Refer to the folders at a location.

        Args:
            location: `HeldFolders.location`.
        """
        parts = urlsplit(location)
        self._host, self._port = parts.hostname or "", parts.port or 0
        self.location, self._path = location, parts.path.rstrip("/")
        self.shown = f"{parts.scheme}://{parts.netloc}"  # without the key

    def names(self) -> list[str]:
        with self._reading("") as response:
            names: list[str] = json.loads(response.read())
        return names

    @contextlib.contextmanager
    def open_read(self, name: str, file: str) -> Iterator[Any]:
        with self._reading(f"/{name}/{file}") as response:
            yield response

    def size(self, name: str, file: str) -> int:
        what = f"read {self.shown}/{name}/{file}"
        with self._connected(what) as connection:
            response = _ask(connection, "HEAD", f"{self._path}/{name}/{file}")
            found = response.status == HTTPStatus.OK
            return int(response.headers["Content-Length"]) if found else -1

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[OpenForWriting]:
        with self._connected(f"write {self.shown}/{name}") as connection:

            @contextlib.contextmanager
            def open_file(file: str) -> Iterator[Any]:
                def write(data: Any) -> None:
                    whole = memoryview(data).cast("B")
                    for start in range(0, max(1, len(whole)), _PIECE_BYTES):
                        _command(connection, "POST", f"{self._path}/{file}", whole[start : start + _PIECE_BYTES])

                write(b"")  # an empty file is a file, too
                yield write

            yield open_file
            _command(connection, "PUT", f"{self._path}/{name}")

    def remove(self, name: str) -> None:
        with self._connected(f"remove {self.shown}/{name}") as connection:
            _command(connection, "DELETE", f"{self._path}/{name}")

    def clean(self) -> list[str]:
        """Return no names: half-written folders end with the process that wrote them."""
        return []

    @contextlib.contextmanager
    def _reading(self, path: str) -> Iterator[HTTPResponse]:
        what = f"read {self.shown}{path}"
        with self._connected(what) as connection:
            response = _ask(connection, "GET", self._path + path)
            if response.status != HTTPStatus.OK:
                raise FileNotFoundError(f"there is no {path or 'such place'}")
            yield response

    @contextlib.contextmanager
    def _connected(self, what: str) -> Iterator[HTTPConnection]:
        connection = HTTPConnection(self._host, self._port, timeout=_TIMEOUT_S)
        try:
            connection.connect()
            connection.auto_open = 0  # a new connection would not have the pieces sent over this one
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            yield connection
        except FileNotFoundError as error:
            raise MemoryStoreError(f"could not {what}: {error}") from error
        except (OSError, HTTPException) as error:
            why = f"the process that held it does not answer ({type(error).__name__}: {error})"
            raise HolderLostError(f"could not {what}: {why}") from error
        finally:
            connection.close()


def _ask(connection: HTTPConnection, method: str, path: str, body: Any = None) -> HTTPResponse:
    connection.request(method, path, body)
    return connection.getresponse()


def _command(connection: HTTPConnection, method: str, path: str, body: Any = None) -> None:
    response = _ask(connection, method, path, body)
    response.read()
    if response.status != HTTPStatus.OK:
        raise FileNotFoundError("there is no such place")
