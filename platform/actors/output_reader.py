"""A reader of what the processes of a run print, on this machine and on others."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestray.platform.process.output import read_output

if TYPE_CHECKING:
    from collections.abc import Mapping

_WAIT_S = 5.0
"""Longest wait of a reader on another node for something new."""
_LOOK_S = 0.25
_LAST_WAIT_S = 2.0
"""Longest wait for other nodes at the end."""


class NodeReader:
    """A reader on another node: an actor without CPUs, which answers when a file there has grown."""

    def read(self, offsets: Mapping[str, int], wait_s: float) -> dict[str, bytes]:
        """Return what the files have from these offsets on; wait until there is anything.

        Args:
            offsets: offset in bytes, by path.
            wait_s: longest wait.
        """
        until_s = time.monotonic() + wait_s
        while True:
            found = {path: more for path, offset in offsets.items() if (more := read_output(path, offset))}
            if found or time.monotonic() >= until_s:
                return found
            time.sleep(_LOOK_S)


class OutputReader:
    """A reader of growing files of several nodes. Files of this machine are read directly."""

    def __init__(self) -> None:
        self._offsets: dict[tuple[str, str], int] = {}
        """Offset up to which each file is read, by node and path."""
        self._readers: dict[str, Any] = {}
        """Actor of each other node."""
        self._asked: dict[str, Any] = {}
        """Ray reference of each actor's answer that is to come."""

    def follow(self, node: str, path: str, offset: int = 0) -> None:
        """Read a file from an offset on, unless it is read already."""
        self._offsets.setdefault((node, path), offset)

    def read(self) -> dict[tuple[str, str], bytes]:
        """Return what is new in each file, by node and path; do not wait for other nodes."""
        return self._taken(_WAIT_S, patience_s=0.0)

    def read_last(self) -> dict[tuple[str, str], bytes]:
        """Return what is new in each file; wait for other nodes for up to 2 s."""
        found = self._taken(0.0, patience_s=_LAST_WAIT_S)
        for key, more in self._taken(0.0, patience_s=_LAST_WAIT_S).items():
            found[key] = found.get(key, b"") + more
        return found

    def close(self) -> None:
        """End the readers on other nodes."""
        for reader in self._readers.values():
            ray.kill(reader)
        self._readers.clear()
        self._asked.clear()

    def _taken(self, wait_s: float, patience_s: float) -> dict[tuple[str, str], bytes]:
        found: dict[tuple[str, str], bytes] = {}
        elsewhere: dict[str, dict[str, int]] = {}
        for (node, path), offset in self._offsets.items():
            if Path(path).exists():
                if more := read_output(path, offset):
                    found[node, path] = more
            else:
                elsewhere.setdefault(node, {})[path] = offset
        for node, offsets in elsewhere.items():
            found |= {(node, path): more for path, more in self._ask(node, offsets, wait_s, patience_s).items()}
        for key, more in found.items():
            self._offsets[key] += len(more)
        return found

    def _ask(self, node: str, offsets: Mapping[str, int], wait_s: float, patience_s: float) -> dict[str, bytes]:
        """Return the answer of the reader on a node, if it has come, and ask it again."""
        try:
            if node not in self._readers:
                ids = {each["NodeManagerAddress"]: each["NodeID"] for each in ray.nodes() if each["Alive"]}
                if node not in ids:  # it is gone, with its files
                    for path in offsets:
                        del self._offsets[node, path]
                    return {}
                self._readers[node] = _start(ids[node])
            asked = self._asked.pop(node, None) or self._readers[node].read.remote(offsets, wait_s)
            if not ray.wait([asked], timeout=patience_s)[0]:
                self._asked[node] = asked
                return {}
            answer: dict[str, bytes] = ray.get(asked)
        except RayError:  # the reader has died, perhaps with its node
            self._readers.pop(node, None)
            return {}
        return answer


def _start(node_id: str) -> Any:
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    reader: Any = ray.remote(NodeReader)
    return reader.options(num_cpus=0, max_restarts=0, scheduling_strategy=there).remote()
