"""Parameter servers that agree on which of them serves which shard, and agree again when one is lost.

Source: Chilimbi et al. 2014, "Project Adam", section 3.3. There a Paxos cluster of controllers keeps the mapping of
shards to servers. It gives the primary's role by a lease, which is part of the replicated state. It moves the shards
of a failed server evenly to the others. Here the servers themselves are the nodes of the cluster.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass

from orchestray.trainers.survey.consensus.messages import Message, Value
from orchestray.trainers.survey.consensus.node import Node, Sent

LEASE_S = 0.8
"""Seconds for which a server may serve a shard; half of it is left when it is renewed."""
CLOCK_SKEW_S = 0.05
"""Seconds by which the clocks of any two servers may differ."""


@dataclass(frozen=True, slots=True)
class Grant:
    """A decision that a server serves a shard from `start_s` until `until_s`, each by the server's own clock.

    The epoch of a shard is the number of servers that it has had. A request to a server names the epoch.
    """

    shard: int
    server: int
    epoch: int
    start_s: float
    until_s: float


class ShardMap:
    """The servers of the shards, after the decisions so far: the same decisions in the same order make the same map.

    Attributes:
        grants: the grant in force, by shard.
    """

    def __init__(self, num_shards: int) -> None:
        self._num_shards = num_shards
        self.grants: dict[int, Grant] = {}

    def apply(self, decided: Grant) -> bool:
        """Take a decision; return False if an earlier one has made it void.

        A leader proposes on what it knows, and another leader may have decided since. A renewal holds for the same
        server only. A new server's grant holds if it has the next epoch, and begins when no clock is any more within
        the old grant.
        """
        now = self.grants.get(decided.shard)
        if now is None:
            holds = decided.epoch == 1
        elif decided.epoch == now.epoch:
            holds = decided.server == now.server and decided.until_s > now.until_s
        else:
            holds = decided.epoch == now.epoch + 1 and decided.start_s >= now.until_s + CLOCK_SKEW_S
        if holds:
            self.grants[decided.shard] = decided
        return holds

    def serves(self, server: int, shard: int, now_s: float) -> bool:
        """Return True if a server may serve a shard when its clock shows `now_s`."""
        grant = self.grants.get(shard)
        return grant is not None and grant.server == server and grant.start_s <= now_s < grant.until_s

    def due(self, alive: Sequence[int], under_way: Container[int], now_s: float) -> list[Grant]:
        """Return the grants that a leader should propose.

        Args:
            alive: servers that can serve.
            under_way: shards for which a grant is proposed already.
            now_s: time on the leader's clock.
        """
        load = Counter(dict.fromkeys(alive, 0))
        load.update(grant.server for grant in self.grants.values() if grant.server in load)
        found = []
        for shard in range(self._num_shards):
            if shard in under_way:
                continue
            now = self.grants.get(shard)
            if now is not None and now.server in load:
                if now.until_s - now_s < LEASE_S / 2:
                    found.append(Grant(shard, now.server, now.epoch, now.start_s, now_s + LEASE_S))
                continue
            server = min(alive, key=lambda each: (load[each], each))
            load[server] += 1
            start_s = now_s if now is None else max(now_s, now.until_s + CLOCK_SKEW_S)
            found.append(Grant(shard, server, 1 if now is None else now.epoch + 1, start_s, start_s + LEASE_S))
        return found


class Server:
    """A parameter server's part in the agreement: a node, and the map that its decisions make.

    Attributes:
        node: the node of the cluster.
        shards: the map after the decisions in `log`.
        log: the values of the slots from 0 on, as far as this server knows them without a gap.
    """

    def __init__(self, node: Node, num_shards: int) -> None:
        """
        Args:
            node: this server's node.
            num_shards: number of shards.
        """
        self.node = node
        self.shards = ShardMap(num_shards)
        self.log: list[Value] = []

    def tick(self, now_s: float) -> Sent:
        """Do what time calls for, and, as the leader, propose the grants that are due."""
        sent = self.node.tick(now_s)
        self._apply()
        if self.node.leads:
            values = [accept.value for accept in self.node.proposer.open.values()]
            under_way = {value.shard for value in values if isinstance(value, Grant)}
            for grant in self.shards.due(self.node.alive(now_s), under_way, now_s):
                if self.node.leads:
                    sent += self.node.propose(grant, now_s)
            self._apply()
        return sent

    def receive(self, sender: int, message: Message, now_s: float) -> Sent:
        """Take a message in, and return those that it calls for."""
        sent = self.node.receive(sender, message, now_s)
        self._apply()
        return sent

    def _apply(self) -> None:
        for slot in range(len(self.log), self.node.learner.first):
            value = self.node.learner.values[slot]
            self.log.append(value)
            if isinstance(value, Grant):
                self.shards.apply(value)
