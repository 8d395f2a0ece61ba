"""The resource manager through which Tune's controller requests resources and gets processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.air.execution.resources import AcquiredResources, ResourceManager, ResourceRequest
from ray.air.execution.resources.fixed import FixedResourceManager
from ray.air.execution.resources.placement_group import PlacementGroupResourceManager

from orchestray.platform.actors.placement import settle

if TYPE_CHECKING:
    from orchestray.search.engine.processes import Processes


class _Start:
    """A stand-in for the actor class with its resources that Tune expects."""

    def __init__(self, processes: Processes, placed: Any) -> None:
        self._processes, self._placed = processes, placed

    def remote(self, config: dict[str, Any], **_: Any) -> Any:
        return self._processes.take(self._placed, config["rules"], config["order"])


@dataclass
class _Acquired(AcquiredResources):
    inner: AcquiredResources
    processes: Processes

    def annotate_remote_entities(self, entities: list[Any]) -> list[Any]:
        return [_Start(self.processes, placed) for placed in self.inner.annotate_remote_entities(entities)]


class SettledPlacementGroups(PlacementGroupResourceManager):
    """Ray's placement group manager, which here waits until it is safe to remove a group just requested."""

    def cancel_resource_request(self, resource_request: ResourceRequest) -> None:
        settle(self._request_to_staged_pgs[resource_request])
        super().cancel_resource_request(resource_request)

    def clear(self) -> None:
        if ray.is_initialized():
            settle(group for staged in self._request_to_staged_pgs.values() for group in staged)
        super().clear()  # type: ignore[no-untyped-call]  # Ray has no types there


class StartingResources(ResourceManager):
    """A resource manager that tracks the resources of trials and has `Processes` start them."""

    def __init__(self, processes: Processes, total: dict[str, float] | None) -> None:
        """
        Args:
            processes: starter of the processes.
            total: all available resources; None: each request gets a placement group.
        """
        self._processes = processes
        made = SettledPlacementGroups() if total is None else FixedResourceManager(dict(total))
        self._inner: ResourceManager = made

    def request_resources(self, resource_request: ResourceRequest) -> None:
        self._inner.request_resources(resource_request)

    def cancel_resource_request(self, resource_request: ResourceRequest) -> None:
        self._inner.cancel_resource_request(resource_request)

    def has_resources_ready(self, resource_request: ResourceRequest) -> bool:
        return bool(self._inner.has_resources_ready(resource_request))

    def acquire_resources(self, resource_request: ResourceRequest) -> AcquiredResources | None:
        inner = self._inner.acquire_resources(resource_request)
        return None if inner is None else _Acquired(resource_request, inner, self._processes)

    def free_resources(self, acquired_resource: AcquiredResources) -> None:
        assert isinstance(acquired_resource, _Acquired)
        self._inner.free_resources(acquired_resource.inner)

    def get_resource_futures(self) -> list[Any]:
        return list(self._inner.get_resource_futures())

    def update_state(self) -> None:
        self._inner.update_state()

    def clear(self) -> None:
        self._inner.clear()
