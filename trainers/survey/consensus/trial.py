"""A cluster of servers in virtual time, on a network and machines that fail, watched by one who sees all disks."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from orchestray.platform.sim.virtual_time import Clock
from orchestray.trainers.survey.consensus.messages import Ballot, Message, Value, Vote
from orchestray.trainers.survey.consensus.node import PATIENCE_S, Node, Sent
from orchestray.trainers.survey.consensus.roles import Disk, majority
from orchestray.trainers.survey.consensus.shards import CLOCK_SKEW_S, Grant, Server

TICK_S = 0.1
"""Seconds between two ticks of a server."""


@dataclass(frozen=True)
class Faults:
    """Chances and rates of what goes wrong.

    Args:
        loss: chance that a message is lost.
        twice: chance that a message arrives twice.
        slow: chance that a message takes up to `slow_s` seconds, so that later ones overtake it.
        slow_s: longest time of such a message, in seconds.
        crashes_per_s: crashes a second, each of a server drawn at random, which keeps its disk.
        down_s: longest time until a crashed server starts again, in seconds.
        partitions_per_s: partitions a second, each between two groups drawn at random.
        split_s: longest time of a partition, in seconds.
    """

    loss: float = 0.0
    twice: float = 0.0
    slow: float = 0.0
    slow_s: float = 0.5
    crashes_per_s: float = 0.0
    down_s: float = 0.5
    partitions_per_s: float = 0.0
    split_s: float = 0.6


NO_FAULTS = Faults()


@dataclass(frozen=True)
class Decision:
    """A value that a majority of disks holds in one ballot: time of the first of these votes, and of the deciding one.

    Both are virtual seconds.
    """

    value: Value
    proposed_s: float
    chosen_s: float


class Watcher:
    """A witness of every vote that reaches a disk, and of every value that a server takes for chosen.

    Attributes:
        decisions: the first value chosen for each slot.
        violations: a sentence for each rule that was broken.
    """

    def __init__(self, num_servers: int) -> None:
        self.decisions: dict[int, Decision] = {}
        self.violations: list[str] = []
        self._majority = majority(num_servers)
        self._voters: dict[tuple[int, Ballot, Value], dict[int, float]] = defaultdict(dict)
        self._server_of: dict[tuple[int, int], int] = {}
        self._served: dict[int, list[tuple[int, float, float]]] = defaultdict(list)

    def vote(self, server: int, slot: int, vote: Vote, now_s: float) -> None:
        """Note a vote that is on a disk; a value with those of a majority is chosen, even if nobody knows it yet."""
        voters = self._voters[slot, vote.ballot, vote.value]
        voters.setdefault(server, now_s)
        if len(voters) < self._majority:
            return
        first = self.decisions.setdefault(slot, Decision(vote.value, min(voters.values()), now_s))
        if first.value != vote.value:
            self.violations.append(f"slot {slot} has two chosen values: {first.value} and {vote.value}")

    def learned(self, server: int, slot: int, value: Value) -> None:
        """Note a value that a server takes for chosen."""
        if slot not in self.decisions or self.decisions[slot].value != value:
            self.violations.append(f"server {server} takes {value} for chosen in slot {slot}")

    def serves(self, server: int, grant: Grant, start_s: float, until_s: float) -> None:
        """Note that a server takes itself for the only one of a shard between two times, in virtual seconds."""
        if self._server_of.setdefault((grant.shard, grant.epoch), server) != server:
            self.violations.append(f"shard {grant.shard} has two servers in epoch {grant.epoch}")
        served = self._served[grant.shard]
        if any(other != server and start_s < end and begin < until_s for other, begin, end in served):
            self.violations.append(f"shard {grant.shard} has two servers at {start_s:.3f} s")
        served.append((server, start_s, until_s))


class _WatchedDisk(Disk):
    def __init__(self, server: int, trial: Trial) -> None:
        super().__init__()
        self._server = server
        self._trial = trial

    def write_vote(self, slot: int, vote: Vote) -> None:
        super().write_vote(slot, vote)
        self._trial.watcher.vote(self._server, slot, vote, self._trial.clock.now_s)


class Trial:
    """Some servers in virtual time, the faults that befall them, and the watcher. The seed decides everything.

    Attributes:
        servers: the processes by number; None while one is down.
        watcher: the witness.
        num_messages: messages between servers, by their class, sent so far.
        num_crashes: crashes so far.
        elected: ballots that a leader had.
    """

    def __init__(
        self,
        num_servers: int,
        seed: int,
        faults: Faults = NO_FAULTS,
        *,
        num_shards: int = 3,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.clock = Clock()
        self.watcher = Watcher(num_servers)
        self.num_messages: Counter[type] = Counter()
        self.num_crashes = 0
        self.elected: set[Ballot] = set()
        self._faults = faults
        self._rng = random.Random(seed)
        self._num_shards = num_shards
        self._patience_s = patience_s
        self._disks = [_WatchedDisk(number, self) for number in range(num_servers)]
        self._ahead_s = [self._rng.uniform(0, CLOCK_SKEW_S) for _ in range(num_servers)]
        self._side: list[int] = [0] * num_servers
        self.servers: list[Server | None] = [None] * num_servers
        for number in range(num_servers):
            self.start(number)
        self._later(faults.crashes_per_s, self._crash_one)
        self._later(faults.partitions_per_s, self._split)

    # -- what a test does --------------------------------------------------------------------------------------------

    def run(self, duration_s: float) -> None:
        """Let virtual time pass."""

        def wait() -> Generator[Any, Any, None]:
            yield self.clock.sleep(duration_s)

        self.clock.start("wait", wait)
        self.clock.run()

    def crash(self, number: int) -> None:
        """End a server's process; its disk stays."""
        self.servers[number] = None
        self.num_crashes += 1

    def start(self, number: int) -> None:
        """Start a server's process with what its disk has, if it is down."""
        if self.servers[number] is None:
            clock_s, rng = self._time_of(number), random.Random(self._rng.random())
            node = Node(number, len(self.servers), self._disks[number], clock_s, rng, self._patience_s)
            server = Server(node, self._num_shards)
            self.servers[number] = server
            self._tick(number, server)

    def heal(self) -> None:
        """End all faults, and start all servers; messages under way stay so."""
        self._faults = NO_FAULTS
        self._side = [0] * len(self.servers)
        for number in range(len(self.servers)):
            self.start(number)

    def split(self, apart: set[int]) -> None:
        """Cut the network between some servers and the others."""
        self._side = [int(number in apart) for number in range(len(self.servers))]

    def serving(self, shard: int) -> list[int]:
        """Return the servers that now take themselves for the one of a shard."""
        return [
            number
            for number, server in enumerate(self.servers)
            if server is not None and server.shards.serves(number, shard, self._time_of(number))
        ]

    def decided_since(self, since_s: float) -> int:
        """Return the number of values that were first voted for after a time, and chosen."""
        return sum(decision.proposed_s > since_s for decision in self.watcher.decisions.values())

    # -- the network -------------------------------------------------------------------------------------------------

    def _send(self, sender: int, sent: Sent) -> None:
        faults, rng = self._faults, self._rng
        for receiver, message in sent:
            self.num_messages[type(message)] += 1
            if self._side[sender] != self._side[receiver] or rng.random() < faults.loss:
                continue
            for _ in range(1 + (rng.random() < faults.twice)):
                longest_s = faults.slow_s if rng.random() < faults.slow else 0.01
                self._deliver_at(self.clock.now_s + rng.uniform(0.001, longest_s), sender, receiver, message)

    def _deliver_at(self, at_s: float, sender: int, receiver: int, message: Message) -> None:
        def deliver() -> None:
            server = self.servers[receiver]
            if server is not None:
                known = len(server.log)
                self._done(receiver, server, known, server.receive(sender, message, self._time_of(receiver)))

        self.clock.at(at_s, deliver)

    def _tick(self, number: int, server: Server) -> None:
        def tick() -> None:
            if self.servers[number] is server:  # not one that has been started since
                known = len(server.log)
                self._done(number, server, known, server.tick(self._time_of(number)))
                self._tick(number, server)

        self.clock.at(self.clock.now_s + TICK_S, tick)

    def _done(self, number: int, server: Server, known: int, sent: Sent) -> None:
        """Watch the slots that a server has learned, and send what it sends."""
        if server.node.leads:
            self.elected.add(server.node.proposer.ballot)
        for slot in range(known, len(server.log)):
            value = server.log[slot]
            self.watcher.learned(number, slot, value)
            if isinstance(value, Grant) and value.server == number and server.shards.grants.get(value.shard) == value:
                start_s = max(self.clock.now_s, value.start_s - self._ahead_s[number])
                until_s = value.until_s - self._ahead_s[number]
                if start_s < until_s:
                    self.watcher.serves(number, value, start_s, until_s)
        self._send(number, sent)

    def _time_of(self, number: int) -> float:
        """Return the time on a server's clock."""
        return self.clock.now_s + self._ahead_s[number]

    # -- faults ------------------------------------------------------------------------------------------------------

    def _later(self, per_s: float, fault: Callable[[], None]) -> None:
        if per_s:
            self.clock.at(self.clock.now_s + self._rng.expovariate(per_s), fault)

    def _crash_one(self) -> None:
        faults, rng = self._faults, self._rng
        leaders = [number for number, server in enumerate(self.servers) if server is not None and server.node.leads]
        number = rng.choice(leaders) if leaders and rng.random() < 0.5 else rng.randrange(len(self.servers))
        if faults.crashes_per_s and self.servers[number] is not None:
            self.crash(number)
            back_s = self.clock.now_s + self._rng.uniform(0.0, faults.down_s)
            self.clock.at(back_s, lambda: self.start(number))
        self._later(faults.crashes_per_s, self._crash_one)

    def _split(self) -> None:
        faults, numbers = self._faults, range(len(self.servers))
        if faults.partitions_per_s:
            self.split({number for number in numbers if self._rng.random() < 0.5})
            self.clock.at(self.clock.now_s + self._rng.uniform(0.0, faults.split_s), lambda: self.split(set()))
        self._later(faults.partitions_per_s, self._split)


def drawn(num_servers: int, seed: int, *, num_shards: int = 3, patience_s: float | None = None) -> Trial:
    """Return a trial with faults that are drawn at random, from few of them to hardly any calm.

    Args:
        num_servers: number of servers.
        seed: seed of all that is drawn.
        num_shards: number of shards.
        patience_s: seconds without a leader after which a server may stand; default: drawn, some shorter than the time
            between two heartbeats, so that many stand.
    """
    rng = random.Random(seed)
    faults = Faults(
        loss=rng.choice([0.0, 0.1, 0.2]),
        twice=rng.choice([0.0, 0.1, 0.2]),
        slow=rng.choice([0.1, 0.3, 0.5]),
        slow_s=0.4,
        crashes_per_s=rng.choice([1.0, 3.0, 5.0]),
        down_s=rng.choice([0.1, 0.3, 0.5]),
        partitions_per_s=rng.choice([0.0, 0.5, 1.5]),
    )
    patience_s = rng.choice([0.05, 0.1, 0.2]) if patience_s is None else patience_s
    return Trial(num_servers, seed, faults, num_shards=num_shards, patience_s=patience_s)
