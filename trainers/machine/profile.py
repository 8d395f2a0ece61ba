"""The profile of a machine: what a planner needs to know of it, as plain numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from orchestray.platform.comm.allreduce.costs import AlphaBeta
from orchestray.platform.errors import ConfigError
from orchestray.trainers.machine.gemm import GemmTable
from orchestray.trainers.machine.transfers import CollectiveTimes, Curve, Kind

FORMAT = 2
"""Version of the file; a profile of another one is refused."""


@dataclass(frozen=True)
class Compute:
    """The speed of one process that computes alone, with some number of threads."""

    gemm: Mapping[str, GemmTable]
    """Maps the name of a dtype, such as `float32`, to the times of its products of matrices."""
    copy_bytes_per_s: float
    """Bytes that a copy in memory reads and writes in a second, together."""
    small_op_s: float
    """Seconds of one operation of torch on a tensor of one element."""

    def to_json(self) -> dict[str, Any]:
        return {
            "copy_bytes_per_s": float(f"{self.copy_bytes_per_s:.4g}"),
            "small_op_s": float(f"{self.small_op_s:.4g}"),
            "gemm": {dtype: table.to_json() for dtype, table in self.gemm.items()},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Compute:
        tables = {dtype: GemmTable.from_json(table) for dtype, table in data["gemm"].items()}
        return cls(tables, float(data["copy_bytes_per_s"]), float(data["small_op_s"]))


@dataclass(frozen=True)
class Contention:
    """The slowdown of processes of one thread that compute at the same time: their time over that of one alone.

    Raises:
        ConfigError: a slowdown is missing, or is not above 0.
    """

    products: Mapping[int, float]
    """Maps the number of processes to the slowdown of products of matrices, which stay in the cache."""
    copies: Mapping[int, float]
    """Maps the number of processes to the slowdown of copies, which do not."""

    def __post_init__(self) -> None:
        for name, factors in (("products", self.products), ("copies", self.copies)):
            if not factors or min(factors) < 1 or min(factors.values()) <= 0:
                raise ConfigError(f"the contention of {name} needs a number of processes with a slowdown above 0")

    def factor(self, processes: int, cores: int, copies: float = 0.0) -> float:
        """Return the slowdown of each of `processes` processes of one thread.

        Args:
            processes: number of processes that compute at the same time.
            cores: number of cores, which more processes share.
            copies: part of the time alone that is spent on memory, 0 to 1.
        """
        at_once = min(processes, cores)
        mixed = (1 - copies) * _between(self.products, at_once) + copies * _between(self.copies, at_once)
        return mixed * max(1.0, processes / cores)

    def to_json(self) -> dict[str, Any]:
        return {
            name: {str(count): float(f"{factor:.4g}") for count, factor in factors.items()}
            for name, factors in asdict(self).items()
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Contention:
        products, copies = (
            {int(count): float(each) for count, each in data[name].items()} for name in ("products", "copies")
        )
        return cls(products, copies)


def _between(factors: Mapping[int, float], count: int) -> float:
    """Return the factor for a count, linear between those that were measured."""
    below = max((each for each in factors if each <= count), default=min(factors))
    above = min((each for each in factors if each >= count), default=max(factors))
    if below == above:
        return factors[below]
    part = (count - below) / (above - below)
    return (1 - part) * factors[below] + part * factors[above]


@dataclass(frozen=True)
class Links:
    """The times of a message within a machine of a cluster and between two: numbers to edit for one's own cluster."""

    intra_node: AlphaBeta
    inter_node: AlphaBeta
    note: str = ""
    """Origin of the numbers."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Links:
        intra_node, inter_node = (
            AlphaBeta(float(data[name]["alpha_s"]), float(data[name]["beta_s_per_byte"]))
            for name in ("intra_node", "inter_node")
        )
        return cls(intra_node, inter_node, str(data.get("note", "")))


@dataclass(frozen=True)
class MachineProfile:
    """A machine in numbers. The file that keeps it is JSON, and may be edited.

    Raises:
        ConfigError: a number is missing, or cannot be one of a machine.
    """

    name: str
    processor: str
    cores: int
    """Cores that processes here may use."""
    memory_bytes: int
    versions: Mapping[str, str]
    compute: Mapping[int, Compute]
    """Maps a number of threads to the speed with it."""
    collectives: CollectiveTimes
    """Collective operations of processes of this machine over gloo, each of one thread."""
    contention: Contention
    overlap: float
    """Part of an all-reduce that is hidden behind a computation of the same length, 0 to 1."""
    channels: Mapping[str, Curve]
    """Maps a channel, `tcp` or `shared_memory`, to the times of a message between two processes."""
    disk_bytes_per_s: float
    """Bytes that a file gets in a second, until they are on the disk."""
    links: Links
    process_bytes: int
    """Resident set of a worker's process that has built nothing yet: Python, torch, Ray."""
    price_per_worker_hour: float | None = None
    """Price of a worker for an hour, in any currency; None: unknown."""
    measured_at: str = ""
    spread: float = 0.0
    """Largest relative distance of repeats of one product of matrices, from begin to end of the calibration."""

    def __post_init__(self) -> None:
        _refuse_impossible(asdict(self))
        if not self.compute or min(self.compute) < 1 or self.cores < 1 or self.memory_bytes < 1:
            raise ConfigError("a machine needs a core and memory, and its speed with a number of threads")
        for threads, each in self.compute.items():
            if "float32" not in each.gemm:
                raise ConfigError(f"the products of float32 with {threads} threads are missing")
        rates = [each.copy_bytes_per_s for each in self.compute.values()]
        if min([*rates, self.disk_bytes_per_s]) <= 0 or not 0 <= self.overlap <= 1:
            raise ConfigError("the speeds of a machine must be above 0, and its overlap from 0 to 1")
        for channel in ("tcp", "shared_memory"):
            if channel not in self.channels:
                raise ConfigError(f"the times of the channel {channel} are missing")

    def computing(self, threads: int) -> Compute:
        """Return the speed with a number of threads: of those measured, the nearest."""
        return self.compute[min(self.compute, key=lambda each: (abs(math.log(each / max(1, threads))), each))]

    def gemm_s(self, m: float, n: float, k: float, *, threads: int = 1, dtype: str = "float32") -> float:
        """Return the seconds of a product of matrices [m, k] and [k, n], in a process that computes alone.

        Raises:
            ConfigError: there is no table for the dtype.
        """
        tables = self.computing(threads).gemm
        if dtype not in tables:
            raise ConfigError(f"the profile has no products of {dtype}; it has those of {', '.join(tables)}")
        return tables[dtype].seconds(m, n, k)

    def flops_per_s(self, threads: int = 1, dtype: str = "float32") -> float:
        """Return the operations a second of the fastest product of matrices."""
        return self.computing(threads).gemm[dtype].peak_flops_per_s

    def seconds(self, kind: Kind, ranks: int, num_bytes: float) -> float:
        """Return the seconds of a collective operation of processes of this machine; see `CollectiveTimes.seconds`."""
        return self.collectives.seconds(kind, ranks, num_bytes)

    def slowdown(self, processes: int, *, copies: float = 0.0) -> float:
        """Return the slowdown of each of some processes of one thread; see `Contention.factor`."""
        return self.contention.factor(processes, self.cores, copies)

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "name": self.name,
            "processor": self.processor,
            "cores": self.cores,
            "memory_bytes": self.memory_bytes,
            "process_bytes": self.process_bytes,
            "versions": dict(self.versions),
            "measured_at": self.measured_at,
            "spread": float(f"{self.spread:.3g}"),
            "price_per_worker_hour": self.price_per_worker_hour,
            "overlap": float(f"{self.overlap:.3g}"),
            "disk_bytes_per_s": float(f"{self.disk_bytes_per_s:.4g}"),
            "links": self.links.to_json(),
            "contention": self.contention.to_json(),
            "channels": {name: curve.to_json() for name, curve in self.channels.items()},
            "collectives": self.collectives.to_json(),
            "compute": {str(threads): each.to_json() for threads, each in self.compute.items()},
        }

    @classmethod
    def from_json(cls, data: Any) -> MachineProfile:
        """Return the profile of a file's content.

        Raises:
            ConfigError: it is of another format, or a number is missing or wrong.
        """
        if not isinstance(data, Mapping) or data.get("format") != FORMAT:
            found = data.get("format") if isinstance(data, Mapping) else None
            raise ConfigError(f"it is not a profile of format {FORMAT}, but of {found}")
        price = data.get("price_per_worker_hour")
        try:
            return cls(
                name=str(data["name"]),
                processor=str(data["processor"]),
                cores=int(data["cores"]),
                memory_bytes=int(data["memory_bytes"]),
                versions={key: str(value) for key, value in data["versions"].items()},
                compute={int(threads): Compute.from_json(each) for threads, each in data["compute"].items()},
                collectives=CollectiveTimes.from_json(data["collectives"]),
                contention=Contention.from_json(data["contention"]),
                overlap=float(data["overlap"]),
                channels={name: Curve.from_json(curve) for name, curve in data["channels"].items()},
                disk_bytes_per_s=float(data["disk_bytes_per_s"]),
                links=Links.from_json(data["links"]),
                process_bytes=int(data["process_bytes"]),
                price_per_worker_hour=None if price is None else float(price),
                measured_at=str(data.get("measured_at", "")),
                spread=float(data.get("spread", 0.0)),
            )
        except KeyError as error:
            raise ConfigError(f"{error.args[0]} is missing") from None
        except (TypeError, ValueError, OverflowError, AttributeError) as error:
            raise ConfigError(f"a value has the wrong type: {error}") from None


def _refuse_impossible(value: Any, place: str = "") -> None:
    """Raise if a number within a value is infinite, NaN or below 0: no number of a machine is.

    Args:
        value: a number, or a mapping or sequence of such values.
        place: keys that lead to it, with a dot behind each.
    """
    if isinstance(value, Mapping):
        for key, each in value.items():
            _refuse_impossible(each, f"{place}{key}.")
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            _refuse_impossible(each, f"{place}{number}.")
    elif isinstance(value, int | float) and not 0 <= value < math.inf:
        raise ConfigError(f"{place.removesuffix('.')} must be a finite number of 0 or more, got {value}")
