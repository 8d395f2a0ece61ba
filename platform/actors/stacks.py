"""The Python stacks of the processes of a gang, each read on its own node."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestray.platform.process.stacks import read_stacks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestray.platform.actors.member import Identity

_REMOTE_TIMEOUT_S = 20.0
"""Time that another node has to start a process and to read."""


def stacks_of(processes: Sequence[Identity], *, kill: bool = False) -> list[str]:
    """Return the stacks of all threads of each process as text; of one that cannot be read, a sentence that says why.

    Each is read on its own node, by a task there where that is not this one. Takes at most 20 s for all together.

    Args:
        processes: workers of Ray.
        kill: True to kill each after that. Ray asks a process to end before it kills it, and a stopped one never
            answers: its place would be free only 5 s later.
    """
    here = ray.util.get_node_ip_address()
    references = [None if process.node == here else _begin_remote(process, kill=kill) for process in processes]
    texts = {index: read_stacks(one.pid, kill=kill) for index, one in enumerate(processes) if references[index] is None}
    asked = {reference: index for index, reference in enumerate(references) if reference is not None}
    ready, late = ray.wait(list(asked), num_returns=len(asked), timeout=_REMOTE_TIMEOUT_S) if asked else ([], [])
    for reference in ready:
        try:
            texts[asked[reference]] = ray.get(reference)
        except RayError as error:
            texts[asked[reference]] = f"The stacks could not be read: {str(error).strip().splitlines()[-1]}\n"
    for reference in late:
        texts[asked[reference]] = f"The stacks could not be read: its node gave no answer in {_REMOTE_TIMEOUT_S:g} s.\n"
    return [texts[index] for index in range(len(processes))]


def _begin_remote(process: Identity, *, kill: bool) -> Any:
    """Start to read a process on its node; return the Ray reference of the text."""
    nodes = {node["NodeManagerAddress"]: node["NodeID"] for node in ray.nodes() if node["Alive"]}
    read: Any = ray.remote(read_stacks)
    there = NodeAffinitySchedulingStrategy(nodes.get(process.node, "0" * 56), soft=False)
    return read.options(num_cpus=0, max_retries=0, scheduling_strategy=there).remote(process.pid, kill=kill)
