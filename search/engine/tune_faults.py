"""Four faults of Ray Tune 2.60, and their repair in this process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.fs
import ray
from ray.air.execution.resources import ResourceRequest
from ray.air.execution.resources.placement_group import PlacementGroupResourceManager
from ray.exceptions import RayActorError, RayError, RayTaskError

from orchestray.platform.actors.placement import settle
from orchestray.platform.cluster import ray_internals
from orchestray.platform.errors import StorageError
from orchestray.platform.run.files import write_atomic

_TASK_FAILED = "ray.air.execution._internal.actor_manager:RayActorManager._actor_task_failed"
_GROUPS = "ray.tune.execution.tune_controller:PlacementGroupResourceManager"
_STORE = "ray.train._internal.storage:_FilesystemSyncer._sync_up_command"


class _OfThread(threading.local):
    """The experiment of a search in a thread."""

    is_search = False
    """True within `groups_of_experiment`."""
    manager: SettledPlacementGroups | None = None
    """Manager of its placement groups; None before its first request."""

    def current(self) -> SettledPlacementGroups | None:
        """Return the manager, which may have come after it was last set to None."""
        return self.manager


_of_thread = _OfThread()


class SettledPlacementGroups(PlacementGroupResourceManager):
    """Ray's manager of placement groups, which here waits until it is safe to remove a group just requested."""

    @property
    def has_given(self) -> bool:
        """True if a process has the resources of a group."""
        return ray_internals.has_given_groups(self)

    def request_resources(self, resource_request: ResourceRequest) -> None:
        # Not when it is made: Ray makes a manager again when it is cleared, even one that is garbage.
        if _of_thread.is_search:
            _of_thread.manager = self
        super().request_resources(resource_request)

    def cancel_resource_request(self, resource_request: ResourceRequest) -> None:
        settle(ray_internals.staged_groups(self, resource_request))
        super().cancel_resource_request(resource_request)

    def clear(self) -> None:
        if ray.is_initialized():
            settle(ray_internals.staged_groups(self))
        super().clear()  # type: ignore[no-untyped-call]  # Ray has no types there


@contextlib.contextmanager
def groups_of_experiment() -> Iterator[None]:
    """Remove the placement groups of the experiment in this thread if it ends by Ctrl-C, and thus its processes.

    Tune does so after an `Exception` only. In a notebook Ray goes on: the processes would train on for an experiment
    that is gone, and hold the resources that its resumption waits for.
    """
    before = _of_thread.is_search, _of_thread.manager
    _of_thread.is_search, _of_thread.manager = True, None
    try:
        yield
    except BaseException:
        if (manager := _of_thread.current()) is not None:
            with contextlib.suppress(Exception):  # Ray may be gone, and what is raised says more
                manager.clear()
        raise
    finally:
        _of_thread.is_search, _of_thread.manager = before


def has_place() -> bool:
    """Return True if a process of the experiment in this thread has its resources, even if it is still starting."""
    manager = _of_thread.manager
    return manager is not None and manager.has_given


def mend() -> None:
    """Have Tune give back all placement groups, take the loss of any process for that of a trial, and keep its files.

    Ray never frees a group that is removed while its bundles are prepared. When Ray kills a process because its machine
    is out of memory, Tune raises a RuntimeError. It ends the whole experiment. Tune empties the files of an experiment
    before it writes them again. If it is killed then, `Tuner.restore` logs an error and leaves trials out.
    """
    inner = ray_internals.find(_TASK_FAILED)
    if getattr(inner, "is_mended", False):
        return

    def failed(self: Any, tracked_actor_task: Any, exception: Exception) -> Any:
        if isinstance(exception, RayError) and not isinstance(exception, RayActorError | RayTaskError):
            exception = RayActorError(error_msg=str(exception))
        return inner(self, tracked_actor_task, exception)

    failed.is_mended = True  # type: ignore[attr-defined]
    ray_internals.replace(_TASK_FAILED, failed)
    ray_internals.replace(_GROUPS, SettledPlacementGroups)
    ray_internals.replace(_STORE, _storing_whole(ray_internals.find(_STORE)))


def _storing_whole(inner: Callable[..., Any]) -> Callable[..., Any]:
    """Return Tune's choice of what a thread does to store a folder, which here replaces whole files on a local disk."""

    def choose(self: Any, local_path: str, uri: str, exclude: list[str] | None = None) -> Any:
        folder, is_local = Path(local_path), isinstance(self.storage_filesystem, pyarrow.fs.LocalFileSystem)
        if exclude or not is_local or not folder.is_dir():
            return inner(self, local_path, uri, exclude)
        try:  # its state at once, which Tune writes in this thread, and again while the other one stores the rest
            _replace(folder, Path(uri), [file for file in folder.iterdir() if file.is_file()])
        except (StorageError, OSError):
            return inner(self, local_path, uri, exclude)  # whose thread tells
        return _store_trials, {"folder": folder, "stored": Path(uri)}

    return choose


def _store_trials(folder: Path, stored: Path) -> None:
    _replace(folder, stored, [file for file in folder.glob("*/**/*") if file.is_file()])


def _replace(folder: Path, stored: Path, files: Iterable[Path]) -> None:
    """Replace the stored files by those of a folder, each as a whole."""
    for file in files:
        path = stored / file.relative_to(folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, file.read_bytes(), sync=False)
