"""What one process of the load generator is told, as JSON, and does."""

from __future__ import annotations

import base64
import ssl
from dataclasses import asdict, dataclass
from typing import Any

from orchestray.serving.load.loads import ClosedLoop, Load, OpenLoop, Trace

_LOADS: dict[str, type[Load]] = {"open": OpenLoop, "trace": Trace, "closed": ClosedLoop}


@dataclass(frozen=True)
class Target:
    """Where requests go, and what they are.

    `payloads` are the bodies, taken in turns; none: requests without a body.
    """

    host: str
    port: int
    path: str
    method: str = "POST"
    tls: bool = False
    verify: bool = True
    """Whether the server's certificate is checked."""
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
        """Whole requests, as sent."""
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
        """For https."""
        if not self.tls:
            return None
        context = ssl.create_default_context()
        if not self.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context


@dataclass(frozen=True)
class Plan:
    """A load on a target, and how it is measured."""

    target: Target
    load: Load
    duration_s: float = 10.0
    """Of what is measured, after the warm-up."""
    warm_up_s: float = 1.0
    """Requests of this time are sent, and not counted."""
    deadline_s: float | None = None
    """An answer within it is good."""
    timeout_s: float = 30.0
    max_connections: int = 1000
    seed: int = 0

    @property
    def end_s(self) -> float:
        return self.warm_up_s + self.duration_s

    def to_json(self) -> dict[str, Any]:
        """What `from_json` takes."""
        kind = next(name for name, kind in _LOADS.items() if isinstance(self.load, kind))
        bodies = [base64.b64encode(body).decode() for body in self.target.bodies]
        return {
            **{name: getattr(self, name) for name in self.__dataclass_fields__ if name not in {"target", "load"}},
            "target": {**asdict(self.target), "bodies": bodies},
            "load": {"kind": kind, **asdict(self.load)},
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Plan:
        """The plan that was written."""
        told = dict(value["target"])
        told["bodies"] = tuple(base64.b64decode(body) for body in told["bodies"])
        told["headers"] = tuple((name, text) for name, text in told["headers"])
        load = dict(value["load"])
        kind = _LOADS[load.pop("kind")]
        if kind is Trace:
            load["recorded_s"] = tuple(load["recorded_s"])
        return cls(**{**value, "target": Target(**told), "load": kind(**load)})
