"""Records of answers that the application did not give: counted and logged like all others."""

from __future__ import annotations

from orchestray.serving.http.access_log import AccessLog
from orchestray.serving.http.monitor import Monitor
from orchestray.serving.http.settings import HttpSettings


class Refusals:
    """A recorder of such answers. Under overload there are many, so that each must cost little.

    Args:
        monitor: counts them.
        settings: decide if there is an access log.
    """

    def __init__(self, monitor: Monitor, settings: HttpSettings) -> None:
        self._monitor = monitor
        self.follow(settings)

    def follow(self, settings: HttpSettings) -> None:
        """Use other settings from now on."""
        self._access_log = AccessLog() if settings.access_log else None

    def note(
        self,
        status: int,
        request_id: str,
        seconds: float,
        *,
        method: str = "POST",
        path: bytes = b"",
        client: str | None = None,
        num_bytes: int = 0,
        model: str = "",
        version: str = "",
    ) -> None:
        """Record an answer.

        Args:
            status: status of the answer.
            request_id: id of the request.
            seconds: time since the request came.
            method: method of the request; empty: not read yet.
            path: path without the query, unmodified; empty: not read yet.
            client: address of the client.
            num_bytes: size of the answer's body.
            model, version: version that would have answered; empty: unknown.
        """
        self._monitor.answered(model, version, status, seconds, method=method)
        if self._access_log is not None and self._access_log.is_on:
            self._access_log.line(
                request_id,
                status,
                seconds,
                method=method,
                path=path.decode("latin-1"),
                client=client,
                num_bytes=num_bytes,
                model=model,
                version=version,
            )
