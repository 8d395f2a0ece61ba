"""The plan of a measurement, which each process of the load generator receives as JSON."""

from __future__ import annotations

import base64
import ssl
from dataclasses import asdict, dataclass
from typing import Any

from orchestray.loadtest.loads import ClosedLoop, Load, OpenLoop, Trace

_LOADS: dict[str, type[Load]] = {"open": OpenLoop, "trace": Trace, "closed": ClosedLoop}


@dataclass(frozen=True)
class Target:
    """The server to which requests go, and their content.

    `bodies` are sent in turns; if there are none, requests have no body.
    """

    host: str
    port: int
    path: str
    method: str = "POST"
    tls: bool = False
    verify: bool = True
    """True to check the server's certificate."""
    headers: tuple[tuple[str, str], ...] = ()
    bodies: tuple[bytes, ...] = ()

    @property
    def url(self) -> str:
        return f"http{'s' if self.tls else ''}://{self.authority}{self.path}"

    @property
    def authority(self) -> str:
        """Host and port."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def requests(self) -> list[bytes]:
        """Return the complete requests, as sent."""
        given = {name.lower() for name, _ in self.headers}
        lines = [f"{self.method} {self.path} HTTP/1.1"]
        if "host" not in given:
            lines.append(f"Host: {self.authority}")
        lines += [f"{name}: {value}" for name, value in self.headers]
        if self.bodies and "content-type" not in given:
            lines.append("Content-Type: application/json")
        head = "\r\n".join(lines)
        bodies = self.bodies or ((b"",) if self.method in {"POST", "PUT", "PATCH"} else ())
        if not bodies:
            return [f"{head}\r\n\r\n".encode("latin-1")]
        return [f"{head}\r\nContent-Length: {len(body)}\r\n\r\n".encode("latin-1") + body for body in bodies]

    def context(self) -> ssl.SSLContext | None:
        """Return the TLS context for https; None for http."""
        if not self.tls:
            return None
        context = ssl.create_default_context()
        if not self.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context


@dataclass(frozen=True)
class Plan:
    """A load on a target, and the settings of its measurement."""

    target: Target
    load: Load
    duration_s: float = 10.0
    """Measured seconds, after the warm-up."""
    warm_up_s: float = 1.0
    """Seconds at the start in which requests are sent but not counted."""
    deadline_s: float | None = None
    """Time within which an answer is in time."""
    timeout_s: float = 30.0
    max_connections: int = 1000
    seed: int = 0

    @property
    def end_s(self) -> float:
        return self.warm_up_s + self.duration_s

    def to_json(self) -> dict[str, Any]:
        """Return JSON values for `from_json`."""
        kind = next(name for name, kind in _LOADS.items() if isinstance(self.load, kind))
        bodies = [base64.b64encode(body).decode() for body in self.target.bodies]
        return {
            **{name: getattr(self, name) for name in self.__dataclass_fields__ if name not in {"target", "load"}},
            "target": {**asdict(self.target), "bodies": bodies},
            "load": {"kind": kind, **asdict(self.load)},
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Plan:
        """Return the plan from the output of `to_json`."""
        target = dict(value["target"])
        target["bodies"] = tuple(base64.b64decode(body) for body in target["bodies"])
        target["headers"] = tuple((name, text) for name, text in target["headers"])
        load = dict(value["load"])
        kind = _LOADS[load.pop("kind")]
        if kind is Trace:
            load["recorded_s"] = tuple(load["recorded_s"])
        return cls(**{**value, "target": Target(**target), "load": kind(**load)})
