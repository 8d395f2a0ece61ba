"""Private names of Ray that this project uses, each with the reason why no public one does.

They are looked up here and nowhere else, so that a new version of Ray breaks in one place:
tests/unit/platform/cluster/test_ray_internals.py says which name is gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from importlib import import_module
from typing import Any

NAMES: Mapping[str, str] = {
    "ray._private.worker:_worker_logs_enabled": "workers' notices would be printed between our own lines",
    "ray._private.services:ConsolePopen": "Ray's servers need process groups of their own, to outlive a signal to ours",
    "ray._private.services:ProcessInfo": "the template of workers is one more process that the node ends",
    "ray._private.services:RAY_PATH": "the template runs Ray's own script of a worker",
    "ray._private.utils:get_dashboard_dependency_error": "a node without a dashboard starts a second earlier",
    "ray._private.authentication.authentication_token_setup:ensure_token_if_auth_enabled": "`ray.init` makes the token "
    "of a new cluster, and the head is started without it",
    "ray._raylet:Config": "it keeps the mode of authentication that it read first, whatever has set another since",
    "ray._private.node:Node": "a head node without the parts that a single run never uses",
    "ray._private.parameter:RayParams": "see above",
    "ray._raylet:DASHBOARD_AGENT_LISTEN_PORT_NAME": "see above: the raylet waits for ports that the agent would report",
    "ray._raylet:persist_port": "see above",
    "ray._private.state:state": "nodes that are being drained, and until when: Ray Train asks in the same way",
    "ray.tune.execution.tune_controller:TuneController._schedule_trial_save": "a scheduler has a trial save its state",
    "ray.train._internal.checkpoint_manager:_CheckpointManager.__init__": "a trial goes on from another's checkpoint",
    "ray.tune.execution.tune_controller:PlacementGroupResourceManager": "a group removed while Ray places it is lost",
    "ray.air.execution._internal.actor_manager:RayActorManager._actor_task_failed": "it ends the experiment when Ray "
    "kills a process for the memory of its node, as that error is not a RayActorError",
    "ray.train._internal.storage:_FilesystemSyncer._sync_up_command": "it empties the files of an experiment before it "
    "writes them again, and a kill in between loses trials",
    "ray.experimental.internal_kv:_internal_kv_put": "a store that outlives the processes that write to it",
    "ray.experimental.internal_kv:_internal_kv_get": "see above",
    "ray.experimental.internal_kv:_internal_kv_list": "see above",
    "ray.experimental.internal_kv:_internal_kv_del": "see above",
    "ray.serve.context:_get_global_client": "whether Serve runs, whether its proxies serve, and who has a route",
}
"""Reason for each name, as "module:attribute"."""


def find(name: str) -> Any:
    """Return what a name of `NAMES` stands for; imports Ray.

    Raises:
        AttributeError, ImportError: this version of Ray does not have it.
    """
    if name not in NAMES:
        raise KeyError(f"{name} is not listed in {__name__}, with its reason")
    module, _, attribute = name.partition(":")
    return reduce(getattr, attribute.split("."), import_module(module))


def replace(name: str, value: Any) -> None:
    """Set what a name of `NAMES` stands for; imports Ray.

    Raises:
        AttributeError, ImportError: this version of Ray does not have it.
    """
    find(name)
    module, _, attribute = name.partition(":")
    *parents, last = attribute.split(".")
    setattr(reduce(getattr, parents, import_module(module)), last, value)


def save_now(tune_controller: Any, trial: Any, result: Mapping[str, Any]) -> Any:
    """Have a running Tune trial save a checkpoint; Ray's own population-based training does it in this way.

    Args:
        tune_controller: controller that a method of a scheduler gets.
        trial: the trial.
        result: its result that the checkpoint belongs to.

    Returns:
        Tune's result with the checkpoint, or a promise of it with a method `resolve`; None if the trial is stopping.
    """
    return tune_controller._schedule_trial_save(trial, result=result)


def restore_from(trial: Any, result: Any) -> None:
    """Have a paused Tune trial go on from another's checkpoint; Ray's own population-based training does it so.

    Args:
        trial: the trial.
        result: Tune's result with the checkpoint.
    """
    trial.run_metadata.checkpoint_manager._latest_checkpoint_result = result


def staged_groups(manager: Any, request: Any = None) -> list[Any]:
    """Return the placement groups that Tune has asked Ray for, and given to no process yet.

    Args:
        manager: a `PlacementGroupResourceManager`.
        request: the resource request that they are for; None: all.
    """
    asked = manager._request_to_staged_pgs
    return [group for groups in (asked.values() if request is None else [asked[request]]) for group in groups]


def has_given_groups(manager: Any) -> bool:
    """Return True if a process has a placement group of a `PlacementGroupResourceManager`."""
    return bool(manager._acquired_pgs)
