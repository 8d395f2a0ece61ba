"""What exchanges of summed gradients have in common: whom they are attached to, and how much they sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from orchestray.platform.collective import Collective
from orchestray.platform.errors import TrainingError
from orchestray.trainers.exchange.base import MAX_EXTRAS, Held, Update
from orchestray.trainers.exchange.defaults import Defaults
from orchestray.trainers.exchange.holdings import held_tensors, updated_whole
from orchestray.trainers.layout.pieces import Piece


class Attached(Defaults):
    """Of `Exchange`: a scheme that leaves gradients in the parameters' `grad`, and sends them uncompressed."""

    def __init__(self) -> None:
        self._collective: Collective | None = None
        self._parameters: list[Tensor] = []
        """Those that are trained."""
        self._held: dict[str, Held] = {}
        self._updates: list[Update] = []
        self._bytes_sent_total = self._bytes_before_step = 0

    def _hold_whole(self, model: nn.Module, collective: Collective, pieces: Mapping[str, Piece] | None) -> None:
        """What this worker holds and updates, if nothing is sharded."""
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._held = held_tensors(model, pieces, is_counted=collective.rank == 0)
        self._updates = updated_whole(model, self._held)

    def detach(self) -> None:
        self._clear_gradients()
        self._collective = None

    def updates(self) -> list[Update]:
        return self._updates

    def held(self) -> dict[str, Held]:
        return self._held

    def before_step(self, step: int) -> None:
        self._clear_gradients()
        self._bytes_before_step = self._bytes_sent_total

    @property
    def bytes_sent(self) -> int:
        return self._bytes_sent_total - self._bytes_before_step

    @property
    def bytes_sent_total(self) -> int:
        return self._bytes_sent_total

    @property
    def bytes_dense_total(self) -> int:
        return self._bytes_sent_total

    def _clear_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def _count(self, num_bytes: int) -> None:
        """This replica has sent so many."""
        self._bytes_sent_total += num_bytes

    def _joined(self) -> Collective:
        if self._collective is None:
            raise TrainingError("The exchange is not attached to a model and a collective.")
        return self._collective

    def _check(self, extras: Sequence[float]) -> None:
        """Raises where `finish` must not be called, or not with these."""
        if len(extras) > MAX_EXTRAS:
            raise ValueError(f"At most {MAX_EXTRAS} numbers ride along with the gradients; got {len(extras)}.")
        self._joined()
