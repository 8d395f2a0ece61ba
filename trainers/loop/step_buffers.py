"""A model's buffers around a step: a failed step leaves none changed, and replicas end it with equal ones.

Batch normalisation's running statistics have a setting of their own, `train.batch_norm`.
"""

from __future__ import annotations

import copy
import zlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from orchestray.platform.comm import objects
from orchestray.platform.errors import TrainingError
from orchestray.platform.run.tensor_file import as_bytes
from orchestray.trainers.core.batch_norm import agreed_statistics, average_buffers
from orchestray.trainers.core.buffer_kinds import kind_of, places_of, set_values
from orchestray.trainers.core.buffers import BufferCopies

if TYPE_CHECKING:
    from collections.abc import Callable

    from orchestray.platform.comm.collective import Collective
    from orchestray.trainers.config.settings import ReplicaSettings

_SHOWN = 5


class StepBuffers:
    """The buffers of the model on one worker, from one connection of the workers to the next."""

    def __init__(
        self,
        model: nn.Module,
        settings: ReplicaSettings,
        *,
        world: Collective,
        replicas: Collective,
        warn: Callable[[str], None],
    ) -> None:
        """
        Args:
            model: part of the model on this worker.
            settings: settings of the run.
            world: all workers.
            replicas: the workers that hold the same part of the model.
            warn: called with a text for the user, on rank 0 once.
        """
        self._model, self._world, self._replicas, self._warn = model, world, replicas, warn
        self._policy, self._batch_norm = settings.buffers, settings.batch_norm
        self._rolls_back = settings.is_replicated and world.size > 1
        self._agrees = replicas.size > 1 and not settings.diverges
        self._keeps_memory = settings.diverges
        self._copies = BufferCopies(model)
        self._with_extra_state = [
            m for m in model.modules() if type(m).get_extra_state is not nn.Module.get_extra_state
        ]
        self._extra_states: list[Any] = []
        self._has_warned = False

    def begin(self) -> None:
        """Note the buffers before a step."""
        if self._rolls_back or self._agrees or self._keeps_memory:
            self._copies.take()
        if self._rolls_back:
            self._extra_states = [copy.deepcopy(module.get_extra_state()) for module in self._with_extra_state]

    def roll_back(self) -> None:
        """Put back what the model had when the step began."""
        if self._rolls_back:
            self._copies.put_back()
            for module, state in zip(self._with_extra_state, self._extra_states, strict=True):
                module.set_extra_state(state)

    def keep_memory(self) -> None:
        """Move what the step has assigned to a buffer into the memory that the buffer had, which the scheme averages.

        Raises:
            TrainingError: a buffer has another shape, which replicas that differ cannot average.
        """
        if self._keeps_memory and (name := self._copies.move_back()):
            raise TrainingError(
                f"The buffer {self._name_of(*name)!r} has got another shape or has come anew in a step, and replicas "
                "with weights of their own average buffers of fixed shapes. Give it its full size in build_model, or "
                "use strategy.exchange.type: allreduce."
            )

    # -- agreement -----------------------------------------------------------------------------------------------------

    def apart(self) -> float:
        """Return a number whose sum over all workers is 0 if the step has left each replica with the same buffers.

        The sum of different buffers is 0 in one of 2**32 cases.
        """
        if not self._agrees:
            return 0.0
        checksum = 0
        for number, module, name in self._changed():
            tensor = module._buffers[name]
            assert tensor is not None
            checksum = zlib.crc32(f"{number} {name} {tensor.dtype} {list(tensor.shape)}".encode(), checksum)
            checksum = _checksum(tensor, checksum)
        others = self._replicas.size - 1
        return float(checksum * others if self._replicas.rank == 0 else -checksum)

    @torch.no_grad()
    def agree(self, num_samples: int, batch_samples: int) -> None:
        """Make the replicas' buffers equal. All workers call, where the sum of `apart` is not 0.

        Args:
            num_samples: number of samples this worker's buffers come from.
            batch_samples: sum of `num_samples` over the replicas, above 0.

        Raises:
            TrainingError: `train.buffers` is `error`, and the buffers differ.
            PeerLostError: another worker is gone.
        """
        changed = {(module, leaf) for _, module, leaf in self._changed()}
        present = self._present()
        own = {
            name: [*kind_of(module, leaf, tensor), _checksum(tensor) if (module, leaf) in changed else None]
            for name, (module, leaf, tensor) in present.items()
        }
        rows = objects.gather_json(self._replicas, own)
        apart = [
            name for name in dict.fromkeys(n for row in rows for n in row) if _differs([r.get(name) for r in rows])
        ]
        self._tell(apart)
        alike = [name for name in apart if all(name in row and row[name][:2] == rows[0][name][:2] for row in rows)]
        averaged = [] if self._policy == "broadcast" else alike
        average_buffers([present[name][2] for name in averaged], self._replicas, num_samples, batch_samples)
        self._take_from_first([name for name in apart if name not in averaged], rows, present)

    def _take_from_first(self, names: list[str], rows: list[Any], present: dict[str, Any]) -> None:
        """Take buffers from the first replica that has them."""
        by_source: dict[int, list[str]] = {}
        for name in names:
            by_source.setdefault(next(rank for rank, row in enumerate(rows) if name in row), []).append(name)
        for source, taken in by_source.items():
            mine = self._replicas.rank == source
            sent = {name: present[name][2] for name in taken} if mine else None
            received = objects.share_tensors(self._replicas, sent, source)
            if not mine:
                for name, tensor in received.items():
                    set_values(self._model, {name: tensor}, is_saved=rows[source][name][2])

    def _tell(self, apart: list[str]) -> None:
        """Warn of buffers that differ, once, or raise."""
        if self._policy not in (None, "error") or self._has_warned:
            return
        if self._world is not self._replicas:
            told = objects.gather_json(self._world, apart)
            apart = list(dict.fromkeys(name for names in told for name in names))
        if not apart:
            return
        shown = ", ".join(map(repr, apart[:_SHOWN])) + (f" and {len(apart) - _SHOWN} more" if apart[_SHOWN:] else "")
        if self._policy == "error":
            raise TrainingError(
                f"The buffers {shown} depend on the samples of a worker's share and differ between the replicas, and "
                "train.buffers: error ends the run. Use average (their mean, weighted by samples) or broadcast (those "
                "of the first replica), or compute them from no sample."
            )
        self._has_warned = True
        self._warn(
            f"the buffers {shown} depend on the samples of a worker's share. After each step the replicas take their "
            "mean, weighted by samples; of whole numbers the largest; of different shapes the first replica's. That is "
            "the result of one process for means over samples, not for sums, extremes or queues. Say "
            "train.buffers: average if it is right, broadcast for those of the first replica, or error."
        )

    def _changed(self) -> list[tuple[int, nn.Module, str]]:
        """Return the buffers that the step has changed, but not those on which batch normalisation agrees."""
        return self._copies.changed(lambda module: agreed_statistics(module, self._batch_norm))

    def _present(self) -> dict[str, tuple[nn.Module, str, Tensor]]:
        """Return module, name there and tensor of each buffer by its name, without those of batch normalisation."""
        return {
            name: (module, leaf, tensor)
            for name, (module, leaf, tensor) in places_of(self._model).items()
            if leaf not in agreed_statistics(module, self._batch_norm) and tensor.layout == torch.strided
        }

    def _name_of(self, owner: nn.Module, leaf: str) -> str:
        return next(name for name, place in places_of(self._model).items() if place[:2] == (owner, leaf))


def _checksum(tensor: Tensor, start: int = 0) -> int:
    # A copy: memory that NumPy has seen cannot be resized, which a module may do.
    return zlib.crc32(as_bytes(tensor.detach().to("cpu", copy=True)).data, start)


def _differs(values: list[Any]) -> bool:
    return any(value != values[0] for value in values)
