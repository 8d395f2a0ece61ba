"""The move of replicas away from nodes that are being drained, before their machines are gone."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from orchestray.platform.cluster.draining import draining_nodes
from orchestray.platform.errors import OrchestrayError
from orchestray.trainers.driver.control import events

if TYPE_CHECKING:
    from collections.abc import Mapping

    from orchestray.platform.actors.gang import Gang
    from orchestray.platform.actors.scale_up import Growth
    from orchestray.trainers.config.settings import ReplicaSettings
    from orchestray.trainers.driver.runlog.losses import Losses
    from orchestray.trainers.driver.runlog.run_log import RunLog

_LOOK_S = 2.0
_LEAST_LEFT_S = 15.0
"""Seconds before the deadline at which a checkpoint is saved, whether new places are ready or not."""


class Evacuation:
    """A watch for drained nodes, and the move of the members that stand on them.

    Members that will take over are started elsewhere while the others train. Then all replicas stop with a checkpoint,
    and the new members take the ranks of those on the drained nodes. If there is no place in time, the checkpoint is
    saved all the same: the loss of the node costs no step before it.
    """

    def __init__(self, gang: Gang, run_log: RunLog, losses: Losses, host: str) -> None:
        """
        Args:
            gang: gang of the replicas.
            run_log: log of the run.
            losses: record of what the run has lost.
            host: import path of the host that its members build.
        """
        self._gang, self._losses, self._host = gang, losses, host
        self._writer, self._progress = run_log.writer, run_log.progress
        self._looked_s = -math.inf
        self._known: set[str] = set()
        """Nodes that were announced, or have no members."""
        self._leaving: set[str] = set()
        """Nodes whose members are still to move."""
        self._ranks: list[int] = []
        """Ranks that the members of `_growth` will take."""
        self._growth: Growth | None = None
        self._is_due = False
        """True if the replicas are to stop with a checkpoint, after which `move` is called."""

    def news(self, settings: ReplicaSettings) -> list[events.Event]:
        """Return that the replicas are to stop for a move, once they are; call this repeatedly. Never waits long.

        Args:
            settings: present settings of the run.
        """
        now_s = time.monotonic()
        cluster = self._gang.cluster
        # A Ray of our own drains nothing, and places made by others are theirs to move.
        is_fixed = cluster.owned or cluster.room is not None
        if is_fixed or self._is_due or now_s - self._looked_s < _LOOK_S:
            return []
        self._looked_s = now_s
        nodes = draining_nodes()
        if nodes.keys() - self._known:
            self._announce(nodes)
        if not self._leaving:
            return []
        self._is_due = self._is_ready(settings) or min(nodes.get(node, 0.0) for node in self._leaving) < _LEAST_LEFT_S
        return [events.MoveWanted()] if self._is_due else []

    def _announce(self, nodes: Mapping[str, float]) -> None:
        """Take note of the nodes that have just begun to be drained."""
        where = [node for _, node in self._gang.whereabouts()]
        for node in sorted(nodes.keys() - self._known):
            self._known.add(node)
            ranks = [rank for rank, at in enumerate(where) if at == node]
            if not ranks:
                continue
            self._leaving.add(node)
            left_s = None if math.isinf(nodes[node]) else round(nodes[node], 1)
            self._writer.event("node_draining", node=node, ranks=ranks, seconds_left=left_s)
            until = "" if left_s is None else f" in {left_s:.0f} s"
            self._progress.event(f"a machine leaves the cluster{until}, with workers {ranks}: they move elsewhere")

    def _is_ready(self, settings: ReplicaSettings) -> bool:
        """Return True if the members that will take over are ready, or there is no place for them."""
        ranks = [rank for rank, (_, node) in enumerate(self._gang.whereabouts()) if node in self._leaving]
        try:
            if ranks != self._ranks:
                self._cancel()
                self._ranks = ranks
                if ranks:
                    self._growth = self._gang.membership.begin_move(len(ranks), self._host, settings)
            return self._growth is None or self._growth.is_ready()
        except OrchestrayError as error:
            self._progress.event(f"there is no other place for them, so a checkpoint is saved: {error}")
            self._cancel()
            return True

    def move(self) -> None:
        """Have the new members take over, if they are there, now that all have stopped and a checkpoint is saved."""
        self._losses.begin()
        where = [node for _, node in self._gang.whereabouts()]
        is_right = self._ranks == [rank for rank, node in enumerate(where) if node in self._leaving]
        if self._growth is not None and is_right and self._has_built():
            self._gang.membership.take_over(self._ranks)
            for rank in self._ranks:
                self._losses.replaced(self._gang.shape.role, rank)
            self._growth = None
        self._cancel()
        self._leaving.clear()
        self._is_due = False

    def _has_built(self) -> bool:
        try:
            return self._growth is not None and self._growth.is_ready()
        except OrchestrayError:
            return False

    def _cancel(self) -> None:
        if self._growth is not None:
            self._growth.cancel()
        self._growth, self._ranks = None, []
