"""The move of a run's processes away from nodes that are being drained, before their machines are gone."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from orchestray.platform.cluster.draining import draining_nodes
from orchestray.platform.errors import ClusterError, OrchestrayError
from orchestray.trainers.driver.control import events

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from orchestray.platform.actors.gang import Gang
    from orchestray.platform.actors.scale_up import Growth
    from orchestray.trainers.config.settings import ReplicaSettings
    from orchestray.trainers.driver.runlog.losses import Losses
    from orchestray.trainers.driver.runlog.run_log import RunLog

_LOOK_S = 2.0
_LEAST_LEFT_S = 15.0
"""Seconds before the deadline at which a checkpoint is saved, whether new places are ready or not."""


class DrainWatch:
    """A watch for nodes that are being drained, each of which it reports once."""

    def __init__(
        self, find: Callable[[], Mapping[str, float]] = draining_nodes, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """
        Args:
            find: returns the seconds that each drained node has left, by its id.
            clock: returns seconds.
        """
        self._find, self._clock = find, clock
        self._looked_s = -math.inf
        self._known: set[str] = set()
        """Nodes that were reported."""
        self.left_s: Mapping[str, float] = {}
        """Seconds that each drained node has left, as of the last look; infinity if it has no deadline."""

    def look(self) -> list[str] | None:
        """Return the ids of the nodes that have just begun to be drained; None if it is too early to look again."""
        now_s = self._clock()
        if now_s - self._looked_s < _LOOK_S:
            return None
        self._looked_s = now_s
        self.left_s = self._find()
        new = sorted(self.left_s.keys() - self._known)
        self._known.update(new)
        return new

    def announce(self, run_log: RunLog, node: str, ranks: Mapping[str, Sequence[int]]) -> None:
        """Record that a node with processes of the run is drained.

        Args:
            run_log: log of the run.
            node: id of the node.
            ranks: ranks of the processes there, by role.
        """
        left_s = None if math.isinf(self.left_s[node]) else round(self.left_s[node], 1)
        for role, its in ranks.items():
            run_log.writer.event("node_draining", node=node, role=role, ranks=list(its), seconds_left=left_s)
        until = "" if left_s is None else f" in {left_s:.0f} s"
        those = ", ".join(f"{role.replace('_', ' ')}s {list(its)}" for role, its in ranks.items())
        run_log.progress.event(f"a machine leaves the cluster{until}, with {those}: they move elsewhere")


class Evacuation:
    """A watch for drained nodes, and the move of the members that stand on them.

    Members that will take over are started elsewhere while the others train. Then the run stops with a checkpoint, and
    the new members take the ranks of those on the drained nodes. If there is no place in time, the checkpoint is saved
    all the same: the loss of the node costs no step before it.
    """

    def __init__(
        self,
        hosts: Sequence[tuple[Gang, str]],
        run_log: RunLog,
        losses: Losses,
        *,
        stay_together: bool = False,
        watch: DrainWatch | None = None,
    ) -> None:
        """
        Args:
            hosts: gangs of the run, and the import path of the host that the members of each build.
            run_log: log of the run.
            losses: record of what the run has lost.
            stay_together: True if the members share a node's memory, so that none can move alone.
            watch: watch for the drained nodes; default: for those of the cluster.
        """
        self._run_log, self._losses, self._stay_together = run_log, losses, stay_together
        self._watch = watch or DrainWatch()
        self._moves = [_Move(gang, host) for gang, host in hosts]
        self._cluster = hosts[0][0].cluster
        self._leaving: set[str] = set()
        """Nodes whose members are still to move."""
        self._is_due = False
        """True if the run is to stop with a checkpoint, after which `move` is called."""

    def news(self, settings: ReplicaSettings) -> list[events.Event]:
        """Return that the run is to stop for a move, once it is; call this repeatedly. Never waits long.

        Args:
            settings: present settings of the run.
        """
        # A Ray of our own drains nothing, and places made by others are theirs to move.
        is_fixed = self._cluster.owned or self._cluster.room is not None
        if is_fixed or self._is_due or (new := self._watch.look()) is None:
            return []
        for node in new:
            ranks = {move.gang.shape.role: ranks for move in self._moves if (ranks := move.ranks_on({node}))}
            if ranks:
                self._leaving.add(node)
                self._watch.announce(self._run_log, node, ranks)
        if not self._leaving:
            return []
        left_s = min(self._watch.left_s.get(node, 0.0) for node in self._leaving)
        self._is_due = self._is_ready(settings) or left_s < _LEAST_LEFT_S
        return [events.MoveWanted()] if self._is_due else []

    def _is_ready(self, settings: ReplicaSettings) -> bool:
        """Return True if the members that will take over are ready, or there is no place for them."""
        try:
            if self._stay_together:
                raise ClusterError("they share memory, so that none can move alone.")
            ready = [move.is_ready(self._leaving, settings) for move in self._moves]  # each is begun
            return all(ready)
        except OrchestrayError as error:
            self._run_log.progress.event(f"there is no other place for them, so a checkpoint is saved: {error}")
            self._cancel()
            return True

    def move(self) -> None:
        """Have the new members take over, if they are there, now that all have stopped and a checkpoint is saved."""
        self._losses.begin()
        for move in self._moves:
            for rank in move.take_over(self._leaving):
                self._losses.replaced(move.gang.shape.role, rank)
        self._cancel()
        self._leaving.clear()
        self._is_due = False

    def _cancel(self) -> None:
        for move in self._moves:
            move.cancel()


class _Move:
    """The members of one gang that are to take over elsewhere."""

    def __init__(self, gang: Gang, host: str) -> None:
        self.gang, self._host = gang, host
        self._ranks: list[int] = []
        """Ranks that the members of `_growth` will take."""
        self._growth: Growth | None = None

    def ranks_on(self, nodes: set[str]) -> list[int]:
        """Return the ranks of the members that are on these nodes now."""
        return [rank for rank, (_, node) in enumerate(self.gang.whereabouts()) if node in nodes]

    def is_ready(self, leaving: set[str], settings: ReplicaSettings) -> bool:
        """Begin the move if that is not done, and return True if all that will take over are ready.

        Args:
            leaving: nodes whose members are to move.
            settings: present settings of the run.

        Raises:
            OrchestrayError: there is no place for them, or they cannot be built.
        """
        ranks = self.ranks_on(leaving)
        if ranks != self._ranks:
            self.cancel()
            self._ranks = ranks
            if ranks:
                self._growth = self.gang.membership.begin_move(len(ranks), self._host, settings)
        return self._growth is None or self._growth.is_ready()

    def take_over(self, leaving: set[str]) -> list[int]:
        """Have the new members take over if they are ready; return their ranks."""
        if self._growth is None or self._ranks != self.ranks_on(leaving) or not self._has_built(self._growth):
            return []
        self.gang.membership.take_over(self._ranks)
        self._growth = None
        return self._ranks

    def _has_built(self, growth: Growth) -> bool:
        try:
            return growth.is_ready()
        except OrchestrayError:
            return False

    def cancel(self) -> None:
        """End the members that were to take over."""
        if self._growth is not None:
            self._growth.cancel()
        self._growth, self._ranks = None, []
