"""The controllers of a search by policy gradients as processes, and the parameter servers that they push to."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from orchestray.platform.errors import OrchestrayError
from orchestray.search.engine.session import SearchError

if TYPE_CHECKING:
    from torch import Tensor

    from orchestray.platform.cluster.cluster import Cluster
    from orchestray.search.methods.base import Method
    from orchestray.search.methods.controllers.hosts import Lesson
    from orchestray.search.methods.controllers.reinforce import Controller, Reinforce
    from orchestray.search.methods.controllers.server import Layout, Learned
    from orchestray.search.spaces.architectures.choices import Decision

_HOSTS = "orchestray.search.methods.controllers.hosts"


class ControllerTeam:
    """Two gangs: a process for each shard, and one for each controller.

    They reserve no CPU: an update takes milliseconds, between trials. A controller pushes when the method has the
    scores of its batch. So the order of the updates, and with it the search, does not depend on clocks.
    """

    def __init__(self, cluster: Cluster, method: Reinforce) -> None:
        """Start the processes with the state that the method has.

        Args:
            cluster: cluster of the search.
            method: method whose controllers they are.

        Raises:
            OrchestrayError: they could not be started.
        """
        from orchestray.platform.actors.gang import Gang  # imports Ray, which reads its token on import
        from orchestray.platform.actors.placement import Shape

        self._method = method
        num_controllers, num_shards = len(method.replicas), method.server.layout.num_shards
        self._num_meetings = 0
        with contextlib.ExitStack() as started:
            self._servers = Gang(cluster, Shape("controller_server", num_shards, cpus_per_member=0.0))
            started.callback(self._servers.close)
            self._controllers = Gang(cluster, Shape("controller", num_controllers, cpus_per_member=0.0))
            started.callback(self._controllers.close)
            self._servers.host(f"{_HOSTS}:ServerHost")
            self._controllers.host(f"{_HOSTS}:ControllerHost", *method.of_controllers)
            self._begin(method.server.state(), method.replicas)
            self._ends = started.pop_all()

    def learn(
        self, replica: Controller, sequences: Sequence[Sequence[Decision]], advantages: Sequence[float]
    ) -> tuple[Sequence[int], Sequence[int], Mapping[str, Tensor]]:
        """Have a controller push the gradient of its batch.

        Args:
            replica: controller, with its policy and the number of its updates so far.
            sequences: the answers of its batch.
            advantages: reward minus baseline of each.

        Returns:
            Of each shard the staleness of the push and the version fetched, and what was learned by parameter.

        Raises:
            SearchError: a process is lost.
        """
        names = replica.policy.vocabulary.names
        arguments = (names, sequences, advantages, replica.updates + 1)
        try:
            replica.policy.grow()
            if not self._layout.holds(replica.policy.parameters):
                self._make_room(replica.policy.parameters)
            call = self._controllers.call_one(replica.index, "learn", *arguments)
            lesson: Lesson = self._controllers.gather_one(call, replica.index)
        except OrchestrayError as error:
            raise SearchError(
                f"The search cannot go on: a controller, or a server of its parameters, is lost ({error}). Go on with "
                "--resume: they start with what they had learned."
            ) from error
        return lesson.staleness, lesson.versions, self._layout.joined(lesson.parts)

    def describe(self) -> dict[str, Any]:
        """Return what `result.json` says of them, and the servers' `parts`."""
        usage = self._servers.gather(self._servers.call("usage"))
        controllers = {
            "processes": self._controllers.gather(self._controllers.call("identify")),
            "servers": [each["pid"] for each in usage],
            "versions": [each["version"] for each in usage],
            "updates": [replica.updates for replica in self._method.replicas],
            "max_staleness": max(self._method.staleness, default=0),
            "bytes": sum(each["bytes"] for each in usage),
        }
        return {"controllers": controllers, "parts": sorted({part for each in usage for part in each["parts"]})}

    def close(self) -> None:
        """End the processes."""
        self._ends.close()

    def _make_room(self, parameters: Mapping[str, Tensor]) -> None:
        """Have the servers begin again with room for more options."""
        from orchestray.search.methods.controllers.server import Layout, Learned

        found = self._servers.gather(self._servers.call("snapshot"))
        state = Learned.of(self._layout, [version for version, _ in found], [tensors for _, tensors in found])
        self._begin(state.in_layout(Layout.of(parameters, self._layout.num_shards)), self._method.replicas)

    def _begin(self, state: Learned, replicas: Sequence[Controller]) -> None:
        """Have all servers serve a state, and all controllers connect to them."""
        from orchestray.trainers.ps.protocol.address import Address

        self._layout: Layout = state.layout
        servers, controllers = self._servers, self._controllers
        nodes, rate = servers.nodes(), self._method.server.learning_rate
        begun = [servers.call_one(rank, "begin", rank, node, state, rate) for rank, node in enumerate(nodes)]
        ports, calls = servers.gather(begun), []
        for replica in replicas:
            self._num_meetings += 1
            name = f"controller-{replica.index}-{self._num_meetings}"
            for rank in range(len(nodes)):
                servers.control_one(rank, "accept", replica.index, name)
            addresses = [Address(node, port, name) for node, port in zip(nodes, ports, strict=True)]
            learned = state.layout.joined(state.layout.cut(replica.learned))
            arguments = (replica.index, state.layout, addresses, replica.versions, learned)
            calls.append(controllers.call_one(replica.index, "connect", *arguments))
        controllers.gather(calls)


@contextlib.contextmanager
def controllers_on(cluster: Cluster, method: Method) -> Iterator[ControllerTeam | None]:
    """Have the controllers of a method in processes of a cluster, if it has several, or several shards."""
    from orchestray.search.methods.controllers.reinforce import Reinforce

    if not (isinstance(method, Reinforce) and method.is_distributed):
        yield None
        return
    team = ControllerTeam(cluster, method)
    try:
        method.work_with(team.learn)
        yield team
    finally:
        method.work_with(None)
        team.close()
