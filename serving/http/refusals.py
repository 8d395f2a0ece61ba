"""What is answered before the application is asked: counted, and in the access log, as everything else is."""

from __future__ import annotations

from orchestray.serving.http.access_log import AccessLog
from orchestray.serving.http.monitor import Monitor
from orchestray.serving.http.settings import HttpSettings


class Refusals:
    """Notes them. Under overload there are many: what this does for each has to be little.

    Args:
        monitor: counts.
        settings: say whether there is a log.
    """

    def __init__(self, monitor: Monitor, settings: HttpSettings) -> None:
        self._monitor = monitor
        self.follow(settings)

    def follow(self, settings: HttpSettings) -> None:
        """Other settings are in force."""
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
        """A request was answered.

        Args:
            status: of the answer.
            request_id: that it has.
            seconds: since it came.
            method: of the request; empty: it was not read so far.
            path: as it came, without the query; empty: it was not read so far.
            client: its address.
            num_bytes: of the answer's body.
            model, version: who was asked; empty: nobody yet.
        """
        self._monitor.answered(model, version, status, seconds)
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
