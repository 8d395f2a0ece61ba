"""What the schemes have in common that combine whole gradients at every step, once the backward pass is over."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from orchestray.platform.collective import Collective, ring_bytes
from orchestray.platform.errors import TrainingError
from orchestray.trainers.exchange.base import MAX_EXTRAS, Held, Update
from orchestray.trainers.exchange.buckets import dense
from orchestray.trainers.exchange.defaults import Defaults
from orchestray.trainers.exchange.holdings import held_tensors, updated_whole
from orchestray.trainers.exchange.sums import ExactSums
from orchestray.trainers.layout.pieces import Piece


class LockStep(Defaults, ABC):
    """Replicas whose optimizers all get the same gradient, the same bits, which a subclass combines in `combine`.

    The replicas scale their losses by num_samples / batch_samples, so what stands for the batch is the sum of their
    gradients. What the loop wants to know of all replicas (the sums of a few numbers, which parameters were used)
    travels in one small all-reduce before the gradients.
    """

    remembers = False
    """Whether a gradient may hold what earlier steps did not send: a parameter that has once been used then always has
    one, or what is still owed to it would be lost."""

    def __init__(self) -> None:
        self._collective: Collective | None = None
        self._parameters: list[Tensor] = []
        self._held: dict[str, Held] = {}
        self._updates: list[Update] = []
        self._pieces: list[Piece] = []
        """Of each update its place; unlike there, every replica's counts: what it keeps is its own."""
        self._sums: ExactSums | None = None
        self._slots = torch.empty(0)
        self._step = 0
        self._ever_used: list[bool] = []
        self._bytes_before = 0
        self._bytes_told = 0
        self._bytes_of_earlier = 0
        self._bytes_dense_total = 0

    def attach(self, model: nn.Module, collective: Collective, pieces: Mapping[str, Piece] | None = None) -> None:
        self.detach()
        self._collective = collective
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._held = held_tensors(model, pieces, is_counted=collective.rank == 0)
        self._updates = updated_whole(model, self._held)
        own = held_tensors(model, pieces, is_counted=True)
        self._pieces = [own[update.name].piece for update in self._updates]
        self._ever_used = [False] * len(self._parameters)
        self._bytes_before = self._bytes_told = collective.own_bytes_sent
        if collective.size > 1:
            num_flags = len(self._parameters) + self.num_flags(model)
            self._sums = ExactSums(num_flags, MAX_EXTRAS, collective.rank, collective.size)
            self._slots = torch.zeros(self._sums.num_slots(torch.float64), dtype=torch.float64)
            self._sums.use(self._slots)
            self.prepare(model)

    def detach(self) -> None:
        if self._collective is not None:
            self._bytes_of_earlier = self.bytes_sent_total
        for parameter in self._parameters:
            parameter.grad = None
        self._parameters = []
        self._collective = self._sums = None

    def updates(self) -> list[Update]:
        return self._updates

    def gradients(self) -> list[Tensor | None]:
        return [parameter.grad for parameter in self._parameters]

    def held(self) -> dict[str, Held]:
        return self._held

    def before_step(self, step: int) -> None:
        self._step = step
        for parameter in self._parameters:
            parameter.grad = None
        self._bytes_told = self.joined().own_bytes_sent

    def begin_backward(self, last_micro_batch: bool) -> None:
        return

    @torch.no_grad()
    def finish(self, extras: Sequence[float]) -> list[float]:
        if len(extras) > MAX_EXTRAS:
            raise ValueError(f"At most {MAX_EXTRAS} numbers ride along with the gradients; got {len(extras)}.")
        collective, sums = self.joined(), self._sums
        if sums is None:
            return [float(extra) for extra in extras]
        gradients = [parameter.grad for parameter in self._parameters]
        sums.write([*(gradient is not None for gradient in gradients), *self.flags()], extras)
        collective.all_reduce(self._slots)
        anywhere = sums.used_anywhere()
        used = anywhere[: len(gradients)]
        self._ever_used = [now or before for now, before in zip(used, self._ever_used, strict=True)]
        if self.remembers:
            used = self._ever_used
        whole = [
            torch.zeros_like(parameter) if gradient is None else dense(gradient)
            for parameter, gradient in zip(self._parameters, gradients, strict=True)
        ]
        self._bytes_dense_total += ring_bytes(self._slots, collective.size) + self._dense_bytes()
        combined = self.combine(whole, anywhere[len(gradients) :])
        for parameter, gradient, is_used in zip(self._parameters, combined, used, strict=True):
            parameter.grad = gradient if is_used else None
        return sums.read()[: len(extras)]

    def _dense_bytes(self) -> int:
        """What an all-reduce of the gradients around a ring would send."""
        size = self.joined().size
        return sum(-(-2 * (size - 1) * parameter.nbytes // size) for parameter in self._parameters)

    # -- what a scheme says --------------------------------------------------------------------------------------------

    def prepare(self, model: nn.Module) -> None:
        """Called at the end of `attach`, with more than one replica."""
        return

    def num_flags(self, model: nn.Module) -> int:
        """How many flags of the scheme's own ride along."""
        return 0

    def weigh(self, weight: float) -> None:
        """The part of the step's batch that this replica has; called before `finish`."""
        return

    def report(self) -> dict[str, float]:
        """What the last step's metric line says beside the loss: `compression_error`, the 2-norm of what this worker
        still owes, where there is such a thing.
        """
        return {}

    def flags(self) -> list[bool]:
        """Those of this step, before anything is sent."""
        return []

    @abstractmethod
    def combine(self, gradients: list[Tensor], flags: list[bool]) -> list[Tensor]:
        """What the optimizers get, the same bits on every replica. All replicas call, and there are several.

        Args:
            gradients: this replica's, one a parameter; zeros where it has none.
            flags: of each of the scheme's flags, whether any replica had set it.

        Raises:
            PeerLostError: another replica is gone.
        """

    # -- the rest ------------------------------------------------------------------------------------------------------

    def rest(self) -> None:
        return

    def after_step(self, step: int) -> None:
        return

    def state(self) -> dict[str, Held]:
        """With a memory: `kept`, a tensor of each parameter's shape where it lies, and which parameters were used."""
        if not self.remembers or self._sums is None:
            return {}
        held: dict[str, Held] = {}
        for kind, tensors in self.kept().items():
            for update, piece, tensor in zip(self._updates, self._pieces, tensors, strict=True):
                if tensor is None:
                    continue
                name = f"{kind}.{update.name}"
                if tensor.shape != update.tensor.shape:
                    piece = Piece.whole(name, tensor.shape, is_counted=piece.is_counted)
                held[name] = Held(tensor, piece)
        for update, used in zip(self._updates, self._ever_used, strict=True):
            name = f"used.{update.name}"
            held[name] = Held(torch.tensor(float(used)), Piece.whole(name, ()))
        return held

    def wanted(self) -> dict[str, Piece]:
        return {name: held.piece for name, held in self.state().items()}

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        if not self.remembers or self._sums is None:
            return
        self._ever_used = [bool(tensors.get(f"used.{update.name}", True)) for update in self._updates]
        self.keep({kind: [tensors.get(f"{kind}.{update.name}") for update in self._updates] for kind in self.kept()})

    def kept(self) -> dict[str, list[Tensor | None]]:
        """What is kept from one step to the next, by kind: of each parameter, in order, a tensor of its shape, or, if
        it is a number or the parameter is whole here, of another; None: nothing.
        """
        return {}

    def keep(self, kept: Mapping[str, Sequence[Tensor | None]]) -> None:
        """Go on from what `kept` gave, here or on a worker that held the same parts of parameters."""
        return

    @property
    def bytes_sent(self) -> int:
        return self.joined().own_bytes_sent - self._bytes_told

    @property
    def bytes_sent_total(self) -> int:
        if self._collective is None:
            return self._bytes_of_earlier
        return self._bytes_of_earlier + self._collective.own_bytes_sent - self._bytes_before

    @property
    def bytes_dense_total(self) -> int:
        return self._bytes_dense_total

    def joined(self) -> Collective:
        if self._collective is None:
            raise TrainingError("The exchange is not attached to a model and a collective.")
        return self._collective


def units_of(updates: Sequence[Update]) -> list[list[int]]:
    """Which gradients may be treated as one vector: indices of those that are whole here, and of those that are not.

    Where layers are split over a tensor group, all its workers hold what is whole, and must come to the same bits of
    it: whatever is computed of a unit of whole tensors depends on nothing that differs between them.
    """
    whole = [index for index, update in enumerate(updates) if update.piece.is_whole]
    parts = [index for index, update in enumerate(updates) if not update.piece.is_whole]
    return [unit for unit in (parts, whole) if unit]


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """The elements of all tensors side by side, in the widest of their types."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unflatten(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Tensors with the shapes of `like`, of the elements of a flat one: views of it."""
    parts = torch.split(flat, [tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


def typed(tensors: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """The tensors in the types of `like`."""
    return [tensor.to(template.dtype) for tensor, template in zip(tensors, like, strict=True)]
