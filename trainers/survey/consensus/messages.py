"""The messages of Paxos with many slots: each slot of a log gets one value."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

Value = Hashable
NO_VALUE: Value = "no value"
"""Value of a slot that a new leader fills because nobody may have proposed one for it."""


class Ballot(NamedTuple):
    """The number of a proposal. Ballots are compared by round, then by node; no two proposers ever use the same."""

    round: int
    node: int


NO_BALLOT = Ballot(0, -1)


@dataclass(frozen=True, slots=True)
class Vote:
    """A value that an acceptor has accepted for a slot, with the ballot that proposed it."""

    ballot: Ballot
    value: Value


@dataclass(frozen=True, slots=True)
class Prepare:
    """A request for promises to accept nothing below a ballot, in any slot; `first` is the first slot of interest."""

    ballot: Ballot
    first: int


@dataclass(frozen=True, slots=True)
class Promise:
    """An acceptor's promise, with its votes in slots from the first of interest."""

    ballot: Ballot
    votes: tuple[tuple[int, Vote], ...]


@dataclass(frozen=True, slots=True)
class Accept:
    """A request to accept a value for a slot."""

    ballot: Ballot
    slot: int
    value: Value


@dataclass(frozen=True, slots=True)
class Accepted:
    """An acceptor's vote."""

    ballot: Ballot
    slot: int
    value: Value


@dataclass(frozen=True, slots=True)
class Refused:
    """An acceptor's answer to a ballot below the one that it has promised."""

    promised: Ballot


@dataclass(frozen=True, slots=True)
class Chosen:
    """A value that a majority has accepted for a slot."""

    slot: int
    value: Value


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A leader's sign of life."""

    ballot: Ballot


@dataclass(frozen=True, slots=True)
class Alive:
    """A node's answer to a heartbeat; `first` is the first slot of which it does not know the value."""

    first: int


Message = Prepare | Promise | Accept | Accepted | Refused | Chosen | Heartbeat | Alive
