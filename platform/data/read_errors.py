"""Errors of reading: what one is called, whether it may pass, and what a user can do about it.

A filesystem in Python (fsspec) raises errors of the library below it, and often hides them: a server that answers 503,
or does not answer at all, becomes a `FileNotFoundError` whose only text is the address.
"""

from __future__ import annotations

import errno
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, replace
from http import HTTPStatus

import pyarrow as pa

from orchestray.platform.errors import DataError

_PREAMBLE = re.compile(r"^Error creating dataset\..*? file\?: ")
_STATUS_IN_TEXT = re.compile(r"\bHTTP (?:status|response code|error)\D{0,3}([45]\d\d)\b", re.IGNORECASE)
_URL = re.compile(r"^https?://\S+$")
_ASK_S = 10.0
"""Seconds to wait for a server that is asked why a file was not found."""

_PASSING_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})
_PASSING_ERRNOS = frozenset(
    getattr(errno, name)
    for name in (
        *("ESTALE", "EIO", "EREMOTEIO", "ETIMEDOUT", "ETIME", "EAGAIN", "EINTR", "EBUSY", "ENOBUFS", "EPROTO"),
        *("ECONNRESET", "ECONNABORTED", "ENOTCONN", "EPIPE", "ESHUTDOWN", "ENETRESET", "ECOMM", "ENOLINK"),
        *("ENETDOWN", "ENETUNREACH", "EHOSTDOWN", "EHOSTUNREACH"),
    )
    if hasattr(errno, name)
)
_NO_ANSWER_YET = -3
"""`socket.EAI_AGAIN`: the name server did not answer."""
_PASSING_CLASSES = frozenset(
    {
        *("ServerDisconnectedError", "ClientPayloadError", "ServerTimeoutError", "ClientConnectionResetError"),
        *("ChunkedEncodingError", "ProtocolError", "IncompleteRead", "IncompleteReadError", "RemoteDisconnected"),
        *("ReadTimeoutError", "ConnectTimeoutError", "ReadTimeout", "ConnectTimeout", "ReadError"),
        *("ResponseStreamingError", "ConnectionClosedError", "EndpointConnectionError"),
    }
)
"""Errors of aiohttp, requests, urllib3, httpx and botocore that do not derive from `OSError`, or have no number."""

_OF_FORMAT = "Is the file whole, and of the right format?"
_OF_PLACE = "Is the path or address right, and the same on every machine?"
_OF_SERVER = "Does its server run, and is the address right?"
_OF_RIGHTS = "May this user read it?"


@dataclass(frozen=True)
class Failure:
    """A failed read, in words for a user."""

    reason: str
    passes: bool = False
    """True if the same read may succeed later."""
    advice: str = _OF_FORMAT

    def error(self, place: str, tried: str = "") -> DataError:
        """Return the error of reading `place`; `tried` tells what was done against it."""
        return DataError(f"cannot read {place}: {self.reason.removeprefix(f'{place}: ')}. {tried or self.advice}")


def failure_of(error: BaseException, *, was_there: bool = False) -> Failure | None:
    """Return what an error of reading says; None for any other error.

    Args:
        error: the error, with those that caused it.
        was_there: True if the same file was found before: then it is not simply missing, nor its server.
    """
    if not isinstance(error, OSError | pa.ArrowException):
        return _telling(error, was_there)
    for each in _chain(error):
        if (found := _telling(each, was_there)) is not None:
            return found
    if isinstance(error, FileNotFoundError):  # without a number: fsspec's, which may hide another
        text = _first_line(error)
        if _URL.match(text):
            asked = _asked(text)
            return replace(asked, reason=f"{text}: {asked.reason}")
        return Failure(f"there is nothing at {text}", was_there, _OF_PLACE)
    return Failure(_first_line(error))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, then what caused it."""
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        yield each
        each = each.__cause__ or each.__context__


def _telling(error: BaseException, was_there: bool) -> Failure | None:
    """Return what this error alone says; None if it does not tell."""
    if (status := _status_of(error)) is not None:
        return _of_status(status)
    if isinstance(error, TimeoutError):
        return Failure(_first_line(error) or "no answer in time", True)
    if isinstance(error, OSError) and error.errno:
        return _of_errno(error, was_there)
    if isinstance(error, ConnectionError) or any(kind.__name__ in _PASSING_CLASSES for kind in type(error).__mro__):
        return Failure(_first_line(error) or type(error).__name__, True)
    return None


def _status_of(error: BaseException) -> int | None:
    """Return the HTTP status that an error carries, whichever library raised it."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore
        response = response.get("ResponseMetadata", {})
        candidates = [response.get("HTTPStatusCode")]
    else:
        candidates = [getattr(response, "status_code", None), getattr(response, "status", None)]
    candidates += [getattr(error, name, None) for name in ("status", "status_code", "code")]
    if isinstance(error, OSError) and (found := _STATUS_IN_TEXT.search(str(error))):  # Arrow's own filesystems
        candidates.append(found.group(1))
    for value in candidates:
        number = int(value) if isinstance(value, str) and value.isdecimal() else value
        if isinstance(number, int) and not isinstance(number, bool) and 400 <= number < 600:
            return int(number)
    return None


def _of_status(status: int) -> Failure:
    try:
        name = f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        name = str(status)
    advice = {401: _OF_RIGHTS, 403: _OF_RIGHTS, 404: _OF_PLACE, 410: _OF_PLACE}.get(status, _OF_SERVER)
    return Failure(f"the server answers {name}", status in _PASSING_STATUSES, advice)


def _of_errno(error: OSError, was_there: bool) -> Failure:
    number, text = error.errno or 0, _first_line(error)
    if number == errno.ECONNREFUSED:
        return Failure(f"the connection is refused ({text})", was_there, _OF_SERVER)
    if number < 0:  # of resolving the name
        return Failure(f"its server is not found ({text})", number == _NO_ANSWER_YET, _OF_SERVER)
    advice = {errno.ENOENT: _OF_PLACE, errno.ENOTDIR: _OF_PLACE, errno.EACCES: _OF_RIGHTS, errno.EPERM: _OF_RIGHTS}
    return Failure(text, number in _PASSING_ERRNOS, advice.get(number, _OF_FORMAT))


def _asked(url: str) -> Failure:
    """Ask the server of an address why nothing was found there."""
    request = urllib.request.Request(url, headers={"Range": "bytes=0-0"})  # noqa: S310 - the address begins with http
    try:
        with urllib.request.urlopen(request, timeout=_ASK_S):  # noqa: S310
            return Failure("it was not found a moment ago", True, _OF_PLACE)
    except urllib.error.HTTPError as error:
        return _of_status(error.code)
    except urllib.error.URLError as error:
        if isinstance(error.reason, OSError):
            return _telling(error.reason, False) or Failure(_first_line(error.reason), False, _OF_SERVER)
        return Failure(str(error.reason), False, _OF_SERVER)
    except OSError as error:
        return _telling(error, False) or Failure(_first_line(error), False, _OF_SERVER)


def _first_line(error: BaseException) -> str:
    return _PREAMBLE.sub("", str(error).strip().partition("\n")[0]).rstrip(".")
