"""The messages between workers, leaf servers and servers, as frozen classes, and the entries of a server's log.

Every exchange is one `Request` and one `Answer`, in order; tensors follow their header in a message of their own. The
sections of a request are processed in the order of its fields; those that are absent have their defaults. The sections
of `Changes` change a server's state: the server passes them to its followers and its log, as an `Entry`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar, Final, Generic, Literal, NamedTuple, Self, TypeAlias, TypeVar

from pydantic import ConfigDict, PlainSerializer, PlainValidator, TypeAdapter, ValidationError

from orchestray.platform.comm.channel.blocks import Place
from orchestray.platform.errors import TrainingError
from orchestray.trainers.ps.protocol.assignments import Compute, Order, order_from_json, order_to_json

NOBODY: Final = -1 << 30
"""In place of a worker's number: the server itself, its driver, or someone who has sent no `hello`."""

DENSE: Final = "dense"
RUNS: Final = "runs"
FACTORS: Final = "factors"
COMPRESSED: Final = "compressed"

Encoding: TypeAlias = Literal["dense", "runs", "factors", "compressed"]
"""Form of a gradient: all its values; runs of rows; factors; or as a compressor sends it."""

AnyOrder = Annotated[Order, PlainValidator(order_from_json), PlainSerializer(order_to_json)]
_STRICT = ConfigDict(extra="forbid", ser_json_inf_nan="constants")


@dataclass(frozen=True)
class Hello:
    """A worker or a leaf introduces itself, over each new connection."""

    worker: int
    """Number of the worker; leaf k has -1 - k."""
    is_new: bool
    """True if it has just started, and holds nothing; False: it goes on with what it held."""
    data: dict[str, list[int]] = field(default_factory=dict)
    """Marks of its data by split (`mark_of`); empty: a leaf has none."""


class Part(NamedTuple):
    """A share of a batch."""

    step: int
    """Number of the batch, from 1."""
    share: int
    """Index of the share in its batch, from 0, in the order of its samples."""
    num_samples: int
    batch_samples: int


@dataclass(frozen=True)
class Origin:
    """The origin of a gradient."""

    worker: int
    parts: tuple[Part, ...]
    """Shares whose gradients it sums, each weighted by num_samples / batch_samples."""
    read_version: int
    """Version of the shard in the parameters that the gradient was computed with."""


@dataclass(frozen=True, kw_only=True)
class Push:
    """A gradient, in the tensors."""

    origin: Origin
    encoding: Encoding = "dense"
    pieces: int = 1
    """Number of tensors that hold it; changes of the buffers, to the lead, and what was measured follow."""
    unused: tuple[str, ...] = ()
    """Parameters that no share had a gradient for."""
    orders: tuple[int, ...] = ()
    """To the lead: ids of the shares' orders, which it claims."""
    workers: tuple[int, ...] = ()
    """From a leaf to the lead: the worker of each order."""


class Report(NamedTuple):
    """A share that all shards have applied. Within a push to the only shard, the server knows the versions."""

    order_id: int
    loss_sum: float
    read_version: int = -1
    write_version: int = -1


@dataclass(frozen=True)
class Asking:
    """Asks for the next order."""

    holding: tuple[int, ...]
    """Ids of the orders that the worker holds."""
    wait: bool
    """True to be answered only once there is an order."""
    more: int = 0
    """Number of further orders that it would take (`hogwild`)."""


@dataclass(frozen=True)
class Validated:
    """A part of a validation is done."""

    order_id: int
    sums: dict[str, float]


class Change(NamedTuple):
    """A leaf has moved parameters itself, by what is in the tensors, in the form of `significance_filter.pack`.

    It is applied once, also if it is sent again to a copy that has taken over.
    """

    number: int
    owes: bool
    """True if the leaf keeps a part back."""


class ReportOf(NamedTuple):
    """A report that a leaf passes on. With a change, both are done, or neither."""

    worker: int
    report: Report


class AskingOf(NamedTuple):
    """A worker's request for an order, which its leaf passes on.

    The answer comes when one of the workers has something to do, or the leaf is to send what it keeps back.
    """

    worker: int
    asking: Asking


@dataclass(frozen=True)
class Pull:
    """Asks for the parameters, in the tensors of the answer."""

    min_version: int = 0
    """Number of steps whose updates they must hold."""
    newer_than: int | None = None
    """Version that the worker has; no tensors are sent if there is no newer one."""
    reads: int | None = None
    """Version of the server's own memory that the worker reads, -1: none; it wants to read them there. None: it wants
    copies.
    """
    since: int | None = None
    """Version of the parameters that the worker holds: what has changed since is enough. None: it wants them all."""


@dataclass(frozen=True)
class Traffic:
    """Bytes over other connections, and what else a `TrafficCounter` collects."""

    bytes: int = 0
    saved: int = 0
    """Bytes that compression has saved."""
    errors: tuple[tuple[int, float], ...] = ()
    """Norms of the compressors' residuals, by worker."""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Snapshot:
    """Asks for all of a shard's state, for a checkpoint after a step; see `ShardServer.snapshot`."""

    step: int | None = None


@dataclass(frozen=True, kw_only=True)
class Changes:
    """Sections that change a server's state."""

    hello: Hello | None = None
    push: Push | None = None
    acknowledge: tuple[Report, ...] = ()
    """To the lead. Within a push it is done after that, if the push counts."""
    deposit: tuple[str, ...] | None = None
    """Names of the state of the worker's compressor for this shard, in the tensors: a copy; see `residuals`."""
    hand_over: tuple[str, ...] | None = None
    """The same, for good."""
    deposited: int | None = None
    """To the lead: id of the order to deposit, which is done."""
    validated: Validated | None = None
    saved: int | None = None
    """To the lead: id of the order to save, which is done."""
    next: Asking | None = None
    relay: tuple[Entry, ...] = ()
    """From a leaf to the lead: reports of workers."""
    change: Change | None = None
    acknowledge_for: tuple[ReportOf, ...] = ()
    """From a leaf to the lead."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    @property
    def changes(self) -> dict[str, Any]:
        """The sections that are there, by their names."""
        return {name: found for name, default in _DEFAULTS if (found := getattr(self, name)) != default}


@dataclass(frozen=True, kw_only=True)
class Entry(Changes):
    """A change that a server applies to its state machine: sent to it, or decided by its driver or itself."""

    worker: int = NOBODY
    leave: bool = False
    """True if the worker leaves."""
    stop: Stop | None = None
    resize: int | None = None
    """Number of shares that batches are cut into from the first that has not begun."""
    dismiss: bool = False
    """True if the worker is to leave once it has done what it holds."""
    took_s: tuple[float | None, ...] = ()
    """Seconds since each acknowledged share was handed out, where the sizes of shares follow the workers' speed."""
    asks: tuple[AskingOf, ...] | None = None
    advance: int | None = None
    """Step whose updates are to be made now."""


@dataclass(frozen=True)
class Stop:
    """A request to end the run with a checkpoint, as in `Coordinator.request_stop`."""

    reason: str
    validate: bool = False


@dataclass(frozen=True, kw_only=True)
class Request(Changes):
    """A request of a worker or a leaf to a server."""

    tally: Traffic | None = None
    """To the lead."""
    residual: bool = False
    """Asks for the shard's copy of the state of the worker's compressor, in the tensors of the answer."""
    snapshot: Snapshot | None = None
    run_state: bool = False
    """Asks for the state of the run."""
    watch: int | None = None
    """To the lead: id of an order that the worker holds. It is answered once another worker has done the order, or this
    one sends another request.
    """
    pull: Pull | None = None
    asks: tuple[AskingOf, ...] | None = None
    """From a leaf to the lead."""
    refresh: int | None = None
    """From a leaf: the version that it has. The values that are new since then, or all, come with the answer."""


@dataclass(kw_only=True)
class Answer:
    """A server's answer, filled in section by section."""

    error: str | None = None
    """Error of the server, which then has done nothing else."""
    claimed: tuple[int, ...] = ()
    """Orders of the push that are the worker's."""
    counts: bool = False
    """True if all that was acknowledged is done by it; False: another worker was first."""
    taken: bool = False
    """True if the push has changed the parameters; False: the shard had it, or a part of it, before."""
    is_dropped: bool = False
    """True if a compressed push is not in the parameters, nor was when it came before: another worker's is instead."""
    missing: tuple[Part, ...] = ()
    """Shares of a refused push of several shares that the shard lacks."""
    staleness: int = 0
    """Number of updates between read and write."""
    version: int = 0
    """Version of the shard."""
    is_sparse: bool = False
    """True if the tensors are the places (int32) and the values of the parameters that have changed, and buffers."""
    deposited: bool = False
    is_taken: bool = False
    """True if the order that the worker watches is not the worker's any more."""
    means: dict[str, float] | None = None
    """Means of a validation, with its last part."""
    saved: bool = False
    """False if the order to save belongs to another worker by now."""
    order: AnyOrder | None = None
    more: tuple[Compute, ...] = ()
    """Further orders (`hogwild`)."""
    relayed: tuple[Answer, ...] = ()
    counts_for: tuple[bool, ...] = ()
    """`counts` of each report that a leaf has passed on."""
    orders: tuple[AnyOrder | None, ...] = ()
    """Order for each request that a leaf has passed on; None: not yet."""
    flush: bool = False
    """True if the leaf is first to send what it keeps back."""
    names: tuple[str, ...] = ()
    """Names of the tensors."""
    heard: bool = False
    """True if the worker has a state that the shard has no copy of."""
    run_state: str | None = None
    """State of the run, as JSON."""
    placed: bool = False
    """True if the parameters are where the worker wanted them."""
    found: Place | None = None
    """Place of the server's own values, which stay unchanged until the worker reads a newer version."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT


@dataclass(frozen=True)
class State:
    """The whole state of a machine, in the tensors of these names and as JSON."""

    state: str
    names: tuple[str, ...]

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT


Sections = TypeVar("Sections", Request, Answer, Entry, State)


@dataclass(frozen=True)
class Header(Generic[Sections]):
    """The header of a message, with the number of tensors that come with it."""

    sections: Sections
    num_tensors: int = 0
    lent: tuple[Place | None, ...] = ()
    """Places of the tensors in memory that is shared; None: it is sent in the message that follows."""
    wanted: tuple[Place, ...] = ()
    """Places, in memory that the sender has lent, where it wants the tensors of the answer."""

    def encode(self) -> bytes:
        row = (self.sections, self.num_tensors, self.lent, self.wanted)
        return _CODECS[type(self.sections)].dump_json(row, exclude_defaults=True)

    @classmethod
    def decode(cls, kind: type[Sections], content: bytes) -> Self:
        """Return the header that `encode` made bytes of.

        Raises:
            TrainingError: the bytes are not a header with such sections.
        """
        try:
            return cls(*_CODECS[kind].validate_json(content))
        except (ValidationError, LookupError, TypeError) as error:
            raise TrainingError(
                f"A message between workers and servers cannot be understood ({_first_line(error)}): all processes of "
                "a run must have the same version of orchestray."
            ) from error


def _first_line(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return f"{type(error).__name__}: {error}"


_DEFAULTS = tuple((field.name, field.default) for field in fields(Changes))
_CODECS: dict[type, TypeAdapter[Any]] = {
    kind: TypeAdapter(tuple[kind, int, tuple[Place | None, ...], tuple[Place, ...]], config=_STRICT)  # type: ignore[valid-type]
    for kind in (Request, Answer, Entry, State)
}
