"""A server's part of the parameters, and the updates that pushed gradients make. Pure: no messages, no threads.

- asynchronous: each push is an update, or each sum of a few (`softsync`) (Dean et al. 2012, Downpour SGD; Recht et
  al. 2011).
- synchronous and stale: the shares of a batch are gathered (`batches`) and become one update once the coordinator knows
  the batch to be complete, batches in order (Ho et al. 2013, stale-synchronous parallel). The two differ only in how
  far workers may run ahead, which the coordinator decides.

A share is applied once. The shard knows it by its step and its index in the batch, not by the worker. So a push that is
sent again, or a copy of a share that was computed twice, changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from orchestray.platform.comm.solo import SoloCollective
from orchestray.platform.errors import ConfigError
from orchestray.trainers.aggregation.base import Aggregation
from orchestray.trainers.compression.bits import nonzero_indices
from orchestray.trainers.optim.clipping import clip
from orchestray.trainers.optim.optimizers import Optimizer
from orchestray.trainers.optim.schedules import lr_at
from orchestray.trainers.ps.protocol.buffers import NO_CHANGE, BufferPush, Buffers
from orchestray.trainers.ps.protocol.json_state import from_json, to_json
from orchestray.trainers.ps.protocol.partition import Slice, slice_views
from orchestray.trainers.ps.protocol.requests import Origin, Part
from orchestray.trainers.ps.protocol.state import SLOTS
from orchestray.trainers.ps.server.batches import Batches, Push, SeenShares
from orchestray.trainers.ps.server.dyn_sgd import Revision
from orchestray.trainers.ps.server.softsync import Softsync

Consistency = Literal["synchronous", "stale", "asynchronous"]


@dataclass(frozen=True)
class Applied:
    """The outcome of a push."""

    taken: bool
    """False if nothing has changed, because the shard already had the push or a part of it."""
    staleness: int
    """Number of updates between read and write."""
    version: int
    """Version of the shard now."""
    missing: tuple[Part, ...] = ()
    """Shares of a refused push of several shares that the shard lacks; each is to be computed again and sent alone."""
    kept: bool = False
    """True if the shard keeps the gradient's memory for later; otherwise the caller may use it again."""


@dataclass
class Rates:
    """The learning rates of all steps."""

    lr: float
    lr_schedule: Mapping[str, Any] = field(default_factory=dict)
    total_steps: int | None = None

    def __post_init__(self) -> None:
        if self.total_steps is not None:
            self.at(self.total_steps)  # a schedule that ends before the run does is refused here

    def at(self, step: int) -> float:
        return lr_at(self.lr_schedule, self.lr, step, self.total_steps)


class Shard:
    """A shard's values, its optimizer, and the record of what has been applied.

    Attributes:
        values: `[elements of the slices]`; another tensor after an update while they were lent.
        version: number of updates.
        buffers: the model's buffers; None except on the lead.
        batches: batches whose updates are still to come.
    """

    def __init__(
        self,
        slices: Sequence[Slice],
        values: Tensor,
        optimizer: Optimizer,
        rates: Rates,
        *,
        consistency: Consistency = "asynchronous",
        scale_by_staleness: bool = False,
        grad_clip: float | None = None,
        version: int = 0,
        buffers: Buffers | None = None,
        aggregation: Aggregation | None = None,
        revision: Revision | None = None,
        notes_changes: bool = False,
        pushes_per_update: int = 1,
    ) -> None:
        """
        Args:
            slices: slices of the parameters that the shard holds.
            values: values of the slices, one after the other; they belong to the shard from now on.
            optimizer: optimizer, which is initialised here.
            rates: learning rate of each step.
            consistency: kind of update, as described in the module docstring.
            scale_by_staleness: multiply the move that a push makes by 1 / (1 + its staleness) (Zhang et al. 2016,
                "Staleness-aware async-SGD", equation 6, with a staleness of 0 allowed).
            grad_clip: largest norm of a batch's gradient; a share's limit is its fraction of this.
            version: number of updates made before; the step where an update is one of a batch.
            buffers: buffers of the model.
            aggregation: combines the gradients of a batch's shares where updates are batches; None: they are summed.
            revision: turns pushed changes into moves. Each push is then an update, also where workers are bounded, and
                the optimizer, the rates, the scaling and the clipping are unused.
            notes_changes: True to know which values have changed since a version.
            pushes_per_update: number of pushes of an update, where updates are neither batches nor moves.

        Raises:
            ConfigError: the optimizer or the clipping needs whole parameters, and the shard holds parts.
        """
        if optimizer.needs_whole and not all(piece.is_whole for piece in slices):
            raise ConfigError(
                f"train.optimizer.type: {type(optimizer).__name__.lower()} looks at whole parameters, which shards cut "
                "apart; use strategy.exchange.shards: 1 or another optimizer"
            )
        self.slices = list(slices)
        self.values = values
        self.version = version
        self.buffers = buffers
        self._views = slice_views(slices, values)
        self._optimizer = optimizer
        optimizer.first_names = {piece.key: piece.name for piece in self.slices}
        optimizer.init([(piece.key, view) for piece, view in zip(self.slices, self._views, strict=True)])
        optimizer.join(SoloCollective())
        self._rates = rates
        self._revision = revision
        self._by_batch = consistency != "asynchronous" and revision is None
        self._softsync = Softsync(pushes_per_update, values) if pushes_per_update > 1 else None
        self._scale_by_staleness = scale_by_staleness
        self._grad_clip = grad_clip
        self._applied = SeenShares(version if self._by_batch else 0)
        self.batches = Batches(aggregation)
        self._changed_at = torch.full(values.shape, version, dtype=torch.int64) if notes_changes else None
        """Version with which each value last changed; None: that is not noted."""
        self._lent: dict[int, int] = {}
        """Number of loans of each memory, by its address."""
        self._spare: list[Tensor] = []
        self._outmoded: set[int] = set()
        """Addresses of lent memory that must not be used again, because the values have since moved to another kind of
        memory.
        """
        self._new_memory: Callable[[Tensor], Tensor] = torch.empty_like

    def run_report(self) -> dict[str, int]:
        """Return the number of `values` that this shard holds, and of the `updates` made."""
        return {"values": self.values.numel(), "updates": self.version}

    def push(
        self, origin: Origin, gradient: Tensor, unused: Sequence[str] = (), buffers: BufferPush | None = None
    ) -> Applied:
        """Take a gradient, `[elements]`, once.

        Args:
            origin: worker, shares and read version of the gradient.
            gradient: gradient; it may be changed, and is kept if the answer says so.
            unused: parameters that none of its shares had a gradient for; its values there are zeros.
            buffers: changes that the shares made to the model's buffers; pushes to the lead carry them.
        """
        if self._by_batch and len({part.step for part in origin.parts}) != 1:
            raise ConfigError("strategy.exchange.push_every: a push is of one batch's shares; set it to 1")
        new = tuple(part for part in origin.parts if part not in self._applied)
        if len(new) < len(origin.parts):
            return Applied(False, 0, self.version, missing=new)
        for part in origin.parts:
            self._applied.add(part)
        weight = sum(part.num_samples / part.batch_samples for part in origin.parts)
        push = Push(frozenset(part.share for part in origin.parts), gradient, frozenset(unused), buffers, weight)
        return self._collect(origin, push) if self._by_batch else self._apply_now(origin, push)

    def room_for_buffers(self, step: int) -> list[Tensor]:
        """Return memory for the `BufferPush` of a step: changes of the buffers, and what is measured."""
        held = self.buffers or NO_CHANGE
        num_floats = held.floats.numel() + self._optimizer.num_measurements(step)
        return [held.floats.new_empty(num_floats), torch.empty_like(held.integers)]

    @property
    def changes_gradients(self) -> bool:
        """True if `push` may change or keep the memory of a gradient."""
        return self._by_batch or self._grad_clip is not None

    def needs(self, step: int) -> bool:
        """Return True if updates are batches and the update of `step` is still to be made."""
        return self._by_batch and self.version < step

    def advance(self, step: int) -> bool:
        """Make the updates of the batches up to `step`, which are known to be complete on all shards.

        Until then the parameters that a batch is computed from must stay: its last share may have to be computed again.
        Return True if anything has changed. Do nothing where each push is an update.
        """
        before = self.version
        while self.needs(step) and self._applied.is_complete(self.version + 1):
            batch = self.batches.take(self.version + 1)
            change = batch.buffers or NO_CHANGE
            size = 0 if self.buffers is None else self.buffers.floats.numel()
            if self.buffers is not None and batch.buffers is not None:
                self.buffers.add(BufferPush(change.floats[:size], change.integers))
            self._optimizer.take_measurements(self.version + 1, change.floats[size:])
            self._update(batch.gradient, batch.unused, self.version + 1, 1.0, 1.0)
            self.batches.reuse(batch.gradient)
        return self.version > before

    def _apply_now(self, origin: Origin, push: Push) -> Applied:
        staleness = max(0, self.version - origin.read_version)
        scale = 1.0 / (1 + staleness) if self._scale_by_staleness else 1.0
        if push.buffers is not None and self.buffers is not None:
            self.buffers.add(push.buffers)
        if self._revision is not None:
            self.move(self._revision.revise(push.gradient, origin.read_version, self.version))
            return Applied(True, staleness, self.version)
        step = max(part.step for part in origin.parts)
        if self._softsync is None:
            self._update(push.gradient, push.unused, step, scale, push.weight)
        elif self._softsync.add(push.gradient, scale, step, push.weight, sorted(push.unused)):
            gradient, unused, step, weight = self._softsync.take()
            self._update(gradient, unused, step, 1.0, weight)
        return Applied(True, staleness, self.version)

    def _collect(self, origin: Origin, push: Push) -> Applied:
        step = origin.parts[0].step
        staleness = max(0, step - 1 - origin.read_version)
        if self._scale_by_staleness and staleness:
            push.gradient /= 1 + staleness
        kept = self.batches.add(step, push)
        return Applied(True, staleness, self.version, kept=kept)

    @torch.no_grad()
    def _update(self, gradient: Tensor, unused: frozenset[str], step: int, scale: float, weight: float) -> None:
        gradients: list[Tensor | None] = [
            None if piece.name in unused else view
            for piece, view in zip(self.slices, slice_views(self.slices, gradient), strict=True)
        ]
        if self._grad_clip is not None and any(g is not None for g in gradients):
            clip(gradients, self._grad_clip * weight)
        lr = self._rates.at(step) * scale
        before = self.values if self._changed_at is None else self.values.clone()
        if self.values.data_ptr() in self._lent:  # values that are being read must not change
            memory = self._free_memory()
            views = slice_views(self.slices, memory)
            self._optimizer.step_into(views, self._views, gradients, lr)
            self.values, self._views = memory, views
        else:
            self._optimizer.step(self._views, gradients, lr)
        self.version += 1
        if self._changed_at is not None:
            self._changed_at[self.values.ne(before).to(self._changed_at.device)] = self.version

    def changed_since(self, version: int) -> Tensor | None:
        """Return the places of the values that have changed since a version, int64; None: that is not known."""
        if self._changed_at is None or version > self.version:
            return None
        return nonzero_indices(self._changed_at > version)

    @torch.no_grad()
    def move(self, change: Tensor, places: Tensor | None = None) -> None:
        """Add to the values a change that was computed elsewhere; it counts as one update.

        Args:
            change: `[elements]`, or `[places]`.
            places: indices of the elements to change, int64, all different; None: all elements.
        """
        self._make_writable()
        if places is None:
            self.values += change
        else:
            self.values.index_add_(0, places, change)
        self.version += 1
        self._all_may_have_changed()

    @torch.no_grad()
    def become(self, values: Tensor) -> None:
        """Copy values from elsewhere, `[elements]`, into the shard; the optimizer's state stays."""
        self._make_writable()
        self.values.copy_(values)
        self._all_may_have_changed()

    def lend(self) -> Tensor:
        """Return the present values, which stay unchanged until `give_back`, whatever updates are made."""
        address = self.values.data_ptr()
        self._lent[address] = self._lent.get(address, 0) + 1
        return self.values

    def give_back(self, values: Tensor) -> None:
        """End a `lend`."""
        address = values.data_ptr()
        self._lent[address] -= 1
        if not self._lent[address]:
            del self._lent[address]
            if address in self._outmoded:
                self._outmoded.remove(address)
            elif values is not self.values:
                self._spare.append(values)

    @torch.no_grad()
    def live_in(self, new_memory: Callable[[Tensor], Tensor]) -> None:
        """Keep the values in other memory from now on.

        Args:
            new_memory: returns memory for a tensor with the dtype and shape of the given one.
        """
        self._new_memory = new_memory
        self._spare.clear()
        self._outmoded = set(self._lent)
        self._move_to(new_memory(self.values))

    def _free_memory(self) -> Tensor:
        return self._spare.pop() if self._spare else self._new_memory(self.values)

    def _move_to(self, memory: Tensor) -> None:
        self.values = memory.copy_(self.values)
        self._views = slice_views(self.slices, self.values)

    def _all_may_have_changed(self) -> None:
        if self._changed_at is not None:
            self._changed_at.fill_(self.version)

    def _make_writable(self) -> None:
        if self.values.data_ptr() in self._lent:
            self._move_to(self._free_memory())

    def tensors(self) -> dict[str, Tensor]:
        """Return values, optimizer's state and buffers, by the names of `ShardServer.snapshot`; not copied."""
        tensors = {"values": self.values}
        tensors |= {f"{SLOTS}{name}": tensor for name, tensor in self._optimizer.state_tensors().items()}
        if self.buffers is not None:
            tensors |= {"buffers/floats": self.buffers.floats, "buffers/integers": self.buffers.integers}
        return tensors

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return all that a copy of this shard needs to continue: JSON values, and tensors that are the shard's own
        memory.
        """
        pending, gradients = self.batches.state()
        tensors = self.tensors() | gradients
        state: dict[str, Any] = {"version": self.version, "applied": to_json(self._applied), "pending": pending}
        if self._revision is not None:
            state["rounds"], means = self._revision.state()
            tensors |= means
        if self._softsync is not None:
            state["softsync"], gathered = self._softsync.state()
            tensors |= gathered
        return state, tensors

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Continue from a copy of what `state` returned."""
        self._make_writable()
        self.values.copy_(tensors["values"])
        self.load_optimizer(
            {key.removeprefix(SLOTS): tensor for key, tensor in tensors.items() if key.startswith(SLOTS)}
        )
        self.version = int(state["version"])
        self._all_may_have_changed()
        self._applied = from_json(SeenShares, state["applied"])
        if self._revision is not None:
            self._revision.load_state(state["rounds"], tensors)
        if self._softsync is not None:
            self._softsync.load_state(state["softsync"], tensors)
        self.batches.load_state(state["pending"], tensors)
        if self.buffers is not None:
            self.buffers.floats.copy_(tensors["buffers/floats"])
            self.buffers.integers.copy_(tensors["buffers/integers"])

    def optimizer_slots(self) -> dict[str, Tensor]:
        """Return the optimizer's state by "<parameter>:<start>.<slot>"; the tensors are the optimizer's own memory."""
        return self._optimizer.state_tensors()

    def load_optimizer(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue with a copy of what `optimizer_slots` returned."""
        self._optimizer.load_state_tensors(tensors)
