"""The choice of a gang's backend: gloo, NCCL, or gloo over pinned host memory, from what its members were given.

The GPUs that a process sees say little: Ray lets actors without a GPU see all those of their machine. A gang on CPUs, a
parameter server or a driver would make NCCL communicators and CUDA contexts there. A gang on machines with and without
GPUs would disagree. So the choice is made once, for all members, from the GPUs that Ray has assigned to them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Literal

from orchestray.platform.errors import ClusterError

BackendKind = Literal["gloo", "nccl", "over_host"]
"""Backend of a process group: gloo for tensors on CPUs; NCCL for those on GPUs, beside gloo; or gloo alone, with
tensors on GPUs copied to pinned host memory and back.
"""

NCCL_SETTINGS: Mapping[str, str] = {
    # A watchdog that handles errors ends the process of a survivor: 1 and 3 tear it down, and 2 aborts a communicator
    # while the main thread uses it. Here the driver says who is lost, and the members abort by themselves. torch's own
    # abort of a group asks for 0.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # A `wait` orders the streams and returns; the member itself waits for the device, and can be woken by an abort.
    # A blocking `wait` would instead raise after a timeout of its own, with the communicator in an unknown state.
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    # The monitor kills a process whose watchdog makes no progress for 8 minutes, as it may while a communicator is
    # aborted. The driver asks each process for a sign every few seconds, and decides with more knowledge.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # One member's error must not reach the others through the store, where they would end by it: the driver tells them.
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
}
"""Environment variables of torch's NCCL backend that recovery relies on. Those that the user has set are kept."""


@dataclass(frozen=True)
class Given:
    """The GPUs that Ray has assigned to a member of a gang.

    Args:
        gpus: number of GPUs, or a fraction of one.
        node: node of the member; empty: not known yet.
        ids: ids of its GPUs on that node; empty: not known yet.
    """

    gpus: float
    node: str = ""
    ids: tuple[str, ...] = ()


def choose_backend(members: Sequence[Given]) -> BackendKind:
    """Return the backend for a gang, the same on every member.

    Where nodes or ids are not known yet, members that may share a GPU count as sharing one.

    Raises:
        ClusterError: no backend fits them all.
    """
    with_gpus = sum(member.gpus > 0 for member in members)
    if not with_gpus:
        return "gloo"
    if with_gpus < len(members):
        raise ClusterError(
            f"{with_gpus} of {len(members)} workers have a GPU and the others have none, so no backend joins them: "
            "NCCL needs a GPU for each of them. Set resources.gpus_per_worker to 0, or take machines with a GPU for "
            "every worker."
        )
    for member in members:
        if refused := refuse_amount(member.gpus):
            raise ClusterError(f"resources.gpus_per_worker {refused}.")
    if len(members) == 1:
        return "gloo"  # nothing is ever sent, and a communicator takes memory of the GPU
    return "over_host" if _share_a_gpu(members) else "nccl"


def backend_of_stages(*, on_gpus: bool) -> BackendKind:
    """Return the backend for the workers of one replica under parameter servers.

    They meet at their servers' store, each time one of them is lost, and nobody tells them which GPUs the others have:
    some may share one. So also sums of a tensor group cross the memory of the host.

    Args:
        on_gpus: True if the workers were given GPUs.
    """
    return "over_host" if on_gpus else "gloo"


def refuse_amount(gpus: float) -> str | None:
    """Return why a worker cannot have this number of GPUs; None: it can."""
    if gpus > 1 and gpus != int(gpus):
        return f"is {gpus:g}: Ray divides one GPU, and gives several only whole; use a whole number, or less than 1"
    return None


def _share_a_gpu(members: Sequence[Given]) -> bool:
    """Return True if two members are on one GPU, or may be: NCCL refuses such a group ("Duplicate GPU detected")."""
    if all(member.node and member.ids for member in members):
        held = Counter((member.node, gpu) for member in members for gpu in member.ids)
        return max(held.values()) > 1
    nodes = Counter(member.node for member in members)
    small = [member for member in members if member.gpus <= 0.5]
    return any(not member.node or nodes[member.node] > 1 for member in small)


def device_index(ids: Sequence[str], visible: Sequence[str]) -> int:
    """Return the index of a process's first GPU among those that it sees.

    An actor sees its own GPUs only, so it is 0. The workers of Ray Train see all that those of their node have.

    Args:
        ids: ids of the GPUs that Ray has assigned to the process; empty: unknown, as outside of Ray.
        visible: entries of CUDA_VISIBLE_DEVICES; empty: all are visible, in the order of their ids.
    """
    if not ids:
        return 0
    first = min(ids, key=visible.index) if all(gpu in visible for gpu in ids) else ids[0]
    if first in visible:
        return visible.index(first)
    return int(first) if not visible and first.isdigit() else 0


def check_visible(index: int, num_visible: int, version: str) -> None:
    """Refuse to compute on a GPU that torch does not find.

    Args:
        index: index of the GPU.
        num_visible: number of GPUs that torch finds.
        version: torch's version, for the message.

    Raises:
        ClusterError: there is no such GPU.
    """
    if index < num_visible:
        return
    raise ClusterError(
        f"resources.gpus_per_worker: this worker was given a GPU, and torch {version} finds "
        f"{f'only {num_visible}' if num_visible else 'none'} on its machine. Install a torch that is built for CUDA "
        "there and check the driver with nvidia-smi, or set resources.gpus_per_worker to 0."
    )


def apply_nccl_settings(environment: MutableMapping[str, str]) -> None:
    """Set `NCCL_SETTINGS` in an environment, before the first communicator is made."""
    environment.update(nccl_settings(environment))


def nccl_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `NCCL_SETTINGS`, with the values of those that the user has set in an environment."""
    return {name: environment.get(name, value) for name, value in NCCL_SETTINGS.items()}
