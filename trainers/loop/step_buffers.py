"""A model's buffers around a step: a failed step leaves none changed, and replicas end it with equal ones.

Batch normalisation's running statistics have a setting of their own, `train.batch_norm`. Parameters without gradients
that a forward pass changes (the weights of a momentum encoder, a codebook) are treated like buffers.
"""

from __future__ import annotations

import zlib
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from orchestray.platform.comm import objects
from orchestray.platform.errors import TrainingError
from orchestray.platform.run.tensor_file import as_bytes
from orchestray.trainers.core.batch_norm import Averaging, agreed_statistics, average_buffers, running_statistics
from orchestray.trainers.core.buffer_kinds import kind_of, places_of, set_values
from orchestray.trainers.core.buffers import BufferCopies
from orchestray.trainers.core.buffers_by_row import agree_by_row, is_by_row, refuse_by_row
from orchestray.trainers.core.own_gradients import writes_parameter
from orchestray.trainers.core.rng import FollowsSteps
from orchestray.trainers.loop.extra_states import ExtraStates

if TYPE_CHECKING:
    from collections.abc import Callable

    from orchestray.platform.comm.collective import Collective
    from orchestray.trainers.config.settings import ReplicaSettings

_SHOWN = 5
_SAMPLED = 4096
"""Elements of a parameter that are looked at to see if a step changes it."""
_Place = tuple[nn.Module, str, Tensor]
"""Module, name there, and tensor."""


class _Parameter(NamedTuple):
    """A parameter before a step."""

    owner: nn.Module
    name: str
    parameter: nn.Parameter
    version: int
    sample: Tensor | None
    """A part of its elements, before the first step, if it is not trained."""


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
            warn: called with a text for the user, once.
        """
        self._model, self._world, self._replicas, self._warn = model, world, replicas, warn
        self._policy, self._batch_norm = settings.buffers, settings.batch_norm
        self._rolls_back = settings.is_replicated and world.size > 1
        self._agrees = replicas.size > 1 and not settings.diverges
        self.averages_statistics = self._agrees and settings.batch_norm == "local"
        """True if `start_statistics` is to be called, as each replica normalises by its own samples."""
        self._diverges = settings.diverges
        if settings.diverges:
            refuse_by_row(model, f"strategy.exchange.type: {settings.exchange['type']}")
        self._copies = BufferCopies(model)
        self._extra = ExtraStates()
        self._has_warned = False
        self._is_open = False
        self._parameters: list[_Parameter] | None = None
        """Parameters before the step: all before the first one, later those that are not trained; None: not yet."""
        self._looks_at_parameters = settings.exchange.get("shard") != "parameters" and not settings.is_streaming
        self._found: list[tuple[nn.Module, str]] = []
        """Parameters without gradients of which the last step has shown that it changes them."""

    def begin(self) -> None:
        """Note the buffers before a step, which would corrupt them if it fails."""
        self._is_open = True
        if not (self._rolls_back or self._agrees or self._diverges):
            return
        if self._parameters is None:
            self._parameters = self._look_at_parameters() if self._agrees and self._looks_at_parameters else []
        elif self._parameters:
            self._parameters = [each._replace(version=each.parameter._version) for each in self._parameters]
        self._copies.parameters += self._found
        self._found = []
        self._copies.take()
        if self._copies.modules is not self._extra.searched:
            self._extra.look_in(self._copies.modules)
        if self._rolls_back and self._extra.modules:
            self._extra.keep()

    def end(self) -> None:
        """Note that the step is completed."""
        self._is_open = False

    def roll_back(self) -> None:
        """Put back what the model had when the step began, if it has not ended."""
        if self._is_open and self._rolls_back:
            self._copies.put_back()
            self._extra.put_back()
        self._is_open = False

    def keep_memory(self) -> None:
        """Move what the step has assigned to a buffer into the memory that it had, which replicas that differ average.

        Raises:
            TrainingError: a buffer has another shape, which replicas that differ cannot average.
        """
        if place := self._copies.move_back():
            raise TrainingError(
                f"The buffer {self._name_of(*place)!r} has another shape now, or did not exist before the step, and "
                "replicas with weights of their own average buffers of fixed shapes. Give it its full size in "
                "build_model, or use strategy.exchange.type: allreduce."
            )

    def start_statistics(self, num_samples: int, batch_samples: int) -> Averaging:
        """Start to average the statistics of batch normalisation.

        All replicas call, and `wait` for the result before the step ends.

        Args:
            num_samples: number of samples this worker's statistics come from.
            batch_samples: sum of `num_samples` over the replicas, above 0.
        """
        buffers = running_statistics(self._copies.tree.modules())
        return Averaging(buffers, self._replicas, num_samples, batch_samples)

    # -- agreement -----------------------------------------------------------------------------------------------------

    def apart(self, *, trains: bool = True, is_updated: bool = True) -> float:
        """Return a number whose sum over all workers is 0 if the step has left each replica with the same buffers.

        The sum of different buffers is 0 in one of 2**32 cases.

        Args:
            trains: False after a validation.
            is_updated: False before the optimizer's update.

        Raises:
            TrainingError: the step has replaced a parameter, or written to one that is trained.
        """
        if not self._agrees:
            return 0.0
        if self._parameters and trains:
            self._compare_parameters(is_updated)
        checksum = self._extra.checksum(0) if self._extra.modules else 0
        for number, module, name in self._changed():
            tensor = _tensor(module, name)
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
            name: [
                *kind_of(module, leaf, tensor),
                _checksum(tensor) if (module, leaf) in changed else None,
                is_by_row(module, leaf),
            ]
            for name, (module, leaf, tensor) in present.items()
        }
        rows = objects.gather_json(self._replicas, own)
        names = dict.fromkeys(chain.from_iterable(rows))
        apart = [name for name in names if any(row.get(name) != rows[0].get(name) for row in rows)]
        by_row = [name for name in apart if all(name in row and row[name][-1] for row in rows)]
        extra_differ = self._extra.differ(self._replicas)
        by_largest = {name for name, (module, _, _) in present.items() if isinstance(module, FollowsSteps)}
        others = [name for name in apart if name not in by_row]
        self._tell([*(each for each in others if each not in by_largest), *(["extra state"] if extra_differ else [])])
        if extra_differ:
            self._extra.take_from_first(self._replicas)
        for name in by_row:
            module, leaf, tensor = present[name]
            kept = self._copies.values_before().get((module, leaf))
            agree_by_row(name, tensor, kept, self._replicas, is_empty=num_samples == 0)
        alike = [name for name in others if all(name in row and row[name][:2] == rows[0][name][:2] for row in rows)]
        averaged = [name for name in alike if self._policy != "broadcast" or name in by_largest]
        average_buffers([present[name][2] for name in averaged], self._replicas, num_samples, batch_samples)
        self._take_from_first([name for name in others if name not in averaged], rows, present)

    def _take_from_first(self, names: list[str], rows: list[Any], present: dict[str, _Place]) -> None:
        """Take buffers from the first replica that has them."""
        by_source: dict[int, list[str]] = {}
        for name in names:
            by_source.setdefault(next(rank for rank, row in enumerate(rows) if name in row), []).append(name)
        for source, taken in by_source.items():
            mine = self._replicas.rank == source
            sent = {name: present[name][2] for name in taken} if mine else None
            received = objects.share_tensors(self._replicas, sent, source)
            if mine:
                continue
            for name, tensor in received.items():
                if name in present and isinstance(present[name][2], nn.Parameter):
                    present[name][2].copy_(tensor)
                else:
                    set_values(self._model, {name: tensor}, is_saved=rows[source][name][2])

    def _tell(self, apart: list[str]) -> None:
        """Warn of buffers that differ, once, or raise."""
        if self._policy not in (None, "error") or self._has_warned:
            return
        if self._world is not self._replicas:
            told = objects.gather_json(self._world, apart)
            apart = list(dict.fromkeys(chain.from_iterable(told)))
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
            "mean, weighted by samples; of whole numbers the largest; of different shapes and of extra state the first "
            "replica's. That is the result of one process for means over samples, not for sums, extremes or queues. "
            "Say train.buffers: average if it is right, broadcast for those of the first replica, or error."
        )

    def _changed(self) -> list[tuple[int, nn.Module, str]]:
        """Return the buffers that the step has changed, but not those on which batch normalisation agrees."""
        changed = self._copies.changed(lambda module: agreed_statistics(module, self._batch_norm))
        return [*changed, *((-1 - number, *place) for number, place in enumerate(self._found))]

    def _present(self) -> dict[str, _Place]:
        """Return the place of each buffer by its name, without those of batch normalisation."""
        places = {
            name: (module, leaf, tensor)
            for name, (module, leaf, tensor) in places_of(self._model).items()
            if leaf not in agreed_statistics(module, self._batch_norm) and tensor.layout == torch.strided
        }
        watched = {*self._copies.parameters, *self._found}
        for path, module in self._model.named_modules() if watched else ():
            for leaf, parameter in module._parameters.items():
                if parameter is not None and (module, leaf) in watched:
                    places[f"{path}.{leaf}" if path else leaf] = module, leaf, parameter
        return places

    def _name_of(self, owner: nn.Module, leaf: str) -> str:
        return next(name for name, place in places_of(self._model).items() if place[:2] == (owner, leaf))

    # -- parameters ----------------------------------------------------------------------------------------------------

    def _look_at_parameters(self) -> list[_Parameter]:
        """Return all parameters, with a part of the elements of those without gradients."""
        return [
            _Parameter(
                module, name, parameter, parameter._version, None if parameter.requires_grad else _sample(parameter)
            )
            for module in self._model.modules()
            if not isinstance(module, torch.jit.ScriptModule)  # it gives other objects each time
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]

    def _compare_parameters(self, is_updated: bool) -> None:
        """Find the parameters without gradients that the step has changed."""
        parameters, self._parameters = self._parameters or [], []
        for module, name, parameter, version, sample in parameters:
            present = module._parameters.get(name)
            if present is not parameter:
                raise TrainingError(
                    f"The model has assigned a new tensor to the parameter {name!r} of a {type(module).__name__} in a "
                    "step. The optimizer and the other replicas know only the first one. Change it in place, or make "
                    "it a buffer (register_buffer)."
                )
            has_new_version = parameter._version != version
            if parameter.requires_grad:
                if has_new_version and not is_updated:
                    raise writes_parameter(f"{type(module).__name__}.{name}")
            elif has_new_version or not (sample is None or torch.equal(_sample(present), sample)):
                self._found.append((module, name))
            else:
                self._parameters.append(_Parameter(module, name, parameter, version, None))


def _tensor(module: nn.Module, name: str) -> Tensor:
    tensor = (module._parameters if name in module._parameters else module._buffers)[name]
    assert tensor is not None
    return tensor.detach()


def _sample(parameter: Tensor) -> Tensor:
    flat = parameter.detach().reshape(-1)
    return flat[:: max(1, len(flat) // _SAMPLED)].clone()


def _checksum(tensor: Tensor, start: int = 0) -> int:
    # A copy: memory that NumPy has seen cannot be resized, which a module may do.
    return zlib.crc32(as_bytes(tensor.detach().to("cpu", copy=True)).data, start)
